"""Context parallelism for `peers.py`: attention over positions cut on two ranks, forward and backward.

torch's `context_parallel` replaces attention by a ring of its flash and memory-efficient kernels. Where it has none for
the CPU, the case says so, with torch's own words, and ours stands alone.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional as F

from vescale_testkit import run_ranks

RANKS, SHAPE = 2, (1, 4, 2048, 64)


def by_torch():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    whole = [torch.randn(SHAPE) for _ in range(3)]

    def step() -> None:
        parts = [tensor.clone() for tensor in whole]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
            leaves = [part.detach().requires_grad_() for part in parts]
            F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()

    return step


def by_us():
    from vescale_dtensor import Shard, distribute_tensor
    from vescale_dtensor.engine import mesh_of, pin
    from vescale_testkit import mesh_of as make_mesh

    mesh = make_mesh(RANKS)
    pin(mesh_of(mesh), 0, "ring")
    torch.manual_seed(0)
    whole = [torch.randn(SHAPE) for _ in range(3)]

    def step() -> None:
        leaves = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in whole]
        F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()

    return step


def raced(rounds: int) -> dict[str, list[float] | str]:
    """Seconds by contender, or why torch's did not run. Runs on every rank."""
    torch.set_num_threads(1)
    steps = {"torch": by_torch(), "ours": by_us()}
    found: dict[str, list[float] | str] = {name: [] for name in steps}
    try:
        steps["torch"]()
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        found["torch"] = str(error).strip().partition("\n")[0] or type(error).__name__
        del steps["torch"]
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if round_:
                found[name].append(time.perf_counter() - began)
    return found


def compared(rounds: int) -> dict[str, dict]:
    found = run_ranks(RANKS, raced, rounds, timeout=300)[0]
    theirs, ours = found["torch"], found["ours"]
    own = {"ms": round(1e3 * median(ours), 1)}
    if isinstance(theirs, str):
        return {"torch": {"not on CPU": theirs}, "ours": own}
    return {
        "torch": {"wall": 1.0, "ms": round(1e3 * median(theirs), 1)},
        "ours": {"wall": round(median(a / b for a, b in zip(ours, theirs)), 4), **own},
    }
