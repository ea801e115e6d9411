"""What adds elements up, of tensors that are partial by layout, whose elements lie on different ranks: a slice of a
sharded dim, rows of a split table. In the reproducible mode the result, and what is computed from it, is one device's.
"""

import itertools
import warnings

import pytest
import torch
from torch.nn import functional as F

import vescale
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks, slice_of

SPLITS = {"batch": 8, "seq": 4, "hidden": 8}
BATCH, POSITIONS, WIDTH, WORDS = 8, 8, 16, 32

# name -> (how a tensor [batch, some positions, width or part of it] is made, how what it is made of is sharded)
MADE = {
    "a position": (lambda x, table, ids: x[:, 2:3], 1),
    "positions of two ranks": (lambda x, table, ids: x[:, 3:6], 1),
    "a feature": (lambda x, table, ids: x[..., 5:6], 2),
    "features of two ranks": (lambda x, table, ids: x[..., 3:13], 2),
    "picked positions": (lambda x, table, ids: x.index_select(1, ids[0] % POSITIONS), 1),
    "one position, spread": (lambda x, table, ids: x[:, 5:6].expand(-1, POSITIONS, -1), 1),
    "rows of a split table": (lambda x, table, ids: F.embedding(ids, table), 0),
}
# name -> what adds up, of the tensor y, another one of y's shape lying as its source does, and a weight.
ADDS = {
    "add": lambda y, other, w: y + other,
    "add one that is whole": lambda y, other, w: y + torch.ones_like(y) * 0.1,
    "itself": lambda y, other, w: y * 0.7 + y,
    "sub, alpha": lambda y, other, w: torch.sub(y, other, alpha=0.3),
    "lerp": lambda y, other, w: torch.lerp(y, other, 0.3),
    "addcmul": lambda y, other, w: torch.addcmul(y, y, other, value=0.1),
    "sum": lambda y, other, w: y + y.sum(1, keepdim=True),
    "mean of all": lambda y, other, w: y * y.mean(),
    "mean of features": lambda y, other, w: y - y.mean(-1, keepdim=True),
    "linear": lambda y, other, w: F.linear(y, w[:, : y.shape[-1]]),
    "linear, bias": lambda y, other, w: F.linear(y, w[:, : y.shape[-1]], w[0]),
    "matmul": lambda y, other, w: y @ other.transpose(1, 2),
    "einsum": lambda y, other, w: torch.einsum("bti,bti->bt", y, other).unsqueeze(-1),
    "stack and sum": lambda y, other, w: torch.stack([y, other, y * 0.3]).sum(0),
    "cumsum": lambda y, other, w: y.cumsum(1),
    "layer norm": lambda y, other, w: F.layer_norm(y, (y.shape[-1],)),
    "three of them": lambda y, other, w: y + other + y.flip(1),
}


def trained(made, adds, mesh=None):
    """The results of two uses of the sum, and the gradients of what it was made of."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH, POSITIONS, WIDTH, generator=generator)
    other = torch.randn(BATCH, POSITIONS, WIDTH, generator=generator)
    table, w = torch.randn(WORDS, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)
    ids = torch.randint(WORDS, (BATCH, POSITIONS), generator=generator)
    make, dim = MADE[made]
    leaves = [x, other, table, w]
    if mesh is not None:
        cut = Shard(dim)
        axes = [Replicate()] * (mesh.ndim - 1)
        cuts = (Shard(1), Shard(1), cut) if dim == 0 else (cut, cut, Replicate())
        leaves = [distribute_tensor(t, mesh, (*axes, how)) for t, how in zip(leaves, (*cuts, Replicate()))]
        ids = distribute_tensor(ids, mesh, (*axes, Replicate()))
    x, other, table, w = leaves = [leaf.requires_grad_() for leaf in leaves]
    y = make(x, table, ids)
    z = ADDS[adds](y, make(other, table * 0.5, ids), w)
    results = [z, z * 0.3, F.linear(z, w[:, : z.shape[-1]] * 0.1)]
    sum(result.square().mean() for result in results).backward()
    return [whole(t) for t in (y, *results, *(leaf.grad for leaf in leaves if leaf.grad is not None))]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor).detach().clone()


def odd_ones(cases, sizes):
    """The cases in which anything differs in its value."""
    warnings.filterwarnings("ignore", ".*has no canonical form")
    found = {}
    with vescale.reproducible(SPLITS):
        mesh = mesh_of(*sizes, names=("dp", "tp")[-len(sizes) :])
        for made, adds in cases:
            wanted = trained(made, adds)
            got = trained(made, adds, mesh)
            apart = [i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if not torch.equal(a, b)]
            if apart:
                found[f"{made}: {adds}"] = apart
    return found


@pytest.mark.parametrize(("made", "sizes"), slice_of(list(itertools.product(MADE, [(4,), (2, 2)])), 4), ids=str)
def test_what_adds_up_adds_reduced_tensors(made, sizes):
    for found in run_ranks(4, odd_ones, [(made, adds) for adds in ADDS], sizes, timeout=300):
        assert found == {}
