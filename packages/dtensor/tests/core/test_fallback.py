"""Functions without a rule: whole, right, and everything they write reaches the shards."""

import collections
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import (
    DTensor,
    FallbackWarning,
    GradientError,
    OperatorError,
    Partial,
    PlainTensorError,
    Replicate,
    Shard,
    ViewError,
    comm_trace,
    distribute_tensor,
)
from vescale_dtensor._dispatch.fallback import gathered
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for, spread

R, P, S = Replicate(), Partial(), Shard
LAYOUTS = [(R, R), (S(0), R), (S(0), S(1)), (S(1), S(1)), (P, S(0)), (P, P)]


def whole(function):
    """`function` as if it had no rule."""
    return gathered(function)


def quietly(function):
    def on_ranks():
        with warnings.catch_warnings(action="ignore", category=FallbackWarning):
            function()

    run_ranks(4, on_ranks)


def lift(function):
    """Runs on plain tensors and, for DTensors, through the fallback."""

    def run(*args, **kwargs):
        if any(type(a) is DTensor for a in (*args, *kwargs.values())):
            return whole(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def test_values_and_gradients_on_the_grid():
    def check():
        mesh = mesh_of(2, 2)
        x, y = torch.randn(5, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
        softmax_product = lift(lambda a, b: torch.softmax(a, 0) * b + a.cumsum(1))
        for places in placements_for((5, 3), 2):
            compare(softmax_product, [x, y], [places, (S(0), R)], mesh)
        compare(lift(torch.mul), [x, y], [(P, R), None], mesh)
        compare(lambda a: lift(torch.mul)(a, a), [x], [(P, S(0))], mesh)

    quietly(check)


def test_what_an_operator_of_a_library_writes():
    """By its schema: kernels through `.data`, numpy or an address do not move the version counter."""

    def kernel(x, into, lists, by):
        into.data.add_(x, alpha=by)
        for one in lists:
            one.data.mul_(by)

    def check():
        mesh = mesh_of(2, 2)
        library = torch.library.Library("vescale_writes", "FRAGMENT")
        library.define("accumulate(Tensor x, Tensor(a!) into, Tensor(b!)[] lists, float by=1.0) -> ()")
        library.impl("accumulate", kernel, "CPU")
        accumulate = getattr(torch, "ops").vescale_writes.accumulate  # noqa: B009  the module cannot travel to the ranks
        for function in (accumulate, accumulate.default):
            for places in LAYOUTS:
                plain = [torch.randn(5, 3) for _ in range(4)]
                made = [spread(one, mesh, places) for one in plain]
                kernel(plain[0], plain[1], plain[2:], 2.0)
                function(made[0], into=made[1], lists=made[2:], by=2.0)
                for found, wanted in zip(made, plain):
                    assert tuple(found.mesh_layout.placements) == places
                    torch.testing.assert_close(found.full_tensor(), wanted)

    quietly(check)


def test_lists_named_tuples_and_dicts():
    def check():
        mesh = mesh_of(2, 2)
        x = torch.randn(4, 6).requires_grad_()
        Pair = collections.namedtuple("Pair", "first rest")
        for places in LAYOUTS:
            compare(lift(lambda a: list(a.unbind(0))), [x], [places], mesh)
            compare(lift(lambda a: Pair(a * 2, [a, a.sum()])), [x], [places], mesh)
            compare(lift(lambda a: {"double": a * 2, "number": 3, "none": None}), [x], [places], mesh)
            compare(lift(lambda a: torch.max(a, 1)), [x], [places], mesh)
            compare(lift(lambda a: torch.linalg.svd(a).S), [x], [places], mesh, rtol=1e-4, atol=1e-4)
            d = spread(x, mesh, places)
            assert type(whole(lambda a: Pair(a, 1))(d)) is Pair
            assert type(whole(torch.max)(d, 1)) is torch.return_types.max
            assert whole(lambda a: a.shape)(d) == (4, 6)

    quietly(check)


def test_in_place_reaches_every_shard():
    def check():
        mesh = mesh_of(2, 2)
        value = torch.randn(5, 3)
        for places in LAYOUTS:
            for function, *rest in (
                (torch.Tensor.exp_,),
                (torch.Tensor.mul_, 3.0),
                (torch.Tensor.cumsum_, 0),
                (torch.Tensor.copy_, torch.ones(3)),
                (lambda x, **options: F.relu(x, **options), {"inplace": True}),
            ):
                options = rest.pop() if rest and isinstance(rest[-1], dict) else {}
                expected = function(value.clone(), *rest, **options)
                shard = spread(value, mesh, places)
                out = whole(function)(shard, *rest, **options)
                assert out is shard and shard.placements == places
                torch.testing.assert_close(shard.full_tensor(), expected)
            twice = spread(value, mesh, places)
            assert whole(torch.Tensor.add_)(twice, twice) is twice
            torch.testing.assert_close(twice.full_tensor(), value * 2)

    quietly(check)


def test_in_place_with_gradient():
    def check():
        mesh = mesh_of(2, 2)

        def body(x, y):
            z = x * y
            (torch.Tensor.mul_ if type(z) is not DTensor else whole(torch.Tensor.mul_))(z, y)
            (torch.Tensor.exp_ if type(z) is not DTensor else whole(torch.Tensor.exp_))(z)
            return z + x

        x, y = torch.randn(5, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
        for places in LAYOUTS:
            for others in ((R, R), (S(0), S(0)), (R, P)):
                compare(body, [x, y], [places, others], mesh)

    quietly(check)


def test_in_place_on_a_leaf_raises_as_on_one_device():
    def check():
        x = distribute_tensor(torch.randn(4, 2), mesh_of(2, 2), (S(0), R)).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            whole(torch.Tensor.exp_)(x)
        with torch.no_grad():
            whole(torch.Tensor.exp_)(x)

    quietly(check)


def test_out_forms():
    def check():
        mesh = mesh_of(2, 2)
        a, b = torch.randn(5, 3), torch.randn(5, 3)
        for mine in LAYOUTS:
            for theirs in ((R, R), (S(1), S(0)), (P, R)):
                da, db = spread(a, mesh, mine), spread(b, mesh, theirs)
                out = distribute_tensor(torch.zeros(5, 3), mesh, (S(0), S(1)))
                for call in (torch.add, torch.maximum, whole(torch.add), whole(torch.hypot)):
                    found = call(da, db, out=out)
                    assert found is out and out.placements == (S(0), S(1))
                want = torch.hypot(a, b)
                torch.testing.assert_close(out.full_tensor(), want)
                partial = spread(torch.zeros(5, 3), mesh, (P, S(0)))
                torch.mul(da, db, out=partial)
                torch.testing.assert_close(partial.full_tensor(), a * b)
                values, indices = da.new_zeros(5), da.new_zeros(5, dtype=torch.long)
                found = torch.max(da, 1, out=(values, indices))
                assert found[0] is values and found[1] is indices
                assert torch.equal(indices.full_tensor(), a.argmax(1))
                plain = torch.zeros(5, 3)
                assert torch.add(da, db, out=plain) is plain
                torch.testing.assert_close(plain, a + b)
        grad = distribute_tensor(a.clone(), mesh, (S(0), R)).requires_grad_()
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            torch.add(grad, grad, out=distribute_tensor(torch.zeros(5, 3), mesh, (S(0), R)))
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.add(grad.detach(), 1.0, out=distribute_tensor(torch.zeros(5, 3, dtype=torch.int64), mesh, (S(0), R)))

    quietly(check)


def test_out_of_another_size_is_resized_and_replicated():
    def check():
        mesh = mesh_of(2, 2)
        a = torch.randn(5, 3)
        out = distribute_tensor(torch.zeros(0), mesh, (R, R))
        torch.add(distribute_tensor(a, mesh, (S(0), R)), 1.0, out=out)
        assert out.shape == (5, 3) and out.placements == (R, R)
        torch.testing.assert_close(out.full_tensor(), a + 1)
        again = distribute_tensor(torch.arange(6.0), mesh, (S(0), R))
        again.resize_(3)
        assert again.shape == (3,) and torch.equal(again.full_tensor(), torch.arange(3.0))

    quietly(check)


def test_plain_tensors_are_written_in_place():
    def check():
        mesh = mesh_of(2, 2)
        x = torch.randn(5, 3)
        for places in LAYOUTS:
            plain = torch.ones(5, 3)
            assert plain.add_(spread(x, mesh, places)) is plain
            torch.testing.assert_close(plain, 1 + x)
            plain[1:3] = spread(x, mesh, places)[1:3]
            torch.testing.assert_close(plain[1:3], x[1:3])
            plain.copy_(spread(x, mesh, places))
            torch.testing.assert_close(plain, x)

    quietly(check)


def test_what_copies_a_shard_over_a_plain_tensor_gathers_nothing_where_nobody_else_sees_it():
    """As a cache of a recurrence does in training: zeros that all ranks hold, and a sharded value with a gradient."""

    def check():
        mesh = mesh_of(2, 2)
        x = torch.randn(5, 3)
        for places, seen in itertools.product(LAYOUTS, (None, "view", "detached", "part", "saved")):
            wanted, found = x.clone().requires_grad_(), spread(x, mesh, places).requires_grad_()
            for source in (wanted, found):
                memory = torch.zeros(30)
                plain = memory[:15].view(5, 3) if seen == "part" else torch.zeros(5, 3)
                scale = torch.ones(5, 3, requires_grad=True)
                if seen == "saved":
                    (scale * plain).sum()
                others = plain[1:] if seen == "view" else plain.detach() if seen == "detached" else None
                with comm_trace() as trace:
                    kept = plain.copy_(source * 2)
                assert kept is plain and plain.shape == (5, 3)
                if source is found and seen is None and S(0) in places:
                    assert trace.count(kind="all_gather") == 0
                (plain * torch.arange(15.0).view(5, 3)).sum().backward()
                if source is found:
                    value = plain.full_tensor() if isinstance(plain, DTensor) else plain
                    torch.testing.assert_close(value, x * 2)
                    if others is not None and seen == "view":
                        told = others.full_tensor() if isinstance(others, DTensor) else others
                        torch.testing.assert_close(told, (x * 2)[1:])
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)

    quietly(check)


def test_running_statistics_are_written_back():
    def check():
        mesh = mesh_of(2, 2)
        x, mean, var = torch.randn(6, 4, 3), torch.zeros(4), torch.ones(4)
        expected = F.batch_norm(x, mean, var, training=True)
        for places in ((R, R), (S(0), R), (S(1), S(0))):
            for stats in ((R, R), (S(0), R)):
                m, v = distribute_tensor(torch.zeros(4), mesh, stats), distribute_tensor(torch.ones(4), mesh, stats)
                out = whole(F.batch_norm)(distribute_tensor(x, mesh, places), m, v, training=True)
                torch.testing.assert_close(out.full_tensor(), expected)
                torch.testing.assert_close(m.full_tensor(), mean)
                torch.testing.assert_close(v.full_tensor(), var)
                plain_mean, plain_var = torch.zeros(4), torch.ones(4)
                whole(F.batch_norm)(distribute_tensor(x, mesh, places), plain_mean, plain_var, training=True)
                torch.testing.assert_close(plain_mean, mean)

    quietly(check)


def test_what_is_handed_back_is_not_restamped():
    def check():
        mesh = mesh_of(2, 2)
        x = distribute_tensor(torch.randn(4, 2), mesh, (S(0), R))
        plain = torch.randn(4, 2)
        found = whole(lambda a, b: (b, a))(x, plain)
        assert found[0] is plain and type(plain) is torch.Tensor
        assert found[1] is not x and x.placements == (S(0), R)
        same = whole(lambda a: a)(distribute_tensor(plain, mesh, (R, R)))
        assert same.placements == (R, R)

    quietly(check)


def test_a_view_that_became_a_copy_refuses_writes():
    def check():
        mesh = mesh_of(2, 2)
        x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, (S(0), R))
        view = whole(lambda a: a[1:3])(x)
        with pytest.raises(ViewError):
            view.zero_()
        with pytest.raises(ViewError):
            x.zero_()
        with pytest.raises(ViewError):
            whole(torch.Tensor.exp_)(x)
        del view
        x.zero_()
        y = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, (R, R))
        whole(lambda a: a[1:3])(y).zero_()
        assert not y.full_tensor()[1:3].any() and y.full_tensor()[3].all()

    quietly(check)


