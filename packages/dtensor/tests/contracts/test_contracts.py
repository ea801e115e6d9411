"""The contracts of design section 3 that live in this package, each by the case that broke an obvious implementation.

Contracts 8 (ragged flattens), 9 (partial and reduced gradients) and 10 (exit) are tested where
they live: the view rules, vescale_plans.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from vescale_dtensor import (
    DTensor,
    FallbackWarning,
    GradientError,
    Partial,
    PlainTensorError,
    Replicate,
    Shard,
    ViewError,
    comm_trace,
    distribute_tensor,
    register_function,
)
from vescale_dtensor._conversions.memo import close_scope, open_scope
from vescale_testkit import mesh_of, raises_on_all, run_ranks

R, P = Replicate(), Partial()


def grid():
    return mesh_of(2, 2, names=("dp", "tp"))


@contextlib.contextmanager
def scope():
    """What vescale_plans opens around a module that has children."""
    open_scope()
    try:
        yield
    finally:
        close_scope()


def whole(*shape, seed=0, grad=True) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def spread(tensor, *placements) -> DTensor:
    return distribute_tensor(tensor, grid(), placements)


def partial(tensor, axis=1) -> DTensor:
    """A DTensor that is partial on one axis, with another part of the sum on each rank."""
    mesh = grid()
    local = tensor.detach() - 3.0 if mesh.get_coordinate()[axis] == 0 else torch.full_like(tensor, 3.0)
    places = [P if a == axis else R for a in range(2)]
    return DTensor.from_local(local, mesh, places, shape=tensor.shape).requires_grad_(tensor.requires_grad)


def close(have, want, what="") -> None:
    have = have.detach().full_tensor() if isinstance(have, DTensor) else have
    torch.testing.assert_close(have, want.detach(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


# --- 1: a checkpoint's recompute converts like the first pass ----------------------

REGION = {
    "x": ((4, 6), (Shard(0), Shard(1))),  # gathered on tp inside the region
    "w1": ((6, 8), (R, Shard(1))),
    "w2": ((8, 6), (R, Shard(0))),  # partial on tp after it, reduced by tanh
    "w3": ((6, 4), (R, R)),
}


def region(x, w1, w2, w3):
    hidden = torch.tanh(torch.tanh(x @ w1) @ w2)
    return torch.sin(hidden @ w3)


def saving_products():
    saved = getattr(torch, "ops").aten.mm.default  # noqa: B009  the ops module cannot travel to the ranks
    return create_selective_checkpoint_contexts(
        lambda _, op, *args, **options: CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.PREFER_RECOMPUTE
    )


def checkpointed(mode: str) -> None:
    plain = {name: whole(*shape, seed=i) for i, (name, (shape, _)) in enumerate(REGION.items())}
    region(*plain.values()).square().sum().backward()
    sharded = {name: spread(plain[name].detach().requires_grad_(), *REGION[name][1]) for name in REGION}
    for _ in range(2):  # the second step meets cached decisions
        for tensor in sharded.values():
            tensor.grad = None
        with comm_trace() as trace:
            if mode == "none":
                out = region(*sharded.values())
            elif mode == "selective":
                out = checkpoint(region, *sharded.values(), use_reentrant=False, context_fn=saving_products)
            else:
                out = checkpoint(region, *sharded.values(), use_reentrant=mode == "reentrant")
            out.square().sum().backward()
        assert trace.count(kind="all_gather") >= 1 and trace.count() >= 3
        for name, tensor in sharded.items():
            close(tensor.grad, plain[name].grad, f"{mode}: gradient of {name}")


@pytest.mark.parametrize("mode", ["none", "reentrant", "plain", "selective"])
def test_1_a_checkpointed_region_with_two_conversions_has_the_gradients_of_one_device(mode) -> None:
    run_ranks(4, checkpointed, mode)


@pytest.mark.parametrize(("nested", "reentrant"), [(False, True), (False, False), (True, True)])
def test_1_checkpoints_keep_sharded_replicated_and_pending_outputs(nested, reentrant) -> None:
    def run() -> None:
        x, w = whole(4, 6), whole(6, 6, seed=1)
        inner = lambda x, w: torch.tanh(x @ w) @ w
        outer = lambda x, w: checkpoint(inner, checkpoint(inner, x, w, use_reentrant=True), w, use_reentrant=True)
        outer = outer if nested else inner
        outer(x, w).sum().backward()
        for places in (
            [(Shard(0), R), (R, R)],
            [(R, R), (R, R)],
            [(R, Shard(1)), (R, Shard(0))],
            [(R, R), (R, Shard(1))],
        ):
            dx, dw = (spread(t.detach().requires_grad_(), *p) for t, p in zip((x, w), places))
            checkpoint(outer, dx, dw, use_reentrant=reentrant).sum().backward()
            close(dx.grad, x.grad, places)
            close(dw.grad, w.grad, places)

    run_ranks(4, run)


def test_1_a_dispatch_mode_sees_local_operators_in_backward() -> None:
    """A FLOP counter counts what this rank computes; the gradients are those without it."""

    def run() -> int:
        plain = [whole(4, 6), whole(6, 8, seed=1), whole(8, 6, seed=2)]
        (torch.relu(plain[0] @ plain[1]) @ plain[2]).sum().backward()
        places = [(Shard(0), R), (R, Shard(1)), (R, Shard(0))]
        x, a, b = (spread(t.detach().requires_grad_(), *p) for t, p in zip(plain, places))
        with FlopCounterMode(display=False) as counter:
            (torch.relu(x @ a) @ b).sum().backward()
        for have, want in zip((x, a, b), plain):
            close(have.grad, want.grad)
            assert have.shape == want.shape and torch.Size(have.grad.shape) == want.shape
        return counter.get_total_flops()

    full = 2 * 4 * 6 * 8 * 2 * 3  # two products forward, four backward
    assert run_ranks(4, run) == [full // 4] * 4


# --- 2: whatever comes in is a gradient in the gradient's layout --------------------

LAYOUTS = [(Shard(0), R), (R, Shard(1)), (R, R), (Shard(1), Shard(0))]


def test_2_backward_takes_a_gradient_of_any_layout() -> None:
    def run() -> None:
        x, seed = whole(4, 6), whole(4, 6, seed=9, grad=False)
        x.sin().backward(seed)
        for places in LAYOUTS:
            for given in (seed, spread(seed, R, R), spread(seed, Shard(1), R), partial(seed)):
                d = spread(x.detach().requires_grad_(), *places)
                d.sin().backward(gradient=given)
                close(d.grad, x.grad, f"{places} {given}")
                assert d.grad.mesh_layout is d.mesh_layout.gradient
                d.grad = None
                torch.autograd.backward([d.sin()], [given])
                close(d.grad, x.grad)
                (g,) = torch.autograd.grad(d.sin(), d, grad_outputs=given)
                close(g, x.grad)
                assert type(seed) is torch.Tensor  # nobody restamped it

    run_ranks(4, run)


@pytest.mark.parametrize("kind", ["replicated", "partial"])
def test_2_a_replicated_or_pending_loss_counts_once(kind) -> None:
    def run() -> None:
        x = whole(4, 6)
        x.square().sum().backward()
        for places in [(R, R)] if kind == "replicated" else [(Shard(0), R), (Shard(0), Shard(1)), (R, Shard(0))]:
            d = spread(x.detach().requires_grad_(), *places)
            loss = d.square().sum()
            assert loss.mesh_layout.is_partial == (kind == "partial")
            loss.backward()
            close(d.grad, x.grad)
            d.grad = None
            torch.autograd.backward(d.square().sum())
            close(d.grad, x.grad)
            d.square().sum().backward(inputs=[d])
            close(d.grad, 2 * x.grad)

    run_ranks(4, run)


def test_2_gradients_are_read_and_assigned_in_any_layout() -> None:
    def run() -> None:
        x, value = whole(4, 6), whole(4, 6, seed=3, grad=False)
        for places in LAYOUTS:
            d = spread(x.detach().requires_grad_(), *places)
            for given in (value, spread(value, R, R), spread(value, R, Shard(0)), partial(value)):
                d.grad = given
                close(d.grad, value, places)
            d.square().sum().backward()  # accumulates onto what was assigned
            close(d.grad, value + 2 * x.detach(), places)
            d.grad = None
            assert d.grad is None
            del d.grad
            with pytest.raises(GradientError, match="global shape"):
                d.grad = value[:2]

    run_ranks(4, run)


def test_2_hooks_see_and_return_whole_gradients() -> None:
    def run() -> None:
        x, w = whole(4, 6), whole(6, 6, seed=1)
        twice = lambda g: 2 * g
        y = x @ w
        y.register_hook(twice)
        w.register_hook(lambda g: g + 1)
        y.sin().sum().backward()
        for px, pw in [((Shard(0), R), (R, R)), ((R, R), (R, Shard(1))), ((R, Shard(1)), (R, Shard(0)))]:
            seen = []
            dx, dw = spread(x.detach().requires_grad_(), *px), spread(w.detach().requires_grad_(), *pw)
            dy = dx @ dw
            dy.register_hook(lambda g, seen=seen: seen.append((type(g), tuple(g.shape))) or 2 * g)
            handle = dw.register_hook(lambda g, seen=seen: seen.append((type(g), tuple(g.shape))) or g + 1)
            dw.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append((type(p), tuple(p.grad.shape))))
            dy.sin().sum().backward()
            assert seen == [(DTensor, (4, 6)), (DTensor, (6, 6)), (DTensor, (6, 6))]
            close(dx.grad, x.grad, px)
            close(dw.grad, w.grad, pw)
            handle.remove()

    run_ranks(4, run)


def test_2_double_backward_through_conversions() -> None:
    def run() -> None:
        x, w = whole(4, 6), whole(6, 6, seed=1)

        def penalty(x, w):
            y = torch.tanh(x @ w).sum()
            gx, gw = torch.autograd.grad(y, [x, w], create_graph=True)
            return gx.square().sum() + (gw * w).sum()

        loss = penalty(x, w)
        loss.backward()
        for px, pw in [
            ((Shard(0), R), (R, R)),
            ((R, R), (R, R)),
            ((Shard(0), Shard(1)), (R, Shard(0))),
            ((R, R), (R, Shard(1))),
        ]:
            dx, dw = spread(x.detach().requires_grad_(), *px), spread(w.detach().requires_grad_(), *pw)
            found = penalty(dx, dw)
            close(found, loss)
            found.backward()
            close(dx.grad, x.grad, (px, pw))
            close(dw.grad, w.grad, (px, pw))

    run_ranks(4, run)


# --- 3: users' autograd Functions ---------------------------------------------------


def scale_by():
    class ScaleBy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad * w, (grad * x).sum(0)

    ScaleBy.__qualname__ = "ScaleBy"
    return ScaleBy


def test_3_a_registered_function_has_the_gradients_of_one_device() -> None:
    """x in I and w in R: run on what they are, the gradient of w came out exactly doubled."""

    def run() -> None:
        warnings.simplefilter("ignore", FallbackWarning)
        function = register_function(scale_by())
        assert register_function(function) is function
        x, w = whole(4, 6), whole(6, seed=1)
        function.apply(x, w).sin().sum().backward()
        assert type(function.apply(x, w)) is torch.Tensor
        for px in [(R, R), (Shard(0), R), (R, Shard(1))]:
            dw = spread(w.detach().requires_grad_(), R, R)
            dx = partial(x) if px == (R, R) else spread(x.detach().requires_grad_(), *px)
            function.apply(dx.redistribute(px), dw).sin().sum().backward()  # I on tp, where x was partial
            close(dw.grad, w.grad, px)
            close(dx.grad, x.grad, px)

    run_ranks(4, run)


def test_3_an_unregistered_function_raises_when_its_result_is_used() -> None:
    def run() -> None:
        x, w = spread(whole(4, 6), Shard(0), R), spread(whole(6, seed=1), R, R)
        out = scale_by().apply(x, w)
        out.sin()

    message = raises_on_all(4, GradientError, run, match="ScaleBy")
    assert "register_function(ScaleBy)" in message


def test_3_without_gradients_an_unregistered_function_is_nobodys_business() -> None:
    def run() -> None:
        x, w = whole(4, 6, grad=False), whole(6, seed=1, grad=False)
        with torch.no_grad():
            close(scale_by().apply(spread(x, Shard(0), R), spread(w, R, R)).sin(), (x * w).sin())

    run_ranks(4, run)


# --- 4: a plain tensor that lost its layout ------------------------------------------


def test_4_a_plain_tensor_with_a_graph_raises_and_says_why() -> None:
    def run() -> None:
        x = spread(whole(4, 6), Shard(0), R)
        lost = x.to_local() * 2
        spread(whole(2, 6, grad=False), R, R) + lost

    message = raises_on_all(4, PlainTensorError, run, match="lost its layout")
    assert "DTensor.from_local" in message


def test_4_a_plain_tensor_without_a_graph_is_taken_as_whole() -> None:
    def run() -> None:
        x, plain, leaf = whole(4, 6), whole(4, 6, seed=1, grad=False), whole(6, seed=2)
        ((x * plain) + leaf).sin().sum().backward()
        want, leaf.grad = leaf.grad, None
        for places in LAYOUTS:
            d = spread(x.detach().requires_grad_(), *places)
            ((d * plain) + leaf).sin().sum().backward()
            close(d.grad, x.grad, places)
            close(leaf.grad, want, places)  # a plain leaf's gradient is whole, on every rank
            leaf.grad = None

    run_ranks(4, run)


# --- 5: what is partial --------------------------------------------------------------

LINEAR = {
    "add": lambda p, r: p + p,
    "neg": lambda p, r: -p,
    "scale": lambda p, r: p * 2.5,
    "divide": lambda p, r: p / 4,
    "by a replicated one": lambda p, r: p * r,
    "matmul": lambda p, r: p @ r.T,
    "double": lambda p, r: p.double(),
    "add replicated": lambda p, r: p + r,
    "subtract": lambda p, r: p - r,
    "view": lambda p, r: p.view(-1),
}
NOT_LINEAR = {
    "add a number": lambda p, r: p + 1.5,
    "rsub": lambda p, r: 1.0 - p,
    "linear with bias": lambda p, r: F.linear(p, r, r.sum(1)),
    "square": lambda p, r: p * p,
    "reciprocal": lambda p, r: 1 / p,
    "cast to int": lambda p, r: p.int(),
    "cast to bool": lambda p, r: p.bool(),
    "round": lambda p, r: p.round(),
    "compare": lambda p, r: p > r,
    "masked_fill": lambda p, r: p.masked_fill(r > 0, 7.0),
    "pad": lambda p, r: F.pad(p, (1, 1), value=3.0),
    "clamp": lambda p, r: p.clamp(min=0),
    "mean of squares": lambda p, r: p.pow(2).mean(),
    "where": lambda p, r: torch.where(r > 0, p, 2.0),
    "ones_like": lambda p, r: torch.ones_like(p),
    "full_like": lambda p, r: torch.full_like(p, 2.0),
}


@pytest.mark.parametrize("name", [*LINEAR, *NOT_LINEAR])
def test_5_constants_enter_a_pending_sum_once(name) -> None:
    def run() -> None:
        warnings.simplefilter("ignore", FallbackWarning)
        function = (LINEAR | NOT_LINEAR)[name]
        p, r = whole(4, 6), whole(4, 6, seed=1)
        want = function(p, r)
        dp, dr = partial(p), spread(r.detach().requires_grad_(), R, R)
        with comm_trace() as trace:
            have = function(dp, dr)
        if name in LINEAR:
            assert trace.count() == 0 and have.mesh_layout.is_partial, name
        close(have, want, name)
        if want.requires_grad:
            want.sum().backward()
            have.sum().backward()
            close(dp.grad, p.grad)
            if r.grad is not None:
                close(dr.grad, r.grad)

    run_ranks(4, run)


def test_5_partial_of_another_kind_than_sum() -> None:
    def run() -> None:
        mesh = grid()
        rank = mesh.get_coordinate()[1]
        parts = torch.stack([whole(3, 2, grad=False), whole(3, 2, seed=1, grad=False)])
        for kind, want in {
            "sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0),
            "product": parts.prod(0),
        }.items():  # fmt: skip
            d = DTensor.from_local(parts[rank].clone(), mesh, [R, Partial(kind)])
            close(d, want, kind)
            assert d.mesh_layout.is_partial == (kind in ("sum", "avg"))
        whole_numbers = DTensor.from_local(
            torch.tensor([2, 3], dtype=torch.int32) + rank, mesh, [R, Partial("product")]
        )
        assert whole_numbers.dtype is torch.int32 and whole_numbers.full_tensor().tolist() == [6, 12]
        local = parts[rank].clone().requires_grad_()
        averaged = DTensor.from_local(local, mesh, [R, Partial("avg")])
        averaged.sin().sum().backward()
        once = mesh.get_coordinate()[0] == 0  # the local tensor is R on dp: its gradient is partial there
        torch.testing.assert_close(local.grad, parts.mean(0).cos() / 2 * once)
        with pytest.raises(GradientError, match="has no gradient"):
            DTensor.from_local(local, mesh, [R, Partial("max")])

    run_ranks(4, run)


# --- 6: reading never communicates where the value is here ---------------------------


def test_6_a_replicated_number_is_read_on_one_rank_alone() -> None:
    """Nobody else joins: a collective here would hang, and fail after the group's timeout."""

    def run() -> str:
        x = spread(whole(4, 6, grad=False), Shard(0), Shard(1))
        loss = x.square().sum().redistribute([R, R])
        if torch.distributed.get_rank() != 2:
            return ""
        with comm_trace() as trace:
            said = f"{loss.item():.3f} {float(loss):.3f} {loss:.3f} {loss.tolist():.3f} {bool(loss)} {int(loss)}"
        assert not trace.events
        return said

    said = run_ranks(4, run)[2].split()
    assert len(set(said[:4])) == 1


