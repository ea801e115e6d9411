"""Worlds whose ranks may be killed; and the imports of the pool's workers begin while pytest still collects."""

import pytest

from vescale_checkpoint.testing import World
from vescale_dtensor.testing import warm_up

warm_up("torch._dynamo", "vescale_checkpoint")


@pytest.fixture
def start_world():
    """start_world(size, function, *args, after=None) -> World; the function is called with the rank first."""
    worlds = []

    def start(size, function, *args, after=None):
        worlds.append(World(size, function, args, after))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()
