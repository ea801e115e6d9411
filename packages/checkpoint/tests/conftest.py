"""Worlds whose ranks may be killed; and the imports of the pool's workers begin while pytest still collects."""

import pytest

from vescale_checkpoint.sync import _presence
from vescale_testkit import World, warm_up

warm_up("torch._dynamo", "vescale_checkpoint")


def impatient(function):
    """The function on ranks that take others for dead sooner, to save the tests' time."""

    def run(rank, *args):
        _presence.SILENT_S, _presence.BEAT_S = 4.0, 0.2
        return function(rank, *args)

    return run


@pytest.fixture
def start_world():
    """start_world(size, function, *args, after=None) -> World; the function is called with the rank first."""
    worlds = []

    def start(size, function, *args, after=None):
        worlds.append(World(size, impatient(function), args, after, ["vescale_checkpoint"]))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()
