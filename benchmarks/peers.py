"""Ours beside torch's own parallelism at real sizes, on two gloo ranks: wall and CPU time of a whole training step.

    python benchmarks/peers.py                      # all cases, Llamas of hidden 512 (6 layers) and 1024 (2 layers)
    python benchmarks/peers.py replicated --hidden 512 --rounds 20
    python benchmarks/peers.py --short              # small sizes and few rounds: that it runs, not how fast

    replicated    DistributedDataParallel                       ours, ZeRO-0
    sharded       fully_shard (FSDP2)                           ours, ZeRO-3
    tensor        parallelize_module, with loss_parallel        ours, the library's plan for Llama
    1f1b          torch.distributed.pipelining                  ours, the same cuts
    interleaved   the same, two stages per rank
    checkpoint    torch.distributed.checkpoint (DCP)            ours: save, load, and what an asynchronous save holds up
    context       context_parallel, where torch has it on CPU   ours, a ring

Where data or tensors are parallel two more take turns that no budget speaks of: each gradient summed as it comes,
written for this model alone ("by hand", of data), and a step in which nothing is sent, which no library can beat.

In one run all contenders of a case take turns, in rotating order, and train on the same batches; their first losses
agree to 1e-4. A step is 4 rows of 256 tokens (pipelines: 8, in 4 microbatches, and a layer for each stage at least):
forward, loss, backward, AdamW, the loss read by the host. Wall time is
from a barrier to a barrier, CPU time that of both processes together, threads of gloo included; a ratio is the median
over rounds of the ratio within a round. Memory is the most that the CPU's allocator has given out at once in a warm
step, parameters, gradients and optimizer states among it, of the rank that has most; it is asked for in steps of their
own, of each contender alone, and no budget speaks of it. The heap keeps what is freed (`HEAP`). Exit status 1 when a
figure is over its budget; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from vescale_testkit import allocations, run_ranks, warm_up

sys.path.insert(0, str(Path(__file__).absolute().parent))
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "examples"))

from peer_cases import peers_checkpoint, peers_context
from peer_cases import peers_training as training

# Of wall time.
BUDGETS = {
    "replicated": 0.95, "sharded": 0.8, "tensor": 0.9, "1f1b": 1.0, "interleaved": 1.0,
    "save": 1.0, "load": 1.0, "asynchronous save": 1.0, "context": 1.0,
}  # fmt: skip
JUDGED = "ours"
HEAP = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(4 << 30)}
"""Of glibc. A program that trains one model has a page fault or two in a step; beside five other models the heap is
trimmed, and pages that are mapped anew (to 40,000 in a step, of 3 us) fall to whoever's turn it is."""


def raced(case: str, sizes: training.Sizes, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Of every contender wall and CPU seconds of each step, and its losses. Runs on every rank."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _, makers = training.contenders(case, sizes)
    steps = {name: make() for name, make in makers.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "CPU": [], "loss": []} for name in steps}
    warm, order = 2, list(steps)
    gc.collect()
    gc.disable()
    for round_ in range(rounds + warm):
        tokens, first = sizes.batch(round_), round_ % len(order)
        for name in order[first:] + order[:first]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = steps[name](tokens)
            dist.barrier()
            if round_ >= warm:
                found[name]["wall"].append(time.perf_counter() - wall)
                found[name]["CPU"].append(time.process_time() - cpu)
            found[name]["loss"].append(loss)
        gc.collect()
    gc.enable()
    return found


