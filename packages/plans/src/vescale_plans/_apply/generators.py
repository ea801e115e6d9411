"""Generators: the states of torch's own, of the host and of this rank's device, that a forward may draw from; seeds for
all that a sample of a data set may draw from; and all of them kept while a model is run that nobody asked to run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vescale_trace.effects import host_generators_kept


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
    begins = getattr(module, "is_initialized", None)  # Apple's has no beginning
    return module if begins is None or begins() else None


def same_states(one: list[Tensor], other: list[Tensor]) -> bool:
    """True if nothing was drawn between the two."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def seeded_for(seed: int, place: int) -> Iterator[None]:
    """Within the block torch's CPU generator, Python's `random` and numpy's, where it is loaded, are those of one place
    of a stream; after it they are as they were."""
    seed = seed * 1_000_003 + place
    with host_generators_kept():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        yield


_HANDED: ContextVar[dict[int, tuple[torch.Generator, Tensor]] | None] = ContextVar("handed", default=None)
"""Generators of the program's own that operators were handed in the `generators_kept` that is entered, and where
each was before."""


@contextmanager
def generators_kept() -> Iterator[None]:
    """Hides the block's draws: afterwards, also where it raises, torch's generators of the host and of this rank's
    device, Python's and numpy's are as they were before. So are others of torch's, if the block's modes tell what they
    hand on (`note_generator`). As a decorator it is for functions that run a user's model for their own purposes: what
    a program draws must not depend on whether it asked for a plan."""
    device, handed = random_states()[1:], {}
    outer = _HANDED.set(handed)
    with host_generators_kept():
        try:
            yield
        finally:
            _HANDED.reset(outer)
            for generator, state in handed.values():  # torch's own come last, which may be among them
                generator.set_state(state)
            module = _device_module()
            if module is not None and device:
                module.set_rng_state(device[0])
            elif module is not None:  # it has begun in the block: what was seeded before is a seed alone
                module.manual_seed_all(module.initial_seed())


def note_generator(kwargs: Mapping[str, Any]) -> None:
    """Notes the state of an operator's generator before the operator runs."""
    if "generator" in kwargs and (handed := _HANDED.get()) is not None:
        generator = kwargs["generator"]
        if isinstance(generator, torch.Generator):
            handed.setdefault(id(generator), (generator, generator.get_state()))
