"""Long slices and pads of a dim whose chunks are dealt out: it stays cut, and rows travel over borders alone."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from vescale_dtensor import InterleavedShard, PlacementError, Shard, comm_trace, distribute_tensor, zigzag
from vescale_testkit import mesh_of, run_ranks

RANKS = 4
LAYOUTS = (
    Shard(1),
    InterleavedShard(1, 1, zigzag(RANKS)),
    InterleavedShard(1, 1, (3, 0, 1, 2, 0, 2, 1, 3, 1, 0, 2, 3)),
)
PLACES = {
    "to the last": lambda x: x[:, :-1],
    "from the first": lambda x: x[:, 1:],
    "within": lambda x: x[:, 2:-1],
    "narrow": lambda x: x.narrow(1, 0, x.shape[1] - 1),
    "one more": lambda x: F.pad(x, (0, 0, 0, 1)),
    "one fewer at the end": lambda x: F.pad(x, (0, 0, 1, -1), value=2.0),
    "flattened": lambda x: x[:, 1:].flatten(0, 1).unflatten(0, (2, -1)),
}


@pytest.mark.parametrize("length", [48, 47, 16, 9])
def test_values_and_gradients(length):
    def check():
        mesh = mesh_of(RANKS)
        for layout in LAYOUTS:
            x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
            d = distribute_tensor(x.detach(), mesh, [layout]).requires_grad_()
            weight = torch.randn(length + 1, 1, dtype=torch.float64)
            for name, function in PLACES.items():
                out, ours = function(x), function(d)
                assert torch.equal(ours.full_tensor(), out), (name, layout)
                mine, theirs = (
                    torch.autograd.grad((y.square() * weight[: y.shape[1]]).sum(), z, create_graph=True)[0]
                    for y, z in ((out, x), (ours, d))
                )
                assert torch.allclose(theirs.full_tensor(), mine), (name, layout)
                (mine,), (theirs,) = (torch.autograd.grad(g.square().sum(), z) for g, z in ((mine, x), (theirs, d)))
                assert torch.allclose(theirs.full_tensor(), mine), (name, layout)

    run_ranks(RANKS, check)


def test_a_shifted_label_is_one_row_per_border():
    def check():
        mesh, rank = mesh_of(RANKS), dist.get_rank()
        for layout, borders in ((InterleavedShard(1, 1, zigzag(RANKS)), (1, 2, 2, 1)),):
            logits = distribute_tensor(torch.randn(2, 48, 5), mesh, [layout])
            labels = distribute_tensor(torch.arange(96).view(2, 48), mesh, [layout])
            with comm_trace() as trace:
                assert logits[:, :-1].placements == (layout,)
            assert not trace.events
            with comm_trace() as trace:
                assert labels[:, 1:].placements == (layout,)
            assert [event.received for event in trace.events] == [borders[rank] * 2 * 8], layout

    run_ranks(RANKS, check)


def test_an_order_names_every_rank():
    def check():
        for order in ((0, 0), (0, 1, 2)):
            with pytest.raises(PlacementError, match="does not name each of the 2 ranks"):
                distribute_tensor(torch.ones(4), mesh_of(2), [InterleavedShard(0, 1, order)])

    run_ranks(2, check)
