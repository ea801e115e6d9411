"""Jobs of two torchrun agents with two ranks each, of which one or two ranks are killed (SIGKILL) again and again, at
random moments: does training go on from memory, and end on the bits of one device that nobody disturbs?

    python tools/sweeps/kills.py run FILE [--seed 0] [--jobs 6] [--kills 5]    a line of JSON per job
    python tools/sweeps/kills.py tell FILE                                     counts, and what does not hold

A node is an agent, with a folder of its own in /dev/shm. Each attempt changes its plan in the middle, by `reshape`;
jobs take turns in which plan is first. Every third job is plain torch's (DDP, from the first step again), which tells
how long torchrun's own restart takes. A job that FILE has is not run again. Attempts in which a rank never made its
groups, as torch's own start failed, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testkit import free_port

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sweeps.recorded import resumed, tree

STEPS, EVERY, SAVES, RESHAPED, LIMIT_S, GROUP_S = 24, 3, 10, 12, 600, 60
PHASES = {
    "load": 0.2, "forward": 0.01, "backward": 0.02, "reduction": 0.005, "optimizer": 0.01, "protect": 0.03,
    "save": 0.05, "reshape": 0.1, "end": 0.05,
}  # fmt: skip
"""What a rank is killed in, and in how many seconds from its beginning."""
SPLITS = {"batch": 4, "hidden": 2}
CUT = {"0.*": {"tp": vescale.Shard(0)}, "3.weight": {"tp": vescale.Shard(1)}, "*": {}}
PLANS = {
    "zero": {"mesh": {"dp": 4}, "zero": 3, "parameters": {"*": {}}},
    "tensor": {"mesh": {"dp": 2, "tp": 2}, "zero": 1, "parameters": CUT},
}
PLAIN = "plain torch"
JOBS = [*PLANS, PLAIN]


def planned(seed: int, job: int, kills: int, phases: list[str]) -> list[dict]:
    chance, found = random.Random(f"{seed} {job}"), []
    for number in range(kills):
        phase = chance.choice(phases if number else [one for one in phases if one != "load"])
        ahead = chance.randrange(2 * EVERY)
        ranks = chance.sample(range(4), chance.choice((1, 1, 2)))
        found.append({"phase": phase, "ahead": ahead, "s": chance.random() * PHASES[phase], "ranks": ranks})
    return found


class Attempt:
    """One attempt of a rank: what it is killed in, and what it has told. Without a folder it is nobody's."""

    def __init__(self, top: Path | None = None, kills: list[dict] = ()) -> None:
        self.top, self.ahead = top, 0
        if top is not None:
            self.rank, self.number = dist.get_rank(), len([*top.glob("killed-*")])
            mine = self.number < len(kills) and self.rank in kills[self.number]["ranks"]
            self.kill = kills[self.number] if mine else None

    def begins(self, phase: str, ahead: int = STEPS) -> None:
        if self.top is not None and self.kill and phase == self.kill["phase"] and ahead >= self.kill["ahead"]:
            threading.Timer(self.kill["s"], self.die).start()

    def die(self) -> None:
        (self.top / f"killed-{self.number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, text: str) -> None:
        if self.top is not None and self.rank == 0:
            with (self.top / "log").open("a") as file:
                print(self.number, time.time(), text, file=file)


def made(plan: dict | None) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if plan is not None:
        vescale.parallelize(vescale.Plan(**plan), model, optimizer)
    return {"model": model, "optimizer": optimizer, "step": 0}


def steps(state: dict, attempt: Attempt, then: dict | None = None) -> Iterator[int]:
    """Trains, and yields the number of each step that is done. From step RESHAPED the plan is `then`, if any."""
    began = state["step"]
    for step in range(began, STEPS):
        torch.manual_seed(step)
        if then and step >= RESHAPED:
            attempt.begins("reshape")
            vescale.reshape(state["model"], state["optimizer"], vescale.Plan(**then))
            then = None
        attempt.begins("forward", step - began)
        loss = state["model"](torch.randn(32, 64)).square().mean()
        attempt.begins("backward", step - began)
        attempt.ahead = step - began
        loss.backward()
        attempt.begins("optimizer", step - began)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] = step + 1
        attempt.tell(f"step {step + 1}")
        yield step + 1


