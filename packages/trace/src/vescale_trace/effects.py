"""Effects of a run of a user's forward: numbers that it has drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def python_states() -> dict[str, Any]:
    """Returns the states of Python's generator, and of numpy's where it is loaded, by module."""
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):  # whoever draws from it has imported it
        name, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states


@contextmanager
def host_generators_kept() -> Iterator[None]:
    """A block whose draws on the host nobody misses: torch's generator, Python's and numpy's are then as before."""
    numpy = sys.modules.get("numpy")
    kept, kept_random = torch.get_rng_state(), random.getstate()
    kept_numpy = numpy.random.get_state(legacy=False) if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        random.setstate(kept_random)
        if numpy:
            numpy.random.set_state(kept_numpy)
