"""Reductions on every layout against one device: values, gradients, and how much they communicate."""

import pytest
import torch

from vescale_testkit import in_turns, mesh_of, run_ranks

SUMS = {
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(1),
    "sum_axis": lambda x: x.sum(axis=0, keepdims=True),
    "sum_dtype": lambda x: torch.sum(x, (0, -1), keepdim=True, dtype=torch.float64),
    "sum_to_int": lambda x: (x.detach() * 4).sum(0, dtype=torch.int64),
    "sum_bool": lambda x: (x > 0).sum(1),
    "nansum": lambda x: x.nansum(0),
    "mean": lambda x: x.mean(),
    "mean_dim": lambda x: torch.mean(x, -1, True),
    "mean_dtype": lambda x: x.mean((0, 1), dtype=torch.float64),
    "nanmean": lambda x: x.nanmean(0, keepdim=True),
    "count_nonzero": lambda x: torch.count_nonzero(x.round(), 0),
    "prod": lambda x: x.prod(),
    "prod_dim": lambda x: x.prod(1),
    "prod_keepdim": lambda x: x.prod(0, keepdim=True),
    "any": lambda x: (x > 1).any(1),
    "any_full": lambda x: (x > 9).any(),
    "all": lambda x: torch.all(x > -1, 0, keepdim=True),
    "all_full": lambda x: (x > -9).all(),
    "all_dims": lambda x: (x > -1).all((0, 1)),
    "trace": lambda x: x.trace(),
    "histc": lambda x: torch.histc(x.detach(), bins=7, min=-1, max=1),
    "histc_method": lambda x: x.detach().histc(5, -2, 2.5),
}
SPREADS = {
    "var": lambda x: x.var(),
    "var_dim": lambda x: torch.var(x, 0, correction=0),
    "var_biased": lambda x: x.var(False),
    "std": lambda x: x.std(1, keepdim=True),
    "std_full": lambda x: torch.std(x),
    "var_mean": lambda x: torch.var_mean(x, (0, 1), correction=0.5),
    "std_mean": lambda x: torch.std_mean(x, 0, keepdim=True),
}
EXTREMA = {
    "amax": lambda x: x.amax((0, 1)),
    "amax_ties": lambda x: x.round().amax(0),
    "amin": lambda x: torch.amin(x, 1, keepdim=True),
    "amin_ties": lambda x: x.round().amin(),
    "aminmax": lambda x: torch.aminmax(x),
    "aminmax_dim": lambda x: torch.aminmax(x.round(), dim=1),
    "max": lambda x: x.round().max(),
    "min": lambda x: torch.min(x.round()),
    "max_dim": lambda x: x.round().max(0),
    "min_dim": lambda x: torch.min(x.round(), dim=1, keepdim=True),
    "max_int": lambda x: (x * 3).detach().int().max(1),
    "max_bool": lambda x: (x > 0).amax(0),
    "max_two": lambda x: torch.max(x, x * x),
    "argmax": lambda x: x.round().argmax(),
    "argmax_dim": lambda x: x.round().argmax(0),
    "argmin": lambda x: torch.argmin(x.round(), -1, keepdim=True),
    "argmin_keepdim": lambda x: torch.argmin(x.round(), keepdim=True),
}


def check(functions, shapes, sizes, values=None):
    """Every function on every layout; on each rank."""
    import warnings

    from vescale_dtensor._dispatch.fallback import FallbackWarning
    from vescale_testkit.oracle import compare, placements_for

    warnings.simplefilter("error", FallbackWarning)
    warnings.filterwarnings("ignore", "std|var", UserWarning)
    mesh = mesh_of(*sizes)
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) if values is None else values
        x.requires_grad_()
        for placements in placements_for(shape, mesh.ndim):
            for name, function in functions.items():
                try:
                    compare(function, [x], [placements], mesh, rtol=1e-5, atol=1e-5)
                except BaseException as error:
                    error.add_note(f"{name} of {list(shape)} on {placements}")
                    raise


@in_turns(3)
@pytest.mark.parametrize("functions", [SUMS, SPREADS, EXTREMA], ids=["sums", "spreads", "extrema"])
@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_every_layout(functions, sizes):
    shapes = [(5, 3)] if len(sizes) == 2 else [(5, 3), (2, 9)]
    run_ranks(4, check, functions, shapes, sizes)


