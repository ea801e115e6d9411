"""What starting costs a rank, by how many ranks there are: counted on a fake world, from which nothing is sent.

    python benchmarks/planning/startup.py [--ranks N ...]

Per world: process groups that this rank makes and asks for, requests that it makes of the store, CPU seconds and memory
of the mesh, of `parallelize` and of the first step. Each world has a process of its own. Status 1 where a rank's own
part (`parallelize`, a step, groups per axis, requests) grows with the ranks; the last line is JSON.

The mesh itself names every rank, and torch enumerates the subgroups of all ranks when it makes one: that part grows,
and is shown apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from time import process_time

RANKS = (64, 1024, 16384)
GROWS = 1.5
"""A rank's own part at the most ranks, over that at the fewest: more is growth and not noise."""
PER_PEER = 2.5e-4
"""CPU seconds of a step per rank of the data axis, with which this one exchanges: what the fake world copies for it."""
TENSOR, REPLICAS = 8, 2
OWN = ("parallelize", "first step", "second step")


def _resident() -> float:
    """MiB, now: the peak would be that of the imports."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def started(ranks: int) -> dict:
    """As rank 0 of a world of `ranks`."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # registers the backend
    from torch import nn

    import vescale
    from vescale import Plan, Shard
    from vescale_plans._apply.join import make_mesh

    requests: Counter[str] = Counter()

    class Store(dist.Store):
        """Knows every key, and counts who asks."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, bytes] = {}

        def set(self, key, value) -> None:
            requests["set"] += 1
            self.kept[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key) -> bytes:
            requests["get"] += 1
            return self.kept.get(key, b"0")

        def add(self, key, amount) -> int:
            requests["add"] += 1
            return ranks

        def wait(self, keys, timeout=None) -> None:
            requests["wait"] += 1

        def check(self, keys) -> bool:
            requests["check"] += 1
            return True

    dist.init_process_group("fake", store=Store(), rank=0, world_size=ranks)
    made: Counter[str] = Counter()
    _count(made, torch.distributed.distributed_c10d, "_new_process_group_helper")

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)])
    column, row = {"tp": Shard(0)}, {"tp": Shard(1)}
    plan = Plan(
        mesh={"replica": REPLICAS, "dp": ranks // (REPLICAS * TENSOR), "tp": TENSOR},
        parameters={"*.0.weight": column, "*.0.bias": column, "*.2.weight": row, "*": {}},
        data_axis=("replica", "dp"),
        zero=3,
    )
    found, clock, held = {}, process_time(), _resident()

    def note(part: str) -> None:
        nonlocal clock, held
        now, memory = process_time(), _resident()
        found[part] = {
            "cpu s": round(now - clock, 3), "MiB": round(memory - held, 1), "groups": made.total(),
            "requests": requests.total(),
        }  # fmt: skip
        made.clear(), requests.clear()
        clock, held = now, memory

    make_mesh(plan)
    note("mesh")
    model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
    note("parallelize")
    for part in ("first step", "second step"):
        model(torch.ones(ranks, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(part)
    return found


def _count(made: Counter[str], module, name: str) -> None:
    inner = getattr(module, name)

    def counted(*args, **kwargs):
        made[name] += 1
        return inner(*args, **kwargs)

    setattr(module, name, counted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(started(arguments.one)))
        return 0
    results = {}
    for ranks in arguments.ranks:
        command = [sys.executable, __file__, "--one", str(ranks)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[ranks] = json.loads(told.stdout.splitlines()[-1])
        for part, figures in results[ranks].items():
            print(f"{ranks:6} ranks  {part:12}", "  ".join(f"{name} {value}" for name, value in figures.items()))
    few, many = results[min(results)], results[max(results)]
    slack = {"MiB": 16, "cpu s": PER_PEER * max(results) / (REPLICAS * TENSOR)}
    grown = [
        f"{part}: {name} {few[part][name]} -> {many[part][name]}"
        for part in OWN
        for name in few[part]
        if many[part][name] > GROWS * few[part][name] + slack.get(name, 0)
    ]
    for line in grown:
        print("grows with the ranks:", line)
    print(json.dumps({"ranks": results, "grown": grown}))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
