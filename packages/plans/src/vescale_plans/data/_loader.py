"""`loader`: any DataLoader, of which every rank loads its part; its position is that of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from vescale_trace.values import tensors_in

from .._plan.parts import PlanError
from ..plan import Plan
from ._cut import Cut, is_by_row
from ._indexed import Batches, Items, PlacedSamples, Walk, check_boundary
from ._streamed import CollateRows, StreamedRows

_START: dict[str, Any] = {"batches": 0, "samples": 0, "generators": []}
"""The state at the beginning of an epoch whose order is not drawn yet."""


def loader(loader: DataLoader, plan: Plan, *, parts: bool | None = None) -> Loader:
    """Wraps a single-device DataLoader: its batches become global batches, of which each rank loads its own rows.

    The loop stays the same: `for batch in vescale.loader(loader, plan)`. Batches that are loaded in parts are DTensors
    of the global batch. Batches that every rank loads whole are returned unchanged, and the model shards them. The
    state of the loader (`vescale.save(path, {"loader": loader, ...})`) is the number of samples delivered to all ranks.
    It resumes with the next sample under any other plan, with workers that fetch ahead, and with another batch size.

    If batches are loaded in parts, the random numbers that a dataset draws depend on the sample's position in the
    epoch. They are the same under all plans, but differ from those of an unwrapped DataLoader.

    Arguments:
        loader: of an indexed or an iterable dataset, with any number of workers. All ranks make the same loader, with
            samplers that shuffle from the same seed, for the batch of all ranks together. A StatefulDataLoader works
            too.
        plan: says which rows of a batch belong to this rank: those of torch.chunk, over the data axes.
        parts: whether each rank loads only its rows. None: if the collate function is known to stack samples; otherwise
            all ranks load whole batches, because a function that pads to the longest sample, or draws a mask, has to
            see all samples. True promises that it treats each sample separately.

    Batches in which some rank would have no row are loaded whole. For an iterable dataset, every rank reads the whole
    stream; workers share it as under torch.

    Communicates, for batches in parts: a small all-gather of shapes per batch, and of indices for the first ones.
    Raises PlanError, on all ranks alike, if ranks draw different samples, or rows have different shapes.
    """
    return Loader(loader, plan, parts)


class Loader(DataLoader):
    """See `loader`. Its attributes are those of the wrapped DataLoader; `_own` is the DataLoader that it loads with."""

    def __init__(self, loader: DataLoader, plan: Plan, parts: bool | None) -> None:
        _check(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        if self._is_stream or loader.batch_sampler is None:
            batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            batches |= {} if self._is_stream else {"sampler": loader.sampler}
        else:
            batches = {"batch_sampler": loader.batch_sampler}
        super().__init__(loader.dataset, **batches, **_options(loader))
        self.__dict__.update(batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=loader.sampler)
        self._given, self._cut = loader, Cut(plan)
        self._in_parts = _loads_parts(loader, parts)
        self._own = self._made()
        self._state = dict(_START)
        self._resumed: dict[str, Any] | None = None
        self._has_workers = False

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        state = self._state = dict(resumed or _START)
        for batch, rows in self._run(state):
            state["batches"] += 1
            state["samples"] += rows
            yield batch
        self._state = dict(_START)  # the next one draws its own order

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the batches and samples delivered in this epoch, and the generator states that its
        order was drawn from; between epochs, those of the loader's own generators. It is the same on all ranks.
        """
        state = dict(self._state if self._resumed is None else self._resumed)
        if not state["batches"]:
            state["generators"] = [generator.get_state() for generator in self._own_generators()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration continue after the samples that the state has delivered. The sampler draws that
        epoch's order again, from the saved generator states. torch's generator itself is not changed; save and restore
        it for the epochs to come. A generator of the loader's or of its samplers goes on where it was.
        """
        if missing := _START.keys() - state.keys():
            rule = f"the state has no {min(missing)!r}: it is none that state_dict returned"
            raise PlanError("Loader.load_state_dict", rule, (), [("loader.state_dict()", "gives one")])
        self._resumed = dict(state) if state["batches"] else None
        self._state = dict(state)
        if not state["batches"]:
            for generator, then in zip(self._own_generators(), state["generators"]):
                generator.set_state(then)
            self._state["generators"] = []

    # --- an epoch ------------------------------------------------------------------------

    def _run(self, state: dict[str, Any]) -> Iterator[tuple[Any, int]]:
        """(batch, its global rows) from the state's position on."""
        skip = state["samples"]
        if isinstance(self._own.batch_sampler, Batches):
            walk = Walk(self._given.batch_sampler, self._cut, self._in_parts, self._generators(), state)
            self._own.batch_sampler.walk = walk
            for batch in self._started(skip):
                rows, whole = walk.handed.popleft()
                yield self._joined(batch, whole), rows
            return
        if isinstance(self._own.sampler, Batches):
            self._own.sampler.walk = Items(self._given.sampler, self._cut, False, self._generators(), state)
            for item in self._started(skip):
                yield self._joined(item, True), _rows_of(item)
            return
        taken = 0
        for read in self._started(skip):
            rows, whole, batch = read if self._in_parts else (_rows_of(read), True, read)
            taken += rows
            if taken > skip:
                check_boundary(taken - rows, skip, taken)
                yield self._joined(batch, whole), rows

    def _started(self, goes_on: int) -> Iterator[Any]:
        """The iterator of this rank's DataLoader, which draws a seed for workers; in an epoch that goes on that was
        drawn when it began."""
        now = torch.default_generator.get_state()
        if self.num_workers and not self._has_workers and isinstance(self._own.batch_sampler, Batches):
            iter(self._given.batch_sampler)  # which torch asks twice where it makes workers: some draw when asked
        self._has_workers = self.persistent_workers
        started = iter(self._own)
        if goes_on:
            torch.default_generator.set_state(now)
        return started

    def _joined(self, batch: Any, whole: bool) -> Any:
        return batch if whole or self._cut.is_whole else self._cut.joined(batch)

    def _own_generators(self) -> list[torch.Generator]:
        return [one for one in self._generators() if one is not torch.default_generator]

    def _generators(self) -> list[torch.Generator]:
        """Generators that the order of samples may be drawn from."""
        batches = self._given.batch_sampler
        samplers = (self._given, self._given.sampler, batches, getattr(batches, "sampler", None))
        held = (*(getattr(one, "generator", None) for one in samplers), torch.default_generator)
        found: list[torch.Generator] = []
        for one in held:
            if isinstance(one, torch.Generator) and all(one is not other for other in found):
                found.append(one)
        return found

    def _made(self) -> DataLoader:
        """The DataLoader that this rank loads by."""
        given, options = self._given, _options(self._given)
        if self._is_stream and self._in_parts:
            options["collate_fn"] = CollateRows(given.collate_fn)
            rows = StreamedRows(given.dataset, given.batch_size, given.drop_last, self._cut)
            return DataLoader(rows, batch_size=None, **options)
        if self._is_stream:
            return DataLoader(given.dataset, batch_size=given.batch_size, drop_last=given.drop_last, **options)
        if given.batch_sampler is None:
            return DataLoader(given.dataset, batch_size=None, sampler=Batches(lambda: len(given.sampler)), **options)
        samples = PlacedSamples(given.dataset) if self._in_parts else given.dataset
        return DataLoader(samples, batch_sampler=Batches(lambda: len(given.batch_sampler)), **options)


def _options(loader: DataLoader) -> dict[str, Any]:
    """Options that a DataLoader is made with, beside its dataset, samplers and batches."""
    names = "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor"
    names += " persistent_workers pin_memory_device in_order"
    return {name: getattr(loader, name) for name in names.split() if hasattr(loader, name)}


def _rows_of(batch: Any) -> int:
    """Rows of a batch that was loaded whole, of what has any; else it counts as one."""
    return next((one.shape[0] for one in tensors_in(batch) if one.ndim), 1)


def _check(loader: DataLoader) -> None:
    if isinstance(loader, Loader):
        raise PlanError(
            "vescale.loader",
            f"a {type(loader).__name__} is not a torch DataLoader of one device",
            (),
            [("vescale.loader(DataLoader(dataset, ...), plan)", "once")],
        )
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise PlanError(
            "vescale.loader",
            "the loader's DistributedSampler already gives each rank its own samples, but vescale.loader splits "
            "batches itself",
            [f"sampler  replica {sampler.rank} of {sampler.num_replicas}"],
            [
                ("DataLoader(dataset, shuffle=True, batch_size=the batch of all ranks)", "the plan says what is whose"),
                ("model(plan.local_batch(batch))", "keep the sampler, without vescale.loader"),
            ],
        )


def _loads_parts(loader: DataLoader, wanted: bool | None) -> bool:
    if not getattr(loader, "in_order", True):
        return False
    if isinstance(loader.dataset, IterableDataset):
        has_batches = loader.batch_size is not None
    else:
        has_batches = loader.batch_sampler is not None
    if wanted and not has_batches:
        raise PlanError(
            "vescale.loader",
            "the dataset's items are batches already: a rank's rows of one are not known before it is loaded",
            (),
            [("parts=None", "every rank loads whole batches"), ("DataLoader(..., batch_size=n)", "of samples")],
        )
    return has_batches and (is_by_row(loader.collate_fn) if wanted is None else wanted)