def train(top: Path, plan: str, kills: list[dict]) -> None:
    """One rank of one attempt."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_S))
    attempt, run = Attempt(top, kills), top / "run"
    attempt.tell("came")
    if plan == PLAIN:
        state = made(None)
        state["model"] = nn.parallel.DistributedDataParallel(state["model"])
        for _ in steps(state, attempt):
            pass
        return
    first, then = PLANS[plan], next(one for name, one in PLANS.items() if name != plan)
    with vescale.reproducible(SPLITS):
        state = made(first)
        state["model"][3].weight.register_hook(lambda _: attempt.begins("reduction", attempt.ahead))
        attempt.begins("load")
        if vescale.latest(run) is not None:
            vescale.load(run, state)
        attempt.tell(f"from {state['step']}")
        with vescale.protect(run, state, every=EVERY) as protected:
            for step in steps(state, attempt, then):
                attempt.begins("protect", step)
                protected.step()
                if step % SAVES == 0:
                    attempt.begins("save", step)
                    vescale.save(run, state, overwrite=True, asynchronous=step % (2 * SAVES) == 0)
            attempt.begins("end")
        time.sleep(0.2 if attempt.kill else 0)  # its moment may come after the last step
        whole = {name: one.detach().full_tensor() for name, one in state["model"].named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, top / "final.pt")


def started(top: Path, memory: Path, node: int, port: int, arguments: list[str], restarts: int) -> subprocess.Popen:
    """An agent with two ranks."""
    options = [
        "--nnodes=2",
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",
        "--rdzv-id=kills",
        "--rdzv-backend=c10d",
    ]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(node == 0)}", "--local-addr=127.0.0.1"]
    env = os.environ | {
        "OMP_NUM_THREADS": "1", "VESCALE_HANG_DIR": f"{top}/hang", "VESCALE_PROTECT_DIR": str(memory / f"node-{node}"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, "train", str(top), *arguments]
    return subprocess.Popen(command, env=env, stdout=(top / f"node-{node}").open("w"), stderr=subprocess.STDOUT)


def run(seed: int, count: int, job: int) -> dict:
    plan = JOBS[job % len(JOBS)]
    kills = planned(seed, job, count, [*PHASES] if plan != PLAIN else ["forward", "backward", "optimizer"])
    memory, began = Path(tempfile.mkdtemp(prefix="kills-", dir="/dev/shm")), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        top, port = Path(folder), free_port()
        nodes = [started(top, memory, i, port, [plan, json.dumps(kills)], 2 * count + 2) for i in (0, 1)]
        try:
            status = [node.wait(max(1.0, began + LIMIT_S - time.monotonic())) for node in nodes]
        except subprocess.TimeoutExpired:
            status = ["hangs"]
        finally:
            for node in nodes:
                node.terminate()
                node.wait()
        told = judged(top, plan, status)
        left = [str(path.relative_to(memory)) for path in memory.rglob("*") if path.is_file() or path.is_symlink()]
        said = "".join((top / f"node-{i}").read_text() for i in (0, 1))
    shutil.rmtree(memory)
    told["wrong"] += [f"left in memory: {left}"] if left else []
    told["back"] = re.findall(r"is back from memory: .*; ([\d.]+) s", said)
    line = {
        "job": job,
        "plan": plan,
        "kills": kills,
        "status": status,
        "seconds": round(time.monotonic() - began),
        **told,
    }
    return line | {"tree": tree(), "said": said[-4000:] if told["wrong"] else ""}


def judged(top: Path, plan: str, status: list) -> dict:
    """What the attempts told: kills, steps that were done again after each, seconds from a kill to the next step."""
    rows = [line.split(maxsplit=2) for line in (top / "log").read_text().splitlines()]
    wrong, again, waits, last, done = [], [], [], {}, 0
    came = Counter(number for number, _, text in rows if text == "came")
    for number, at, text in rows:
        word, _, value = text.partition(" ")
        if word == "from":
            again.append(done - int(value))
            last["from"] = float(at)
        elif word == "step":
            killed = top / f"killed-{int(number) - 1}"
            if number not in last and killed.exists():
                waits.append(round(float(at) - killed.stat().st_mtime, 1))
            last[number], done = True, int(value)
    if status != [0, 0]:
        wrong.append(f"the agents ended with {status}")
    elif plan != PLAIN:
        final, alone = torch.load(top / "final.pt"), undisturbed()
        wrong += [f"{name} is not one device's" for name, one in alone.items() if not torch.equal(one, final[name])]
    killed = len([*top.glob("killed-*")])
    lost = sum(came.values()) - 1 - killed
    return {"killed": killed, "again": again[1:], "waits": waits, "other_starts": lost, "wrong": wrong}


@cache
def undisturbed() -> dict[str, torch.Tensor]:
    with vescale.reproducible(SPLITS):
        state = made(None)
        for _ in steps(state, Attempt()):
            pass
    return {name: one.detach() for name, one in state["model"].named_parameters()}


def tell(lines: list[dict]) -> None:
    plain = sorted(wait for line in lines if line["plan"] == PLAIN for wait in line["waits"])
    lines = [line for line in lines if line["plan"] != PLAIN]
    again = [count for line in lines for count in line["again"]]
    waits = sorted(wait for line in lines for wait in line["waits"])
    told = {
        "jobs": len(lines), "kills": sum(line["killed"] for line in lines),
        "in": Counter(kill["phase"] for line in lines for kill in line["kills"][: line["killed"]]),
        "of two ranks": sum(len(kill["ranks"]) > 1 for line in lines for kill in line["kills"][: line["killed"]]),
        "steps again": Counter(again), "seconds to the next step": waits[len(waits) // 2 :][:1] + waits[-1:],
        "of plain torch": plain[len(plain) // 2 :][:1] + plain[-1:],
        "seconds of that from memory to disk": max((float(s) for line in lines for s in line["back"]), default=None),
        "starts beside": sum(line["other_starts"] for line in lines),
        "wrong": {line["job"]: line["wrong"] for line in lines if line["wrong"]},
    }  # fmt: skip
    print(json.dumps(told, indent=1))


def main() -> int:
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("run", "tell"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    jobs = range(options.jobs) if options.do == "run" else ()
    lines = resumed(options.file, "job", jobs, partial(run, options.seed, options.kills), ("said", "tree"))
    if options.do == "tell":
        tell(lines)
    return any(line["wrong"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
