"""Steps in slices: torch's optimizers pass over a parameter once for each of their operations, Adam ten times, and on a
CPU what is large has left the caches when the next operation comes for it. They are therefore given a large parameter
as slices, one after the other: the same operations on the same elements.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SLICE = 1 << 17
"""Elements of a slice: with two moments and a gradient 2 MiB in float32. A multiple of any vector's width, so that what
a kernel computes behind its last whole vector, for which some round otherwise, is the same as without slices."""

# With one of these, of a group, a step is no loop over parameters and operations.
_OTHER_WAYS = ("foreach", "fused", "capturable", "differentiable")


@contextlib.contextmanager
def in_slices(optimizer: Any) -> Iterator[None]:
    """Within the block the optimizer's groups and its state have slices in the places of large plain parameters of the
    host that have a gradient and states by now. Nothing is copied but states of one number.

    Of kernels that run on several threads each part has its last whole vector: they are given all at once."""
    if torch.get_num_threads() > 1:
        yield
        return
    state = optimizer.state
    slices: dict[Tensor, list[Tensor]] = {}
    inside: dict[Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        if not any(group.get(way) for way in _OTHER_WAYS):
            for plain in group["params"]:
                if plain.numel() > SLICE and _is_flat(plain, state.get(plain)):
                    slices[plain] = _cut(plain, state[plain], inside)
    if not slices:
        yield
        return
    shown = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [one for plain in group["params"] for one in slices.get(plain, (plain,))]
    others = {plain: values for plain, values in state.items() if plain not in slices}
    optimizer.state = now = defaultdict(dict, {**others, **inside})
    try:
        yield
        for plain, (first, *_) in slices.items():
            for key, value in state[plain].items():
                if value.shape != plain.shape:
                    value.copy_(now[first][key])
    finally:
        for group, given in zip(optimizer.param_groups, shown):
            group["params"] = given
        state.update((plain, values) for plain, values in now.items() if plain not in inside)
        optimizer.state = state


def _is_flat(plain: Tensor, values: dict[str, Any] | None) -> bool:
    """Whether the parameter, its gradient and its states lie so that a slice of one meets a slice of the others."""
    if plain.device.type != "cpu" or not values or plain.grad is None:
        return False
    return _lies_alike(plain.grad, plain) and all(
        type(one) is Tensor and (one.numel() == 1 or _lies_alike(one, plain)) for one in values.values()
    )


def _lies_alike(one: Tensor, plain: Tensor) -> bool:
    return one.shape == plain.shape and one.device == plain.device and one.is_contiguous() and plain.is_contiguous()


def _cut(plain: Tensor, values: dict[str, Tensor], states: dict[Tensor, dict[str, Any]]) -> list[Tensor]:
    """The parameter's slices, with their gradients; their states go into `states`."""
    slices = plain.detach().view(-1).split(SLICE)
    gradients = plain.grad.view(-1).split(SLICE)
    parts = {key: one.view(-1).split(SLICE) if one.shape == plain.shape else None for key, one in values.items()}
    for i, (one, gradient) in enumerate(zip(slices, gradients)):
        one.grad = gradient
        states[one] = {key: part[i] if part is not None else values[key].clone() for key, part in parts.items()}
    return list(slices)
