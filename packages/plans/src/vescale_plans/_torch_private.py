"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
What costs much to import is imported where it is asked for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm, conv, module
from torch.utils import _python_dispatch, checkpoint

# Whether a tensor was written to, without the call of a method. Instead: a public `Tensor.version`.
version_of = Tensor._version.__get__

# Reads of gradients and nodes that are not the forward's, which a recorder of functions must not see. Instead: the
# public `torch.overrides` name of it.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# Whether a function runs under vmap or grad of torch.func. Instead: a public question.
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active

# How many modes see each function, and each operator. Instead: public questions in `torch.overrides` and `torch.utils`.
_len_torch_function_stack = torch._C._len_torch_function_stack
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack


def owners_of(tensor: Tensor) -> int:
    """Returns how many own the tensor's memory, this call's own look at it included. Instead: a public count of a
    storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# What two tensor objects stand for, exchanged. Instead: `torch.utils.swap_tensors`, without its refusals.
_swap_tensor_impl = torch._C._swap_tensor_impl

# Whether somebody packs what backward needs. Instead: a public question of `torch.autograd.graph`.
_top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def is_checkpoint_selective() -> bool:
    """True if a checkpoint notes, or takes up, the results of single functions, which it tells apart by their number.
    Instead: a public question of `torch.utils.checkpoint`."""
    modes = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
    return any(isinstance(mode, modes) for mode in _python_dispatch._get_current_dispatch_mode_stack())


# Which backward runs on this thread, -1 outside of one. Instead: a public question of `torch.autograd.graph`.
_current_graph_task_id = torch._C._current_graph_task_id

# The number that the next node of this thread's graphs gets, as `node._sequence_nr()` of one says it. Instead: a public
# one.
_get_sequence_nr = torch._C._autograd._get_sequence_nr

# Whether a compiler traces. Instead: `torch.compiler.is_compiling`, which is true in what it has compiled, too.
TracingContext = torch._guards.TracingContext

# Whether one tensor can take another's place by `.data =`. Instead: an attempt, and its error.
_has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type

# Calls a function at the end of the backward that runs; of nested ones, the innermost. Instead: a public one.
queue_callback = Variable._execution_engine.queue_callback

# Ends a group without waiting for what is in flight in it. Instead: a public `dist.abort_process_group`.
_abort_process_group = distributed_c10d._abort_process_group

# What batch norms have in common, and what convolutions do. Instead: their public classes, listed.
_NormBase = batchnorm._NormBase
_ConvNd = conv._ConvNd

# Sees each operator of a dry run. Instead: a public `torch.utils` name of it.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

# A checkpoint whose beginning and end are apart, around a module's hooks. Instead: `checkpoint`, of a function alone.
_checkpoint_without_reentrant_generator = checkpoint._checkpoint_without_reentrant_generator
_DEFAULT_DETERMINISM_MODE = checkpoint._DEFAULT_DETERMINISM_MODE

# Recurrent functions, which a probe takes apart into steps. Instead: their modules' public functional forms.
_VF = torch._VF


def decomposition_table() -> dict[Any, Any]:
    """Operator -> what it is made of. Instead: `torch.export`'s decompositions, which leave recurrent ones whole."""
    return torch._decomp.decomposition_table


def distributions_check_values() -> bool:
    """True if distributions check values by default. Instead: a public question beside the public
    `Distribution.set_default_validate_args`."""
    return torch.distributions.Distribution._validate_args


def global_forward_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Hooks before, and after, the forward of every module, by id. Instead: none in public.

    torch's names of them are bound anew where ranks are simulated: these functions look them up in each call.
    """
    return module._global_forward_pre_hooks, module._global_forward_hooks


def has_global_hooks() -> bool:
    """True if somebody has hooks on all modules, of whatever kind. Instead: a public question."""
    return bool(
        module._global_forward_pre_hooks
        or module._global_forward_hooks
        or module._global_backward_pre_hooks
        or module._global_backward_hooks
    )


def global_forward_hook_kinds() -> tuple[dict[int, bool], dict[int, bool]]:
    """Ids of those after forwards that take keyword arguments, and that are always called. Instead: none in public."""
    return module._global_forward_hooks_with_kwargs, module._global_forward_hooks_always_called


def global_backward_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Hooks before, and after, the backward of every module, by id. Instead: none in public."""
    return module._global_backward_pre_hooks, module._global_backward_hooks


