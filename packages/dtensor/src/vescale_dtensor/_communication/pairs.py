"""Two ranks on gloo: what they exchange travels once, and goes straight to where it belongs.

Torch's gloo gathers into memory of its own and copies from there (2.5 times the host's work, and the buffer once
more), and an all-to-all hands every rank its own rows as well. Between two ranks an exchange of the other's rows alone
does both. A sum of two numbers is the same in either order, so gloo's own all-reduce has the bits of a sum in rank
order, in place, for 0.45 of the work; of more ranks it adds other parts in other orders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, ProcessGroup

_LEAST_BYTES = 1 << 16
"""Below this a message's latency is all, and the views cost more than the copies."""

# Of other dtypes gloo rounds in ways of its own, or has no sum.
_SUMS_EXACTLY = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


def sums(tensor: Tensor) -> bool:
    """True if gloo's all-reduce of a pair has the bits of a sum in rank order."""
    return tensor.dtype in _SUMS_EXACTLY


def directly(method: Callable) -> Callable:
    """A group's method past the look at its arguments that we have put before it (`_rules/doors/communication.py`),
    which is for users: what the engine sends is plain. What others have put there, a monitor, sees all."""
    function = getattr(method, "__func__", None)
    original = getattr(function, "__wrapped__", None)
    if original is None or not function.__globals__["__name__"].startswith("vescale_"):
        return method
    return partial(original, method.__self__)


def swapper(group: ProcessGroup, options: Any = None) -> Callable:
    """swap(out, sent): starts to send the other rank `sent`, flat, and to take as many elements into `out`, flat."""
    other, call = 1 - group.rank(), directly(group.alltoall_base)
    options = AllToAllOptions() if options is None else options

    def swap(out: Tensor, sent: Tensor) -> Any:
        splits = [0, 0]
        splits[other] = sent.numel()
        return call(out, sent, splits, splits, options)

    return swap


def gather_call(group: ProcessGroup, options: Any) -> Callable:
    """Returns a replacement for `group._allgather_base`, with `options` for its exchange."""
    rank, small = group.rank(), directly(group._allgather_base)
    swap, swap_at_once = swapper(group), swapper(group, options)

    def gather(out: Tensor, part: Tensor, *rest):
        if part.nbytes < _LEAST_BYTES:
            return small(out, part, *rest)
        halves = out.view(2, -1)
        own, part = halves[rank], part.view(-1)
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return (swap_at_once if rest else swap)(halves[1 - rank], part)

    return gather