COUNTS = {
    "all": lambda x: torch.bincount((x.detach() * 3).int().abs()),
    "at least": lambda x: (x.detach() * 3).long().abs().bincount(minlength=2),
    "more": lambda x: torch.bincount((x.detach() * 3).to(torch.uint8), None, 300),
    "of zeros": lambda x: torch.bincount((x.detach() * 0).int(), minlength=1),
}


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_counts_of_what_ranks_hold(sizes):
    run_ranks(4, check, COUNTS, [(7,), (3,), (12,)], sizes)


def test_what_cannot_be_counted_raises_as_on_one_device():
    def body():
        from vescale_dtensor import Shard, distribute_tensor

        for values in (torch.tensor([2, 0, -1, 1]), torch.ones(4)):
            with pytest.raises(RuntimeError) as alone:
                torch.bincount(values)
            with pytest.raises(RuntimeError) as sharded:
                torch.bincount(distribute_tensor(values, mesh_of(2), [Shard(0)]))
            assert str(alone.value).splitlines()[0] in str(sharded.value)

    run_ranks(2, body)


def test_three_dims_and_nested_shards():
    def body():
        from vescale_dtensor import InterleavedShard, Replicate, Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(2, 2)
        x = torch.randn(3, 4, 8).requires_grad_()
        for placements in ((Shard(1), Shard(1)), (Shard(2), Shard(0)), (InterleavedShard(2, 2), Replicate()),
                           (Shard(1), InterleavedShard(2, 2)), (InterleavedShard(2, 2), Shard(2))):  # fmt: skip
            for function in (
                lambda x: x.sum((0, 2)), lambda x: x.mean((1, 2), keepdim=True), lambda x: x.amax((0, 2)),
                lambda x: x.max(2), lambda x: x.argmax(), lambda x: x.argmax(2), lambda x: x.var((1, 2)),
                lambda x: x.prod(2), lambda x: x.round().amax((1, 2)),
            ):  # fmt: skip
                compare(function, [x], [placements], mesh, rtol=1e-5, atol=1e-5)

    run_ranks(4, body)


def test_nan_infinity_and_zero():
    def body():
        from vescale_dtensor import Shard
        from vescale_testkit.oracle import compare

        def aminmax(x):  # torch 2.11 has no derivative of it
            of_one = type(torch.ones(1, requires_grad=True).aminmax(dim=0).min.grad_fn).__name__
            return (x.detach() if of_one == "NotImplemented" else x).aminmax(dim=1)

        inf, nan = float("inf"), float("nan")
        mesh = mesh_of(4)
        for row in ([-inf] * 6, [nan, 1, nan, 2, 2, nan], [inf, 0, inf, -inf, 0, 1], [0, 0, 3, 4, 0, 2.0]):
            x = torch.tensor([row, row[::-1]]).requires_grad_()
            for function in (
                lambda x: x.amax(1), lambda x: x.max(1), lambda x: x.max(), lambda x: x.min(1), lambda x: x.argmax(1),
                lambda x: x.argmin(), lambda x: x.prod(1), lambda x: x.nansum(1), lambda x: x.nanmean(1),
                aminmax, lambda x: x.cumsum(1), lambda x: x.detach().cumprod(1),
            ):  # fmt: skip
                for dim in (0, 1):
                    compare(function, [x], [(Shard(dim),)], mesh)

    run_ranks(4, body)


def test_dtypes():
    def body():
        from vescale_dtensor import Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(4)
        whole = torch.randint(-5, 5, (3, 6))
        for dtype in (torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64):
            x = whole.abs().to(dtype)
            functions = [SUMS["sum"], SUMS["sum_dim"], SUMS["prod_dim"], lambda x: x.any(1), lambda x: x.all()]
            if not dtype.is_complex:
                functions += [lambda x: x.amax(1), lambda x: x.amin((0, 1)), lambda x: x.max(1), lambda x: x.cumsum(1)]
            if dtype.is_floating_point or dtype.is_complex:
                functions += [lambda x: x.mean(1), lambda x: x.var(1), lambda x: torch.std_mean(x, 1)]
            for function in functions:
                tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
                compare(function, [x], [(Shard(1),)], mesh, **tolerance)

    run_ranks(4, body)


