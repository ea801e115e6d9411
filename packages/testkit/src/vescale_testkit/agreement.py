"""Checks that all ranks gave the same, to the last bit, and says where not; and what a training is compared by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import bits_of


def assert_ranks_agree(values: Sequence[Any]) -> Any:
    """Check that all ranks gave the same result, tensors bitwise; return it.

    Arguments:
        values: results in rank order, as from ``run_ranks``.  Tensors and
            arrays must agree in dtype, shape and every bit; containers and
            dataclasses are compared element by element, floats likewise
            (NaN agrees with NaN), all else by ``==``.

    Raises:
        AssertionError: names the first rank that differs from rank 0, and where.
    """
    for rank, value in enumerate(values):
        difference = _difference(values[0], value, "result")
        if difference is not None:
            raise AssertionError(f"rank {rank} of {len(values)} differs from rank 0: {difference}")
    return values[0]


def _difference(a: Any, b: Any, where: str) -> str | None:
    """Says where and how two results differ, or None."""
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{where}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        bits_a, bits_b = bits_of(a), bits_of(b)
        if torch.equal(bits_a, bits_b):
            return None
        changed = (bits_a != bits_b).reshape(a.numel(), -1).any(1)
        at = int(changed.nonzero()[0])
        return (
            f"{where}: {int(changed.sum())} of {a.numel()} elements, first at flat index {at}: "
            f"{a.reshape(-1)[at].item()} and {b.reshape(-1)[at].item()}"
        )
    if type(a).__module__ == "numpy" and hasattr(a, "tobytes"):
        same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        return None if same else f"{where}: {a!r} and {b!r}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{where}: keys {list(a)} and {list(b)}"
        pairs = [(a[key], b[key], f"{where}[{key!r}]") for key in a]
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{where}: {len(a)} and {len(b)} elements"
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a) if field.compare]
        pairs = [(getattr(a, name), getattr(b, name), f"{where}.{name}") for name in names]
    elif a == b or (isinstance(a, float) and a != a and b != b):
        return None
    else:
        return f"{where}: {a!r} and {b!r}"
    for x, y, place in pairs:
        difference = _difference(x, y, place)
        if difference is not None:
            return difference
    return None


def full_values(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Copies on the host of all that a training holds, by name: the model's state, gradients, the optimizer's states.
    A collective where DTensors are among them."""
    found = dict(model.state_dict())
    found |= {f"{name}.grad": one.grad for name, one in model.named_parameters() if one.grad is not None}
    for name, one in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(one, {}).items()}
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().cpu().clone()
        for name, one in found.items()
    }
