"""The default generators that a forward may draw from: the host's, and that of the device that a pipeline computes on.

Neither waits for the device: a generator's state is the host's.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

States = tuple[Tensor, ...]


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: where its first parameter lies."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def states(device: torch.device) -> States:
    """The host's first."""
    host = torch.get_rng_state()
    return (host,) if device.type == "cpu" else (host, torch.get_device_module(device).get_rng_state())


def set_states(device: torch.device, given: States) -> None:
    """What `states` gave."""
    torch.set_rng_state(given[0])
    for state in given[1:]:
        torch.get_device_module(device).set_rng_state(state)


def digest(device: torch.device) -> int:
    """Of the states, in 56 bits."""
    found = b"".join(state.numpy().tobytes() for state in states(device))
    return int.from_bytes(hashlib.blake2b(found, digest_size=7).digest(), "big")
