"""What gloo allocates for itself to gather, from the call until somebody waits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from vescale_dtensor.engine import GatherInFlight
from vescale_dtensor.engine import mesh_of as engine_mesh
from vescale_plans._dry.meter import Meter
from vescale_testkit import mesh_of, run_ranks

NUMBERS = 1 << 14
ONCE = 4 * 4 * NUMBERS  # bytes of a result of four ranks' parts


def more(meter):
    """Bytes beyond those of tensors."""
    meter.mark()
    return meter.peak.total() - meter.live.total()


def gathers(steps):
    """What is held beside tensors after each step: a number starts a gather of so many times the parts, a letter waits
    for the first, the second ..."""
    mesh, found, under_way = engine_mesh(mesh_of(4)), [], []
    sizes = [one * NUMBERS for one in steps if isinstance(one, int)]
    pairs = iter([(torch.zeros(4 * size), torch.zeros(size)) for size in sizes])
    with Meter("gloo") as meter:
        for one in steps:
            if isinstance(one, int):
                under_way.append(GatherInFlight(*next(pairs), mesh, (0,)))
            else:
                under_way["abc".index(one)].wait()
            found.append(more(meter))
    return found


@pytest.mark.parametrize(
    "steps, held",
    [
        ((1, "a"), (1, 0)),
        ((1, 2, "a", "b"), (1, 3, 2, 0)),
        ((1, 2, 3, "b", "c", "a"), (1, 3, 5, 4, 1, 0)),  # two threads gather, and a third gather waits for one
    ],
)
def test_a_gather_is_held_until_it_is_waited_for(steps, held):
    assert run_ranks(4, gathers, steps) == [[ONCE * one for one in held]] * 4


def of_a_user():
    mesh_of(4)
    out, part = torch.zeros(4 * NUMBERS), torch.zeros(NUMBERS)
    with Meter("gloo") as meter:
        meter.label([out, part], "other")
        before = meter.live.total()
        dist.group.WORLD._allgather_base(out, part, AllgatherOptions()).wait()
        return meter.peak.total() - before, more(meter)


def test_what_nobody_announced_is_over_at_once():
    assert run_ranks(4, of_a_user) == [(ONCE, 0)] * 4