def peaks(case: str, sizes: training.Sizes) -> dict[str, int]:
    """Of every contender the bytes that this rank has at the worst moment of a warm step. Runs on every rank."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name, make in training.contenders(case, sizes)[1].items():
        with allocations() as log:
            step = make()
            for number in range(3):
                with log.phase("step"):
                    step(sizes.batch(number))
        found[name] = log.total("step")
        del step
        gc.collect()
    return found


def compared(case: str, sizes: training.Sizes, rounds: int) -> dict[str, dict]:
    """Of each of ours the ratios over the peer, of all the milliseconds, tokens per second and bytes."""
    sizes = training.sizes_of(case, sizes)
    peer = training.contenders(case, sizes)[0]
    ranks = run_ranks(training.RANKS, raced, case, sizes, rounds, timeout=1500)
    for name, one in ranks[0].items():
        apart = abs(one["loss"][0] / ranks[0][peer]["loss"][0] - 1)
        if apart > 1e-4 and name != training.NOTHING_SENT:  # of tensor parallelism that is a part of the model
            raise SystemExit(f"{case}: {name} trains another model than {peer}: first losses differ by {apart:.1e}")
    wall = {name: [max(each) for each in zip(*(rank[name]["wall"] for rank in ranks))] for name in ranks[0]}
    cpu = {name: [sum(each) for each in zip(*(rank[name]["CPU"] for rank in ranks))] for name in ranks[0]}
    tokens = sizes.rows * sizes.positions
    of_ranks = run_ranks(training.RANKS, peaks, case, sizes, timeout=600)
    most = {name: max(each[name] for each in of_ranks) for name in wall}
    return {
        name: {
            "wall": round(median(a / b for a, b in zip(wall[name], wall[peer])), 4),
            "CPU": round(median(a / b for a, b in zip(cpu[name], cpu[peer])), 4),
            "ms": round(1e3 * median(wall[name]), 1),
            "tokens per second": round(tokens / median(wall[name])),
            "memory": round(most[name] / most[peer], 4),
            "peak bytes per rank": most[name],
        }
        for name in wall
    }


def show(title: str, rows: dict[str, dict], budget: float | None) -> bool:
    """Prints a case; whether what is judged of it is within its budget."""
    print(f"\n{title}" + ("" if budget is None else f"  (budget {budget})"))
    holds = True
    for name, row in rows.items():
        cells = "  ".join(f"{key} {value}" for key, value in row.items())
        missed = budget is not None and name == JUDGED and row.get("wall", 0.0) > budget
        holds = holds and not missed
        print(f"  {name:<16} {cells}{'  MISSED' if missed else ''}", flush=True)
    return holds


def measured(cases: Sequence[str], sizes: dict[int, training.Sizes], rounds: int, mib: int) -> tuple[dict, bool]:
    figures, holds = {}, True
    for case in cases:
        if case in training.CASES:
            for hidden, one in sizes.items():
                rows = compared(case, one, rounds)
                figures[f"{case}, hidden {hidden}"] = rows
                holds &= show(f"{case}, hidden {hidden}", rows, BUDGETS[case])
        elif case == "checkpoint":
            for part, rows in peers_checkpoint.compared(mib, max(rounds // 3, 2)).items():
                figures[part] = rows
                holds &= show(part, rows, BUDGETS[part])
        else:
            rows = peers_context.compared(rounds)
            figures[case] = rows
            holds &= show(case, rows, BUDGETS[case])
    return figures, holds


def main() -> int:
    every = (*training.CASES, "checkpoint", "context")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(every))
    parser.add_argument("--hidden", type=int, nargs="*", choices=list(training.REAL))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--short", action="store_true", help="small sizes, two rounds, no budgets")
    arguments = parser.parse_args()
    if unknown := [case for case in arguments.cases if case not in every]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(every)}")
    cases = arguments.cases or every
    sizes = training.SHORT if arguments.short else training.REAL
    if arguments.hidden:
        sizes = {hidden: training.REAL[hidden] for hidden in arguments.hidden}
    os.environ.update(HEAP)
    warm_up("torch._dynamo", "vescale", "transformers", "llama.model")
    rounds, mib = (2, 4) if arguments.short else (arguments.rounds, 256)
    figures, holds = measured(cases, sizes, rounds, mib)
    print(json.dumps(figures))
    return int(not holds and not arguments.short)


if __name__ == "__main__":
    sys.exit(main())
