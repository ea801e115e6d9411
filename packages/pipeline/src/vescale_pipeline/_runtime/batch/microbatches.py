"""A batch in microbatches: the parts of its tensors, and how much each part's loss weighs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import fill, tensors_in

from ..._errors import PipelineError
from ..._trace.event import Record
from ..._trace.placeholder import Placeholder
from ..._trace.rows.reduction import refused
from ..._trace.rows.scattered import SCATTERS, check_rows_take_own
from ..._trace.rows.tags import LABELLED, MEAN, ONCE, Lost, Tag
from ..loss import Weights
from ..skeleton import Run


def rows_in_order(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Views of `count` equal parts."""
    return tensor.split(tensor.shape[0] // count) if len(tensor) else (tensor,) * count


def split(
    inputs: tuple[tuple, dict], count: int, parts_of: Callable[[Tensor, int], Sequence[Tensor]] = rows_in_order
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
            return parts_of(value, count) if is_cut else (value,) * count
        tensors = tensors_in(value)
        if not tensors:
            return (value,) * count
        return [fill(value, part) for part in zip(*map(parts, tensors))]

    args, kwargs = inputs
    columns = zip(*map(parts, args)) if args else repeat((), count)
    named = zip(*map(parts, kwargs.values())) if kwargs else repeat((), count)
    return [(own, dict(zip(kwargs, values))) for own, values in zip(columns, named)]


def check_awaits_no_gradient(inputs: tuple[tuple, dict]) -> None:
    """Raises PipelineError where something given to a training call awaits a gradient: the backward has run when the
    model returns, for the parameters alone, so that whatever computed the input would silently not be trained."""
    args, kwargs = inputs
    for name, value in (*enumerate(args), *kwargs.items()):
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                given = f"argument {name}" if isinstance(name, int) else f"the argument {name!r}"
                raise PipelineError(
                    "pipeline",
                    f"{given} requires a gradient ({list(tensor.shape)}), and a pipeline gives gradients to the "
                    "model's parameters alone",
                    (),
                    [
                        ("model(x.detach())", "where the gradient is not needed"),
                        ("a module of the model that computes it, before the first cut", "then it is trained"),
                    ],
                )


def rows_of(inputs: Any) -> int:
    """Dim 0 of the first tensor that has dims."""
    for tensor in tensors_in(inputs):
        if tensor.ndim:
            return tensor.shape[0]
    raise PipelineError(
        "pipeline", "the model was called without a tensor that has rows", (), [("model(batch)", "dim 0 is the batch")]
    )


# --- weights ------------------------------------------------------------------------


def loss_weights(
    reduction: Tag,
    record: Record,
    forward: Callable[[Any], Any],
    parts: list[Any],
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Weights:
    """Returns the weight of each microbatch's loss in the batch's: shares of 1, or 1 each if the loss is a sum.

    A mean over labels weighs a part by the labels that it does not ignore. They are counted from the targets, which no
    stage computes: the forward is run once more per part, on placeholders alone. `whole` makes a distributed count one
    device's. On a device the shares of a single mean stay there. Means that are to be compared, and labels that a
    weight might cancel, are read by the host, all at once. What no row enters, the same in every part, is right with
    any shares of 1. Raises PipelineError for a loss that is no such mean or sum, for one that adds up what weighs the
    parts differently, and for a mask by which rows take values of others.
    """
    if isinstance(reduction, Lost):
        raise refused(reduction)
    kinds = (reduction if isinstance(reduction, frozenset) else MEAN) - ONCE
    labelled = sorted(kind for kind in kinds if isinstance(kind, int))
    counters = [Counter(record).count(forward, part) for part in parts] if labelled or record.takes_own else []
    counts = [[whole(counter.counts[kind]).double() for counter in counters] for kind in labelled]
    if len(kinds) == 1 and labelled and counts[0][0].device.type != "cpu" and not counters[0].weighs:
        column = torch.stack(counts[0])
        return list((column / column.sum()).unbind())
    columns = (
        torch.stack([count for column in counts for count in column]).view(len(counts), -1).tolist() if counts else []
    )
    found = dict(zip(labelled, map(_shares, columns)))
    if "mean" in kinds:
        found["mean"] = [1 / len(parts)] * len(parts)
    if "sum" in kinds:
        found["sum"] = [1.0] * len(parts)
    first, *others = found.values()
    is_once = isinstance(reduction, frozenset) and reduction >= ONCE
    differ = any(math.isnan(a) is not math.isnan(b) or abs(a - b) > 1e-12 for o in others for a, b in zip(first, o))
    if differ or is_once and abs(sum(first) - 1) > 1e-9:
        lines = [f"{_name(kind)}  {', '.join(f'{share:.4g}' for share in shares)}" for kind, shares in found.items()]
        raise PipelineError(
            "pipeline",
            "the loss adds up parts that weigh the microbatches differently",
            [*lines, *(["what no row enters (a penalty)  once in all"] if is_once else [])],
            [
                ("loss_fn=", "one mean over all labels, or sums alone"),
                ("reduction='sum' over a number that you pass in", ""),
                ('Pipeline(loss="mean")', "if the batch's loss is the mean of the microbatches' losses"),
                *([("loss = model(batch) + penalty", "of model.parameters(), in the loop")] if is_once else []),
            ],
        )
    return first


def _name(kind: str | int) -> str:
    return f"mean over labels {kind + 1}" if isinstance(kind, int) else f"{kind} over rows"


def _shares(counts: list[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else float("nan") for count in counts]


class Counter(Run):
    """Runs a forward on placeholders alone, looks at its masks, and counts what its losses are means over."""

    __slots__ = ("counts", "weighs", "_takes_own", "_rows")

    def __init__(self, record: Record) -> None:
        super().__init__(record, len(record.events), {})
        self._replays, self._takes_own = False, record.takes_own
        self.counts: list[Tensor | None] = []
        self.weighs = False

    def count(self, forward: Callable[[Any], Any], part: Any) -> Counter:
        self._rows = rows_of(part)
        self(lambda: forward(part))
        return self

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if self._takes_own and function in SCATTERS:
            check_rows_take_own(args, kwargs, self._rows)
        if function in LABELLED:
            self.counts.append(_labels(*args, **kwargs))
            self.weighs |= len(args) > 2 and args[2] is not None or kwargs.get("weight") is not None
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
) -> Tensor | None:
    """The labels that a mean divides by, a number; None if it is none, which nobody asks for."""
    if reduction != "mean" or type(target) is Placeholder or target.is_floating_point():
        return None
    kept = target != ignore_index
    if weight is None or type(weight) is Placeholder:
        return kept.sum()
    return weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0).sum()
