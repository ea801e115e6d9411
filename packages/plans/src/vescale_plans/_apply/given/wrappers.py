"""torch's own ways to distribute or compile a model, before or on top of `parallelize`: errors that name what to leave
out.

Nothing of torch is changed: what these ways read of a module answers for it. DistributedDataParallel reads a list of
parameters that it is to leave alone, the composable functions (fully_shard, replicate) what was applied before,
torch.compile what it may have compiled already, and its tracer, in a compiled function that uses the model, who manages
a module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..._plan.parts import PlanError
from ..._torch_private import TracingContext, composable_state_key

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_COMPOSES = frozenset({"checkpoint"})
"""Composable functions that distribute nothing."""
_COMPILED = "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id"
"""Attributes that torch.compile reads of its argument."""
_TRACED = "_is_fsdp_managed_module"
"""Attribute that the tracer of torch.compile reads of every module that it meets."""
_NOT_COMPILED = [
    ('parallelize(plan, model, optimizer_fn, mode="compile")', "of the model as it was built: compiles what is local"),
    ("leave torch.compile out", "eager mode computes the same"),
]
_NOT_COMPILED_STEP = [
    ("leave torch.compile out of the step", "eager mode computes the same"),
    ('parallelize(plan, model, optimizer_fn, mode="compile")', "compiles what of the model is local"),
]


def check_unwrapped(model: nn.Module) -> None:
    """Raises PlanError for a model that transformers or torch distributes already."""
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise PlanError(
            "parallelize",
            "the model was sharded by transformers, which from_pretrained was told by distributed_config",
            (),
            [
                ("vescale.from_pretrained(folder, config)", "with the same config, or a plan: reads shards alone, too"),
                ("parallelize(config, AutoModel.from_pretrained(folder))", "without distributed_config"),
            ],
        )
    key = composable_state_key()
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            rule = f"{name or 'the model'} is already compiled: it would run as it was compiled, without shards"
            raise PlanError("parallelize", rule, (), _NOT_COMPILED)
        applied = {function.__name__ for function in module.__dict__.get(key, ())} - _COMPOSES
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            applied.add(type(module).__name__)
        if applied:
            raise PlanError(
                "parallelize",
                f"{name or 'the model'} is distributed by {min(applied)} already",
                (),
                [("parallelize(plan, model)", f"of the model alone, without {min(applied)}: the plan shards it")],
            )


def refuse_wrappers(model: nn.Module) -> None:
    """Makes torch's wrappers raise PlanError for the model and its modules from now on."""
    key = composable_state_key()
    for module in model.modules():
        if not isinstance(module.__dict__.get(key), _Applied):
            module.__dict__[key] = _Applied(module.__dict__.get(key, ()))
        module.__dict__[_IGNORED] = _LeftAlone()
        module.__dict__.update(dict.fromkeys(_COMPILED, _NotCompiled()))
        module.__dict__["compile"] = _refuse_compile
        module.__dict__[_TRACED] = _NotTraced(model)


def _refuse_compile(*args: Any, **options: Any) -> NoReturn:
    rule = "the model is parallelized, and a compiler does not see its shards"
    raise PlanError("torch.compile", rule, (), _NOT_COMPILED)


class _Applied(OrderedDict):
    """Composable functions that were applied to a module."""

    def __contains__(self, function: Any) -> bool:
        if function.__name__ not in _COMPOSES:
            raise _refusal(function.__name__)
        return super().__contains__(function)


class _LeftAlone:
    """Names of parameters for DistributedDataParallel to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise _refusal("DistributedDataParallel")


class _NotCompiled:
    """The source a module was compiled from: torch.compile compares, or asks further, before it compiles."""

    __hash__ = object.__hash__
    __eq__ = __call__ = _refuse_compile
    _torchdynamo_orig_callable = property(_refuse_compile)


class _NotTraced:
    """Says that FSDP does not manage a module; raises if the tracer of another mode than compile asks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __deepcopy__(self, memo: dict) -> _NotTraced:
        return self  # a copy's own is put in its place; the model is not to be copied for the sake of a part

    def __bool__(self) -> bool:
        captured = self._model._vescale.captured
        if TracingContext.try_get() is not None and (captured is None or not captured.is_asking):
            raise PlanError(
                "torch.compile",
                "a compiled function uses a parallelized model: a compiler does not see its shards",
                (),
                _NOT_COMPILED_STEP,
            )
        return False


def _refusal(what: str) -> PlanError:
    return PlanError(
        what,
        "the model is parallelized: its parameters are shards, and its gradients are reduced once",
        (),
        [
            (f"leave {what} out", "the plan does that"),
            ("Plan(..., data_axis=..., zero=3)", "shards parameters, gradients and optimizer states over data ranks"),
        ],
    )
