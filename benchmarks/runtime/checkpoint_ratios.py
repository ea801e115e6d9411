"""What checkpoints cost against the raw work on the same bytes, pairwise in one run on two ranks: issue 6, point 3.

    python benchmarks/runtime/checkpoint_ratios.py [--mib 1024] [--repeats 3] [--only save,load]

Each figure is a ratio of medians of pairs that alternate in one process group; it ends with one line of JSON, and
exits 1 where a budget is missed. A raw write is `write` and `fsync` of the same bytes, as many files as ranks; a
raw read is `readinto` of the same bytes from the page cache.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from vescale_checkpoint import load, save
from vescale_checkpoint._job import wait_for_save
from vescale_checkpoint.format._box import pieces_of
from vescale_checkpoint.manifest import Section, Stored
from vescale_checkpoint.plan._catalogue import Entry, Holder
from vescale_checkpoint.plan._load_plan import Target, plan_reads
from vescale_checkpoint.plan._save_plan import block_bytes, plan_writes
from vescale_dtensor import DTensor, Replicate, Shard
from vescale_dtensor.engine import Mesh, canonical_states, layout_of
from vescale_testkit import mesh_of, run_ranks

TENSORS, SMALL = 128, 10_000
# name -> (budget, whether larger is better)
BUDGETS = {
    "save_vs_raw_write": (0.9, True),
    "load_vs_raw_read": (0.6, True),
    "reshard_bytes_read_vs_needed": (1.05, False),
    "small_save_us": (15.0, False),
    "small_load_us": (15.0, False),
    "async_stall_vs_memcpy": (1.2, False),
    "plan_save_s": (2.0, False),
    "plan_load_s": (2.0, False),
}


def big_state(mib, fill):
    """`mib` MiB of float32 in TENSORS tensors, rows sharded over all ranks; each rank makes its shard only."""
    mesh = mesh_of(dist.get_world_size())
    rows = mib * (1 << 20) // 4 // 1024 // TENSORS
    local = rows // dist.get_world_size()
    return {
        "model": {
            f"t{i}": DTensor.from_local(torch.full((local, 1024), fill), mesh, [Shard(0)], shape=(rows, 1024))
            for i in range(TENSORS)
        }
    }


def timed(call, *args, **kwargs):
    """Seconds from when all ranks begin to when the last one ends."""
    dist.barrier()
    started = time.perf_counter()
    call(*args, **kwargs)
    dist.barrier()
    return time.perf_counter() - started


def raw_write(path, tensors):
    with open(f"{path}/{dist.get_rank()}", "wb", buffering=0) as file:
        for tensor in tensors:
            file.write(tensor.numpy())
        os.fsync(file.fileno())


def raw_read(path, tensors):
    with open(f"{path}/{dist.get_rank()}", "rb", buffering=0) as file:
        for tensor in tensors:
            file.readinto(tensor.numpy())


def big(folder, mib, repeats):
    state = big_state(mib, 1.5)
    shards = [tensor.to_local() for tensor in state["model"].values()]
    seconds = {"save": [], "write": [], "load": [], "read": []}
    for repeat in range(repeats + 1):  # the first pair warms up
        raw, run = f"{folder}/raw{repeat}", f"{folder}/run{repeat}"
        os.makedirs(raw, exist_ok=True)
        pairs = [("write", raw_write, raw, shards), ("save", save, run, state)]
        for name, call, *args in pairs if repeat % 2 else reversed(pairs):
            seconds[name].append(timed(call, *args))
        pairs = [("read", raw_read, raw, shards), ("load", load, run, state)]
        for name, call, *args in pairs if repeat % 2 else reversed(pairs):
            for shard in shards:
                shard.zero_()
            seconds[name].append(timed(call, *args))
            assert all(bool((shard == 1.5).all()) for shard in shards)
        dist.barrier()
        if dist.get_rank() == 0 and repeat < repeats:
            shutil.rmtree(raw), shutil.rmtree(run)
    return {name: found[1:] for name, found in seconds.items()}


def resharded(path, mib):
    """Bytes that four ranks read of what two saved, over the bytes they needed."""
    state = big_state(mib, 0.0)
    report = load(path, state)
    return report.bytes_read, sum(tensor.to_local().nbytes for tensor in state["model"].values())


def small(folder, repeats):
    mesh = mesh_of(dist.get_world_size())
    state = {
        f"t{i}": DTensor.from_local(torch.full((16,), float(i)), mesh, [Replicate()], shape=(16,)) for i in range(SMALL)
    }
    saves, loads = [], []
    for repeat in range(repeats + 1):
        path = f"{folder}/small{repeat}"
        saves.append(timed(save, path, {"model": state}))
        loads.append(timed(load, path, {"model": state}))
    return saves[1:], loads[1:]


def copy_all(copies, shards):
    for copy, shard in zip(copies, shards):
        copy.copy_(shard)


def stall(folder, mib, repeats):
    """Seconds that an asynchronous save takes from the caller, and a copy of the same bytes to memory in use."""
    state = big_state(mib, 2.0)
    shards = [tensor.to_local() for tensor in state["model"].values()]
    copies = [torch.empty_like(shard).zero_() for shard in shards]
    stalls, memcpys = [], []
    for repeat in range(repeats + 1):
        memcpys.append(timed(copy_all, copies, shards))
        stalls.append(timed(save, f"{folder}/async{repeat}", state, asynchronous=True))
        wait_for_save()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/async{repeat}")
    return stalls[1:], memcpys[1:]


def planning(tensors, ranks):
    """Seconds in which one of many ranks plans its save, and its load of what all of them saved; simulated.

    Half of the tensors are sharded over all ranks, half over an axis of 32 with 32 replicas.
    """
    mesh = Mesh((32, ranks // 32), ("dp", "tp"))
    entries = []
    for i in range(tensors):
        shape = (4096 + 1024 * (i % 7), 1024)
        placements = [Shard(0), Shard(1)] if i % 2 else [Replicate(), Shard(0)]
        layout = layout_of(mesh, canonical_states("save", placements, mesh, shape), shape)
        entries.append(Entry(f"t{i}", "float32", shape, (), (Holder(layout, tuple(range(ranks))),), ""))
    started = time.perf_counter()
    mine = plan_writes(entries, 5)
    planned = time.perf_counter() - started
    assert mine
    block = block_bytes(sum(Stored(e.dtype, e.shape, ()).nbytes for e in entries))
    sections = {entry.shape: tuple(_sections(entry, ranks)) for entry in entries}
    kept = [Stored(entry.dtype, entry.shape, sections[entry.shape]) for entry in entries]
    other = Mesh((16, ranks // 16), ("dp", "tp"))
    started = time.perf_counter()
    targets = []
    for entry, one in zip(entries, kept):
        layout = layout_of(other, canonical_states("load", [Shard(1), Shard(0)], other, entry.shape), entry.shape)
        targets.append(Target(entry.name, entry.name, one, pieces_of(layout, (3, 5)), "float32"))
    assert plan_reads(targets, block)
    return planned, time.perf_counter() - started


def _sections(entry, ranks):
    """As many sections as ranks, each with its bytes in one file."""
    rows, columns = entry.shape
    high, wide = (32, ranks // 32)
    for r in range(high):
        for c in range(wide):
            box = ((rows * r // high, rows * (r + 1) // high), (columns * c // wide, columns * (c + 1) // wide))
            nbytes = 4 * (box[0][1] - box[0][0]) * (box[1][1] - box[1][0])
            yield Section(box, f"{r * wide + c:05d}.safetensors", 0, nbytes, "0" * 8 * -(-nbytes // 65536))


def median_ratio(above, below):
    return statistics.median(a / b for a, b in zip(above, below))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="big,small,async,plan")
    options = parser.parse_args()
    figures = {}
    folder = tempfile.mkdtemp(prefix="vescale-checkpoint-")
    try:
        if "big" in options.only:
            seconds = run_ranks(2, big, folder, options.mib, options.repeats, timeout=200)[0]
            figures["save_vs_raw_write"] = median_ratio(seconds["write"], seconds["save"])
            figures["load_vs_raw_read"] = median_ratio(seconds["read"], seconds["load"])
            figures["seconds"] = {name: [round(s, 3) for s in found] for name, found in seconds.items()}
            read = run_ranks(4, resharded, f"{folder}/run{options.repeats}", options.mib, timeout=100)
            figures["reshard_bytes_read_vs_needed"] = sum(a for a, _ in read) / sum(b for _, b in read)
        if "small" in options.only:
            saves, loads = run_ranks(2, small, folder, options.repeats, timeout=100)[0]
            figures["small_save_us"] = statistics.median(saves) / SMALL * 1e6
            figures["small_load_us"] = statistics.median(loads) / SMALL * 1e6
        if "async" in options.only:
            stalls, memcpys = run_ranks(2, stall, folder, options.mib // 2, options.repeats, timeout=200)[0]
            figures["async_stall_vs_memcpy"] = median_ratio(stalls, memcpys)
        if "plan" in options.only:
            figures["plan_save_s"], figures["plan_load_s"] = planning(1024, 1024)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    missed = [name for name, value in figures.items() if name in BUDGETS and not _within(name, value)]
    for name, value in figures.items():
        if name in BUDGETS:
            print(f"{name:32} {value:8.3f}  budget {BUDGETS[name][0]}{'  MISSED' if name in missed else ''}")
    print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}))
    return 1 if missed else 0


def _within(name, value):
    budget, larger_is_better = BUDGETS[name]
    return value >= budget if larger_is_better else value <= budget


if __name__ == "__main__":
    sys.exit(main())