def test_second_derivatives():
    def body():
        from vescale_dtensor import Shard, distribute_tensor

        mesh = mesh_of(4)
        whole = torch.randn(3, 6, dtype=torch.float64)
        functions = [
            lambda x: x.var(1), lambda x: x.prod(1), lambda x: x.round().mul(x).amax(1), lambda x: (x * x).max(1)[0],
            lambda x: x.softmax(1), lambda x: x.logsumexp(1), lambda x: x.norm(dim=1), lambda x: x.norm(p=3),
            lambda x: x.cumsum(1) ** 2, lambda x: torch.nn.functional.layer_norm(x, (6,)),
            lambda x: x.topk(1, 1)[0] ** 2,
        ]  # fmt: skip
        for number, function in enumerate(functions):
            found = []
            for x in (whole.clone(), distribute_tensor(whole, mesh, [Shard(1)])):
                x.requires_grad_()
                weighted = (function(x) ** 3).sum()
                (first,) = torch.autograd.grad(weighted, x, create_graph=True)
                (second,) = torch.autograd.grad((first * first).sum(), x)
                found.append(second)
            torch.testing.assert_close(found[1].full_tensor(), found[0], msg=lambda m, number=number: f"{number}: {m}")

    run_ranks(4, body)


def test_no_communication_where_none_is_needed():
    def body():
        from vescale_dtensor import Partial, Replicate, Shard
        from vescale_testkit.oracle import compare

        x = torch.randn(8, 12).requires_grad_()
        linear = [lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.mean(1), lambda x: x.mean()]
        mesh = mesh_of(2, 2)
        for function in (*linear, lambda x: x.nansum(1), lambda x: torch.count_nonzero(x, 0)):
            assert not compare(function, [x], [(Shard(0), Shard(1))], mesh)
        for function in linear:
            assert not compare(function, [x], [(Partial(), Shard(1))], mesh, rtol=1e-5, atol=1e-5)
        for function in (
            lambda x: x.amax(1), lambda x: x.var(1), lambda x: x.argmax(1), lambda x: x.prod(1), lambda x: x.max(1),
        ):  # fmt: skip
            assert not compare(function, [x], [(Shard(0), Replicate())], mesh)
            assert not compare(function, [x], [(Shard(0), Shard(0))], mesh)

    run_ranks(4, body)


def test_sharded_dim_is_not_gathered():
    def body():
        from vescale_dtensor import Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(4)
        x = torch.randn(3, 256).requires_grad_()
        gathered = x.nbytes * 3 // 4
        for function in (
            lambda x: x.amax(1), lambda x: x.max(1), lambda x: x.argmax(), lambda x: x.var(1), lambda x: x.any(1),
            lambda x: x.prod(1), lambda x: x.cumsum(1), lambda x: x.topk(3, 1), lambda x: x.nanmean(1),
        ):  # fmt: skip
            events = compare(function, [x], [(Shard(1),)], mesh, rtol=1e-4, atol=1e-4)
            assert 0 < sum(event.received for event in events) < gathered / 4, events

    run_ranks(4, body)


def test_equal_and_allclose():
    def body():
        from vescale_dtensor import Partial, Replicate, Shard
        from vescale_testkit.oracle import spread

        mesh = mesh_of(2, 2)
        x = torch.arange(15.0).view(5, 3)
        other = x.clone()
        other[4, 2] += 1  # on one rank only
        layouts = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Partial(), Shard(0)), (Shard(0), Shard(0))]
        for ours in layouts:
            for theirs in (*layouts, None):
                a = spread(x, mesh, ours)
                for value, expected in ((x, True), (other, False)):
                    b = value if theirs is None else spread(value, mesh, theirs)
                    assert torch.equal(a, b) is expected
                    assert b.equal(a) is expected
                    assert torch.allclose(a, b) is expected
                    assert a.allclose(b, atol=2) is True
        assert torch.equal(a, x[:4]) is False
        assert torch.allclose(a, torch.zeros(1)) is False

    run_ranks(4, body)


def test_strict_refuses_the_gather_of_parts():
    def body():
        from vescale_dtensor import Shard, distribute_tensor, strict
        from vescale_dtensor._errors import ImplicitCommunicationError

        x = distribute_tensor(torch.randn(8), mesh_of(4), [Shard(0)])
        for function in (torch.amax, torch.argmax, torch.std, torch.any, lambda x: x.softmax(0), lambda x: x.topk(1)):
            with strict(), pytest.raises(ImplicitCommunicationError):
                function(x)
        with strict():
            x.sum(), x.mean()

    run_ranks(4, body)
