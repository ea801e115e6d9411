"""A contender: a process that trains when it is told to. Imports torch alone; either environment runs it.

`python ours.py MODE LAYOUT` and `python theirs.py BACKEND LAYOUT` build their step, print one JSON line with what they
are, and then answer each line of standard input: `N` runs N steps and prints `{"cpu_ms", "wall_ms", "losses"}`, the
times per step; `profile` runs one step under torch's profiler and prints how often what was called; the end of
standard input ends them. So contenders of different environments take turns within a round, milliseconds apart, and
their ratios hold on a machine that is shared. The collector of garbage is off, one thread.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from setting import LAYOUTS, Layout


def join(layout: Layout) -> int:
    """Joins the process group that the layout needs; returns this process's rank."""
    rank = int(os.environ.get("RANK", 0))
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(layout.ranks))
    if layout.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())
    elif layout.ranks > 1:
        dist.init_process_group("gloo")
    return rank


def serve(make: Callable[[str, Layout], tuple[dict[str, Any], Callable[[int], float]]]) -> None:
    """Runs `make(mode, layout)`, which gives what it is and a step that returns the loss, and answers."""
    mode, layout = sys.argv[1], LAYOUTS[sys.argv[2]]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    answers, sys.stdout = sys.stdout, sys.stderr
    about, step = make(mode, layout)
    done = 0
    gc.disable()
    say(answers, {"torch": torch.__version__, **about})
    for line in sys.stdin:
        if line.strip() == "profile":
            say(answers, profiled(step, done))
            done += 1
            continue
        count = int(line)
        losses = []
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            losses.append(step(done))
            done += 1
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        gc.collect()
        say(answers, {"cpu_ms": 1e3 * cpu / count, "wall_ms": 1e3 * wall / count, "losses": [float(x) for x in losses]})
    sys.stdout.flush()
    os._exit(0)  # gloo's threads wait for peers that end at their own time


def say(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def profiled(step: Callable[[int], Any], number: int) -> dict[str, Any]:
    """One step under cProfile and torch's profiler: calls, and where the host's time goes."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step(number)
    events = prof.key_averages()
    python = cProfile.Profile()
    python.runcall(step, number)
    rows = pstats.Stats(python).stats.items()
    own = sorted(((own, calls, name) for name, (_, calls, own, _, _) in rows), reverse=True)[:25]
    return {
        "aten": sum(each.count for each in events if each.key.startswith("aten::")),
        "collectives": sum(each.count for each in events if "c10d" in each.key),
        "python calls": sum(calls for _, (_, calls, _, _, _) in rows),
        "aten by own ms": {
            each.key: [each.count, round(each.self_cpu_time_total / 1e3, 3)]
            for each in sorted(events, key=lambda each: -each.self_cpu_time_total)[:15]
        },
        "python by own ms": [
            [f"{os.path.basename(file)}:{line} {function}", calls, round(1e3 * own, 3)]
            for own, calls, (file, line, function) in own
        ],
    }
