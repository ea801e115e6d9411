"""The numbers of conversions in compiled graphs: the same in every process, and of the gradient's as well."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_dtensor._static import compile as graphs
from vescale_dtensor.engine import route_between
from vescale_dtensor.testing import run_ranks

PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def numbers(first):
    """Of all routes between some layouts, asked for in one order or another; and of their gradients' routes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    told = {}
    for shape in ((4, 6), (6, 4)):
        layouts = [distribute_tensor(torch.zeros(shape), mesh, [placement])._layout.base for placement in PLACEMENTS]
        for i, source in enumerate(layouts):
            for j, target in enumerate(layouts):
                told[shape, i, j] = route_between(source, target)
    names = sorted(told) if first else sorted(told, reverse=True)
    found = {name: graphs.number_of(told[name]) for name in names}
    both = {name: (found[name], graphs._numbers[told[name].back]) for name in sorted(told)}
    return both, len(set(map(id, told.values())))


def test_a_number_says_what_a_route_does_whenever_it_is_asked_for():
    """They were counted up: a backward from the compiler's cache on disk converted along another process' routes."""
    (one, count), *_ = run_ranks(2, numbers, True)
    (other, _), *_ = run_ranks(2, numbers, False)
    assert one == other
    assert len({number for number, _ in one.values()}) == count  # each route has its own
    assert all(0 <= number < 1 << 56 for pair in one.values() for number in pair)
