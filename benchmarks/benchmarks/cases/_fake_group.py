"""A mesh of many ranks in one process, over torch's `fake` backend.

Its collectives return at once (an all-gather copies the input n times into the output), so what
is left to measure is the host's own work, which is what these benchmarks are about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(ranks: int = 8, axis: str = "tp") -> Iterator[DeviceMesh]:
    """A one-axis mesh as seen from rank 0; the process group lives as long as the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))
    finally:
        dist.destroy_process_group()
