"""The process group of the second device: what NCCL may do to a program, done every time.

    collective        the same on all ranks, in the same order per communicator; else an error that names both
    outputs           poison until `wait()`; with `async_op=False` valid at once for what the stream does next
    memory in flight  must stay as it is: `wait()` says what was written, and which collective it belonged to
    send, receive     without tags; alone: one queue per pair of ranks, both directions in one; in a batch: on the
                      communicator's own stream. A send ends when its receive was reached, and not before
    tensors           of the device, contiguous, of NCCL's dtypes
    wait(timeout)     blocks the host, as `barrier` does; `wait()` alone does not
    abort             ends what is queued here, with an error; the other ranks notice nothing
    destroy           waits for what is queued, as NCCL does: here until `HANG_SECONDS`

Sums are made as a ring makes them: of the n chunks, chunk c begins with rank c + 1. Whoever waits longer than
`HANG_SECONDS` is told what it waits for, and what the other ranks did last.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ._collectives import Collectives
from ._communicator import groups
from ._extension import extension
from ._transfers import Transfers


def register() -> None:
    """Makes `second` a backend of torch.distributed, and the device's default."""
    if "second" not in dist.Backend.backend_list:
        dist.Backend.register_backend("second", _create, devices=["second"])


def _create(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    group = Group(store, rank, size)
    groups.append(group)
    return extension().backend(rank, size, group)


class Group(Collectives, Transfers):
    """This rank's end of a communicator; the C++ half calls it, with torch's own ProcessGroup before that."""
