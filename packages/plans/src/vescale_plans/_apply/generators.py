"""Generators: the states of torch's own, of the host and of this rank's device, that a forward may draw from; and seeds
for all that a sample of a data set may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor


def random_states() -> list[Tensor]:
    """The states, of the host's generator first."""
    states = [torch.get_rng_state()]
    device = _device_module()
    return states if device is None else [*states, device.get_rng_state()]


def set_random_states(states: list[Tensor]) -> None:
    """Takes them back to what `random_states` gave."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        _device_module().set_rng_state(state)


def _device_module() -> ModuleType | None:
    """`torch.cuda`, say, where it has a generator that anybody could have drawn from."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if module.is_initialized() else None


def same_states(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether nothing was drawn between the two."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def seeded_for(seed: int, place: int) -> Iterator[None]:
    """Within the block torch's CPU generator, Python's `random` and numpy's, where it is loaded, are those of one place
    of a stream; after it they are as they were."""
    seed = seed * 1_000_003 + place
    numpy = sys.modules.get("numpy")  # whoever draws from it has imported it
    kept, kept_random = torch.get_rng_state(), random.getstate()
    kept_numpy = numpy.random.get_state() if numpy else None
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        torch.set_rng_state(kept)
        random.setstate(kept_random)
        if numpy:
            numpy.random.set_state(kept_numpy)
