"""Datasets with indices: every rank walks the global batches of indices, and loads its rows of each."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler

from .._apply.generators import seeded_for
from .._plan.parts import PlanError
from ._cut import Cut

FIRST_CHECKS = 3
_REMEDIES = [
    ("torch.manual_seed(seed) with one seed on all ranks", "before the loader is iterated"),
    ("no sampler that cuts by rank (DistributedSampler)", "the plan says what is whose"),
]


class Walk:
    """One epoch of global batches of indices: what was handed to the DataLoader, in order.

    in_parts: whether ranks load their rows alone. generators: what the order may be drawn from. state: the loader's:
    where the epoch begins, and with which states of the generators; noted when it begins at its start.
    """

    def __init__(
        self, batches: Any, cut: Cut, in_parts: bool, generators: list[torch.Generator], state: dict[str, Any]
    ) -> None:
        self._batches, self._cut, self._in_parts = batches, cut, in_parts
        self._generators, self._state = generators, state
        self.handed: deque[tuple[int, bool]] = deque()  # rows of the global batch, and whether it is loaded whole

    def __iter__(self) -> Iterator[list]:
        place = self._state["samples"]
        seed, order = self._order(place)
        for number, batch in enumerate(order):
            if number < FIRST_CHECKS and not self._cut.is_whole:
                self._cut.check_alike(batch, "draw other samples for one global batch", _REMEDIES)
            rows = self._cut.rows(len(batch)) if self._in_parts else None
            self.handed.append((len(batch), rows is None))
            start, stop = rows or (0, len(batch))
            if self._in_parts:
                yield [Placed(batch[at], seed, place + at) for at in range(start, stop)]
            else:
                yield batch
            place += len(batch)

    def _order(self, skip: int) -> tuple[int, Iterator[list]]:
        """A seed for the samples, and the batches that remain. Those of an epoch that goes on are drawn from the
        generators as they were when it began. torch's own is then put back: the program restores it. A generator of the
        loader's goes on from there to the next epoch."""
        now = [generator.get_state() for generator in self._generators]
        then = self._state["generators"] = self._state["generators"] or now
        seed = zlib.crc32(b"".join(one.numpy().tobytes() for one in then))
        order = self._remaining(skip)
        if not skip:
            return seed, order
        for generator, state in zip(self._generators, then):
            generator.set_state(state)
        first = list(islice(order, 1))
        for generator, state in zip(self._generators, now):
            if generator is torch.default_generator:
                generator.set_state(state)
        return seed, chain(first, order)

    def _remaining(self, skip: int) -> Iterator[Any]:
        return _rest(self._batches, skip)


class Items(Walk):
    """One epoch of indices, of a DataLoader without batches: each item of its dataset is a batch."""

    def __iter__(self) -> Iterator[Any]:
        yield from self._order(self._state["batches"])[1]

    def _remaining(self, skip: int) -> Iterator[Any]:
        return islice(iter(self._batches), skip, None)


class Batches(Sampler):
    """The batch sampler of a rank's own DataLoader: each iteration is the walk that was set."""

    def __init__(self, length: Callable[[], int]) -> None:
        self._length = length
        self.walk: Walk | None = None

    def __iter__(self) -> Iterator[list]:
        return iter(self.walk)

    def __len__(self) -> int:
        return self._length()


class Placed:
    """An index, and where in the stream its sample stands."""

    __slots__ = ("index", "place", "seed")

    def __init__(self, index: Any, seed: int, place: int) -> None:
        self.index, self.seed, self.place = index, seed, place


class PlacedSamples(Dataset):
    """Samples whose random numbers follow from their places: torch's, Python's and numpy's generators are seeded before
    each, and put back after, so that ranks with other samples go on with the same generators."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, placed: Placed) -> Any:
        with seeded_for(placed.seed, placed.place):
            return self.dataset[placed.index]


def _rest(batches: Any, skip: int) -> Iterator[list]:
    """The batches after the first `skip` samples, at any batch size; nothing is loaded for it."""
    if type(batches) is BatchSampler:
        indices = islice(iter(batches.sampler), skip, None)
        while batch := list(islice(indices, batches.batch_size)):
            if len(batch) == batches.batch_size or not batches.drop_last:
                yield batch
        return
    taken = 0
    for batch in batches:
        taken += len(batch)
        if taken > skip:
            check_boundary(taken - len(batch), skip, taken)
            yield list(batch)


def check_boundary(start: int, skip: int, stop: int) -> None:
    """Raises PlanError where the samples that were taken end inside of a batch."""
    if start < skip < stop:
        raise PlanError(
            "vescale.loader",
            "the state was saved in the middle of what is now one batch",
            [f"samples taken  {skip}", f"batch  {start} to {stop}"],
            [("the batch size that it was saved with", "or a dataset with indices in torch's BatchSampler: any size")],
        )