def test_a_lost_layout_and_a_foreign_function_raise():
    def check():
        mesh = mesh_of(2, 2)
        x = distribute_tensor(torch.randn(4, 2), mesh, (S(0), R)).requires_grad_()
        lost = x.to_local().new_ones(4, 2) * x.to_local().sum()
        with pytest.raises(PlainTensorError):
            torch.renorm(x + 0, 2, 0, 1.0) + lost

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return torch.renorm(x * 2, 2, 0, 1.0)

            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        with pytest.raises(GradientError):
            out = Twice.apply(x)
            torch.renorm(out, 2, 0, 1.0)
        with pytest.raises(OperatorError):
            y = x * 1
            whole(torch.Tensor.unsqueeze_)(y, 0)

    quietly(check)


def test_in_place_on_pending_tensors_is_reduced_and_put_back():
    def check():
        mesh = mesh_of(2, 2)
        x = torch.randn(5, 3).requires_grad_()
        for places in ((P, S(0)), (P, P), (S(1), P), (P, R)):
            for function in (
                lambda x: (x * 2).exp_(),
                lambda x: (x * 2).clamp_(-1, 1),
                lambda x: (x * 2).add_(1),
                lambda x: (x * 2).mul_(x),
                lambda x: F.relu(x * 2, inplace=True),
            ):
                compare(function, [x], [places], mesh)
            y = spread(x.detach(), mesh, places)
            assert y.clamp_(-1, 1) is y and y.placements == places

    quietly(check)


def test_it_is_reported_once_with_its_cost():
    def check():
        x = distribute_tensor(torch.randn(4, 2), mesh_of(2, 2), (S(0), R))

        def peculiar(a):
            return a * 2

        with pytest.warns(FallbackWarning, match=r"peculiar has no rule.*8 elements.*register_rule"):
            whole(peculiar)(x)
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            whole(peculiar)(x)

    run_ranks(4, check)
