"""Seeing communication, forbidding it, stopping in a debugger."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_dtensor import ImplicitCommunicationError, Partial, Replicate, Shard, comm_trace, distribute_tensor, strict
from vescale_dtensor._communication import events
from vescale_testkit import mesh_of, run_ranks

R = Replicate()


def grid():
    return mesh_of(2, 2, names=("dp", "tp"))


def place(*shape, placements) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.randn(shape), grid(), placements))


class Layer(nn.Module):
    """A column-parallel and a row-parallel product: one reduction forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = place(6, 8, placements=(R, Shard(1)))
        self.down = place(8, 6, placements=(R, Shard(0)))

    def forward(self, x):
        return torch.relu(torch.tanh(x @ self.up) @ self.down)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum().redistribute([R, R])


def batch():
    return distribute_tensor(torch.randn(4, 6), grid(), [Shard(0), R]).requires_grad_()


# --- comm_trace -------------------------------------------------------------------------


def test_every_collective_has_its_cause() -> None:
    def run() -> None:
        model, x = Model(), batch()
        with comm_trace(model) as trace:
            loss = model(x)
            forward = len(trace)
            loss.backward()
        # forward: relu of a partial product, per layer; and the loss over dp
        assert trace.count(direction="forward") == forward == 3
        assert trace.count(kind="all_reduce", direction="forward", axes="tp") == 2
        assert trace.count(function="relu", module="layers.0") == 1
        assert trace.count(module="layers") == trace.count(module="layers", axes=("tp",))
        assert trace.count(function="redistribute", axes="dp") == 1
        # backward: what entered the second column-parallel product, alike on all ranks, comes back partial;
        # the batch, in state R, wants its gradient partial
        back = trace.select(direction="backward")
        assert back and all(event.cause.function == "matmul" and event.axes == ("tp",) for event in back)
        assert {event.cause.module for event in back} == {"layers.1"}
        assert all("test_debug.py:" in event.cause.line for event in trace.events)
        # bytes: an all-reduce over two ranks receives as much as the tensor holds
        assert trace.received(function="relu") == 2 * (2 * 6 * 4)
        assert trace.received(function="redistribute") == 4
        assert trace.received() == sum(event.received for event in trace.events)

    run_ranks(4, run)


def test_without_the_model_modules_are_named_by_their_class() -> None:
    def run() -> None:
        model, x = Model(), batch()
        with comm_trace() as trace:
            model(x)
        assert trace.count(module="Layer") == 2 and trace.count(module="Model") == 1
        with comm_trace() as trace:
            (x @ model.layers[0].up @ model.layers[0].down).relu()
        assert {event.cause.module for event in trace.events} == {""}

    run_ranks(4, run)


def test_the_table_has_one_row_per_cause() -> None:
    def run() -> str:
        model, x = Model(), batch()
        with comm_trace(model) as trace:
            for _ in range(3):
                model(x)
        return str(trace)

    header, *rows = run_ranks(4, run)[0].splitlines()
    assert header.split() == "count bytes collective axes direction function module line".split()
    assert [row.split()[:7] for row in rows] == [
        ["3", "144", "all_reduce", "tp", "forward", "relu", "layers.0"],
        ["3", "144", "all_reduce", "tp", "forward", "relu", "layers.1"],
        ["3", "12", "all_reduce", "dp", "forward", "redistribute"] + [rows[2].split()[6]],
    ]
    assert all("test_debug.py:" in row for row in rows)


def test_traces_nest_and_end() -> None:
    def run() -> None:
        partial = distribute_tensor(torch.ones(2), grid(), [R, Partial()])
        with comm_trace() as outer:
            with comm_trace() as inner:
                partial.full_tensor()
            partial.full_tensor()
        partial.full_tensor()
        assert (len(inner), len(outer)) == (1, 2)
        with pytest.raises(ZeroDivisionError), comm_trace() as broken:
            1 / 0  # noqa: B018
        assert not events.listeners and len(broken) == 0

    run_ranks(4, run)


def test_a_conversion_over_an_axis_of_one_is_not_a_collective() -> None:
    def run() -> None:
        mesh = mesh_of(4, 1, names=("dp", "tp"))
        x = distribute_tensor(torch.randn(4, 6, requires_grad=True), mesh, [R, Shard(0)])
        with comm_trace() as trace:
            y = x.redistribute([R, Shard(1)]).redistribute([R, R])
            partial = distribute_tensor(torch.ones(4), mesh, [R, Partial()]).redistribute([R, R])
            (y.sum() + partial.sum()).redistribute([R, R])
        assert not trace.events
        y.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.ones(4, 6))

    run_ranks(4, run)


# --- strict -----------------------------------------------------------------------------


def test_strict_allows_what_was_asked_for_and_what_is_free() -> None:
    def run() -> None:
        x = distribute_tensor(torch.randn(4, 6), grid(), [Shard(0), Shard(1)])
        w = distribute_tensor(torch.randn(6, 8), grid(), [R, R])
        with strict():
            partial = x @ w  # a slice of w: free
            whole = partial.redistribute([Shard(0), R])
            torch.relu(whole)
            whole.full_tensor()
            with pytest.raises(ImplicitCommunicationError, match="all_reduce on 'tp'"):
                torch.relu(partial)
            with strict(), pytest.raises(ImplicitCommunicationError):
                torch.relu(partial)
        torch.relu(partial)
        assert events.strict_depth == 0

    run_ranks(4, run)


def test_strict_leaves_backward_alone() -> None:
    def run() -> None:
        model, x = Model(), batch()
        loss = model(x)
        with strict():
            loss.backward()
        assert x.grad is not None

    run_ranks(4, run)
