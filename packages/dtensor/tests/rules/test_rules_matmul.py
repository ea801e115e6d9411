"""Products against one device: the grid of layouts, and what must not communicate."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P, S = Replicate(), Partial(), Shard
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def strictly(function, *args):
    def on_ranks():
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            function(*args)

    run_ranks(4, on_ranks)


def rand(*shape, complex=False):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    dtype = torch.complex64 if complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def test_linear_on_the_whole_grid():
    def check():
        mesh = mesh_of(2, 2)
        x, weight, bias = rand(3, 5, 4), rand(6, 4), rand(6)
        for xp, wp in itertools.product(
            placements_for(x.shape, 2), [(R, R), (R, S(0)), (S(0), S(1)), (S(1), S(1)), (P, S(0))]
        ):
            compare(F.linear, [x, weight, bias], [xp, wp, (S(0), R)], mesh, **CLOSE)
        for wp, bp in itertools.product(placements_for(weight.shape, 2), placements_for(bias.shape, 2)):
            compare(F.linear, [x, weight, bias], [(S(0), S(2)), wp, bp], mesh, **CLOSE)

    strictly(check)


def test_matmul_on_the_whole_grid():
    def check():
        mesh = mesh_of(2, 2)
        a, b = rand(5, 3), rand(3, 4)
        for ap, bp in itertools.product(placements_for(a.shape, 2), placements_for(b.shape, 2)):
            compare(torch.matmul, [a, b], [ap, bp], mesh, **CLOSE)

    strictly(check)


def test_megatron_layers_communicate_only_where_they_must():
    def check():
        mesh = mesh_of(2, 2)
        x = rand(4, 6)
        column, row = rand(8, 6), rand(6, 8)

        def block(x, w1, w2):
            return F.linear(F.linear(x, w1), w2)

        assert not compare(block, [x, column, row], [(S(0), R), (R, S(0)), (R, S(1))], mesh, **CLOSE)
        assert not compare(F.linear, [x, column], [(P, R), (R, S(0))], mesh, **CLOSE)
        assert not compare(torch.matmul, [rand(4, 2, 6), rand(4, 6, 3)], [(S(0), S(0)), (S(0), S(0))], mesh, **CLOSE)
        assert not compare(torch.matmul, [rand(4, 2, 6), rand(6, 3)], [(S(0), S(2)), (R, S(0))], mesh, **CLOSE)

    strictly(check)


CALLS = {
    "operator": (lambda a, b: a @ b, (5, 3), (3, 4)),
    "method": (lambda a, b: a.matmul(b), (2, 5, 3), (3, 4)),
    "mm": (torch.mm, (5, 3), (3, 4)),
    "mv": (torch.mv, (5, 3), (3,)),
    "dot": (torch.dot, (5,), (5,)),
    "vector matrix": (torch.matmul, (3,), (2, 3, 4)),
    "matrix vector": (torch.matmul, (2, 4, 3), (3,)),
    "bmm": (torch.bmm, (3, 5, 2), (3, 2, 4)),
    "broadcast": (torch.matmul, (3, 1, 5, 2), (1, 2, 2, 4)),
    "linalg": (torch.linalg.matmul, (5, 3), (3, 4)),
    "outer": (torch.outer, (5,), (3,)),
    "inner": (torch.inner, (2, 5), (3, 5)),
    "inner of a scalar": (torch.inner, (2, 5), ()),
    "vdot": (torch.vdot, (5,), (5,)),
    "vecdot": (lambda a, b: torch.linalg.vecdot(a, b, dim=0), (5, 3), (5, 3)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (4, 5), (5, 3)),
    "tensordot of pairs": (lambda a, b: torch.tensordot(a, b, dims=([0, 2], [1, 0])), (5, 2, 3), (3, 5)),
    "einsum": (lambda a, b: torch.einsum("bik,bkj->bij", a, b), (3, 5, 2), (3, 2, 4)),
    "einsum permuted": (lambda a, b: torch.einsum("b i k, k j -> j b i", a, b), (3, 5, 2), (2, 4)),
    "einsum summed": (lambda a, b: torch.einsum("ij,jk", a, b), (5, 3), (3, 4)),
    "einsum dots": (lambda a, b: torch.einsum("...ik,...jk->...ij", a, b), (3, 5, 2), (1, 4, 2)),
    "einsum reduced": (lambda a, b: torch.einsum("ij,kl->ik", a, b), (5, 3), (4, 2)),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b, a]), (5, 3), (3, 5)),
    "chain": (lambda a, b: torch.chain_matmul(a, b, a), (5, 3), (3, 5)),
}


@in_turns(3)
@pytest.mark.parametrize("name", CALLS)
def test_spellings(name):
    function, left, right = CALLS[name]

    def check():
        mesh = mesh_of(2, 2)
        a, b = rand(*left), rand(*right)
        ways_a = [(R, R), (S(0), R), (R, S(len(left) - 1)), (S(0), S(len(left) - 1)), (P, S(0)), (S(0), S(0)), (R, P)]
        ways_b = [(R, R), (R, P)]
        if right:
            ways_b += [(S(0), R), (R, S(len(right) - 1)), (S(0), S(0)), (S(len(right) - 1), S(0))]
        for ap, bp in itertools.product(ways_a, ways_b):
            compare(function, [a, b], [ap, bp], mesh, **CLOSE)

    strictly(check)


ADDED = {
    "addmm": (torch.addmm, (5, 4), (5, 3), (3, 4)),
    "addmm row": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (4,), (5, 3), (3, 4)),
    "addmm_": (lambda c, a, b: (c * 1).addmm_(a, b), (5, 4), (5, 3), (3, 4)),
    "addmv": (torch.addmv, (5,), (5, 3), (3,)),
    "baddbmm": (torch.baddbmm, (2, 5, 4), (2, 5, 3), (2, 3, 4)),
    "addbmm": (torch.addbmm, (5, 4), (2, 5, 3), (2, 3, 4)),
    "addr": (torch.addr, (5, 4), (5,), (4,)),
}


@in_turns(3)
@pytest.mark.parametrize("name", ADDED)
def test_sums_of_products(name):
    function, *shapes = ADDED[name]

    def check():
        mesh = mesh_of(2, 2)
        tensors = [rand(*shape) for shape in shapes]
        last = [len(shape) - 1 for shape in shapes]
        for added, left, right in itertools.product(
            [(R, R), (S(0), R), (P, S(last[0])), (S(0), S(0))],
            [(R, R), (S(0), S(last[1])), (R, P)],
            [(R, R), (S(0), R), (R, S(last[2])), (R, S(0))],
        ):
            compare(function, tensors, [added, left, right], mesh, **CLOSE)

    strictly(check)


def test_complex_products_conjugate():
    def check():
        mesh = mesh_of(2, 2)
        a, b = rand(5, complex=True), rand(5, complex=True)
        compare(torch.vdot, [a, b], [(S(0), R), (R, S(0))], mesh, **CLOSE)
        compare(torch.dot, [a, b], [(S(0), P), (R, S(0))], mesh, **CLOSE)

    strictly(check)


def test_empty_and_interleaved_shards():
    def check():
        mesh = mesh_of(4)
        compare(F.linear, [rand(2, 3), rand(5, 3), rand(5)], [(S(0),), (S(0),), (S(0),)], mesh, **CLOSE)
        compare(F.linear, [rand(2, 3), rand(5, 3), rand(5)], [(S(1),), (S(1),), (R,)], mesh, **CLOSE)
        compare(
            F.linear,
            [rand(3, 8), rand(24, 8), rand(24)],
            [(R,), (InterleavedShard(0, 3),), (InterleavedShard(0, 3),)],
            mesh,
            **CLOSE,
        )
        compare(torch.matmul, [rand(3, 24), rand(24, 5)], [(InterleavedShard(1, 3),), (S(0),)], mesh, **CLOSE)

    strictly(check)


def test_wrong_sizes_name_the_contracted_dims():
    def check():
        from vescale_dtensor import ShapeError, distribute_tensor

        mesh = mesh_of(2, 2)
        x = distribute_tensor(torch.zeros(4, 3), mesh, (S(0), R))
        with pytest.raises(ShapeError, match="contracted dims differ: 3 and 5"):
            x @ torch.zeros(5, 2)

    strictly(check)