def test_6_repr_never_communicates() -> None:
    def run() -> list[str]:
        tensors = [spread(whole(4, 6), Shard(0), R), partial(whole(2)), spread(whole(4, 6), R, R)]
        tensors.append(tensors[0].sin())
        if torch.distributed.get_rank() != 1:
            return []
        with comm_trace() as trace:
            said = [text for t in tensors for text in (repr(t), str(t), f"{t}")]
        assert not trace.events
        return said

    said = run_ranks(4, run)[1]
    assert said[0].startswith("DTensor([4, 6] S(0), R on (dp=2, tp=2), local=tensor(")
    assert "P on (dp=2, tp=2)" in said[3]


# --- 7: views that are copies, in place, and objects that are somebody else's -----------


def moved_view(x: DTensor) -> DTensor:
    """A view that cannot keep the sharding of dim 0, 4 over 4 ranks, and so is a copy."""
    return x.view(2, 2, 6)


def quad(grad=False) -> DTensor:
    return distribute_tensor(whole(4, 6, grad=grad), mesh_of(4, names=("tp",)), [Shard(0)])


def test_7_a_write_to_a_moved_view_raises() -> None:
    def run() -> None:
        x = quad()
        moved_view(x).add_(1)

    message = raises_on_all(4, ViewError, run, match="copy and not a view")
    assert "torch.where" in message


