"""Graphs of the second device: the addresses and the numbers of their capture, and what CUDA would refuse."""

import pytest
import torch
import torch.distributed as dist

from vescale_testkit import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no graphs of any device")


def captured(function):
    """A graph of what the function does, and what it returned while it was captured."""
    graph, side, now = torch.accelerator.Graph(), torch.Stream("second"), torch.accelerator.current_stream()
    side.wait_stream(now)
    with side:
        graph.capture_begin()
        try:
            out = function()
        finally:
            graph.capture_end()
    now.wait_stream(side)
    return graph, out


def on_one(function, *args):
    return run_ranks(1, function, *args, device="second")[0]


def repeats():
    x, total, rate = torch.ones(3, device="second"), torch.zeros(3, device="second"), 2.0

    def step():
        return total.add_(x * rate).sum() * 0.5

    graph, out = captured(step)
    found = [total.tolist(), out.isnan().item()]
    for value in (1.0, 10.0):
        x.fill_(value)
        rate = 3.0
        graph.replay()
        found.append((total.tolist(), out.item()))
    return found


def test_a_capture_leaves_nothing_and_a_run_reads_what_lies_at_its_addresses():
    assert on_one(repeats) == [[0.0] * 3, True, ([2.0] * 3, 3.0), ([22.0] * 3, 33.0)]


def draws():
    torch.manual_seed(3)
    graph, out = captured(lambda: torch.rand(5, device="second"))
    found = []
    for _ in range(3):
        graph.replay()
        found += out.tolist()
    torch.manual_seed(3)
    return found == [one for _ in range(3) for one in torch.rand(5, device="second").tolist()]


def test_runs_draw_on():
    assert on_one(draws)


def reads():
    x = torch.ones(3, device="second")
    return captured(lambda: x.sum().item())


def asks_the_generator():
    return captured(torch.second.get_rng_state)


def alone():
    side = torch.Stream("second")
    x = torch.ones(3, device="second")
    side.wait_stream(torch.accelerator.current_stream())

    def step():
        with side:
            x.add_(1)

    return captured(step)


def unjoined():
    side = torch.Stream("second")
    x = torch.ones(3, device="second")

    def step():
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.add_(1)

    try:
        captured(step)
    finally:
        torch.accelerator.current_stream().wait_stream(side)


def given_back():
    held = [torch.ones(3, device="second")]
    graph, _ = captured(lambda: held[0] + 1)
    held.clear()
    graph.replay()


WRONG = {
    reads: "not permitted when stream is capturing: item",
    asks_the_generator: "not permitted when stream is capturing: the state of a generator",
    alone: "while a graph is captured that this stream has no part in",
    unjoined: "has a part in a graph, and the one that is captured does not wait for its end",
    given_back: "runs aten::add.Tensor on memory of 12 bytes that was given back",
}


def told(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("function", WRONG, ids=lambda one: one.__name__)
def test_what_cuda_refuses_is_refused(function):
    assert WRONG[function] in on_one(told, function)


def sums():
    x, y = torch.ones(4, device="second"), torch.zeros(4, device="second")

    def step():
        y.copy_(x)
        dist.all_reduce(y)
        return y.clone()

    graph, out = captured(step)
    found = [y.tolist()]
    for _ in range(2):
        x.mul_(dist.get_rank() + 2)
        graph.replay()
        found.append(out.tolist())
    return found


def test_a_collective_is_run_with_the_graph():
    assert run_ranks(2, sums, device="second") == [[[0.0] * 4, [5.0] * 4, [13.0] * 4]] * 2
