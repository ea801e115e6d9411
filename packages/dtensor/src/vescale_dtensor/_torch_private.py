"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
What costs much to import is imported where it is asked for.
"""

import contextlib
import sys
from collections.abc import Callable
from math import log
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.jit import _builtins
from torch.utils import _foreach_utils, _python_dispatch, checkpoint

from vescale_trace.stack import frames, module_of

# -- Dispatch --

# Runs functions on shards as on plain tensors, without and with a context manager; the first costs less. Instead:
# public `torch.overrides` names of them.
_disabled_torch_function_impl = torch._C._disabled_torch_function_impl
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
_is_torch_function_enabled = torch._C._is_torch_function_enabled

# How many modes see each function: methods that dispatch at once must leave it to them. Instead: a public question.
_len_torch_function_stack = torch._C._len_torch_function_stack

# The same below autograd, where an operator was called that no function names. Instead: public `torch.library` names.
DispatchKey = torch._C.DispatchKey
_DisableTorchDispatch = torch._C._DisableTorchDispatch
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack  # how many modes see each operator
_dispatch_tls_is_dispatch_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Operators of `torch.ops`, which are called like functions. Instead: public classes of them.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# The same memory as another class, and no view; as it was before `constructors.py` replaced it. Instead: `as_subclass`
# that makes no view of a tensor without gradient.
_make_subclass = Tensor._make_subclass

# A tensor without memory, which stands for a mask that is described. Instead: a public constructor of it.
_make_wrapper_subclass = Tensor._make_wrapper_subclass

# -- Autograd, torch.func, torch.compile --

# Which backward runs on this thread, -1 outside of one. Instead: a public question of `torch.autograd.graph`.
_current_graph_task_id = torch._C._current_graph_task_id

# The node that a backward is at. Instead: the node, given to its hooks.
_current_autograd_node = torch._C._current_autograd_node

# The number of the next node of the graph: what was computed before, and what since. Instead: a public question of
# `torch.autograd.graph`, which nodes answer with `_sequence_nr`.
_get_sequence_nr = torch._C._autograd._get_sequence_nr

# Whether somebody packs what backward needs. Instead: a public question of `torch.autograd.graph`.
_top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# Transforms of torch.func wrap tensors before a DTensor hears of them: where they do it, it is refused. Instead: a
# protocol by which a subclass hears of a transform.
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
_process_batched_inputs = vmap._process_batched_inputs
_wrap_all_tensors = eager_transforms._wrap_all_tensors
_wrap_all_tensors_to_functional = eager_transforms._wrap_all_tensors_to_functional
_make_dual = torch._VF._make_dual


def dual_level() -> int:
    """Returns the depth of forward-mode differentiation, -1 outside. Instead: a public question of it."""
    return forward_ad._current_level


# What `torch.autograd.backward` and `grad` begin with, a gradient that is no root's being asked for nothing. Instead:
# gradients that are asked for `__torch_function__`, as roots and inputs are.
_make_grads = torch.autograd._make_grads


def replace_make_grads(how: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """Makes torch call `how` for it from now on. Instead: as above."""
    torch.autograd._make_grads = how


# What of a checkpoint keeps tensors, which notes their layouts: the first in later versions of torch, else the second.
# Instead: a hook of `torch.utils.checkpoint`.
_CheckpointFrame = checkpoint._CheckpointFrame
_NoopSaveInputs = getattr(checkpoint, "_NoopSaveInputs", None)

# The node of autograd around a module with backward hooks. Instead: hooks that are given what the module was given.
BackwardHookFunction = nn.modules._functions.BackwardHookFunction

# Where the compiler stands in the user's code. Instead: the public lines of a graph break.
TracingContext = torch._guards.TracingContext


def skipped_frame() -> Any:
    """Returns the value by which a tracer leaves a function, and what it calls, to Python. Instead: a public value of
    it."""
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    return FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)


def compiler_user_errors() -> tuple[Any, Any]:
    """The class of errors that a tracer gives its user, and its kinds. Instead: public names of them."""
    from torch._dynamo.exc import UserError, UserErrorType

    return UserError, UserErrorType


def leave_to_python(code: CodeType) -> None:
    """Makes a tracer that comes to a frame of this code leave it, and what it calls, to Python. Instead: a public
    `torch.compiler.disable` of code.

    What traces a caller sees it as ever.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def compiled_as(function: Callable) -> Callable | None:
    """`function`, compiled as what runs was that torch compiled last; None if nothing was. Instead: public settings.

    The settings are those of `torch.compile` around it: backend, mode, options, dynamic, fullgraph.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return None
    from torch._dynamo.eval_frame import OptimizeContext

    for frame in frames():
        if module_of(frame) == OptimizeContext.__module__:
            context = frame.f_locals.get("self")
            if isinstance(context, OptimizeContext):
                return context(function)
    return None


def without_dispatch_modes() -> contextlib.AbstractContextManager:
    """Within it no dispatch mode is on: torch compiles nothing under one. Instead: modes that allow it, in public."""
    on = _python_dispatch._get_current_dispatch_mode() is not None
    return _python_dispatch._disable_current_modes() if on else contextlib.nullcontext()


def flex_formula(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None = None, block_mask: Any = None,
    scale: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result, the logarithms of its sums and the largest scores by the formula that flex_attention is on a CPU,
    uncompiled. Instead: a public one."""
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import _identity, noop_mask

    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask_mod = noop_mask if block_mask is None else block_mask.mask_mod
    out, lse, largest = math_attention(query, key, value, score_mod or _identity, (mask_mod,), scale, {})
    return out, lse * log(2), largest * log(2)


