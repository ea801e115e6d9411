"""Every layout sees the same global batches, also after a restart under another one."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vescale_dtensor.testing import run_ranks, warm_up
from vescale_plans import GlobalBatchSampler, Plan, PlanError, SeededSamples, parallelize

warm_up("torch._dynamo", "vescale_plans")

EVERYTHING = {"*": {}}
MESHES = {
    "one": Plan({"dp": 1}, EVERYTHING),
    "dp 4": Plan({"dp": 4}, EVERYTHING),
    "dp 2 x tp 2": Plan({"dp": 2, "tp": 2}, EVERYTHING),
    "dpr 2 x dp 3": Plan({"dpr": 2, "dp": 3}, EVERYTHING, data_axis=("dpr", "dp")),
    "tp 2": Plan({"tp": 2}, EVERYTHING),
}


def samplers(plan, size=29, batch_size=7, **options):
    """One per rank that holds another part of the batch, in order."""
    places = torch.cartesian_prod(*[torch.arange(plan.mesh[a] if a in plan.data_axes else 1) for a in plan.mesh])
    return [
        GlobalBatchSampler(size, plan, batch_size=batch_size, coordinate=place.tolist(), **options)
        for place in places.reshape(-1, len(plan.mesh))
    ]


def joined(lists):
    return [item for one in lists for item in one]


def epoch(parts):
    """The global batches of one epoch: what the ranks load, put together."""
    return [joined(batch) for batch in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"batch_size": 12, "drop_last": False, "size": 35}], ids=str
)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_layout_sees_the_same_global_batches(mesh, options):
    alone, parts = samplers(MESHES["one"], **options), samplers(MESHES[mesh], **options)
    for _ in range(3):
        wanted = epoch(alone)
        assert epoch(parts) == wanted
        assert len(wanted) == len(parts[0])
        seen = joined(wanted)
        assert len(set(seen)) == len(seen) == (35 if "size" in options else 28)


def test_epochs_differ_and_depend_on_the_seed():
    (one,), (other,) = samplers(MESHES["one"]), samplers(MESHES["one"], seed=1)
    first, second = list(one), list(one)
    assert first != second and sorted(joined(first)) != sorted(joined(second))  # others are left out
    assert list(other) != first


def test_the_last_batch_is_short_on_request():
    parts = samplers(MESHES["dp 2 x tp 2"], size=30, batch_size=7, drop_last=False)
    assert [[len(batch) for batch in part] for part in parts] == [[4, 4, 4, 4, 1], [3, 3, 3, 3, 1]]


@pytest.mark.parametrize("batches", range(10))
@pytest.mark.parametrize(("before", "after"), [("dp 4", "dp 2 x tp 2"), ("dpr 2 x dp 3", "one"), ("tp 2", "dp 4")])
def test_another_layout_goes_on_with_the_next_unseen_sample(before, after, batches):
    def stream(parts, count):
        found, iterators = [], [iter(part) for part in parts]
        while len(found) < count:
            try:
                found.append(joined([next(iterator) for iterator in iterators]))
            except StopIteration:
                iterators = [iter(part) for part in parts]
        return found

    uninterrupted = stream(samplers(MESHES["one"]), 12)
    first = samplers(MESHES[before])
    begun = stream(first, batches)
    states = [sampler.state_dict() for sampler in first]
    assert states == [states[0]] * len(states)
    second = samplers(MESHES[after])
    for sampler in second:
        sampler.load_state_dict(states[0])
    assert begun + stream(second, 12 - batches) == uninterrupted


def test_another_batch_size_repeats_and_skips_nothing():
    (first,) = samplers(MESHES["one"], size=24, batch_size=8)
    begun = [next(iter(first)), next(iter(first))]
    parts = samplers(MESHES["dp 4"], size=24, batch_size=4)
    for sampler in parts:
        sampler.load_state_dict(first.state_dict())
    assert sorted(joined(begun) + joined(epoch(parts))) == list(range(24))


def test_the_state_counts_what_the_loop_has_finished():
    (sampler,) = samplers(MESHES["one"])
    loader = DataLoader(list(range(29)), batch_sampler=sampler, num_workers=1, prefetch_factor=2)
    for done, _ in enumerate(loader, 1):
        if done == 1:
            break
    (fresh,) = samplers(MESHES["one"])
    next(iter(fresh))
    assert sampler.state_dict(batches=1) == fresh.state_dict() != sampler.state_dict()


@pytest.mark.parametrize(("given", "expected"), [
    (
        {"size": 29, "drop_last": False},
        "GlobalBatchSampler: a batch of 1 samples leaves ranks without any, over ('dp',) of (dp=4)\n"
        "fix one of: drop_last=True               # leaves it out, at the end of an epoch\n"
        "            a batch_size that 4 divides",
    ),
    (
        {"batch_size": 5},
        "GlobalBatchSampler: a batch of 5 samples leaves ranks without any, over ('dp',) of (dp=4)\n"
        "fix: a batch_size that 4 divides",
    ),
    (
        {"size": 6},
        "GlobalBatchSampler: a dataset of 6 samples has no batch of 7\n"
        "fix one of: drop_last=False\n"
        "            batch_size=6",
    ),
    ({"batch_size": 0}, "GlobalBatchSampler: batch_size is 0, not a positive number\nfix: batch_size=1"),
])  # fmt: skip
def test_batches_that_cannot_be_shared(given, expected):
    with pytest.raises(PlanError) as caught:
        samplers(MESHES["dp 4"], **given)
    assert str(caught.value) == expected


def test_a_state_of_another_stream():
    (one,), (other,) = samplers(MESHES["one"]), samplers(MESHES["one"], seed=3)
    with pytest.raises(PlanError) as caught:
        other.load_state_dict(one.state_dict())
    assert str(caught.value) == (
        "GlobalBatchSampler.load_state_dict: the state is of a stream with seed 0, and this one has 3\n"
        "fix: make the sampler with seed 0  # the order of samples depends on it"
    )


class Noisy(Dataset):
    """Samples with an augmentation from every generator that people use."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        import numpy

        return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()])


