"""Bytes that operators made and that are still alive, told by the storages themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vescale_dtensor.engine import local_only

from .._torch_private import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """While it is on, counts the storages that operators make, as long as they live; those of `given` are left out.

    Arguments:
        given: tensors that are there before: parameters, whose storages an operator may return.
        device: of the storages that count, by its type; None counts those of every device.
    """

    def __init__(self, given: Iterable[Tensor], device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        with local_only():
            self._before = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and self._device in (None, tensor.device.type):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._made[storage] = True
        return out

    @property
    def total(self) -> int:
        """Bytes that are alive now."""
        return sum(storage.nbytes() for storage in self._made)
