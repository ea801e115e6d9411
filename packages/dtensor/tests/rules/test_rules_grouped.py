"""Experts in a stack as grouped products: cut inside, they send nothing but the sum of their parts."""

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import InterleavedShard, Replicate, Shard, comm_trace, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

TOKENS, HIDDEN, COUNT = 12, 16, 3
ON_FULL = Replicate()


def experts(x, gate_up, down, ends):
    gate, up = torch._grouped_mm(x, gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
    return F.grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)


def whole(inner, ends):
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (COUNT, 2 * inner, HIDDEN), (COUNT, HIDDEN, inner)
    return [0.3 * torch.randn(shape, generator=generator) for shape in shapes], torch.tensor(ends, dtype=torch.int32)


def both(inner, ends, placements) -> list[str]:
    """The kinds of what forward sends."""
    mesh = mesh_of(2, names=("tp",))
    leaves, ends = whole(inner, ends)
    wanted = experts(*(one.requires_grad_() for one in leaves), ends)
    wanted.square().sum().backward()
    cut = [distribute_tensor(one.detach(), mesh, [p]).requires_grad_() for one, p in zip(leaves, placements)]
    with comm_trace() as trace:
        found = experts(*cut, distribute_tensor(ends, mesh, [ON_FULL]))
        found = found.redistribute([ON_FULL])
    torch.testing.assert_close(found.full_tensor(), wanted, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    for one, other in zip(cut, leaves):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)
    return [event.kind for event in trace.events if event.count]


@pytest.mark.parametrize("ends", [(4, 4, 12), (1, 5, 12)], ids=["one without rows", "all with"])
def test_experts_cut_inside_send_their_sum(ends):
    assert run_ranks(2, both, 32, ends, [ON_FULL, InterleavedShard(1, 2), Shard(2)])[0] == ["all_reduce"]


def test_rows_that_kernels_do_not_take_are_gathered_first():
    assert "all_gather" in run_ranks(2, both, 8, (4, 6, 12), [ON_FULL, InterleavedShard(1, 2), Shard(2)])[0]


def test_other_cuts_are_right():
    for placements in ([Shard(0), ON_FULL, ON_FULL], [ON_FULL, Shard(0), Shard(0)], [Shard(1), Shard(2), Shard(1)]):
        run_ranks(2, both, 32, (4, 6, 12), placements)