def backend_of(device: torch.device) -> Any:
    """The backend of the default group for a device. Instead: a public method of `dist.ProcessGroup`."""
    return dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]


def meta_collectives() -> Any:
    """torch's module of collectives on meta tensors, which draws a number for each from Python's generator, by
    `generate_unique_id`. Instead: numbers that are counted."""
    from torch.distributed import _meta_registrations

    return _meta_registrations


def compiler_errors() -> tuple[type[Exception], ...]:
    """Errors that `torch.compile` raises if it gives up. Instead: public classes of them."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode


def backend_named(name: str) -> Callable:
    """A compiler's backend, to be called by one of ours; inductor draws random numbers as eager code does. Instead: a
    public `torch.compiler` way to look one up."""
    backend = torch._dynamo.lookup_backend(name)
    settings = {"config_patches": {"fallback_random": True}} if name == "inductor" else {}
    return functools.partial(backend, **settings)


def make_fx(function: Callable) -> Callable:
    """A tracer of the operators that a function of plain tensors calls. Instead: a public one."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor.make_fx(function)


def partitioned(joint: torch.fx.GraphModule, count: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """A forward of `count` results, what its backward needs behind them, and that backward. Instead: a public
    partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=count)


def without_values(examples: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these for a compiler to look at. Instead: a public class of them."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in examples]


# Operators with graphs of their own among their arguments. Instead: a public class of them.
HigherOrderOperator = torch._ops.HigherOrderOperator


def capture_settings(passed_over: set[Callable]) -> Any:
    """A context, for any number of uses, in which what a compiler cannot take raises, code is guarded by hooks of
    modules and by which parameters are one tensor, numpy's draws are numpy's, and some methods of loggers are passed
    over. Instead: public options of `torch.compile`."""
    settings = torch._dynamo.config
    return settings.patch(
        suppress_errors=False,
        skip_nnmodule_hook_guards=False,
        skip_no_tensor_aliasing_guards_on_parameters=False,
        use_numpy_random_stream=True,
        ignore_logger_methods=settings.ignore_logger_methods | passed_over,
    )


def traced_output() -> Any:
    """Returns the output of torch.compile's tracer for the code that it goes through. Instead: public questions, such
    as `side_effect_replay_policy`, which torch 2.11 has not."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def compiler_is_asked_otherwise() -> bool:
    """True if somebody has changed what compiled functions do (`torch.compiler.set_stance`), or traces them. Instead: a
    public question of `torch.compiler`."""
    stance = torch._dynamo.eval_frame._stance.stance
    return stance != "default" or torch._dynamo.config.disable or torch.jit.is_tracing()


def missing_compiler(device_type: str) -> str | None:
    """Names what inductor lacks to compile for a device, None if nothing. Instead: a public question of
    `torch.compiler`; without it a backward ends in an error of inductor's own."""
    if device_type == "cpu":
        from torch._inductor import cpp_builder
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            cpp_builder.get_cpp_compiler()
        except InvalidCxxCompiler:
            return "a C++ compiler"
        return None
    from torch.utils._triton import has_triton

    return None if device_type != "cuda" or has_triton() else "Triton"


def functorch_config() -> Any:
    """Holds the switch for writes into what was saved for backward. Instead: a public option of `torch.compile`."""
    from torch._functorch import config

    return config


def composable_state_key() -> str:
    """Returns the key under which torch notes that it distributes a module; the import takes as long as all of
    vescale's own.

    Instead: a public question of `torch.distributed.fsdp`.
    """
    from torch.distributed._composable.contract import STATE_KEY

    return STATE_KEY
