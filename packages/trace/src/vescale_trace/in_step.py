"""What ranks compare to be in step, and at which calls of a model: digests of the bits that they should hold alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._torch_private import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass

FIRST, EVERY, FULL = 3, 10, 100
"""Calls of which each is checked in full; then one of how many is checked, and one of how many in full."""
_LOOKED_AT = 1 << 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_full(number: int) -> bool:
    """True for the calls that are checked in full, counted from 0."""
    return number < FIRST or number % FULL == 0


def is_turn(number: int, device_type: str) -> bool:
    """True for the calls that are checked. The numbers that ranks tell each other come from the device: one that runs
    behind the host would be waited for, so there only those that are checked in full are."""
    return is_full(number) or (device_type == "cpu" and number % EVERY == 0)


def first_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Digests the first elements of each, by place; of a tensor's local memory where it is sharded. The host waits
    once."""
    looked = [
        one
        for one in tensors
        if one.layout is torch.strided and not one.is_meta and not is_traceable_wrapper_subclass(one)
    ]
    places = lambda bits: torch.arange(1, len(bits) + 1, device=bits.device)
    return digests(looked, lambda bits: (bits[:_LOOKED_AT] * places(bits[:_LOOKED_AT])).sum())


def digests(tensors: Sequence[Tensor], digest: Callable[[Tensor], Tensor]) -> list[int]:
    """Folds each tensor's bits, as integers: exact, whatever the order of adding. Some may lie on the host."""
    made: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.no_grad(), DisableTorchFunctionSubclass():
        for at, tensor in enumerate(tensors):
            flat = tensor.detach().reshape(-1)
            flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
            one = digest(flat.view(_BITS[flat.element_size()]).as_subclass(Tensor))
            made.setdefault(one.device, []).append((at, one))
        found = {at: value for row in made.values()
                 for (at, _), value in zip(row, torch.stack([one for _, one in row]).tolist())}  # fmt: skip
    return [found[at] for at in range(len(tensors))]
