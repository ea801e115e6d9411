"""Lists the optimizers that step on flat parts: their steps treat every element of a parameter alike and alone.

torch's are listed, a user's are registered, and a subclass is as its base as long as it leaves alone what the base's
step runs through: the step itself, and every method and attribute that the step may call. What a subclass adds under
names of its own is not called by it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .._plan.parts import PlanError

Kind = type[torch.optim.Optimizer]
_elementwise: dict[Kind, tuple[str, ...]] = dict.fromkeys(
    (
        getattr(torch.optim, name)
        for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
    ),
    (),
)
"""Classes whose step treats every element of a parameter alike and alone -> methods beside it that do, too."""
MATRIX = frozenset(kind for kind in (getattr(torch.optim, "Muon", None),) if kind is not None)
"""Classes whose step looks at one whole matrix at a time. Subclasses are not meant."""

# What a step does not go through, nor through Python's own names but those of attributes.
_FREE = frozenset(
    """add_param_group zero_grad state_dict load_state_dict register_step_pre_hook register_step_post_hook
    register_state_dict_pre_hook register_state_dict_post_hook register_load_state_dict_pre_hook
    register_load_state_dict_post_hook""".split()
)
_ATTRIBUTES = {"__getattribute__", "__getattr__", "__setattr__", "__delattr__"}


def register_elementwise(kind: Kind | None = None, *, methods: tuple[str, ...] = ()) -> Any:
    """Declares that an optimizer's `step` treats each element of a parameter independently, as Adam's does.

    Under a plan, such an optimizer steps on this rank's shard of the parameters, and its states have the size of the
    shard. This takes one all-gather of new parameters per step. An unknown optimizer steps on the DTensors themselves,
    which is correct too, but gathers whatever its rules require. Norms of tensors, factored or blockwise quantised
    states, and anything that reads shapes are not elementwise. Subclasses that override neither `step` nor what it
    calls are included. Call it before `parallelize`; it is also a decorator.

    Arguments:
        kind: the class of the optimizer.
        methods: methods other than `step` that read gradients or states (Sophia's `update_hessian`).

    Raises PlanError if `kind` is not an optimizer, or lacks such a method.
    """
    if kind is None:
        return lambda given: register_elementwise(given, methods=methods)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind in MATRIX:
        why = "looks at whole matrices" if kind in MATRIX else "is no class of optimizers"
        raise PlanError(
            "register_elementwise", f"{getattr(kind, '__name__', kind)!s} {why}", (), [("a torch.optim.Optimizer", "")]
        )
    missing = [name for name in methods if not callable(getattr(kind, name, None))]
    if missing:
        raise PlanError(
            "register_elementwise", f"{kind.__name__} has no method {missing[0]!r}", (), [("methods=()", "step alone")]
        )
    _elementwise[kind] = tuple(methods)
    return kind


def elementwise_methods(optimizer: torch.optim.Optimizer) -> tuple[str, ...] | None:
    """The methods beside `step` that run on flat parts; None for an optimizer that is not known to be elementwise."""
    kind = type(optimizer)
    base = next((one for one in kind.__mro__ if one in _elementwise), None)
    if base is None:
        return None
    reached = {name for name in dir(base) if not name.startswith("__") and name not in _FREE} | _ATTRIBUTES
    if any(_found(kind, name) is not _found(base, name) for name in reached):
        return None
    if any(name in reached and callable(value) for name, value in vars(optimizer).items()):
        return None  # replaced on the object
    return _elementwise[base]


def _found(kind: type, name: str) -> Any:
    found = inspect.getattr_static(kind, name, None)
    return without_hooks(found) if name == "step" else found


def without_hooks(step: Any) -> Any:
    """A step as its class wrote it: torch wraps that of each class that it meets, for its profiler and hooks."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step
