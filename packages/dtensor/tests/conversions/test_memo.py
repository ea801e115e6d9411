"""Conversions that are remembered: shared within a scope, never stale, and gone when the scope closes."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.utils.checkpoint

from vescale_dtensor import DTensor, FallbackWarning, Partial, Replicate, Shard, comm_trace, distribute_tensor
from vescale_dtensor._conversions.memo import close_scope, open_scope
from vescale_testkit import in_turns, mesh_of, run_ranks

R = Replicate()


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


def close(have, want, what="") -> None:
    have = have.detach().full_tensor() if isinstance(have, DTensor) else have
    torch.testing.assert_close(have, want.detach(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def test_a_scope_shares_one_conversion_among_its_consumers() -> None:
    def run() -> None:
        x = spread(whole(4, 6), Shard(0), Shard(1))
        weights = [spread(whole(6, 8, seed=i), R, Shard(1)) for i in range(3)]
        with comm_trace() as trace:
            with scope():
                outs = [x @ w for w in weights]
            sum(out.sum() for out in outs).backward()
        assert trace.count(kind="all_gather", direction="forward") == 1
        assert trace.count(kind="reduce_scatter", direction="backward") == 1
        with comm_trace() as trace:
            [x @ w for w in weights]
        assert trace.count(kind="all_gather") == 3

    run_ranks(4, run)


def test_a_memo_belongs_to_one_version_and_one_grad_mode() -> None:
    def run() -> None:
        plain = whole(4, 6)
        x, w = (
            spread(plain.detach().clone().requires_grad_(), Shard(0), Shard(1)),
            spread(whole(6, 8, seed=1), R, Shard(1)),
        )
        value, weight = plain.detach().clone(), whole(6, 8, seed=1, grad=False)
        with scope():
            with torch.no_grad():
                assert not (x @ w).requires_grad
            y = x @ w
            assert y.requires_grad
            with torch.no_grad():
                x.add_(1)
                close(x @ w, (value + 1) @ weight)
                x[0] = 5.0
                value += 1
                value[0] = 5.0
                close(x @ w, value @ weight)
                x.data.mul_(2)
                x.data = x.data * 2
                close(x @ w, 4 * value @ weight)
            frozen = x.detach()
            close(frozen @ w, 4 * value @ weight)
            frozen.requires_grad_()
            (frozen @ w).sum().backward()
            assert frozen.grad is not None

    run_ranks(4, run)


def test_a_remembered_conversion_that_was_written_is_not_recalled() -> None:
    def run() -> None:
        x = spread(whole(4, 6, grad=False), Shard(0), Shard(1))
        value = x.full_tensor()
        with scope():
            out = x + spread(torch.zeros(4, 6), R, R)
            close(out, value)
            gathered = x.redistribute([Shard(0), R])
            gathered.mul_(0)
            close(x @ spread(torch.eye(6), R, Shard(1)), value)

    run_ranks(4, run)


def reads(program) -> int:
    """What the backward sends where two scopes inside read one value that all ranks have."""
    values = [whole(4, 6), whole(6, 8, seed=1), whole(6, 8, seed=2)]
    found = []
    for cut in (False, True):
        x, *weights = (one.detach().clone().requires_grad_() for one in values)
        if cut:
            x = spread(x, R, Partial())
            weights = [spread(one, R, Shard(1)) for one in weights]
        leaf = x
        with scope():
            x = x.redistribute([R, R]) if cut else x
            if program == "leaf":
                x = x.detach().requires_grad_()
                leaf = x
            elif program == "computed":
                x = torch.sin(x)
            outs = []
            for weight in weights:
                with scope():
                    outs.append(x @ weight)
        with comm_trace() as trace:
            (outs[0] * outs[1]).sum().backward()
        sent = trace.count(axes="tp")
        found.append(leaf.grad.full_tensor() if cut else leaf.grad)
    close(*found)
    return sent


def test_scopes_inside_share_the_gradient_of_what_was_computed_around_them() -> None:
    """Projections that adapters wrap, attention beside a feed-forward part: each is a module with children."""
    assert run_ranks(4, reads, "computed") == [1] * 4


def test_a_leaf_is_remembered_no_longer_than_the_innermost_scope() -> None:
    assert run_ranks(4, reads, "leaf") == [2] * 4


def norm(x):
    """Reads its input twice: what comes of the squares needs the sum, what is multiplied would do without."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


def residual(x, ups, downs):
    """Blocks whose sums nobody asked to be made whole."""
    for up, down in zip(ups, downs):
        with scope():
            x = x + torch.tanh(norm(x) @ up) @ down
    return norm(x)


