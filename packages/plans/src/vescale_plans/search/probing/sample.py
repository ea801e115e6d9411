"""Input of a model while it is probed: one row of a batch, as often as needed.

Most inputs have the batch's rows first. Where the first dim of one is of another size, all rows may share it (a table
of places), or have as many entries of it each (the patches of images, one image after the other): both are tried.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product
from typing import Any

import torch
from torch import Tensor, nn

from vescale_trace.values import map_tensors, tensors_in

from ..._plan.parts import PlanError

POSITIONS = 5
"""Positions of the sample that is made if the user gives none: few, and no size that models have."""
MOST_READINGS = 9
"""Ways to read a sample's inputs that are tried."""
INTEGER_INPUTS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class Sample:
    """One row of the model's inputs.

    Arguments:
        args, kwargs: tensors [entries of the row, ...], or what all rows share.
        entries: per tensor, in order: 1, or more, or 0 of what all rows share; empty if all are 1.
        others: the same inputs read otherwise, in the order in which to try them.
    """

    args: tuple
    kwargs: Mapping[str, Any]
    entries: tuple[int, ...] = ()
    others: tuple[Sample, ...] = ()

    def repeat(
        self, batch: int, *, follow: bool = False, turned: Collection[int] = (), moved: int | None = None
    ) -> tuple[tuple, dict[str, Any]]:
        """The row `batch` times: arguments and keyword arguments.

        With `follow`, row 1 differs: its numbers are NaN, and the integers of the tensors at the places `turned` are
        turned by one position; of the tensors of integers that turning leaves alike, those at number `moved` are one
        less, or 1 for 0.
        """
        alike, places = count(), enumerate(self._tensors)

        def grow(tensor: Tensor) -> Tensor:
            place, (_, entries) = next(places)
            if not tensor.ndim or not entries:
                return tensor
            grown = tensor.repeat(batch, *[1] * (tensor.ndim - 1))
            row = grown[entries : 2 * entries]
            if follow and tensor.is_floating_point():
                row.fill_(float("nan"))
            elif follow and entries == 1 and _stays(tensor):
                if next(alike) == moved:
                    row.copy_(torch.where(row == 0, 1, row - 1))
            elif follow and place in turned and tensor.ndim > 1:
                row.copy_(row.roll(1, -1))
            return grown

        return map_tensors((self.args, dict(self.kwargs)), grow)

    @property
    def _tensors(self) -> list[tuple[Tensor, int]]:
        """Its tensors in order, each with its entries."""
        tensors = tensors_in((self.args, dict(self.kwargs)))
        return list(zip(tensors, self.entries or (1,) * len(tensors)))

    def longer(self, times: int) -> Sample:
        """The row with its positions so many times over."""
        positions, tensors = self.positions, iter(self._tensors)

        def grow(tensor: Tensor) -> Tensor:
            dim = int(next(tensors)[1] > 0)  # of what all rows share the positions come first
            if tensor.ndim <= dim or tensor.shape[dim] != positions:
                return tensor
            return tensor.repeat([times if at == dim else 1 for at in range(tensor.ndim)])

        args, kwargs = map_tensors((self.args, dict(self.kwargs)), grow)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def turnings(self) -> list[tuple[int, ...]]:
        """Tensors of integers to turn, in the order in which to try it: all, all but one, for it may hold sizes (those
        of an image) which turned are others, or none; of those with one entry a row, and of all."""
        some = [(at, n) for at, (one, n) in enumerate(self._tensors) if one.ndim > 1 and not one.is_floating_point()]
        single, several = tuple(at for at, n in some if n == 1), tuple(at for at, n in some if n)
        but_one = (tuple(at for at in single if at != left) for left in single)
        return [*dict.fromkeys((single, *but_one, (), several))]

    @property
    def alike(self) -> int:
        """Tensors of integers that are the same when they are turned by one position."""
        return sum(entries == 1 and _stays(tensor) for tensor, entries in self._tensors)

    @property
    def positions(self) -> int | None:
        """Positions of the first integer tensor [batch, positions], or the first numbers [batch, positions,
        features]."""
        found = [(one, n) for one, n in self._tensors if n and one.ndim == (3 if one.is_floating_point() else 2)]
        found.sort(key=lambda each: each[1] != 1)  # what has several entries a row tells where nothing else does
        return found[0][0].shape[1] if found else None