def test_7_a_write_to_a_view_of_a_moved_view_raises() -> None:
    def run() -> None:
        x = quad()
        moved_view(x)[0].mul_(2)

    raises_on_all(4, ViewError, run)


def test_7_a_write_to_the_base_raises_while_the_copy_lives() -> None:
    def run() -> None:
        x = quad()
        part = moved_view(x)[1]  # the copy itself is gone, a view of it is not
        assert part.shape == (2, 6)
        x.mul_(2)

    raises_on_all(4, ViewError, run, match="of which a view had to be redistributed")


def test_7_a_base_whose_copies_died_is_written() -> None:
    def run() -> None:
        x = quad()
        want = x.full_tensor() * 2 + 1
        moved_view(x)
        x.mul_(2)
        with scope():  # the conversion is remembered, and no copy of the user's
            moved_view(x)
            x.add_(1)
        close(x, want)
        y = moved_view(quad().clone())  # its base died
        y.add_(1)
        close(y, whole(4, 6, grad=False).view(2, 2, 6) + 1)
        outer, inner = x[:], moved_view(x)
        with pytest.raises(ViewError):
            outer.add_(1)  # the base's memory under another name
        del inner
        outer.add_(1)
        close(x, want + 1)

    run_ranks(4, run)


def test_7_a_true_view_is_written_and_read_through() -> None:
    def run() -> None:
        plain, d = whole(4, 6, grad=False), spread(whole(4, 6, grad=False), Shard(0), R)
        for tensor in (plain, d):
            tensor.view(4, 2, 3)[:, 0].mul_(3)
            tensor.t().add_(1)
        close(d, plain)

    run_ranks(4, run)


