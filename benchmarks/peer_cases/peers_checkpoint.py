"""Checkpoints for `peers.py`: the same sharded tensors saved and loaded by torch's DCP and by us, on two ranks.

What an asynchronous save holds up is the time until it returns, over that of DCP's `async_save`, which also copies
before it returns; both are waited for outside of the time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from vescale_testkit import run_ranks

RANKS, TENSORS, COLUMNS = 2, 64, 1024
PARTS = ("save", "load", "asynchronous save")
PATIENCE = timedelta(minutes=5)  # of a rank with one that writes to a disk that others use


def states(mib: int) -> tuple[dict, dict]:
    """`mib` MiB of float32 in `TENSORS` tensors, rows cut: as torch's DTensors, and as ours of the same values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor import Shard as TorchShard

    from vescale_dtensor import DTensor, Shard

    rows = (mib << 20) // 4 // COLUMNS // TENSORS
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    theirs, ours = {}, {}
    for i in range(TENSORS):
        local = torch.full((rows // RANKS, COLUMNS), float(i))
        theirs[f"t{i}"] = TorchDTensor.from_local(local.clone(), mesh, [TorchShard(0)], run_check=False)
        ours[f"t{i}"] = DTensor.from_local(local, mesh, [Shard(0)], shape=(rows, COLUMNS))
    return theirs, ours


def timed(call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def raced(folder: str, mib: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by part and contender. Runs on every rank; the first round warms up."""
    import warnings

    import torch.distributed.checkpoint as dcp

    import vescale
    from vescale_checkpoint._job import wait_for_save

    warnings.simplefilter("ignore")
    dist.distributed_c10d._set_pg_timeout(PATIENCE)
    theirs, ours = states(mib)
    beside = dist.new_group(backend="gloo", timeout=PATIENCE)  # async_save's thread must not share the barriers' group
    found: dict[str, dict[str, list[float]]] = {part: {"DCP": [], "ours": []} for part in PARTS}
    for round_ in range(rounds + 1):
        at = {name: f"{folder}/{name}{round_}" for name in ("dcp", "own", "dcp_async", "own_async")}
        waiting: list = []
        calls = {
            "save": {
                "DCP": lambda at=at: dcp.save(theirs, checkpoint_id=at["dcp"]),
                "ours": lambda at=at: vescale.save(at["own"], {"model": ours}),
            },
            "load": {
                "DCP": lambda at=at: dcp.load(theirs, checkpoint_id=at["dcp"]),
                "ours": lambda at=at: vescale.load(at["own"], {"model": ours}),
            },
            "asynchronous save": {
                "DCP": lambda at=at, waiting=waiting: waiting.append(
                    dcp.async_save(theirs, checkpoint_id=at["dcp_async"], process_group=beside)
                ),
                "ours": lambda at=at: vescale.save(at["own_async"], {"model": ours}, asynchronous=True),
            },
        }
        for part, by in calls.items():
            for name in list(by) if round_ % 2 else reversed(by):
                seconds = timed(by[name])
                for future in waiting:
                    future.result()
                waiting.clear()
                wait_for_save()
                dist.barrier()
                if round_:
                    found[part][name].append(seconds)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in at.values():
                shutil.rmtree(path)
    return found


def compared(mib: int, rounds: int) -> dict[str, dict[str, dict]]:
    """Of each part the ratio over DCP's, and milliseconds."""
    folder = tempfile.mkdtemp(prefix="vescale-peers-", dir=os.environ.get("TMPDIR"))
    try:
        found = run_ranks(RANKS, raced, folder, mib, rounds, timeout=600)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        part: {
            name: {
                "wall": round(median(a / b for a, b in zip(seconds, by["DCP"])), 4),
                "ms": round(1e3 * median(seconds), 1),
            }
            for name, seconds in by.items()
        }
        for part, by in found.items()
    }
