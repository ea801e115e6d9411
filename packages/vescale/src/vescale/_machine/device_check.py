"""Tries whether the accelerators of all ranks reach each other: collectives of their own backend (NCCL), with a
bound."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch_private import _abort_process_group

BOUND_S = 30.0
"""So long may a collective of a few bytes take, the making of its communicator included."""


def tried(device: str, backend: str, group: Any) -> Iterator[tuple[str, str | None]]:
    """(what was tried, how it failed or None), the same on all ranks: an all-reduce over the world, over each machine's
    ranks, and over ranks of one place on every machine, which are the axes that meshes are made of; then a send and a
    receive between neighbours.

    Arguments:
        group: of the host, by which ranks tell each other how it went.

    What fails ends it: a communicator in which a collective hangs takes no other.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    devices = torch.accelerator.device_count()
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % devices)
    token = torch.ones(256, device=device)
    for name, rows in lines(size, int(os.environ.get("LOCAL_WORLD_SIZE", size))).items():
        groups = [(row, dist.new_group(row, backend=backend)) for row in rows]
        row, own = next(one for one in groups if rank in one[0])

        def reduced(row: list[int] = row, own: Any = own) -> str | None:
            out = token.clone()
            said = waited([dist.all_reduce(out, group=own, async_op=True)])
            return said or wrong(out, len(row))

        failed = agreed(attempted(reduced), group)
        if failed is not None:
            abandoned([own for _, own in groups])  # before it is told: whoever hears it may ask no further
        yield f"an all-reduce over {name}", failed
        if failed is not None:
            return
    if size % 2 == 0:
        whole = dist.new_group(list(range(size)), backend=backend)

        def exchanged() -> str | None:
            out, other = torch.zeros_like(token), rank ^ 1
            operations = [dist.P2POp(dist.isend, token, other, whole), dist.P2POp(dist.irecv, out, other, whole)]
            return waited(dist.batch_isend_irecv(operations)) or wrong(out, 1)

        failed = agreed(attempted(exchanged), group)
        if failed is not None:
            abandoned([whole])
        yield "a send and a receive between neighbours", failed


def lines(size: int, local: int) -> dict[str, list[list[int]]]:
    """Returns the groups of ranks to try, by name. Pure."""
    found = {"the world": [list(range(size))]}
    if 1 < local < size and size % local == 0:
        found["each machine"] = [list(range(start, start + local)) for start in range(0, size, local)]
        found["one rank per machine"] = [list(range(start, size, local)) for start in range(local)]
    return found


def attempted(attempt: Callable[[], str | None]) -> str | None:
    try:
        return attempt()
    except RuntimeError as error:  # of torch.distributed and its backends
        return str(error).splitlines()[0]


def waited(works: list[Any]) -> str | None:
    """Waits; returns None if all are done within the bound, else what happened."""
    until = time.monotonic() + BOUND_S
    while not all(work.is_completed() for work in works):
        if time.monotonic() > until:
            return f"not done after {BOUND_S:g} s"
        time.sleep(0.002)
    for work in works:
        work.wait()
    return None


def wrong(out: Tensor, expected: int) -> str | None:
    found = out.cpu()
    return None if bool((found == expected).all()) else f"the result is {found[0].item():g} where {expected} was due"


def agreed(failed: str | None, group: Any) -> str | None:
    """The first rank's failure, on all ranks."""
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failed, group=group)
    odd = [(rank, said) for rank, said in enumerate(everyone) if said is not None]
    return None if not odd else f"on rank {odd[0][0]}: {odd[0][1]}" + (f" ({len(odd)} ranks)" if len(odd) > 1 else "")


def abandoned(groups: list[Any]) -> None:
    """Ends what is in flight: destroying a group would wait for it."""
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            _abort_process_group(group)
