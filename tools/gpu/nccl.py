"""(j) Ranks over NCCL, which share a GPU where there are fewer: collectives, trainings, waits of the host, faults.

The trainings are those of (b), twelve first that use all of the engine between them. `make gpu PARTS=nccl` goes on
where it was cut off, so that several calls of ten minutes answer all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sweeps.training_cases import CASES, Case
from vescale_testkit import free_port, one_gpu, run_ranks, worker

from .faulty_rank import FAULTS, HANG_S
from .host_waits import waits_here
from .part import Part, run
from .training import held

FIRST = (
    "llama-zero0-clip", "llama-zero3-clip", "gpt-dropout-zero2", "llama-tp-sp", "gpt-dropout-tp-sp", "mixtral-experts",
    "llama-1f1b-clip", "gpt-tied-zbv-clip", "llama-streams-zero3", "llama-offload-activations", "gpt-save",
    "llama-dp-tp-sp-zero3",
)  # fmt: skip
WAITED = ("llama-zero3-clip", "llama-tp-sp", "llama-dp-tp-sp-zero3")
RING = Case("llama-ring", "llama", {"cp": 2}, {"context_axis": "cp", "context": "ring", "data_axis": None})
FAULT_S = 90  # in which all other ranks are to have ended
PROBE_S = 60


def ask(part: Part) -> None:
    world = "second" if part.device == "second" else "nccl"
    if world == "nccl":
        part.each("recipe", lambda: {"nccl": torch.cuda.nccl.version(), "environment": one_gpu.settings(0, part.ranks)})
        for name in ON_GPUS:
            part.each(name, lambda name=name: probed(ON_GPUS[name], world))
    for name in PROBES:
        part.each(name, lambda name=name: probed(PROBES[name], world))
    for name in FIRST:
        part.each(name, lambda name=name: held(CASES[name], part, world))
    for name in WAITED:
        part.each(f"host waits of {name}", lambda name=name: waited(CASES[name], part.device, world))
    for fault in FAULTS:
        part.each(f"a rank that {fault}", lambda fault=fault: ended(fault, part))
    for case in (RING, *(case for case in CASES.values() if case.name not in FIRST)):
        part.each(case.name, lambda case=case: held(case, part, world))


# ------------------------------------------------------------------- probes


def probed(probe: Callable[[], bool], world: str) -> dict[str, Any]:
    """Whether a collective gives each rank what it is to, and its milliseconds on the slowest rank."""
    answers = run_ranks(2, timed, probe, timeout=PROBE_S, device=world)
    return {"holds": all(right for right, _ in answers), "ms": round(max(ms for _, ms in answers), 3)}


def timed(probe: Callable[[], bool], rounds: int = 3) -> tuple[bool, float]:
    right = probe()  # makes the communicator
    began = time.perf_counter()
    for _ in range(rounds):
        right &= probe()  # reads the numbers on the host
    return right, 1e3 * (time.perf_counter() - began) / rounds


def full(count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), float(value), dtype=dtype, device=worker.device_type)


def total() -> int:
    return sum(range(1, dist.get_world_size() + 1))


def reduced(count: int, dtype: torch.dtype = torch.float32) -> Callable[[], bool]:
    def probe() -> bool:
        x = full(count, dist.get_rank() + 1, dtype)
        dist.all_reduce(x)
        return bool((x == total()).all())

    return probe


def gathered() -> bool:
    size = dist.get_world_size()
    y = full(size * 1000, -1)
    dist.all_gather_into_tensor(y, full(1000, dist.get_rank()))
    return all(bool((y[1000 * rank : 1000 * (rank + 1)] == rank).all()) for rank in range(size))


def scattered() -> bool:
    y = full(1000, 0)
    dist.reduce_scatter_tensor(y, full(1000 * dist.get_world_size(), dist.get_rank() + 1))
    return bool((y == total()).all())


def exchanged() -> bool:
    """Rank s sends s + d + 1 numbers to rank d."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [rank + other + 1 for other in range(size)]
    y = full(sum(counts), -1)
    dist.all_to_all_single(y, full(sum(counts), rank), counts, counts)
    return torch.equal(y, torch.cat([full(count, source) for source, count in enumerate(counts)]))