def test_7_what_copies_on_one_device_is_no_view_where_a_shard_is_one_row() -> None:
    """A permuted shard of one row is contiguous, so that torch would hand back its memory."""

    def run() -> None:
        for shape, places in itertools.product(
            [(4, 2), (2, 4), (4, 3)], [(R, Shard(1)), (R, Shard(0)), (Shard(0), Shard(1))]
        ):
            for copied in (lambda x: x.t().contiguous(), lambda x: x.t().reshape(-1), lambda x: x.t().flatten()):
                plain, d = whole(*shape, grad=False), spread(whole(*shape, grad=False), *places)
                copied(plain).add_(1)
                with contextlib.suppress(ViewError):  # a reshape that cannot tell says so
                    copied(d).add_(1)
                close(d, plain, (shape, places))
            for same in (lambda x: x.contiguous(), lambda x: x.reshape(-1)):
                plain, d = whole(*shape, grad=False), spread(whole(*shape, grad=False), *places)
                same(plain).add_(1)
                try:
                    same(d).add_(1)
                except ViewError:
                    continue
                close(d, plain, (shape, places))

    run_ranks(4, run)


def test_7_in_place_results_keep_the_layout_of_self() -> None:
    def run() -> None:
        for places in LAYOUTS:
            for other in ((R, R), (Shard(1), R), (R, Shard(0))):
                plain, d = whole(4, 6, grad=False), spread(whole(4, 6, grad=False), *places)
                before = d.mesh_layout
                for tensor, addend in (
                    (plain, whole(4, 6, seed=1, grad=False)),
                    (d, spread(whole(4, 6, seed=1, grad=False), *other)),
                ):
                    result = tensor.add_(addend).mul_(2.0)
                    assert result is tensor
                    tensor += addend
                assert d.mesh_layout is before
                close(d, plain)

    run_ranks(4, run)


