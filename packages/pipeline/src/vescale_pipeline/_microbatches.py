"""A batch in microbatches: the parts of its tensors, and how much each part's loss weighs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._containers import fill, tensors_in
from ._errors import PipelineError
from ._placeholder import Placeholder
from ._record import Record
from ._skeleton import Run


def rows_in_order(tensor: Tensor, index: int, count: int) -> Tensor:
    """Part `index` of `count`: a view."""
    size = tensor.shape[0] // count
    return tensor[index * size : (index + 1) * size]


def split(
    inputs: tuple[tuple, dict], count: int, part_of: Callable[[Tensor, int, int], Tensor] = rows_in_order
) -> list[tuple[tuple, dict]]:
    """`inputs` (the args and kwargs of a call) in `count` equal parts of rows; views, nothing is copied.

    The rows are dim 0 of the first tensor that has dims. A tensor of another size in
    dim 0 (a mask over positions) goes whole to every part.
    """
    rows = rows_of(inputs)
    if rows % count:
        near = rows - rows % count
        raise PipelineError(
            "pipeline",
            f"a batch of {rows} rows does not divide into {count} microbatches",
            (),
            [
                (f"a batch of {near or count} or {near + count} rows", ""),
                (f"microbatches={max(n for n in range(1, count + 1) if rows % n == 0)}", "a divisor of the rows"),
            ],
        )

    def parts(value: Any) -> Sequence[Any]:
        """One argument's part for every microbatch."""
        if isinstance(value, Tensor):
            is_cut = value.ndim and value.shape[0] == rows
            return [part_of(value, i, count) for i in range(count)] if is_cut else (value,) * count
        tensors = tensors_in(value)
        if not tensors:
            return (value,) * count
        return [fill(value, part) for part in zip(*map(parts, tensors))]

    columns = [parts(value) for value in inputs[0]]
    named = {name: parts(value) for name, value in inputs[1].items()}
    return [
        (tuple(column[i] for column in columns), {name: column[i] for name, column in named.items()})
        for i in range(count)
    ]


def rows_of(inputs: Any) -> int:
    """Dim 0 of the first tensor that has dims."""
    for tensor in tensors_in(inputs):
        if tensor.ndim:
            return tensor.shape[0]
    raise PipelineError(
        "pipeline", "the model was called without a tensor that has rows", (), [("model(batch)", "dim 0 is the batch")]
    )


# --- weights ------------------------------------------------------------------------


def loss_weights(record: Record, forward: Callable[[Any], Any], parts: list[Any]) -> list[float]:
    """What each part's loss counts for in the batch's: shares of 1, or 1 each where the loss is a sum.

    A mean over labels weighs a part by the labels that it does not ignore. They are
    counted from the targets, which no stage computes: the forward is run once more per
    part, on placeholders alone.
    """
    if not any(event.function in _COUNTS for event in record.events):
        return [1 / len(parts)] * len(parts)
    counts = [Counter(record).count(forward, part) for part in parts]
    weights = {tuple(_shares([part[i] for part in counts])) for i in range(len(counts[0]))}
    if len(weights) > 1:
        raise PipelineError(
            "pipeline",
            "the loss adds means over different numbers of labels, which weigh the microbatches differently",
            [f"labels per microbatch  {list(of_part)}" for of_part in zip(*counts)],
            [("loss_fn=", "one mean over all labels"), ("reduction='sum' over a number that you pass in", "")],
        )
    return list(weights.pop())


def _shares(counts: list[float | None]) -> list[float]:
    """None stands for a sum, -1 for a mean over what is not known: alike in every part."""
    if counts[0] is None:
        return [1.0] * len(counts)
    if counts[0] == -1:
        return [1 / len(counts)] * len(counts)
    total = sum(counts)
    return [count / total if total else float("nan") for count in counts]


class Counter(Run):
    """Runs a forward on placeholders alone, and counts what its losses are means over."""

    __slots__ = ("counts",)

    def __init__(self, record: Record) -> None:
        super().__init__(record, len(record.events), {})
        self._replays = False
        self.counts: list[float | None] = []

    def count(self, forward: Callable[[Any], Any], part: Any) -> list[float | None]:
        self(lambda: forward(part))
        return self.counts

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        count = _COUNTS.get(function)
        if count is not None:
            self.counts.append(count(*args, **kwargs))
        return super().call(function, args, kwargs)


def _labels(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> float | None:
    """The labels that a mean divides by; see `_shares`."""
    if reduction == "sum":
        return None
    if reduction != "mean" or type(target) is Placeholder or target.is_floating_point():
        return -1
    kept = target != ignore_index
    if weight is None or type(weight) is Placeholder:
        return int(kept.sum())
    return float(weight[torch.where(kept, target, 0)][kept].sum())


_COUNTS = {F.cross_entropy: _labels, F.nll_loss: _labels}
