"""torch's checkpoints hand back DTensors in a recomputation, however they are nested.

A checkpoint keeps its inputs as saved tensors. Where a checkpoint around it, or anything else, has hooks on these,
autograd makes fresh tensors of what the hooks give back: plain ones, of this rank's shard, which the recomputed code
would take for whole tensors. Nothing of this passes `__torch_function__`, so the three places where torch's
checkpoints save and take back their inputs note the layouts beside them:

    CheckpointFunction.apply               reentrant
    _CheckpointFrame.save_inputs, .get_inputs   not reentrant
    _NoopSaveInputs.apply                  not reentrant, before torch 2.13
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import checkpoint

from .._layouts.layout import Layout
from .._torch_private import _CheckpointFrame, _NoopSaveInputs
from .tensor import DTensor, attach

Layouts = Sequence[Layout | None]


def keep_layouts() -> None:
    """Puts the notes in place, once for the process."""
    _replace(checkpoint.CheckpointFunction, "apply", _reentrant, static=True)
    if hasattr(_CheckpointFrame, "get_inputs"):
        _replace(_CheckpointFrame, "save_inputs", _save_inputs)
        _replace(_CheckpointFrame, "get_inputs", _get_inputs)
    else:
        _replace(_NoopSaveInputs, "apply", _saved_by_function, static=True)


def _replace(owner: type, name: str, how: Callable, static: bool = False) -> None:
    original = getattr(owner, name)

    def replaced(*args: Any) -> Any:
        return how(original, *args)

    setattr(owner, name, staticmethod(replaced) if static else replaced)


def _layouts_of(values: Sequence[Any]) -> Layouts | None:
    """Returns the layouts, None if there is no DTensor."""
    found = [value._layout.base if type(value) is DTensor else None for value in values]
    return found if any(layout is not None for layout in found) else None


def _restored(values: Sequence[Any], layouts: Layouts) -> list[Any]:
    """`values` with the tensors that came back as plain shards under their layouts."""
    return [
        attach(value, layout)
        if layout is not None and isinstance(value, Tensor) and type(value) is not DTensor
        else value
        for value, layout in zip(values, layouts, strict=True)
    ]


def _reentrant(apply: Callable, function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
    layouts = _layouts_of(args)
    if layouts is None:
        return apply(function, preserve_rng_state, *args)
    return apply(lambda *given: function(*_restored(given, layouts)), preserve_rng_state, *args)


def _save_inputs(save: Callable, frame: Any, *args: Any) -> None:
    frame._vescale_layouts = _layouts_of(args)
    save(frame, *args)


def _get_inputs(get: Callable, frame: Any) -> list[Any]:
    found, layouts = get(frame), getattr(frame, "_vescale_layouts", None)
    return found if layouts is None else _restored(found, layouts)


def _saved_by_function(apply: Callable, dummy: Tensor, kwargs: dict, *args: Any) -> Tensor:
    out, layouts = apply(dummy, kwargs, *args), _layouts_of(args)
    node = out.grad_fn
    if node is not None and layouts is not None:
        given = node.get_args
        node.get_args = lambda tensors: _restored(given(tensors), (None, *layouts))
    return out