def sums(program) -> tuple[int, int]:
    """Collectives of the forward and of the backward of two such blocks."""
    values = [whole(4, 6)] + [whole(6, 8, seed=i) for i in (1, 2)] + [whole(8, 6, seed=i) for i in (3, 4)]
    found = []
    for cut in (False, True):
        x, *weights = (one.detach().clone().requires_grad_() for one in values)
        if cut:
            x = spread(x, R, Partial())
            weights = [spread(one, R, Shard(1 if i < 2 else 0)) for i, one in enumerate(weights)]
        with comm_trace() as trace, scope():
            if program == "recomputed":
                y = norm(torch.utils.checkpoint.checkpoint(residual, x, weights[:2], weights[2:], use_reentrant=False))
            else:
                y = residual(x, weights[:2], weights[2:])
        forward = trace.count(axes="tp")
        with comm_trace() as trace:
            y.square().sum().backward()
        found.append([one.grad.full_tensor() if cut else one.grad for one in (x, *weights)])
    for one, other in zip(*found):
        close(one, other)
    return forward, trace.count(axes="tp")


def test_who_reads_a_sum_of_parts_again_takes_the_sum_that_was_made() -> None:
    """Megatron's least without a boundary: one sum for each block in forward, one in backward; and the last norm's."""
    assert run_ranks(4, sums, "as it is") == [(3, 2)] * 4
    assert run_ranks(4, sums, "recomputed")  # whose gradients are right


def test_an_older_value_goes_with_the_outermost_scope_and_is_not_kept_alive_by_it() -> None:
    def run() -> None:
        x = torch.sin(spread(whole(4, 6), R, Partial()).redistribute([R, R]))
        w = spread(whole(6, 8, seed=1), R, Shard(1))
        kept = weakref.ref(x)
        with scope(), scope():
            y = x @ w
            assert len(x._conversions) == 1
        assert "_conversions" not in x.__dict__
        with scope():
            with scope():
                y = x @ w
            assert len(x._conversions) == 1
            del x, y
            gc.collect()
            assert kept() is None

    run_ranks(4, run)


class Block(torch.nn.Module):
    """Conversions of activations and of leaves, and a reduction: what a transformer block does."""

    def __init__(self, mesh) -> None:
        super().__init__()
        place = lambda shape, seed, *p: torch.nn.Parameter(
            distribute_tensor(whole(*shape, seed=seed, grad=False), mesh, p)
        )
        self.up = place((6, 8), 1, R, Shard(1))
        self.down = place((8, 6), 2, R, Shard(0))
        self.scale = place((6,), 3, R, R)

    def forward(self, x):
        with scope():
            hidden = x * self.scale
            out = (torch.tanh(hidden @ self.up) + torch.sin(hidden @ self.up)) @ self.down
            return x + torch.tanh(out) * self.scale


def live() -> Counter[tuple[str, torch.Size]]:
    gc.collect()
    return Counter((type(t).__name__, t.shape) for t in gc.get_objects() if issubclass(type(t), torch.Tensor))


@in_turns(3)
@pytest.mark.parametrize("collect", [True, False], ids=["counted", "without the cycle collector"])
def test_a_hundred_steps_at_constant_memory(collect) -> None:
    """A memo on a leaf that outlives its scope is a cycle through autograd's graph, which Python cannot see."""

    def run() -> None:
        model = Block(grid())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        watched: list[weakref.ref] = []

        def step() -> None:
            x = spread(whole(4, 6), Shard(0), Shard(1))
            y = model(x)
            watched.append(weakref.ref(y))
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        before = live()
        if not collect:
            gc.disable()
        for _ in range(100):
            step()
        alive = sum(ref() is not None for ref in watched)
        gc.enable()
        assert alive == 0, f"{alive} activations alive"
        for _ in range(20):  # another thread that looks at this one's stack may hold a frame for a moment, before, too
            more = live() - before
            if not more:
                break
            step()
        assert not more

    run_ranks(4, run)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_the_optimizer_is_seen_by_the_next_forward(fused) -> None:
    """A fused optimizer writes without a new version."""

    def run() -> None:
        warnings.simplefilter("ignore", FallbackWarning)
        plain = [whole(6, 8, seed=1), whole(8, 6, seed=2)]
        places = [(R, Shard(1)), (R, R)]
        sharded = [torch.nn.Parameter(spread(t.detach(), *p)) for t, p in zip(plain, places)]
        losses = []
        for parameters in (plain, sharded):
            optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
            mine = []
            for i in range(4):
                x = whole(4, 6, seed=10 + i, grad=False)
                x = spread(x, Shard(0), R) if parameters is sharded else x
                with scope():
                    loss = torch.tanh(torch.tanh(x @ parameters[0]) @ parameters[1]).square().sum()
                loss.backward()
                if parameters is sharded:  # what vescale.parallelize does at gradient-sync time
                    for parameter in parameters:
                        parameter.grad = parameter.grad.redistribute(parameter.placements)
                optimizer.step()
                optimizer.zero_grad()
                mine.append(loss.item())
            losses.append(mine)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)

    run_ranks(4, run)