# -- Memory --

# A tensor's storage as an object with a dtype, which pickle and old code ask for. Instead: `untyped_storage`.
_typed_storage = Tensor._typed_storage

# Whether two tensors lie in one memory. Instead: the addresses of `untyped_storage`, which cost more.
_is_alias_of = torch._C._is_alias_of

# Whether anybody else sees a tensor's memory, before its owner is given other memory. Instead: a public count.
_storage_Use_Count = torch._C._storage_Use_Count

# Whether one tensor can take another's place by `.data =`. Instead: an attempt, and its error.
_has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type

# Whether a tensor fills its memory, in any order of its dims. Instead: the same arithmetic here.
is_non_overlapping_and_dense_or_false = torch._prims_common.is_non_overlapping_and_dense_or_false

# An assertion that does not wait for the device. Instead: a public name.
_assert_async = torch._assert_async

# -- What users reach by public names, of which rules must know the private one --

# What a GradScaler calls. Instead: a public name.
_amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# What optimizers and norms of gradients call; the last two came after torch 2.11. Instead: public names.
_foreach_max = torch._foreach_max
_foreach_norm = torch._foreach_norm
_foreach_mm = getattr(torch, "_foreach_mm", None)
_foreach_powsum = getattr(torch, "_foreach_powsum", None)

# The classes of which torch takes lists there. Instead: a registration.
_foreach_supported_types = _foreach_utils._foreach_supported_types

# What experts call. Instead: `F.grouped_mm`, once every torch that is supported has it.
_grouped_mm = torch._grouped_mm

# The product of float8 numbers. Instead: `F.scaled_mm`, once compilers take it as they do this one.
_scaled_mm = torch._scaled_mm

# What `torch.nn.functional`, `torch.special`, `torch.meshgrid` and `int` lead to. Instead: their public names, where
# these reach `__torch_function__`.
_nn = torch._C._nn
_special = torch._C._special
_VF_meshgrid = torch._VF.meshgrid
_TensorBase_int = torch._C.TensorBase.__int__

# What "mean", "sum" and the older `size_average` say. Instead: the same table here.
legacy_get_string = nn._reduction.legacy_get_string

# -- Constructors that are replaced --

# TorchScript knows functions by identity: a replaced one is told to it. Instead: a public registration.
_find_builtin = _builtins._find_builtin
_register_builtin = _builtins._register_builtin

# What `with torch.device` knows to make tensors, which is read before any is replaced. Instead: a public table.
_device_constructors = torch.utils._device._device_constructors

# What `torch.set_default_tensor_type` leads to. Instead: none; it is deprecated.
_set_default_tensor_type = torch._C._set_default_tensor_type


def replace_set_default_tensor_type(how: Callable[[Any], None]) -> None:
    """Makes torch call `how` for it from now on. Instead: none; it is deprecated."""
    torch._C._set_default_tensor_type = how


# -- torch.distributed --

# What has the methods of a process group, beside `dist.ProcessGroup`. Instead: a public name of it.
Backend = torch._C._distributed_c10d.Backend  # type: ignore[attr-defined]

# torch's look at the lists of tensors that collectives take. Instead: collectives that ask `__torch_function__`.
_check_tensor_list = distributed_c10d._check_tensor_list

# What torch's own recorder of collectives kept, as JSON, where a build has one. Instead: a public name.
_dump_nccl_trace_json = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)

# The store of the process group, through which ranks say how they end. Instead: a public `dist.get_default_store`.
_get_default_store = distributed_c10d._get_default_store


def replace_check_tensor_list(how: Callable[[Any, str], None]) -> None:
    """Makes torch's collectives call `how` for it from now on. Instead: collectives that ask `__torch_function__`."""
    distributed_c10d._check_tensor_list = how


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank is in, in order of creation. Instead: a public list."""
    return list(distributed_c10d._world.pg_map)


def backend_timeouts(group: dist.ProcessGroup | None = None) -> list[float]:
    """Returns how long each backend of a group waits, or of the default one, s. Instead: a public property.

    A backend that keeps it to itself is left out.
    """
    found, group = [], group or dist.group.WORLD
    for device in group._device_types:  # type: ignore[union-attr]
        with contextlib.suppress(RuntimeError, AttributeError):
            backend = dist.ProcessGroup._get_backend(group, device)  # type: ignore[arg-type]
            found.append(backend.options._timeout.total_seconds())
    return found


def fake_store() -> Any:
    """The store of the backend "fake", which importing it registers. Instead: a public one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
