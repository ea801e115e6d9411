"""Users' own kernels: rules, local maps, autograd Functions, and bridges to torch's DTensor."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from vescale_dtensor import (
    DTensor,
    FallbackWarning,
    Partial,
    Replicate,
    Shard,
    comm_trace,
    distribute_tensor,
    from_torch,
    local_map,
    register_function,
    register_rule,
    to_torch,
)
from vescale_dtensor.rules import Signature, decomposed
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P = Replicate(), Partial()


def grid():
    return mesh_of(2, 2, names=("dp", "tp"))


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def overridable(body):
    """A function that asks `__torch_function__`, as a library's own would."""

    def function(x):
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return body(x)

    return function


# --- register_rule ----------------------------------------------------------------------------


def test_a_rule_for_a_users_function_keeps_it_sharded() -> None:
    def run() -> None:
        warnings.simplefilter("error", FallbackWarning)
        scale = overridable(lambda x: 3 * x)

        @register_rule(scale)
        def scale_rule(call):
            dims = tuple(range(call.operands[0].ndim))
            return Signature([dims], [dims], linear=[(0,)])

        for places in placements_for((4, 6), 2):
            assert compare(scale, [randn(4, 6)], [places], grid()) == [], "linear and elementwise: nothing is sent"

    run_ranks(4, run)


def test_without_a_rule_it_is_gathered_and_says_so_once() -> None:
    def run() -> None:
        odd = overridable(lambda x: x.flip(0) * x)
        x = distribute_tensor(randn(4, 6), grid(), [Shard(0), R])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            odd(x), odd(x)
        assert [w.category for w in said] == [FallbackWarning] and "register_rule" in str(said[0].message)
        for places in placements_for((4, 6), 2):
            compare(odd, [randn(4, 6)], [places], grid())

    run_ranks(4, run)


def test_a_rule_may_be_a_composite_or_have_no_opinion() -> None:
    def run() -> None:
        warnings.simplefilter("ignore", FallbackWarning)
        silu = overridable(lambda x: x * torch.sigmoid(x))

        @register_rule(silu)
        def silu_rule(call):
            if call.operands[0].ndim == 1:
                return None
            return decomposed(lambda x: x * torch.sigmoid(x))

        for shape in ((4, 6), (5,)):
            for places in placements_for(shape, 2):
                compare(silu, [randn(*shape)], [places], grid())

    run_ranks(4, run)


def test_a_rule_for_a_torch_library_op() -> None:
    def run() -> None:
        warnings.simplefilter("error", FallbackWarning)
        library = torch.library.Library("vescale_test", "FRAGMENT")
        library.define("triple(Tensor x) -> Tensor")
        library.impl("triple", lambda x: 3 * x, "CompositeImplicitAutograd")
        triple = getattr(torch, "ops").vescale_test.triple  # noqa: B009  the ops module cannot travel to the ranks

        @register_rule(triple, triple.default)
        def triple_rule(call):
            dims = tuple(range(call.operands[0].ndim))
            return Signature([dims], [dims], linear=[(0,)])

        for function in (triple, triple.default):
            for places in placements_for((4, 6), 2):
                assert compare(function, [randn(4, 6)], [places], grid()) == []
        library._destroy()

    run_ranks(4, run)


# --- local_map ---------------------------------------------------------------------------------


def test_a_local_map_computes_on_shards_and_its_gradients_are_whole() -> None:
    """Columns of w: x is replicated on tp and ranks do different work with it, so its gradient is a sum over them."""

    def run() -> None:
        x, w = randn(4, 6), randn(6, 8, seed=1)
        torch.tanh(x @ w).sin().sum().backward()
        columns = local_map(
            lambda x, w: torch.tanh(x @ w), [Shard(0), Shard(1)], [(Shard(0), R), (R, Shard(1))], shapes=[(4, 8)]
        )
        for px, pw in itertools.product(
            [(Shard(0), R), (R, R), (Shard(1), Shard(0))], [(R, Shard(1)), (R, R), (Shard(0), R)]
        ):
            dx, dw = (distribute_tensor(t.detach().requires_grad_(), grid(), p) for t, p in ((x, px), (w, pw)))
            out = columns(dx, dw)
            assert out.shape == (4, 8) and out.placements == (Shard(0), Shard(1))
            out.sin().sum().backward()
            torch.testing.assert_close(dx.grad.full_tensor(), x.grad, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dw.grad.full_tensor(), w.grad, rtol=1e-5, atol=1e-5)

    run_ranks(4, run)


