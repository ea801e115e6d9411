"""Iterable datasets: every rank reads the whole stream, in its order, and collates its own rows of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from ._cut import Collate, Cut


class StreamedRows(IterableDataset):
    """Yields (rows of the global batch, whether all are here, the samples that are)."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, cut: Cut) -> None:
        self.dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        # What a worker process needs of the cut, of which there is one per size.
        self._rows = {size: cut.rows(size) for size in range(1, batch_size + 1)}

    def __iter__(self) -> Iterator[tuple[int, bool, list]]:
        samples = iter(self.dataset)
        while batch := list(islice(samples, self._batch_size)):
            if len(batch) < self._batch_size and self._drop_last:
                return
            rows = self._rows[len(batch)]
            start, stop = rows or (0, len(batch))
            yield len(batch), rows is None, batch[start:stop]


class CollateRows:
    """The user's collate function, of the samples that are here."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, read: tuple[int, bool, list]) -> tuple[int, bool, Any]:
        count, whole, samples = read
        return count, whole, self._collate(samples)