def _stays(tensor: Tensor) -> bool:
    """True if it is integers, [1, ...], that a turn by one position leaves as they were."""
    if tensor.ndim < 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    return torch.equal(tensor, tensor.roll(1, -1))


def sample_of(model: nn.Module, batch: Any = None, positions: int = POSITIONS, *, rows: int | None = None) -> Sample:
    """The first row of `batch`: what the model is called with, a tensor, a tuple of arguments or a dict of keywords.

    Without `batch`, a model whose forward takes `input_ids`, or a HuggingFace model that says what its inputs are,
    gets small inputs made up for it. Raises PlanError where that is not known. As long as most of the tensors are, so
    many rows `batch` has; of several lengths that are as frequent it is `rows`, or the first. If the model does not run
    so, it has `rows`, if one length is that or all are multiples of it, or the least, if all are multiples of that.
    """
    if batch is None:
        batch = _made_up(model, positions)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, Sequence) else (batch,)
    tensors = tensors_in((args, kwargs))
    read = {way: None for count in _counts(tensors, rows) for way in islice(_products(tensors, count), MOST_READINGS)}
    first, *others = (_read(args, kwargs, entries) for entries in read)
    return replace(first, others=tuple(others))


def _counts(tensors: Sequence[Tensor], rows: int | None) -> list[int]:
    """Returns how many rows the tensors may have, in the order in which to try it."""
    lengths = Counter(len(tensor) for tensor in tensors if tensor.ndim)
    most = max(lengths, key=lambda length: (lengths[length], length == rows), default=0)
    least = min(lengths, default=0)
    others = [count for count in (rows, least) if count and all(length % count == 0 for length in lengths)]
    return [*dict.fromkeys([most, *([rows] if rows in lengths else []), *others])]


def _products(tensors: Sequence[Tensor], rows: int) -> Iterator[tuple[int, ...]]:
    """Ways to read all of them by which some have rows."""
    ways = product(*(_ways(tensor, rows) if tensor.ndim else (1,) for tensor in tensors))
    sized = [place for place, tensor in enumerate(tensors) if tensor.ndim]
    return (way for way in ways if not sized or any(way[place] for place in sized))


def _ways(tensor: Tensor, rows: int) -> tuple[int, ...]:
    """Returns how many entries of its first dim may be a row's."""
    size = len(tensor)
    if size == rows:
        return (1,)
    return (0, size // rows, 1) if rows and size > rows and size % rows == 0 else (0, 1)


def _read(args: tuple, kwargs: Mapping[str, Any], entries: tuple[int, ...]) -> Sample:
    places = iter(entries)

    def cut(tensor: Tensor) -> Tensor:
        count = next(places)
        return (tensor[:count] if tensor.ndim and count else tensor).detach().cpu().clone()

    return Sample(*map_tensors((args, kwargs), cut), entries if set(entries) != {1} else ())


def _made_up(model: nn.Module, positions: int) -> dict[str, Any]:
    accepted = inspect.signature(model.forward).parameters
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    asked = [name for name in INTEGER_INPUTS[: 1 + bool(decodes)] if name in accepted]
    made: dict[str, Any] = {name: torch.arange(5, 5 + positions)[None] for name in asked}
    if made and getattr(model, "main_input_name", "input_ids") == "input_ids":
        return made | ({"use_cache": False} if "use_cache" in accepted else {})
    named = getattr(model, "dummy_inputs", None)
    if isinstance(named, Mapping) and set(named) <= set(accepted):
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}
    raise PlanError(
        "generate_plan",
        f"{type(model).__name__}.forward takes {', '.join(accepted)}, and nothing says what they look like",
        (),
        [("sample={...}", "what the model is called with: one row of a batch is enough")],
    )
