"""The states of the generators that a forward may draw from: torch's own, of the host and of this rank's device."""

from __future__ import annotations

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
