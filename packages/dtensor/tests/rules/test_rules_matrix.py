"""Batched linear algebra, Fourier transforms, integrals, view copies and other compositions, from the rules' tables."""

# ruff: noqa: B023  every function that closes over a loop variable runs within that turn of the loop

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from vescale_dtensor import FallbackWarning, Partial, Replicate, ShapeError, Shard
from vescale_dtensor._rules.products.matrix import CORES, TRANSFORMED, function_named
from vescale_dtensor._rules.solvers.composed import COPIES
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for, spread

R, P, S = Replicate(), Partial(), Shard
WAYS = [(R, R), (S(0), R), (S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (S(2), S(0)), (S(2), S(3)), (P, S(0)), (P, P)]
FREE = [(R, R), (S(0), R), (S(0), S(1)), (S(1), S(0)), (S(0), S(0))]


def rand(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def strictly(function):
    """On the ranks a fallback is an error."""

    def on_ranks():
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            warnings.filterwarnings("ignore", message="(?s).*torch.qr is deprecated")
            function()

    run_ranks(4, on_ranks)


def problem(name, core, batch):
    """[*batch, 3, 3], far from singular; symmetric where a factorization wants it."""
    if core < 2:
        return rand(*batch, 3)
    matrix = rand(*batch, 3, 3).detach()
    if name.split(".")[-1].startswith(("cholesky", "ldl")) or "logdet" in name or name.endswith("det"):
        matrix = matrix @ matrix.mT + 2 * torch.eye(3)
    return (matrix + 6 * torch.eye(3)).requires_grad_()


@in_turns(3)
@pytest.mark.parametrize("name", CORES)
def test_linear_algebra(name):
    """Batch dims move nothing; cut core dims are right."""
    if name == "qr" and TorchVersion(torch.__version__) >= (2, 15):
        pytest.skip("torch 2.15 has removed torch.qr: it raises")

    def check():
        mesh = mesh_of(2, 2)
        cores, _ = CORES[name]
        options = {"upper": True} if "triangular" in name else {}
        function = function_named(name)[0]
        for batch, places in itertools.product([(5, 3), (1, 3)], WAYS):  # the other leaves shards without a problem
            given = [problem(name, core, batch) for core in cores]
            if "ldl" in name:  # torch has no derivative of it
                given = [one.detach() for one in given]
            fit = [p for p in places if not isinstance(p, Shard) or p.dim < min(one.ndim for one in given)]
            if len(fit) == len(places):
                events = compare(
                    lambda *xs: function(*xs, **options), given, [places] * len(given), mesh, rtol=1e-4, atol=1e-4
                )
                assert not (events and places in FREE), (name, places)

    strictly(check)


@in_turns(3)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_fourier(name):
    """Linear, and free in every dim that is not transformed; uneven and empty shards."""

    def check():
        mesh = mesh_of(2, 2)
        function = getattr(torch.fft, name)
        options = {} if TRANSFORMED[name] else {"dim": (2, 3)}
        for shape in ((5, 3, 4, 6), (1, 2, 4, 6)):
            for places in WAYS:
                x = rand(*shape)
                events = compare(lambda x: function(x, **options), [x], [places], mesh, rtol=1e-4, atol=1e-4)
                assert not (events and places in [*FREE, (P, S(0)), (P, P)]), places
        compare(lambda x: function(x, dim=(0,) if TRANSFORMED[name] != (-1,) else 0), [rand(4, 3)], [(S(0), R)], mesh)

    strictly(check)


def test_integrals_and_cross_products():
    def check():
        mesh = mesh_of(2, 2)
        for function in (torch.trapezoid, torch.trapz, torch.cumulative_trapezoid):
            for places in WAYS:
                y = rand(5, 3, 4, 3)
                compare(lambda y: function(y, dx=0.5), [y], [places], mesh)
                compare(lambda y, x: function(y, x, dim=1), [y, rand(3)], [places, (R, R)], mesh)
                compare(lambda y, x: function(y, x, dim=-1), [y, rand(5, 3, 4, 3)], [places, (S(0), S(2))], mesh)
        for places in WAYS:
            compare(torch.linalg.cross, [rand(5, 3, 4, 3), rand(1, 3, 1, 3)], [places, (S(1), R)], mesh)
            compare(torch.cross, [rand(5, 3, 4, 3), rand(5, 3, 4, 3)], [places, (S(0), R)], mesh)
        assert not compare(torch.linalg.cross, [rand(4, 3), rand(4, 3)], [(S(0), R), (S(0), R)], mesh)

    strictly(check)


def test_distances():
    def check():
        mesh = mesh_of(2, 2)
        for places in [*WAYS[:6], (P, S(0)), (P, P)]:
            for p in (1.0, 2.0, 3.0):
                given = [rand(5, 7, 3), rand(5, 4, 3)]
                layouts = [places, (R, R)]
                events = compare(lambda a, b: torch.cdist(a, b, p=p), given, layouts, mesh, rtol=1e-4, atol=1e-4)
                assert not (events and places in FREE)
        for size in (24, 28):  # beyond 25 rows torch computes by a matrix product
            given = [rand(size, 3), rand(4, 3)]
            compare(torch.cdist, given, [(S(0), S(0)), (S(0), R)], mesh, rtol=1e-4, atol=1e-4)
        compare(torch.cdist, [rand(1, 3), rand(4, 3)], [(S(0), R), (R, S(0))], mesh, rtol=1e-4, atol=1e-4)

    strictly(check)


# Per view copy, its arguments on a [5, 4, 6].
ARGUMENTS = {
    "diagonal_copy": (0, 1, 2),
    "expand_copy": ((2, 5, 4, 6),),
    "permute_copy": ((2, 0, 1),),
    "select_copy": (1, -1),
    "split_copy": (2, 1),
    "split_with_sizes_copy": ([1, 3], 1),
    "squeeze_copy": (1,),
    "transpose_copy": (0, 2),
    "unbind_copy": (1,),
    "unfold_copy": (2, 3, 2),
    "unsqueeze_copy": (1,),
    "view_copy": ((5, 24),),
}


def test_copies_of_views():
    """Whatever the view keeps, the copy does; it may be written to."""

    def check():
        mesh = mesh_of(2, 2)
        for name in COPIES:
            function = getattr(torch, name)
            shape = (5, 4) if name == "t_copy" else (5, 4, 6)
            for places in [(R, R), (S(0), R), (S(0), S(1)), (P, S(0))]:
                given = ARGUMENTS.get(name, ())
                events = compare(lambda x: function(x, *given), [rand(*shape)], [places], mesh, bitwise=P not in places)
                assert not (events and places == (S(0), R)), name

        def written(x):
            copy = torch.transpose_copy(x, 0, 1)
            copy.zero_()
            torch.zero_(x.clone())
            return x, copy

        compare(written, [rand(5, 4)], [(S(0), R)], mesh)

    strictly(check)


def test_compositions():
    def check():
        mesh = mesh_of(2, 2)
        close = {"rtol": 1e-4, "atol": 1e-5}
        for places in [(R, R), (S(0), R), (R, S(1)), (S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (P, S(0))]:
            first = [p if p != S(1) else R for p in places]
            compare(torch.kron, [rand(4, 3), rand(2, 5)], [places, (R, S(0))], mesh)
            compare(torch.kron, [rand(4, 3), rand(2, 2, 5)], [places, places], mesh)
            compare(lambda a, b: torch.meshgrid(a, b, indexing="ij"), [rand(5), rand(3)], [first, (R, R)], mesh)
            compare(lambda a, b: torch.meshgrid([a, b], indexing="xy"), [rand(5), rand(3)], [first, first], mesh)
            compare(torch.cartesian_prod, [rand(4), rand(3)], [first, (R, R)], mesh)
            compare(torch.diagflat, [rand(4, 3)], [places], mesh)
            compare(lambda x: x.sum_to_size(3, 1), [rand(5, 3, 4)], [places], mesh, **close)
            for correction in (0, 1):
                compare(lambda x: torch.cov(x, correction=correction), [rand(5, 7)], [places], mesh, **close)
            compare(torch.corrcoef, [rand(5, 7)], [places], mesh, **close)
            compare(lambda x: torch.cov(x[0]), [rand(5, 7)], [places], mesh, **close)
            weights = rand(7).detach().abs()
            compare(lambda x, a: torch.cov(x, aweights=a), [rand(5, 7), weights], [places, (R, R)], mesh, **close)
            counts = torch.arange(1, 8)
            compare(lambda x, f: torch.cov(x, fweights=f), [rand(5, 7), counts], [places, (S(0), R)], mesh, **close)
            compare(
                lambda x, f, a: torch.cov(x, fweights=f, aweights=a), [rand(5, 7), counts, weights],
                [places, (R, R), None], mesh, **close,
            )  # fmt: skip

    strictly(check)


@pytest.mark.parametrize("shape", [(4, 3), (1, 3), (), (0, 3), (2, 1, 4)], ids=str)
def test_sum_to_any_size(shape):
    """To each size that broadcasts to the shape; any other is an error, on every rank."""
    kinds = [(), (1,), (2,), (3,), (4,), (0,), (-1,), (1, 3), (2, 3), (4, 1), (4, 3), (1, 4), (0, 3), (-1, 3)]
    sizes = [*kinds, (1, 1), (2, 1, 4), (2, 4, 3), (1, 1, 1), (1, 4, 3)]

    def check():
        mesh = mesh_of(2, 2)
        for size in sizes:
            whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).requires_grad_()
            try:
                whole.sum_to_size(size)
            except RuntimeError:
                for places in placements_for(shape, 2):
                    with pytest.raises(ShapeError, match="global shape"):
                        spread(whole, mesh, places).sum_to_size(size)
                continue
            for places in placements_for(shape, 2):
                compare(lambda x: x.sum_to_size(size), [whole], [places], mesh, rtol=1e-4, atol=1e-5)
                compare(lambda x: x.sum_to_size(size=size), [whole], [places], mesh, rtol=1e-4, atol=1e-5)

    strictly(check)


def test_instance_norm():
    def check():
        mesh = mesh_of(2, 2)
        close = {"rtol": 1e-4, "atol": 1e-5}
        x, weight, bias = rand(5, 4, 3, 2), rand(4), rand(4)
        for places in WAYS:
            channels = [S(0) if p == S(1) else R for p in places]
            compare(
                lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [x, weight, bias], [places, channels, channels],
                mesh, **close,
            )  # fmt: skip
            assert not (compare(F.instance_norm, [x], [places], mesh, **close) and places in FREE)
            compare(F.instance_norm, [rand(1, 3, 4)], [[R if p == S(3) else p for p in places]], mesh, **close)

    strictly(check)
