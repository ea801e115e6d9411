"""The states of the generators that a forward may draw from: torch's own, of the host and of this rank's device."""

from __future__ import annotations

import torch
from torch import Tensor


def random_states() -> list[Tensor]:
    """The states, of the host's generator first."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def set_random_states(states: list[Tensor]) -> None:
    """Takes them back to what `random_states` gave."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def same_states(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether nothing was drawn between the two."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