def samples(plan, workers, coordinate):
    sampler = GlobalBatchSampler(Noisy(), plan, batch_size=8, coordinate=coordinate)
    loader = DataLoader(SeededSamples(Noisy()), batch_sampler=sampler, num_workers=workers)
    return [batch for _ in range(2) for batch in loader]


def test_a_sample_is_a_function_of_its_place_alone():
    before = torch.get_rng_state(), random.getstate()
    assert torch.equal(SeededSamples(Noisy())[3], SeededSamples(Noisy())[3])
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    whole = samples(MESHES["one"], 0, (0,))
    parts = [samples(MESHES["dp 4"], rank % 2, (rank,)) for rank in range(4)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), batch)
    first, second = (torch.cat(whole[i : i + 3]) for i in (0, 3))
    assert set(first[:, 0].tolist()) == set(second[:, 0].tolist())
    assert not set(first[:, 1].tolist()) & set(second[:, 1].tolist())  # drawn anew in the next epoch


def losses(plan):
    torch.manual_seed(0)
    model, optimizer = parallelize(plan, nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.05))
    sampler = GlobalBatchSampler(Noisy(), plan, batch_size=8)
    found = []
    for batch in DataLoader(SeededSamples(Noisy()), batch_sampler=sampler):
        loss = model(plan.local_batch(batch)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_training_sees_the_same_batches():
    alone = run_ranks(1, losses, MESHES["one"])[0]
    for mesh in ("dp 4", "dp 2 x tp 2"):
        for found in run_ranks(4, losses, MESHES[mesh]):
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=0)


def test_shard_batch_gives_what_the_model_takes():
    def run():
        plan = MESHES["dp 2 x tp 2"]
        batch = {"x": torch.arange(10.0).view(5, 2), "scale": torch.tensor(3.0)}
        shards = plan.shard_batch(batch)
        rank = torch.distributed.get_rank()
        assert torch.equal(shards["x"].to_local(), batch["x"][:3] if rank < 2 else batch["x"][3:])
        assert torch.equal(shards["x"].full_tensor(), batch["x"]) and shards["scale"].item() == 3

    run_ranks(4, run)
