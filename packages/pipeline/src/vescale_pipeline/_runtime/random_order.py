"""Random numbers of microbatches: each draws what one device would draw that runs one microbatch after another.

The default generators that a forward may draw from are the host's, and that of the device that a pipeline computes on.
Neither waits for the device: a generator's state is the host's.
"""

from __future__ import annotations

import hashlib
import warnings

import torch
from torch import Tensor, nn

from .._torch_private import _get_privateuse1_backend_name

States = tuple[Tensor, ...]


def device_of(model: nn.Module) -> torch.device:
    """Returns the device that a model computes on: that of its first parameter."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def states(device: torch.device) -> States:
    """The host's first."""
    host = torch.get_rng_state()
    return (host,) if device.type == "cpu" else (host, torch.get_device_module(device).get_rng_state())


def set_states(device: torch.device, given: States) -> None:
    """Sets what `states` returned."""
    torch.set_rng_state(given[0])
    for state in given[1:]:
        torch.get_device_module(device).set_rng_state(state)


def digest(device: torch.device) -> int:
    """Digest of the states, in 56 bits."""
    found = b"".join(state.numpy().tobytes() for state in states(device))
    return int.from_bytes(hashlib.blake2b(found, digest_size=7).digest(), "big")


class RandomOrder:
    """The default generators, kept where one device would have them that runs the microbatches one after another.

    What other stages draw is known by the operators of a dry run, replayed on this stage's device. Kernels that take
    numbers otherwise than these operators do (a fused dropout on CUDA) may leave its generator elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", _get_privateuse1_backend_name()):
            warnings.warn(
                f"vescale_pipeline: random numbers of a pipeline on {device.type} may not be those of one device: the "
                "draws of other stages are skipped by operators that may differ from fused kernels",
                stacklevel=2,
            )
        self._device = device
        self._states = {0: states(device)}

    def before(self, microbatch: int) -> None:
        set_states(self._device, self._states[microbatch])

    def after(self, microbatch: int) -> None:
        self._states.setdefault(microbatch + 1, states(self._device))

    def end(self) -> None:
        """Past the last microbatch that was run."""
        set_states(self._device, self._states[max(self._states)])
