"""Slices of one tensor that meet shards one after another: what is sent does not grow with their number."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, Partial, Replicate, Shard, comm_trace, distribute_tensor
from vescale_dtensor._conversions import slices
from vescale_dtensor._conversions.memo import close_scope, open_scope
from vescale_testkit import mesh_of, run_ranks

WIDTH, STATES = 4, 3
R = Replicate()
TAKES = {
    "select": lambda t, i: t[:, i],
    "narrow": lambda t, i: t.narrow(1, i, 1).squeeze(1),
    "of a view": lambda t, i: t.transpose(0, 1)[i],
    "from the end": lambda t, i: t[:, -1 - i],
    "unbound": lambda t, i: t.unbind(1)[i],
    "wide": lambda t, i: t[:, max(i - 1, 0) : i + 1].sum(1),
}


@contextlib.contextmanager
def scope():
    """What vescale_plans opens around a module that has children."""
    open_scope()
    try:
        yield
    finally:
        close_scope()


def scan(x, b, c, take):
    """A recurrence over positions whose state is cut by channels; `b` and `c` are alike for all channels."""
    state, out = 0.0, []
    for i in range(x.shape[1]):
        state = 0.5 * state + x[:, i, :, None] * take(b, i)[:, None]
        out.append((state * take(c, i)[:, None]).sum(-1))
    return torch.stack(out, 1)


def cells(x, b, c, take):
    """Each step in a scope of its own."""
    out = []
    for i in range(x.shape[1]):
        with scope():
            out.append((x[:, i, :, None] * take(b, i)[:, None] * take(c, i)[:, None]).sum(-1))
    return torch.stack(out, 1)


def written(x, b, c, take):
    """What is sliced is written in between: no slice may be one of before."""
    b, out = b * 1.0, []
    for i in range(x.shape[1]):
        parts = 2 * x[:, i, :, None] + take(b, i)[:, None] - take(c, i)[:, None]
        out.append((parts + take(b, i)[:, None]).sum(-1))
        if i % 2:
            b.mul_(1.5)
        else:
            b[:, -1] = b[:, -1] * 0.5
    return torch.stack(out, 1)


def recomputed(x, b, c, take):
    """The second half of the slices is taken in a checkpoint."""
    first = scan(x, b, c, take)
    return checkpoint(lambda x, b, c: scan(x, b, c, take), first, b, c, use_reentrant=False)


PROGRAMS = {"scan": scan, "cells": cells, "written": written, "recomputed": recomputed}


def alike(tensor):
    """Whole along "tp", as a sum is after a module's boundary."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute([*tensor.placements[:-1], R])


def gradients(program, take, x, b, c, partial=False):
    leaves = [one.requires_grad_() for one in (x, b, c)]
    b, c = (one * 2 if partial else alike(one * 2) for one in (b, c))
    with scope():
        out = program(x, b, c.sin(), TAKES[take])
    loss = (out.square() * 0.1).sum()
    loss.backward()
    return [loss, *(one.grad for one in leaves)]


def whole(length):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, length, width, generator=generator, dtype=torch.double) for width in (WIDTH, STATES, STATES)]


@contextlib.contextmanager
def little(nbytes):
    """What is so little that it travels whole for one slice."""
    before, slices.LITTLE = slices.LITTLE, nbytes
    try:
        yield
    finally:
        slices.LITTLE = before


def both(program, take, length, sizes, partial, least=0) -> int:
    mesh = mesh_of(*sizes, names=("dp", "tp")[-len(sizes) :])
    wanted = gradients(PROGRAMS[program], take, *whole(length))
    rows = [Shard(0)] * (len(sizes) - 1)
    placements = [[*rows, Shard(2)], [*rows, Partial()], [*rows, Partial()]]
    cut = [distribute_tensor(one, mesh, where) for one, where in zip(whole(length), placements)]
    with comm_trace() as trace, little(least):
        found = gradients(PROGRAMS[program], take, *cut, partial)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, DTensor) else one, other)
    return len(trace)


@pytest.mark.parametrize("take", [name for name in TAKES if name != "wide"])  # which meets shards as what it computed
def test_what_a_scan_sends_does_not_grow_with_its_length(take):
    (short, _), (long, _) = (run_ranks(2, both, "scan", take, length, (2,), False) for length in (8, 24))
    assert short == long == 2 + 2 * 3  # the sums themselves, and of each what two slices send and the whole


