"""Chooses the samples that a rank loads: the global batches are the same under every layout, and after every restart.

The order of samples is a function of the seed and the epoch alone. Global batch k is
`batch_size` samples of it in a row, and a rank loads that part of it which the plan
shards to it. What the state of a loader is, is then one number: how many samples of
the stream all ranks together have taken. It means the same under any other
data-parallel degree, which goes on with the next unseen sample.

    sampler = GlobalBatchSampler(dataset, plan, batch_size=256)
    loader = DataLoader(SeededSamples(dataset), batch_sampler=sampler, num_workers=4)
    for batch in loader:
        loss = model(plan.local_batch(batch))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from vescale_dtensor.engine import Mesh, canonical_states, layout_of, mesh_of

from ._apply.generators import seeded_for
from ._apply.join import join, make_mesh
from ._plan.parts import PlanError, check_count
from .plan import Plan


class GlobalIndex(int):
    """The index of a sample in its dataset, which also knows the sample's place in the stream of all epochs."""

    place: int

    def __new__(cls, index: int, place: int) -> GlobalIndex:
        made = super().__new__(cls, index)
        made.place = place
        return made

    def __reduce__(self):
        return (GlobalIndex, (int(self), self.place))


class GlobalBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` for `DataLoader` that yields, for each global batch, the indices of this rank's part.
    `plan.local_batch` assembles the parts.

    Each iteration resumes where the last one stopped and runs to the end of the epoch; the iteration after it starts
    the next epoch. There is no `set_epoch` to forget.

    Arguments:
        dataset: the dataset, or its size.
        plan: says which part belongs to this rank: that of torch.chunk, over the data axes.
        batch_size: samples of a global batch, over all ranks.
        shuffle: draw a new order for each epoch, from `seed` and the epoch.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch.
        coordinate: the rank's position in the plan's mesh; by default this rank's, which joins torch.distributed as
            `parallelize` does.

    Raises PlanError if a batch would leave a rank without any sample. No communication.
    """

    def __init__(
        self,
        dataset: Sized | int,
        plan: Plan,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        coordinate: Sequence[int] | None = None,
    ) -> None:
        self._size = dataset if isinstance(dataset, int) else len(dataset)
        check_count("GlobalBatchSampler", "batch_size", batch_size)
        self._batch_size, self._shuffle, self._seed, self._drop_last = batch_size, shuffle, seed, drop_last
        self._plan = plan
        self._mesh = _mesh_at(plan, coordinate)
        self._position = self._started = 0
        self._order: tuple[int, torch.Tensor] | None = None
        self._check_sizes()

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-self._epoch_size // self._batch_size)

    def __iter__(self) -> Batches:
        return Batches(self)

    def state_dict(self, *, batches: int | None = None) -> dict[str, int]:
        """Returns the position in the stream; it is the same on all ranks, and for all layouts.

        Arguments:
            batches: how many of this sampler's batches the loop has finished since the sampler was made or loaded a
                state. Needed if a loader's workers fetch ahead of the loop; without it, all yielded batches count.
        """
        position = self._position if batches is None else self._after(batches)
        return {"position": position, "seed": self._seed, "size": self._size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues after the samples that the state has seen, with any plan and batch size.

        Raises PlanError if the seed or the dataset's size differs, because the order of samples would differ too.
        """
        for name, mine in {"seed": self._seed, "size": self._size}.items():
            if state.get(name) != mine:
                raise PlanError(
                    "GlobalBatchSampler.load_state_dict",
                    f"the state is of a stream with {name} {state.get(name)}, and this one has {mine}",
                    (),
                    [(f"make the sampler with {name} {state.get(name)}", "the order of samples depends on it")],
                )
        self._position = self._started = state["position"]
        self._check_sizes()

    @property
    def _epoch_size(self) -> int:
        return self._size - self._size % self._batch_size if self._drop_last else self._size

    def _next(self, position: int) -> tuple[range, int]:
        """The places of the batch that begins at `position`, and where the one after it begins."""
        epoch, start = divmod(position, self._size)
        stop = start + self._batch_size
        if stop > self._size and self._drop_last:  # a state of another batch size, near the end of its epoch
            epoch, start, stop = epoch + 1, 0, self._batch_size
        stop = min(stop, self._size)
        first = epoch * self._size
        left_out = self._drop_last and stop + self._batch_size > self._size
        return range(first + start, first + stop), first + (self._size if left_out else stop)

    def _after(self, batches: int) -> int:
        position = self._started
        for _ in range(batches):
            position = self._next(position)[1]
        return position

    def _part(self, places: range) -> list[int]:
        """This rank's part of a global batch."""
        order = self._order_of(places.start // self._size)
        start, stop = self._ranges(len(places))
        return [GlobalIndex(int(order[place % self._size]), place) for place in places[start:stop]]

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            order = torch.arange(self._size)
            if self._shuffle:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                order = torch.randperm(self._size, generator=generator)
            self._order = (epoch, order)
        return self._order[1]

    def _ranges(self, samples: int) -> tuple[int, int]:
        states = canonical_states("GlobalBatchSampler", self._plan.batch_placements, self._mesh, (samples,))
        ((start, stop),) = layout_of(self._mesh, states, (samples,)).region_at(self._mesh.coordinate)[0] or ((0, 0),)
        return start, stop

    def _data_axes(self) -> tuple[int, ...]:
        return tuple(self._mesh.names.index(axis) for axis in self._plan.data_axes)

    def _check_sizes(self) -> None:
        if self._size < self._batch_size and self._drop_last:
            raise PlanError(
                "GlobalBatchSampler",
                f"a dataset of {self._size} samples has no batch of {self._batch_size}",
                (),
                [("drop_last=False", ""), (f"batch_size={max(self._size, 1)}", "")],
            )
        last = (self._size - self._position % self._size) % self._batch_size if self._size else 0
        for samples in (self._batch_size, *([last] if last and not self._drop_last else ())):
            states = canonical_states("GlobalBatchSampler", self._plan.batch_placements, self._mesh, (samples,))
            layout = layout_of(self._mesh, states, (samples,))
            corner = tuple(size - 1 for size in self._mesh.sizes)  # torch.chunk leaves the last ranks empty
            if not layout.shape_at(corner)[0]:
                raise PlanError(
                    "GlobalBatchSampler",
                    f"a batch of {samples} samples leaves ranks without any, over {self._plan.data_axes} of "
                    f"{self._mesh}",
                    (),
                    [("drop_last=True", "leaves it out, at the end of an epoch")] * (samples != self._batch_size)
                    + [(f"a batch_size that {self._mesh.count(self._data_axes())} divides", "")],
                )


class Batches(Iterator[list[int]]):
    """The rest of the sampler's epoch; stateful itself, for loaders that ask the iterator."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler
        self._epoch: int | None = None

    def __next__(self) -> list[int]:
        sampler = self._sampler
        places, after = sampler._next(sampler._position)
        epoch = places.start // sampler._size
        if self._epoch not in (None, epoch):
            raise StopIteration
        self._epoch = epoch
        sampler._position = after
        return sampler._part(places)

    def state_dict(self) -> dict[str, int]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._sampler.load_state_dict(state)


class SeededSamples(Dataset):
    """A dataset that seeds the random generators by each sample's position in the stream.

    A random augmentation therefore gives the same sample on any rank and in any worker process, and a different one
    in the next epoch. torch's CPU generator, Python's `random` and, if it is loaded, numpy's are seeded before
    `dataset[index]` and restored afterwards.
    """

    def __init__(self, dataset: Dataset | Sequence[Any], *, seed: int = 0) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # torch says Sized nowhere

    def __getitem__(self, index: int) -> Any:
        with seeded_for(self._seed, getattr(index, "place", int(index))):
            return self._dataset[int(index)]


def _mesh_at(plan: Plan, coordinate: Sequence[int] | None) -> Mesh:
    if coordinate is None:
        join()
        return mesh_of(make_mesh(plan))
    return Mesh(tuple(plan.mesh.values()), tuple(plan.mesh), tuple(coordinate))
