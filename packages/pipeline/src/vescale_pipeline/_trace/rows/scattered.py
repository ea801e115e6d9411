"""Values that are put one after another where a mask is true: the features of images among the tokens of a text.

Where a value goes depends on the mask before it. Where a mask is true in each row as often as there are values for a
row, each row takes its own, and `masked_scatter` leaves the rows at their places. A mask that comes from the batch's
inputs alone is there before anything is computed, and is looked at in each call.

Cost: two numbers of the mask are read for each microbatch, of a device by a wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._errors import PipelineError
from ..placeholder import Placeholder
from .notes import Ref, Step

SCATTERS = frozenset((torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_))


def is_seen(args: tuple, kwargs: dict) -> bool:
    """True if the mask of a call of SCATTERS has values."""
    mask = _given(args, kwargs)[1]
    return type(mask) is not Placeholder and not mask.is_meta


def check_rows_take_own(args: tuple, kwargs: dict, rows: int) -> None:
    """Raises PipelineError where a mask that has values is not true, in each of the microbatch's `rows`, as often as
    there are values for a row."""
    if not is_seen(args, kwargs):
        return
    target, mask, source = _given(args, kwargs)
    shape = torch.broadcast_shapes(target.shape, mask.shape)
    taken = mask.expand(shape).reshape(rows, -1).sum(1)
    fewest, most = int(taken.min()), int(taken.max())
    if not fewest * rows == most * rows == source.numel():
        raise PipelineError(
            "masked_scatter",
            f"the mask puts {fewest} to {most} values into a row of the batch, and there are {source.numel() / rows:g} "
            "for each: rows would take values of others, and in microbatches not those that they take on one device",
            [f"mask    {list(mask.shape)}", f"source  {list(source.shape)}"],
            [
                ("a mask that is true equally often in each row", "as often as there are values for a row"),
                ("Pipeline(microbatches=1)", "one microbatch is the batch"),
                ("generate_plan(model, pin={'pp': 1}, ...)", "rows take each other's values without a pipeline"),
            ],
        )


def takes_own(step: Step, is_once: Callable[[Ref], bool]) -> bool:
    """True if each row of a call that passed `check_rows_take_own` takes values of its own.

    Arguments:
        is_once: tells of a value whether the batch lies in it once.
    """
    note, out = step.note, step.note.outs[0]
    target, mask, source = _given(note.args, note.kwargs)
    axes = {ref.number: axis for ref, axis in zip(step.refs, step.axes)}
    if mask.placeholder or not (target.placeholder or source.placeholder) or type(axes[source.number]) is not int:
        return False
    rows = [(ref, axis) for ref, axis in (*zip(step.refs, step.axes), (out, step.outs[0])) if type(axis) is int]
    return all(prod(ref.shape[:axis]) == 1 and is_once(ref) for ref, axis in rows)


def _given(args: tuple, kwargs: dict) -> list[Any]:
    """Returns the target, the mask and the values."""
    given = dict(zip(("input", "mask", "source"), args)) | kwargs
    return [given[name] for name in ("input", "mask", "source")]
