"""Transfers of an accelerator's tensors where only gloo connects the ranks, which sends none of them: through the host.

So do ranks that share one GPU, which NCCL refuses. The host waits for every transfer; nothing runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor


def wire_of(group: Any, device: torch.device, timeout: timedelta) -> Any:
    """Returns the channel for tensors of a device: the group's backend, without the dispatcher's share of the cost."""
    wire = group._get_backend(device)
    return Staged(wire, timeout) if device.type != "cpu" and wire.name() == "gloo" else wire


def directly(method: Callable) -> Callable:
    """A backend's method past the look at its arguments that vescale_dtensor puts before it for users: what travels
    here is plain, and a look costs as much Python as all else of a transfer. What others have put there sees all."""
    function = getattr(method, "__func__", None)
    original = getattr(function, "__wrapped__", None)
    if original is None or not function.__globals__["__name__"].startswith("vescale_"):
        return method
    return partial(original, method.__self__)


class Staged:
    """A backend of the host, for another device's tensors.

    Arguments:
        wire: the backend.
        timeout: of every wait.
    """

    def __init__(self, wire: Any, timeout: timedelta) -> None:
        self.wire, self._timeout = wire, timeout
        self._send, self._recv = directly(wire.send), directly(wire.recv)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Passing:
        (tensor,) = tensors
        here = tensor.cpu()
        return Passing(self._send([here], peer, tag), self._timeout, here, None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Passing:
        (tensor,) = tensors
        here = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Passing(self._recv([here], peer, tag), self._timeout, here, tensor)


class Passing:
    """A transfer on its way; what arrives is on the device when somebody has waited."""

    def __init__(self, work: Any, timeout: timedelta, here: Tensor, there: Tensor | None) -> None:
        self._work, self._timeout, self._here, self._there = work, timeout, here, there

    def wait(self) -> None:
        self._work.wait(self._timeout)
        if self._there is not None:
            self._there.copy_(self._here)
        self._here = self._there = None
