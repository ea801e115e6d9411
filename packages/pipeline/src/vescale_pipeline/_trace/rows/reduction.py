"""Relates a forward's loss, and all that it returns, to the rows of its batch: how much a microbatch's loss weighs, and
how an evaluation's outputs come together. See `tags.py`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..._errors import PipelineError
from ..placeholder import Placeholder
from .notes import Note, Notes, refs_in
from .tags import CONSTANT, Lost, Tag, Tags, axis_of


def reduction(part: Notes, whole: Notes, times: int, losses: tuple[Tensor, Tensor]) -> Tag:
    """The tag of the loss of a forward that ran on a part, and on the whole batch of `times` parts."""
    return _tags(part, whole, times, [losses])[0]


def outputs(part: Notes, whole: Notes, times: int, results: tuple[list[Tensor], list[Tensor]]) -> list[int | Tag]:
    """Describes everything that a forward returned: the dim that has the batch's rows, or else its tag."""
    if times == 1:
        return [CONSTANT] * len(results[0])
    pairs = list(zip(*results))
    if len(results[0]) != len(results[1]):
        return [Lost("a forward that fails, or returns other tensors, for another number of rows")] * len(results[0])
    found = []
    for (small, large), tag in zip(pairs, _tags(part, whole, times, pairs)):
        dim = axis_of(tuple(small.shape), tuple(large.shape), times)
        if isinstance(tag, Lost) or type(dim) is int:
            found.append(tag if isinstance(tag, Lost) else dim)
        else:
            known = dim is None and (tag == CONSTANT or isinstance(tag, frozenset))
            found.append(tag if known else Lost("a function that moves rows"))
    return found


def _tags(part: Notes, whole: Notes, times: int, results: list[tuple[Tensor, Tensor]]) -> list[Tag]:
    pairs, other_ways = (
        _aligned(part.notes, whole.notes, times),
        Lost("a forward that calls other functions for another number of rows"),
    )
    if pairs is None:
        return [other_ways] * len(results)
    tags = Tags(times)
    for small, large in pairs:
        tags.go_on(small, large)
    part.takes_own |= tags.places.takes_own
    if tags.read is not None:
        return [replace(tags.read, cause=f"{tags.read.cause} of what depends on the batch")] * len(results)
    found: list[Tag] = []
    for small, large in results:
        number, other = part.number_of(small), whole.number_of(large)
        if _place([note for note, _ in pairs], number) != _place([note for _, note in pairs], other):
            found.append(other_ways)
        elif number in tags.of:
            found.append(tags.of[number])
        else:
            is_value = type(small) is Placeholder and not small.is_weight
            found.append(Lost("a function that is not torch's own") if is_value else CONSTANT)
    return found


def _aligned(part: list[Note], whole: list[Note], times: int) -> list[tuple[Note, Note]] | None:
    """Each function of a part's forward with that of the whole batch; None if they call different ones. The whole
    batch may repeat a row for all of its rows, which models leave out for a batch of one row (transformers, of
    positions)."""
    pairs, rest = [], iter(whole)
    for small in part:
        large = next(rest, None)
        while large is not None and large.name != small.name and _repeats_a_row(large, times):
            large = next(rest, None)
        if large is None or large.name != small.name:
            return None
        pairs.append((small, large))
    return pairs if all(_repeats_a_row(note, times) for note in rest) else None


def _repeats_a_row(note: Note, times: int) -> bool:
    shapes = [one.shape for one in (*refs_in(note), *note.outs)]
    return note.name == "expand" and len(shapes) == 2 and shapes[1] == (times, *shapes[0][1:]) and shapes[0][:1] == (1,)


def _place(notes: list[Note], number: int) -> tuple[int, int] | None:
    """Finds the function that made it, and its place among that one's outputs; None if no function did."""
    made = ((at, place) for at, note in enumerate(notes) for place, out in enumerate(note.outs) if out.number == number)
    return next(made, None)


def refused(lost: Lost) -> PipelineError:
    """The error for a loss of which nobody can tell what a microbatch weighs."""
    line = f", at {lost.line}" if lost.line else ""
    return PipelineError(
        "pipeline",
        f"the loss comes from the batch by {lost.cause}{line}: the batch's loss cannot be derived from the "
        "microbatches' losses",
        ["known  means and sums over rows, means over labels, and these times constants, added up"],
        [
            ("F.cross_entropy(x, labels)", "a masked mean: labels of -100 do not count"),
            ("loss = x.sum() / count", "with `count` an argument of the model's call, of the whole batch"),
            ('Pipeline(loss="mean")', "if the batch's loss is the mean of the microbatches' losses"),
            ('Pipeline(loss="sum")', "if it is their sum"),
            ("generate_plan(model, pin={'pp': 1}, ...)", "rows that meet in the loss do so without a pipeline"),
        ],
    )
