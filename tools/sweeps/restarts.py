"""Jobs of `torchrun --max-restarts 3` of which a rank is killed at random moments of saving, overwriting, loading and
training: does every attempt go on from the newest whole step, and is each committed step the one of an undisturbed run?

    python tools/sweeps/restarts.py run FILE [--seed 0] [--jobs 14]    a line of JSON per job, of three kills each
    python tools/sweeps/restarts.py tell FILE                          counts, and what does not hold

A job that FILE has is not run again. Every second one shares torchrun's store with its ranks, as torchrun does unless
TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set; there torch's own start may find addresses of dead ranks. Such attempts, in
which not all ranks made their groups, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import vescale
import vescale_checkpoint
from vescale_testkit import free_port

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sweeps.recorded import resumed, tree

STEPS, RESTARTS, START_S, LIMIT_S = 6, 3, 30, 300
PHASES = {"training": 0.03, "saving": 0.06, "overwriting": 0.06, "loading": 0.06}
"""What a rank is killed in, and in how many seconds from its beginning."""
PLANS = {
    "zero": {"mesh": {"dp": 2}, "zero": 3},
    "stages": {"mesh": {"pp": 2}, "pipeline": vescale.Pipeline("pp", ["2"], microbatches=2)},
}


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def built(plan: vescale.Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    return vescale.parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


def kills(seed: int, job: int) -> list[dict]:
    """What is killed in each attempt but the last: a rank, in a phase of a step, after so many seconds."""
    chance, found = random.Random(f"{seed} {job}"), []
    for attempt in range(RESTARTS):
        phase = chance.choice([*PHASES] if attempt else [*PHASES][:-1])
        ahead = chance.randrange(2)
        found.append(
            {"phase": phase, "rank": chance.randrange(2), "ahead": ahead, "s": chance.random() * PHASES[phase]}
        )
    return found


def train(folder: str, plan: str, asynchronous: bool, planned: list[dict]) -> None:
    """One rank of one attempt: loads the newest step, and trains; saves each step, and each second one again."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    kill = planned[attempt] if attempt < len(planned) and planned[attempt]["rank"] == rank else None
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
    model, optimizer = built(vescale.Plan(parameters={"*": {}}, **PLANS[plan]))
    print(f"came {os.getpid()}", flush=True)
    state = {"model": model, "optimizer": optimizer, "step": 0}

    def begins(phase: str, ahead: int) -> None:
        if kill is not None and (phase, ahead >= kill["ahead"]) == (kill["phase"], True):
            threading.Timer(kill["s"], os.kill, (os.getpid(), signal.SIGKILL)).start()

    newest = max(committed(folder), default=0)
    begins("loading", 1)
    if newest:
        vescale.load(folder, state)
    print(f"went on from {state['step']} of {newest}", flush=True)
    began = state["step"]
    for step in range(began + 1, STEPS + 1):
        begins("training", step - began)
        torch.manual_seed(step)
        model(torch.randn(32, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        begins("saving", step - began)
        vescale.save(folder, state, step=step, asynchronous=asynchronous)
        if step % 2 == 0:
            begins("overwriting", step - began)
            vescale.save(folder, state, step=step, overwrite=True, asynchronous=asynchronous)
    vescale_checkpoint.close()
    if kill is not None:
        time.sleep(0.2)  # its moment may come after the last step
    print("done", flush=True)


def committed(folder: str | Path) -> list[int]:
    return [int(path.parent.name[5:]) for path in Path(folder).glob("step-????????/manifest.json")]


def run(seed: int, job: int) -> dict:
    plan, asynchronous = (*PLANS,)[job // 2 % 2], bool(job // 4 % 2)
    planned = kills(seed, job)
    with tempfile.TemporaryDirectory() as top:
        env = os.environ | {"OMP_NUM_THREADS": "1", "VESCALE_HANG_DIR": f"{top}/hang"}
        if job % 2:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        folder = f"{top}/run"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
        command += [f"--log-dir={top}/logs", "--redirects=3", __file__, "train", folder, plan, str(int(asynchronous))]
        command += [json.dumps(planned)]
        said = subprocess.run(command, env=env, timeout=LIMIT_S, capture_output=True, text=True, check=False)
        logs = {
            tuple(map(int, re.findall(r"attempt_(\d+)/(\d+)/", str(path))[0])): path.read_text(errors="replace")
            for path in sorted(Path(top, "logs").glob("*/attempt_*/*/std*.log"))
            if path.name == "stdout.log"
        }
        errors = {
            tuple(map(int, re.findall(r"attempt_(\d+)/(\d+)/", str(path))[0])): path.read_text(errors="replace")
            for path in sorted(Path(top, "logs").glob("*/attempt_*/*/stderr.log"))
        }
        lost = {attempt for attempt, rank in logs if not job % 2 and "came" not in logs[attempt, rank]}
        is_cut = max(attempt for attempt, _ in logs) in lost
        wrong = judged(logs, errors, planned, lost) + compared(folder, is_cut)
    return {
        "job": job, "plan": plan, "asynchronous": asynchronous, "shared_store": not job % 2, "kills": planned,
        "status": said.returncode, "attempts": 1 + max(attempt for attempt, _ in logs), "wrong": wrong, "tree": tree(),
        "lost_by_torch": sorted(lost),
        "errors": {f"{a}/{r}": text[-1500:] for (a, r), text in errors.items()},
    }  # fmt: skip


def judged(logs: dict, errors: dict, planned: list[dict], lost: set[int]) -> list[str]:
    """What is wrong of what attempts said, but for those that were lost by torch's start."""
    wrong = []
    for (attempt, rank), text in logs.items():
        if attempt in lost:
            continue
        for began, newest in re.findall(r"went on from (\d+) of (\d+)", text):
            if began != newest:
                wrong.append(f"attempt {attempt} rank {rank} went on from {began}, and {newest} was committed")
        pids = {pid for (other, _), said in logs.items() if other == attempt for pid in re.findall(r"came (\d+)", said)}
        told = errors.get((attempt, rank), "")
        strange = {*re.findall(r"\(process (\d+)\)", told)} - pids
        victim = planned[attempt]["rank"] if attempt < len(planned) else None
        blamed = {*map(int, re.findall(r"first cause: rank (\d)", told))} - {victim}
        if strange or blamed:
            wrong.append(f"attempt {attempt} rank {rank} tells of processes {strange}, ranks {blamed}: {told[-1000:]}")
    last = max(attempt for attempt, _ in logs)
    if last not in lost and not all("done" in logs[last, rank] for rank in (0, 1)):
        wrong.append(f"the last attempt, {last}, did not end: {errors.get((last, 0), '')[-2000:]}")
    return wrong


def compared(folder: str, is_cut: bool) -> list[str]:
    """Committed steps that are not those of a run on one rank, which nothing disturbs."""
    wrong, found = [], committed(folder)
    if sorted(found) != list(range(1, len(found) + 1 if is_cut else STEPS + 1)):
        wrong.append(f"steps {sorted(found)} are committed")
    alone, optimizer = built(vescale.Plan(mesh={}, parameters={"*": {}}))
    model, other = built(vescale.Plan(mesh={}, parameters={"*": {}}))
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        alone(torch.randn(32, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in found:
            try:
                vescale.load(folder, {"model": model, "optimizer": other, "step": 0}, step=step)
                for one, its in zip(alone.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(its, one, rtol=1e-4, atol=1e-5)
            except (vescale.VescaleError, AssertionError) as error:
                wrong.append(f"step {step}: {type(error).__name__}: {error}"[:1000])
    return wrong


def tell(lines: list[dict]) -> None:
    phases = Counter(kill["phase"] for line in lines for kill in line["kills"])
    lost = {
        shared: sum(len(one["lost_by_torch"]) for one in lines if one["shared_store"] == shared)
        for shared in (True, False)
    }
    wrong = {line["job"]: line["wrong"] for line in lines if line["wrong"]}
    told = {"jobs": len(lines), "kills": phases, "attempts": sum(line["attempts"] for line in lines)}
    told |= {"lost by torch's start": {"shared store": lost[True], "own": lost[False]}, "wrong": wrong}
    print(json.dumps(told, indent=1))


def main() -> int:
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3], sys.argv[4] == "1", json.loads(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("run", "tell"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=14)
    options = parser.parse_args()
    jobs = range(options.jobs) if options.do == "run" else ()
    lines = resumed(options.file, "job", jobs, partial(run, options.seed), ("errors", "tree"))
    if options.do == "tell":
        tell(lines)
    return any(line["wrong"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
