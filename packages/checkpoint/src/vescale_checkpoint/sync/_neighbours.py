"""Copies of files from node to node, through a process group of their own: they never meet the training's collectives.

Every rank's file goes to a rank on each of the next `copies` nodes, or on as many others as there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = timedelta(minutes=5)
File = tuple[int, str, int]
"""The rank that it goes to, or comes from; its path here; its bytes."""


class Nodes:
    """The ranks by node. Arguments: what each rank calls its node."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.ranks = names, {name: [] for name in names}
        for rank, name in enumerate(names):
            self.ranks[name].append(rank)

    def receivers(self, rank: int, copies: int) -> list[int]:
        """Returns the ranks that get copies of what a rank writes."""
        order, name = list(self.ranks), self.names[rank]
        at, place = order.index(name), self.ranks[name].index(rank)
        others = (order[at + 1 :] + order[:at])[:copies]
        return [self.ranks[other][place % len(self.ranks[other])] for other in others]

    def group(self) -> Any:
        """Returns a group of all ranks, on the host. Call it on every rank."""
        return dist.new_group(backend="gloo", timeout=_PATIENCE)


def exchange(sends: Sequence[File], takes: Sequence[File], group: Any) -> None:
    """Sends and receives files, straight from and into their memory; those that come are there, with their sizes."""
    works = [
        do(torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8), peer, group=group)
        for do, files in ((dist.isend, sends), (dist.irecv, takes)) for peer, path, nbytes in files
    ]  # fmt: skip
    for work in works:
        work.wait()