@pytest.mark.parametrize("take", [name for name in TAKES if name != "wide"])
def test_what_is_little_travels_with_the_first_slice(take):
    assert run_ranks(2, both, "scan", take, 8, (2,), False, 4 * 8 * STATES * 8) == [2 + 2] * 2
    assert run_ranks(2, both, "scan", take, 8, (2,), False, 4 * 8 * STATES * 8 - 1) == [2 + 2 * 3] * 2


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("sizes, partial", [((2,), False), ((2,), True), ((2, 2), False)])
def test_gradients_are_one_devices(program, sizes, partial):
    for take in ("select", "from the end", "wide"):
        for least in (0, slices.LITTLE):
            run_ranks(2 * len(sizes), both, program, take, 6, sizes, partial, least)


def parts(length) -> list[tuple[int, int]]:
    """What the backward of the three parts of one tensor sends: how often, and bytes."""
    mesh, generator = mesh_of(2, names=("tp",)), torch.Generator().manual_seed(0)
    plain = [torch.randn(4, length, width, generator=generator, dtype=torch.double) for width in (WIDTH, 3 * STATES)]
    found = []
    for cut in (False, True):
        x, y = plain
        if cut:
            x, y = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(y, mesh, [Partial()])
        y = y.requires_grad_()
        with scope():
            step, b, c = (alike(y) * 1.0).split(STATES, -1)
            out = [(x[..., None] * part[:, :, None]).sum(-1) for part in (step.sigmoid(), b, c)]
            out += [(x[..., None] * part[:, :, None]).sum(-1) for part in (b, step)]
        with comm_trace() as trace:
            sum(one.square().sum() for one in out).backward()
        found.append(y.grad.full_tensor() if cut else y.grad)
    torch.testing.assert_close(*found)
    return [(event.count, event.received) for event in trace.select(direction="backward") if event.count]


def test_parts_that_fill_a_tensor_travel_together():
    """A state-space layer's step, B and C: one that is computed with before it meets a shard, and two as they are."""
    for sent in run_ranks(2, parts, 4):
        assert sorted(sent) == [(1, 4 * 4 * STATES * 8), (1, 3 * 4 * 4 * STATES * 8)]


def dealt(sizes) -> int:
    """Rows that are dealt out to experts whose weights are cut: what backward sends."""
    mesh, generator = mesh_of(2, names=("tp",)), torch.Generator().manual_seed(0)
    plain = torch.randn(sum(sizes), WIDTH, generator=generator, dtype=torch.double)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.double) for _ in sizes]
    found = []
    for cut in (False, True):
        rows, experts = plain, weights
        if cut:
            rows = distribute_tensor(rows, mesh, [Partial()])
            experts = [distribute_tensor(one, mesh, [Shard(0)]) for one in experts]
        rows = rows.requires_grad_()
        with scope():
            given = (alike(rows) * 1.0).split(sizes)
            out = [torch.nn.functional.linear(some, expert) for some, expert in zip(given, experts)]
        with comm_trace() as trace:
            sum(one.square().sum() for one in out).backward()
        found.append(rows.grad.full_tensor() if cut else rows.grad)
    torch.testing.assert_close(*found)
    return trace.count(direction="backward")


@pytest.mark.parametrize("sizes", [[1, 2, 13], [13, 1, 2], [8, 8], [1, 15], [0, 1, 9], [3] * 6])
def test_rows_that_are_dealt_out_travel_together(sizes):
    assert run_ranks(2, dealt, sizes) == [1, 1]


def test_one_slice_alone_travels_alone():
    assert 4 * STATES * 8 in run_ranks(2, one_slice)[0]


def one_slice() -> list[int]:
    """Bytes of what is sent."""
    mesh = mesh_of(2, names=("tp",))
    x, b, _ = whole(6)
    x, b = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(b, mesh, [Partial()]).requires_grad_()
    b = alike(b)
    with comm_trace() as trace, scope(), little(0):
        (x[:, 0, :, None] * b[:, 3][:, None]).to_local().sum().backward()
    return [event.received for event in trace.events if event.count]