def test_7_no_function_restamps_what_it_was_given() -> None:
    def run() -> None:
        x = spread(whole(4, 6, grad=False), Shard(0), R)
        plain = whole(4, 6, seed=1, grad=False)
        kept = [plain, plain.contiguous(), plain.to(torch.float32)]
        (
            x * plain,
            plain * x,
            torch.where(plain > 0, x, plain),
            F.dropout(plain, 0.0),
            x.type_as(plain),
            plain.type_as(x),
        )
        plain.expand_as(x), torch.broadcast_tensors(x, plain), plain.to(x), plain.contiguous()
        assert all(type(tensor) is torch.Tensor for tensor in kept)
        layout = x.mesh_layout
        (
            x.contiguous(),
            x.to(torch.float32),
            F.dropout(x, 0.0),
            x.view(4, 6),
            x.detach(),
            x.float(),
            x.requires_grad_(False),
        )
        assert x.mesh_layout is layout
        seed = torch.ones(4, 6)
        a = spread(whole(4, 6), Shard(0), R)
        (g,) = torch.autograd.grad([a.to_local()], [a], [torch.ones(2, 6) if (one := seed) is None else one[:2]])
        assert type(g) is DTensor and type(seed) is torch.Tensor

    run_ranks(4, run)


def test_7_results_that_were_asked_for_are_ones_own() -> None:
    """`redistribute` and `distribute_tensor` of a slice: a write to it reaches nobody else."""

    def run() -> None:
        plain = whole(4, 6, grad=False)
        kept = plain.clone()
        x = spread(plain, R, R)
        for places in ((Shard(0), R), (R, Shard(1)), (Shard(0), Shard(0)), (P, R)):
            with scope():
                first, second = x.redistribute(places), x.redistribute(places)
                first.mul_(0)
                close(second, kept, places)
                close(x.redistribute(places), kept, places)
            spread(plain, *places).mul_(0)
            x.requires_grad_()
            with torch.no_grad():
                x.redistribute(places).mul_(0)
            x.detach_()
        close(x, kept)
        assert torch.equal(plain, kept)

    run_ranks(4, run)


def test_copies_of_a_leaf_have_their_own_memory() -> None:
    def run() -> None:
        x = spread(whole(4, 6), Shard(0), R)
        x.square().sum().backward()
        twin = copy.deepcopy(x)
        assert type(twin) is DTensor and twin.mesh_layout is x.mesh_layout and twin.requires_grad
        close(twin.grad, x.grad.full_tensor())
        with torch.no_grad():
            twin.mul_(0)
        assert x.full_tensor().abs().sum() > 0

    run_ranks(4, run)


def test_what_the_fallback_writes_reaches_the_shards_in_every_grad_mode() -> None:
    """Inference tensors have no version that would tell of the write."""

    def run() -> None:
        warnings.simplefilter("ignore")
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                want, d = whole(4, 6, grad=False).clone(), spread(whole(4, 6, grad=False), Shard(0), R)
                for tensor in (want, d):
                    torch.fmod(tensor, 0.5, out=tensor)
                    tensor.index_reduce_(0, torch.tensor([1, 3]), torch.full((2, 6), 2.0), "prod")
                    tensor.put_(torch.tensor([1, 2]), torch.tensor([9.0, 9.0]))
                close(d, want, mode)

    run_ranks(4, run)
