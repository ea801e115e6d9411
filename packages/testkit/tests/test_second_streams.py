"""Streams of the second device: what is in order by luck alone is an error, and copies beside the host are late."""

import pytest
import torch

from vescale_testkit import RankError, run_ranks, warm_up

warm_up("vescale_testkit.second")
DEVICE = "second"


def on_one(function, *args):
    return run_ranks(1, function, *args, device=DEVICE)[0]


def now():
    return torch.accelerator.current_stream()


def there_and_back(*, goes=True, returns=True, keeps=True):
    """A result that a stream of its own makes of what lies on the device's, and that is written there."""
    x, side = torch.ones(8, device=DEVICE), torch.Stream(device=DEVICE)
    if goes:
        side.wait_stream(now())
    with side:
        y = x + 1
    if returns:
        now().wait_stream(side)
    if keeps:
        y.record_stream(now())
    y.mul_(2)
    return y.tolist() if keeps else None  # with which the host waits for all


def written_while_it_is_read():
    x, side = torch.ones(8, device=DEVICE), torch.Stream(device=DEVICE)
    side.wait_stream(now())
    with side:
        y = x + 1
    x.add_(1)
    return y


def given_back_while_it_is_read(keeps):
    x, side = torch.ones(8, device=DEVICE) + 1, torch.Stream(device=DEVICE)
    side.wait_stream(now())
    with side:
        (x + 1).sum()
    if keeps:
        x.record_stream(side)
    del x


def written_on_another_stream(waits):
    side = torch.Stream(device=DEVICE)
    y = torch.ones(8, device=DEVICE) + 1  # the stream is at work
    y = torch.empty(8, device=DEVICE)
    if waits:
        side.wait_stream(now())
    with side:
        y.fill_(1)
    now().wait_stream(side)
    return y.tolist()


def started_on_one_waited_for_on_another():
    import torch.distributed as dist

    x, side = torch.ones(4, device=DEVICE), torch.Stream(device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    with side:
        work.wait()
    x.add_(1)


@pytest.mark.parametrize(
    "program, message",
    [
        (lambda: there_and_back(goes=False), "read by aten::add on stream .*, and was written by"),
        (lambda: there_and_back(returns=False), "written by aten::mul_ on .* own stream, and was written by aten::add"),
        (lambda: there_and_back(keeps=False), "given back after .* without record_stream"),
        (written_while_it_is_read, "written by aten::add_ on .* own stream, and was read by aten::add on stream"),
        (lambda: written_on_another_stream(False), "written by aten::fill_ on stream .*, and was .* by whoever had it"),
        (lambda: given_back_while_it_is_read(False), "given back after aten::.* used it"),
        (started_on_one_waited_for_on_another, "and was written by a collective on stream"),
    ],
)
def test_memory_of_two_streams_without_an_order_is_an_error(program, message):
    with pytest.raises(RankError, match=message):
        on_one(program)


def test_what_is_in_order_is_none():
    def programs():
        given_back_while_it_is_read(True)
        written_on_another_stream(True)
        x, side = torch.ones(8, device=DEVICE), torch.Stream(device=DEVICE)
        torch.accelerator.synchronize()  # the host gives nothing more until all is done
        with side:
            y = x + 1
        done = side.record_event()
        done.synchronize()
        return there_and_back(), (y * 1).tolist()

    assert on_one(programs) == ([4] * 8, [2] * 8)


def test_backward_runs_on_the_streams_of_the_forward():
    def trained():
        torch.manual_seed(0)
        model, side = torch.nn.Linear(8, 8).to(DEVICE), torch.Stream(device=DEVICE)
        for _ in range(2):
            side.wait_stream(now())
            with side:
                loss = model(torch.ones(2, 8, device=DEVICE)).square().sum()
            now().wait_stream(side)
            loss.backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad.zero_()
        return loss.item() > 0

    assert on_one(trained)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_the_host_arrives_when_the_host_has_waited(waits):
    def copied():
        x, here = torch.arange(8.0, device=DEVICE), torch.zeros(8).pin_memory()
        here.copy_(x, non_blocking=True)
        if waits:
            now().synchronize()
        return here.clone()

    found = on_one(copied)
    assert found.equal(torch.arange(8.0)) if waits else found.isnan().all()


@pytest.mark.parametrize("what", ["written before it is sent", "written while it arrives"])
def test_the_host_keeps_off_memory_that_is_copied(what):
    def copied():
        here = torch.zeros(8).pin_memory()
        if what == "written before it is sent":
            here.to(DEVICE, non_blocking=True)
        else:
            here.copy_(torch.ones(8, device=DEVICE), non_blocking=True)
        here.fill_(3)
        torch.accelerator.synchronize()

    with pytest.raises(RankError, match=r"pinned memory .*while a copy .* it was in flight"):
        on_one(copied)


@pytest.mark.parametrize("in_order", [True, False])
def test_there_and_back_through_the_host_without_a_wait_of_it(in_order):
    def copied():
        x, here, side = torch.arange(8.0, device=DEVICE), torch.zeros(8).pin_memory(), torch.Stream(device=DEVICE)
        side.wait_stream(now())
        with side:
            here.copy_(x, non_blocking=True)
        if in_order:
            now().wait_stream(side)
        return here.to(DEVICE, non_blocking=True).tolist()

    if in_order:
        assert on_one(copied) == list(range(8))
    else:
        with pytest.raises(RankError, match="meets one on stream"):
            on_one(copied)