def sent_round() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = full(1 << 16, rank), full(1 << 16, -1)
    sends = dist.P2POp(dist.isend, x, (rank + 1) % size)
    takes = dist.P2POp(dist.irecv, y, (rank - 1) % size)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
    return bool((y == (rank - 1) % size).all())


def two_groups() -> bool:
    """Two communicators and products, all in flight at once."""
    if dist.group.WORLD not in _groups:
        _groups[dist.group.WORLD] = dist.new_group([*range(dist.get_world_size())])
    group = _groups[dist.group.WORLD]
    a, b = (full(1 << 20, dist.get_rank() + 1) for _ in range(2))
    works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=group, async_op=True)]
    product = full(512 * 512, 0.5).view(512, 512)
    for _ in range(20):
        product = (product @ product).clamp(-1, 1)
    for work in works:
        work.wait()
    return bool((a == total()).all() and (b == total()).all() and product.isfinite().all())


_groups: dict[Any, Any] = {}


def beside_products() -> bool:
    """A collective that waits for another rank, which the kernels of that rank keep from beginning: do both end?"""
    if dist.get_rank():
        product = full(2048 * 2048, 0.5).view(2048, 2048)
        for _ in range(30 if worker.device_type == "cuda" else 1):
            product = (product @ product).clamp(-1, 1)
    return reduced(1 << 20)()


def captured() -> bool:
    """A collective in a CUDA graph, which is run three times."""
    x, y = full(4096, dist.get_rank() + 1), full(4096, 0)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        dist.all_reduce(y)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y.copy_(x)
            dist.all_reduce(y)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return bool((y == total()).all())


PROBES = {
    **{f"all_reduce of {count}": reduced(count) for count in (1, 4096, 1 << 20)},
    "all_reduce of bfloat16": reduced(1 << 20, torch.bfloat16), "all_gather": gathered, "reduce_scatter": scattered,
    "all_to_all, uneven": exchanged, "messages round a ring": sent_round, "two groups and products": two_groups,
    "beside products of another rank": beside_products,
}  # fmt: skip
ON_GPUS = {f"all_reduce of {1 << 24}": reduced(1 << 24), "a collective in a graph": captured}


def waited(case: Case, device: str, world: str) -> dict[str, Any]:
    """Where the host waits in a step, on the rank where it does most often."""
    return max(run_ranks(case.world, waits_here, case, device, device=world), key=lambda one: sum(one["ours"].values()))


# ------------------------------------------------------------------- faults


def ended(fault: str, part: Part) -> dict[str, Any]:
    """Rank 1 of a training does something else: how long it takes until rank 0 ends, and whether it names rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
            "VESCALE_HANG_SECONDS": str(HANG_S), "VESCALE_HANG_DIR": f"{folder}/hang",
        }  # fmt: skip
        command = [sys.executable, "-m", "gpu.faulty_rank", part.device, fault, folder]
        ranks = [
            subprocess.Popen(
                command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            said = ranks[0].communicate(timeout=PROBE_S + FAULT_S)[1]
        except subprocess.TimeoutExpired:
            return {"holds": False, "failed": f"rank 0 has not ended {PROBE_S + FAULT_S} s after its start"}
        finally:
            at = time.time()
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                rank.wait()
        begun = Path(folder, "fault")
        if not begun.exists():
            return {"holds": False, "failed": said[-1500:]}
        lines = said.splitlines()
        told = [line for line in lines if "first cause" in line] + [line for line in lines if "rank 1" in line]
        return {
            "holds": bool(told) and ranks[0].returncode != 0,
            "seconds": round(at - json.loads(begun.read_text()), 1),
            "said": (told or lines[-1:])[0][:300],
        }


if __name__ == "__main__":
    run(ask)
