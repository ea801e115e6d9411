"""torch's own ways to distribute a model, before or on top of `parallelize`: errors that name what to leave out.

Nothing of torch is changed: what these ways read of a module answers for it. DistributedDataParallel reads a list of
parameters that it is to leave alone, and the composable functions (fully_shard, replicate) what was applied before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .._plan.parts import PlanError

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_COMPOSES = frozenset({"checkpoint"})
"""Composable functions that distribute nothing."""


def check_unwrapped(model: nn.Module) -> None:
    """Raises PlanError for a model that torch distributes already."""
    from torch.distributed._composable.contract import STATE_KEY

    for name, module in model.named_modules():
        applied = {function.__name__ for function in module.__dict__.get(STATE_KEY, ())} - _COMPOSES
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
    """From now on torch's wrappers raise PlanError for the model and its modules."""
    from torch.distributed._composable.contract import STATE_KEY  # costs more than the rest of an import of vescale

    for module in model.modules():
        if not isinstance(module.__dict__.get(STATE_KEY), _Applied):
            module.__dict__[STATE_KEY] = _Applied(module.__dict__.get(STATE_KEY, ()))
        module.__dict__[_IGNORED] = _LeftAlone()


class _Applied(OrderedDict):
    """What of the composable functions was applied to a module."""

    def __contains__(self, function: Any) -> bool:
        if function.__name__ not in _COMPOSES:
            raise _refusal(function.__name__)
        return super().__contains__(function)


class _LeftAlone:
    """Which parameters DistributedDataParallel is to leave alone."""

    def __iter__(self) -> Iterator[str]:
        raise _refusal("DistributedDataParallel")


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
