"""Two ranks on gloo exchange in ways of their own: the bits are those of a sum in rank order, and of a plain gather."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor._communication import pairs
from vescale_dtensor._communication.collectives import all_gather, all_reduce, exchange, reduce_scatter, scatter_recipe
from vescale_dtensor._communication.in_flight import GatherInFlight, ReductionInFlight, RowsInFlight
from vescale_dtensor._layouts.mesh import Mesh, mesh_of
from vescale_testkit import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64, torch.bool]
NUMEL = 40_000  # of the narrowest dtype more than what goes as one message


def _values(rank: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    torch.manual_seed(rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if dtype is torch.bool else 1 << 40, (numel,)).to(dtype)
    values = torch.randn(numel, dtype=torch.float64) * 10.0 ** torch.randint(-3, 3, (numel,))
    values[:4] = torch.tensor([0.0, -0.0, torch.inf, 1e-40])
    return values.to(dtype)


def _mesh() -> Mesh:
    return mesh_of(dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _exchanged(dtype):
    mesh, rank = _mesh(), dist.get_rank()
    assert NUMEL * dtype.itemsize // 2 > pairs._LEAST_BYTES or dtype.itemsize < 4
    mine, each = _values(rank, dtype), [_values(r, dtype) for r in range(2)]
    gathered = all_gather(mine, mesh, (0,))
    assert _bits(gathered) == _bits(torch.stack(each))
    out = torch.zeros(2 * NUMEL, dtype=dtype)
    out.view(2, -1)[rank] = mine
    GatherInFlight(out, out.view(2, -1)[rank], mesh, (0,)).wait()
    assert _bits(out) == _bits(torch.cat(each))
    if dtype is torch.bool:
        return
    total = each[0] + each[1]
    assert _bits(all_reduce(mine, mesh, (0,))) == _bits(total)
    for keep, wanted in (("whole", total), ("part", total.view(2, -1)[rank])):
        first = ReductionInFlight(mine.clone(), mesh, (0,), (), keep)
        second = ReductionInFlight(2 * mine, mesh, (0,), (), keep)
        second.advance()
        assert _bits(first.finish()) == _bits(wanted)
        assert _bits(second.finish()) == _bits(2 * wanted)
    rows = mine.view(4, -1)
    scattered = scatter_recipe(mesh, (0,), (2, NUMEL // 4))(rows)
    assert _bits(scattered) == _bits(total.view(2, 2, -1)[rank])
    assert _bits(mine) == _bits(each[rank])  # what was given stays as it was


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_sum_in_rank_order(dtype):
    run_ranks(2, _exchanged, dtype)


def _moved(dtype):
    taken = {}
    for numel in (64, 1 << 20):
        part = torch.ones(numel, dtype=dtype)
        with torch.profiler.profile(profile_memory=True) as seen:
            all_gather(part, _mesh(), (0,))
        taken[numel] = max((event.cpu_memory_usage for event in seen.key_averages()), default=0)
    return taken


def test_a_gather_takes_memory_for_its_result_alone():
    for taken in run_ranks(2, _moved, torch.float32):
        assert 2 * 4 * (1 << 20) <= taken[1 << 20] < 2.1 * 4 * (1 << 20)


def _files_of_a_step():
    """The files whose Python functions are called while everything is sent that the engine sends, twice."""
    mesh = mesh_of(dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    ranks, called = dist.get_world_size(), set()
    rows = torch.arange(ranks * ranks * 10_000.0).view(ranks * ranks, -1)
    scatter = scatter_recipe(mesh, (0,), (ranks, 10_000))

    def sent():
        for numel in (100, NUMEL):
            all_gather(torch.ones(numel), mesh, (0,))
            all_reduce(torch.ones(numel), mesh, (0,))
            reduce_scatter([torch.ones(numel)] * ranks, mesh, (0,))
            exchange([torch.ones(numel)] * ranks, [(numel,)] * ranks, mesh, 0)
            out = torch.zeros(ranks * numel)
            GatherInFlight(out, out.view(ranks, -1)[dist.get_rank()], mesh, (0,)).wait()
            for keep in ("whole", "part"):
                ReductionInFlight(torch.ones(ranks * numel), mesh, (0,), (), keep).finish()
            RowsInFlight(torch.ones(ranks, numel), [1] * ranks, [1] * ranks, mesh, 0).wait()
        return scatter(rows)

    sent()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        out = sent()
    finally:
        sys.setprofile(None)
    assert torch.equal(out, ranks * rows.view(ranks, ranks, -1)[dist.get_rank()])
    assert any(file.endswith("collectives.py") for file in called)
    return [file for file in called if "doors" in file]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_the_engine_sends_passes_no_look_that_stands_there_for_users(ranks):
    """It is plain, and a look costs as much Python as all else of a small message."""
    assert run_ranks(ranks, _files_of_a_step) == [[]] * ranks


def _seen_by_a_monitor():
    mesh = mesh_of(dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    names, seen = ("allreduce", "_allgather_base", "alltoall_base"), []
    kept = {name: getattr(dist.ProcessGroup, name) for name in names}

    def monitored(name):
        @functools.wraps(kept[name])
        def method(*args, **kwargs):
            seen.append(name)
            return kept[name](*args, **kwargs)

        return method

    for name in kept:
        setattr(dist.ProcessGroup, name, monitored(name))
    try:
        ranks = dist.get_world_size()
        all_gather(torch.ones(100), mesh, (0,))
        ReductionInFlight(torch.ones(ranks * 100), mesh, (0,), (), "whole", at_once=True).finish()
        scatter_recipe(mesh, (0,), (1, 5))(torch.ones(ranks, 5))
    finally:
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, method)
    return seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_others_put_before_a_groups_methods_sees_all(ranks):
    assert run_ranks(ranks, _seen_by_a_monitor) == [["_allgather_base", "allreduce", "alltoall_base"]] * ranks