def test_a_local_map_of_an_invariant_input_sums_its_gradient() -> None:
    def run() -> None:
        x, w = randn(4, 6), randn(6, 8, seed=1)
        (2 * x @ w).square().sum().backward()
        dx = distribute_tensor(x.detach().requires_grad_(), grid(), [R, P])
        dw = distribute_tensor(w.detach().requires_grad_(), grid(), [R, Shard(1)])
        product = local_map(lambda a, b: a @ b, [R, Shard(1)])
        product((2 * dx).redistribute([R, R]), dw).square().sum().backward()  # I on tp
        torch.testing.assert_close(dx.grad.full_tensor(), x.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dw.grad.full_tensor(), w.grad, rtol=1e-5, atol=1e-5)

    run_ranks(4, run)


def test_a_local_map_has_several_results_and_plain_arguments() -> None:
    def run() -> None:
        def both(x, scale, *, shift):
            return x * scale + shift, x.sum(0), "a note"

        x = randn(4, 6)
        d = distribute_tensor(x, grid(), [Shard(0), R])
        mapped = local_map(both, [(Shard(0), R), (P, R), None])
        scaled, total, note = mapped(d, 2.0, shift=1.0)
        torch.testing.assert_close(scaled.full_tensor(), 2 * x + 1)
        torch.testing.assert_close(total.full_tensor(), x.sum(0))
        assert note == "a note" and mapped.__name__ == "both"
        made = local_map(lambda n: torch.ones(n), [Shard(0), R], device_mesh=grid())(2)
        assert made.shape == (4,)

    run_ranks(4, run)


# --- register_function ---------------------------------------------------------------------------


def test_a_registered_function_runs_whole_and_a_rule_makes_it_cheaper() -> None:
    def run() -> None:
        warnings.simplefilter("ignore", FallbackWarning)

        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x)
                ctx.scale = scale
                return scale * x**3

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad * 3 * ctx.scale * x**2, None

        register_function(Cube)
        for places in placements_for((4, 6), 2):
            compare(lambda x: Cube.apply(x, 2.0), [randn(4, 6)], [places], grid())
        x = distribute_tensor(randn(4, 6), grid(), [Shard(0), R])
        with comm_trace() as trace:
            Cube.apply(x, 2.0)
        assert trace.count(kind="all_gather") == 1

        @register_rule(Cube.apply)
        def cube_rule(call):
            dims = tuple(range(call.operands[0].ndim))
            return Signature([dims], [dims])

        for places in placements_for((4, 6), 2, partial=False):
            assert compare(lambda x: Cube.apply(x, 2.0), [randn(4, 6)], [places], grid()) == []
        for places in placements_for((4, 6), 2):
            compare(lambda x: Cube.apply(x, 2.0), [randn(4, 6)], [places], grid())

    run_ranks(4, run)


# --- torch's DTensor ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 6), (5, 3)], ids=str)
def test_bridges_copy_nothing_and_carry_gradients(shape) -> None:
    def run() -> None:
        x = randn(*shape)
        x.sin().square().sum().backward()
        for places in itertools.product([R, Shard(0), Shard(1)], repeat=2):
            ours = distribute_tensor(x.detach().requires_grad_(), grid(), places)
            theirs = to_torch(ours)
            assert type(theirs) is TorchDTensor and theirs.placements == places and theirs.shape == x.shape
            assert theirs.to_local().data_ptr() == ours.to_local().data_ptr()
            back = from_torch(theirs)
            assert type(back) is DTensor and back.placements == places
            assert back.to_local().data_ptr() == ours.to_local().data_ptr()
            back.sin().square().sum().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), x.grad, rtol=1e-5, atol=1e-5, msg=f"{places}")

    run_ranks(4, run)


def test_torchs_dtensor_computes_between_the_bridges() -> None:
    def run() -> None:
        x = randn(4, 6)
        x.sin().square().sum().backward()
        for places in [(Shard(0), R), (R, Shard(1)), (Shard(0), Shard(1)), (R, R)]:
            ours = distribute_tensor(x.detach().requires_grad_(), grid(), places)
            out = from_torch(to_torch(ours).sin().square())
            torch.testing.assert_close(out.detach().full_tensor(), x.detach().sin().square())
            out.sum().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), x.grad, rtol=1e-5, atol=1e-5, msg=f"{places}")

    run_ranks(4, run)
