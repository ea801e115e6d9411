"""`loader`: the batches of one device under every plan, each rank's rows loaded by it alone, resumed anywhere."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from vescale_dtensor import DTensor
from vescale_plans import Plan, PlanError, loader, parallelize
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("vescale_plans")

PLANS = {
    1: Plan(mesh={"dp": 1}, parameters={"*": {}}),
    2: Plan(mesh={"dp": 2}, parameters={"*": {}}),
    3: Plan(mesh={"dp": 3}, parameters={"*": {}}),
    4: Plan(mesh={"dp": 2, "tp": 2}, parameters={"*": {}}),
}


class Rows(Dataset):
    """Notes what was read; `noise` draws from the generators, as augmentations do."""

    def __init__(self, size, noise=False):
        self.size, self.noise, self.read = size, noise, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        drawn = (torch.rand(()).item() + random.random()) if self.noise else 0.0
        return {"x": torch.full((3,), float(index)) + drawn, "label": index}


class Items(Rows):
    def __getitem__(self, index):
        return {"x": torch.full((4, 3), float(index))}


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, by = (info.id, info.num_workers) if info else (0, 1)
        return iter([{"x": torch.full((3,), float(at)), "label": at} for at in range(start, self.size, by)])


class WhenAsked(BatchSampler):
    """Draws all batches when it is asked for an iterator, which torch does twice where it makes workers."""

    def __init__(self, size):
        self.generator = torch.Generator().manual_seed(5)
        super().__init__(range(size), 4, False)

    def __iter__(self):
        return iter([batch.tolist() for batch in torch.randperm(len(self.sampler), generator=self.generator).split(4)])


def _whole(value):
    return value.full_tensor() if type(value) is DTensor else value


def _collate_longest(samples):
    longest = max(int(sample["label"]) for sample in samples)  # looks at all samples
    return {"x": torch.stack([sample["x"] + longest for sample in samples])}


def _promised(samples):
    return {"x": torch.stack([sample["x"] for sample in samples])}


def _batches(made):
    return [{name: _whole(value).tolist() for name, value in batch.items()} for batch in made]


MADE = {
    "shuffled": lambda: DataLoader(Rows(22), batch_size=4, shuffle=True),
    "in order, last dropped": lambda: DataLoader(Rows(22), batch_size=4, drop_last=True),
    "generator": lambda: DataLoader(Rows(22), 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Rows(22), 4, sampler=WeightedRandomSampler(range(1, 23), 18)),
    "batch sampler": lambda: DataLoader(Rows(22), batch_sampler=BatchSampler(RandomSampler(Rows(22)), 4, False)),
    "workers": lambda: DataLoader(Rows(22), batch_size=4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Rows(22), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "drawn when asked": lambda: DataLoader(Rows(22), batch_sampler=WhenAsked(22)),
    "drawn when asked, workers": lambda: DataLoader(Rows(22), batch_sampler=WhenAsked(22), num_workers=2),
    "drawn when asked, persistent": lambda: DataLoader(
        Rows(22), batch_sampler=WhenAsked(22), num_workers=1, persistent_workers=True
    ),
    "looks at all": lambda: DataLoader(Rows(22), batch_size=4, shuffle=True, collate_fn=_collate_longest),
    "stream": lambda: DataLoader(Stream(22), batch_size=4),
    "stream, last dropped": lambda: DataLoader(Stream(22), batch_size=4, drop_last=True),
    "stream, workers": lambda: DataLoader(Stream(22), batch_size=4, num_workers=2),
    "stream, looks at all": lambda: DataLoader(Stream(22), batch_size=4, collate_fn=_collate_longest),
    "batches of the dataset": lambda: DataLoader(Items(7), batch_size=None, shuffle=True),
}


def epochs(world, case, wraps):
    """Two epochs of it, and numbers that were drawn between and after: all of one device."""
    torch.manual_seed(7)
    made = MADE[case]()
    if wraps:
        made = loader(made, PLANS[world])
        assert isinstance(made, DataLoader)
    found = []
    for _ in range(2):
        found += [_batches(made), torch.rand(2).tolist()]
    return found, (len(made) if "stream" not in case else None)


@in_turns(3)
@pytest.mark.parametrize("case", MADE)
def test_batches_are_those_of_one_device(case):
    wanted = epochs(1, case, False)
    for world in (2, 3, 4) if "workers" not in case else (2,):
        assert all(found == wanted for found in run_ranks(world, epochs, world, case, True))


def read(world):
    data = Rows(24)
    made = loader(DataLoader(data, batch_size=8, shuffle=True), PLANS[world])
    kinds = {type(value) for batch in made for value in batch.values()}
    return sorted(data.read), kinds == {DTensor}


def test_every_rank_loads_its_rows_alone():
    (first, parts), (second, _) = run_ranks(2, read, 2)
    assert parts and len(first) == len(second) == 12 and sorted(first + second) == list(range(24))


def noisy(world, workers=0):
    torch.manual_seed(1)
    made = loader(DataLoader(Rows(20, noise=True), batch_size=4, shuffle=True, num_workers=workers), PLANS[world])
    return [_batches(made), _batches(made), torch.rand(1).item()]


def test_random_samples_are_the_same_under_all_plans():
    wanted = run_ranks(1, noisy, 1)[0]
    assert wanted[0] != wanted[1]
    for world in (2, 3, 4):
        assert all(found == wanted for found in run_ranks(world, noisy, world))
    assert all(found == wanted for found in run_ranks(2, noisy, 2, 2))


RESUMED = [case for case in MADE if case != "batches of the dataset"]


def saved(world, case, taken):
    """The state after so many batches of the second epoch, as a loop would save it, and all that comes after."""
    torch.manual_seed(7)
    made = loader(MADE[case](), PLANS[world])
    list(made)
    iterator = iter(made)
    for _ in range(taken):
        next(iterator)
    state, generator = made.state_dict(), torch.get_rng_state()
    torch.manual_seed(123)  # a loop that draws between batches does not change what comes
    rest = _batches(iterator)
    return state, generator, rest


def resumed(world, case, state, generator):
    torch.manual_seed(99)
    made = loader(MADE[case](), PLANS[world])
    made.load_state_dict(state)
    torch.set_rng_state(generator)
    assert made.state_dict()["samples"] == state["samples"]
    rest = _batches(made)
    return rest, torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("case", RESUMED)
def test_resumes_exactly_under_another_data_degree(case):
    state, generator, rest = run_ranks(2, saved, 2, case, 3)[0]
    for world in (1, 3) if "workers" not in case else (1,):
        for found, same in run_ranks(world, resumed, world, case, state, generator):
            assert found == rest and same


def other_size(state, generator):
    made = loader(DataLoader(Rows(22), batch_size=5, shuffle=True, drop_last=True), PLANS[3])
    made.load_state_dict(state)
    torch.set_rng_state(generator)
    return [int(row) for batch in _batches(made) for row in batch["label"]]


def test_resumes_with_another_batch_size():
    state, generator, rest = run_ranks(2, saved, 2, "shuffled", 3)[0]
    wanted = [row for batch in rest for row in batch["label"]]
    assert run_ranks(3, other_size, state, generator)[0] == wanted[:10]


def trained(world):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    made = DataLoader(Rows(22), batch_size=4, shuffle=True)
    model, optimizer = parallelize(PLANS[world], model, lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    losses = []
    for batch in loader(made, PLANS[world]):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["label"] % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_trains_as_one_device():
    wanted = run_ranks(1, trained, 1)[0]
    for world in (2, 3):
        assert torch.tensor(run_ranks(world, trained, world)[0]).allclose(torch.tensor(wanted), rtol=1e-5)


class Ragged(Rows):
    def __getitem__(self, index):
        return torch.ones(2 if index < 2 else 3)


class Names(Rows):
    def __getitem__(self, index):
        return {"x": torch.ones(2), "name": str(index)}


def _other_seeds():
    torch.manual_seed(torch.distributed.get_rank())
    list(loader(MADE["shuffled"](), PLANS[2]))


def _data_parallel_sampler():
    data = Rows(22)
    loader(DataLoader(data, 4, sampler=DistributedSampler(data, 2, torch.distributed.get_rank())), PLANS[2])


REFUSED = {
    "other seeds": (_other_seeds, "draw other samples for one global batch"),
    "distributed sampler": (_data_parallel_sampler, "DistributedSampler already gives each rank its own samples"),
    "other shapes": (lambda: list(loader(DataLoader(Ragged(8), 4), PLANS[2])), "rows of one batch have other shapes"),
    "names": (lambda: list(loader(DataLoader(Names(8), 4), PLANS[2])), "a batch holds something that is not a tensor"),
    "wrapped twice": (lambda: loader(loader(MADE["shuffled"](), PLANS[2]), PLANS[2]), "not a torch DataLoader"),
    "no loader": (lambda: loader([1, 2], PLANS[2]), "loader is [1, 2], not DataLoader"),
    "promise for batches": (
        lambda: loader(DataLoader(Rows(7), batch_size=None), PLANS[2], parts=True),
        "the dataset's items are batches already",
    ),
}


def refused(call):
    with pytest.raises(PlanError) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_all_ranks_alike(case):
    call, text = REFUSED[case]
    first, second = run_ranks(2, refused, call)
    assert text in first and text in second
    assert case == "distributed sampler" or first == second


def promised():
    data = Rows(24)
    made = loader(DataLoader(data, batch_size=8, collate_fn=_promised), PLANS[2], parts=True)
    return [_whole(batch["x"])[:, 0].tolist() for batch in made], len(data.read)


def test_a_promise_is_believed():
    for found, reads in run_ranks(2, promised):
        assert [row for part in found for row in part] == list(range(24)) and reads == 12


# Loaders that draw their orders from generators, over several epochs: name -> how one is made.
DRAWN = {
    "torch's generator": lambda: DataLoader(list(range(20)), batch_size=6, shuffle=True),
    "its own": lambda: DataLoader(
        list(range(20)), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "its own, workers": lambda: DataLoader(
        list(range(20)), batch_size=6, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(5)
    ),
    "its sampler's": lambda: DataLoader(
        list(range(20)), batch_size=6, sampler=RandomSampler(range(20), generator=torch.Generator().manual_seed(5))
    ),
    "no batches": lambda: DataLoader(torch.arange(8.0).view(4, 2), batch_size=None, shuffle=True),
}
LENGTH = 4  # batches of an epoch


def three_epochs(make, stop, state):
    """Batches of three epochs, and the state after `stop` of them, or after the epoch that they end; or what comes
    after a state. The program draws, and keeps torch's generator, as one that saves it."""
    torch.manual_seed(3)
    plan = Plan(mesh={"dp": 1}, parameters={"*": {}})
    parallelize(plan, nn.Linear(2, 2))
    batches = loader(make(), plan)
    taken, rest, kept = [], 3 * LENGTH, None
    if state is not None:
        batches.load_state_dict(state[0])
        torch.set_rng_state(state[1])
        rest -= stop
    while len(taken) < rest:
        for batch in batches:
            torch.rand(1)
            taken.append(batch.tolist())
            if len(taken) == stop and state is None:
                kept = batches.state_dict(), torch.get_rng_state()
        if len(taken) == stop and state is None and stop % (2 * LENGTH) == 0:
            kept = batches.state_dict(), torch.get_rng_state()  # between two epochs
    return taken, kept


def goes_on(kind):
    for stop in range(1, 3 * LENGTH):
        wanted, kept = three_epochs(DRAWN[kind], stop, None)
        assert three_epochs(DRAWN[kind], stop, kept)[0] == wanted[stop:], stop


@pytest.mark.parametrize("kind", list(DRAWN))
def test_the_epochs_after_a_resume_have_their_orders(kind):
    run_ranks(1, goes_on, kind)
