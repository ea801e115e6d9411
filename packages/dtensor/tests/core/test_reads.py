"""What the host reads meets nothing but the same read on the other ranks, and ranks that went apart are told so."""

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import CommunicationError, Partial, Replicate, Shard, distribute_tensor
from vescale_testkit import assert_ranks_agree, mesh_of, raises_on_all, run_ranks

ELEMENTS = (torch.arange(35) % 3).reshape(7, 5)  # whose sums are exact in every dtype
READS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool((t > 0).any()),
    "float": lambda t: float(t.amax()),
    "int": lambda t: int(t.sum()),
    "numpy": lambda t: t.detach().numpy().tolist(),
    "in": lambda t: 2 in t,
    "as a size": lambda t: torch.zeros(t.sum().long()).numel(),
    "as data": lambda t: torch.tensor([t.amax(), t.amin()]).tolist(),
    "of strides": lambda t: (t.sum(0) * t.amax()).flatten()[1:2].tolist(),
    "a diagonal": lambda t: (t @ t.mT).diagonal().tolist(),
    "format": lambda t: f"{t.sum():.3f}",
}
LAYOUTS = [
    (2, [Shard(0)]), (3, [Shard(0)]), (5, [Shard(1)]), (3, [Partial()]), (4, [Shard(0), Partial()]),
    (4, [Shard(1), Shard(0)]), (6, [Shard(0), Shard(0)]), (4, [Replicate(), Shard(0)]),
]  # fmt: skip


def made(ranks, placements, dtype=torch.float32):
    mesh = mesh_of(*{1: (ranks,), 2: (2, ranks // 2)}[len(placements)])
    return distribute_tensor(ELEMENTS.to(dtype), mesh, placements)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize(("ranks", "placements"), LAYOUTS)
def test_every_read_is_one_devices(ranks, placements, dtype):
    def read():
        whole, found = ELEMENTS.to(dtype), {}
        for name, way in READS.items():
            if dtype is torch.bfloat16 and name == "numpy":
                continue
            found[name] = way(made(ranks, placements, dtype)), way(whole)
        return found

    for name, (found, expected) in assert_ranks_agree(run_ranks(ranks, read)).items():
        assert found == expected, name


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.complex64])
def test_of_other_dtypes(kind):
    def read():
        whole = (torch.arange(9000) % 2).to(kind)
        return distribute_tensor(whole, mesh_of(3), [Shard(0)]).tolist() == whole.tolist()

    assert all(run_ranks(3, read))


def test_a_large_partial_tensor_is_summed_in_rank_order():
    def read():
        torch.manual_seed(dist.get_rank())
        mesh = mesh_of(3)
        from vescale_dtensor import DTensor

        t = DTensor.from_local(torch.randn(5000), mesh, [Partial()])
        return torch.tensor(t.tolist()), t.full_tensor()

    for read_value, full in run_ranks(3, read):
        assert torch.equal(read_value, full)


def alone_then_together(rank):
    a, b = made(4, [Shard(0)]).sum(), made(4, [Shard(0)]).mean()
    if dist.get_rank() == rank:
        a.item()
    return b.item()



def another_line(rank):
    a = made(4, [Shard(0)]).sum()
    if dist.get_rank() == rank:
        return a.item()
    return a.item() + 0


def another_value(rank):
    a, b = made(4, [Shard(0)]).sum(), made(4, [Shard(0)]).sum(0)
    return (a if dist.get_rank() == rank else b).tolist()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("way", [alone_then_together, another_line, another_value])
def test_reads_that_are_not_the_same_raise_on_all_ranks(way, rank):
    said = raises_on_all(4, CommunicationError, way, rank)
    assert "do not read the same value" in said
    assert "before `if rank == 0:`" in said
    assert said.count("test_reads.py:") == 4
