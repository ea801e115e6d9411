"""Ranks of which one does something else (`watched_ways.py`), under torchrun: does each way end, and what is said?

    python tools/sweeps/watchdog.py run FILE [--seed 0] [--machines 2] [--only WAY ...]    a line of JSON per way
    python tools/sweeps/watchdog.py tell FILE                                              a table

The seed chooses the layout and the culprit of each way. A way that FILE has is not run again. A way holds if all ranks
end within the bound, the text names the culprit and a line of it, and no process is left behind; or if the training
gives what it gives without the way, to the bit, as it must where that is legal. Machines are namespaces of Linux
(`unshare`, as root): each has its own processes, host's name and shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from vescale_testkit import free_port

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sweeps import watched_training as training
from sweeps import watched_ways as ways
from sweeps.recorded import resumed, tree

HANG_S, PATIENCE_S, TIMEOUT_S = 6, 10, 30
"""Bounds: of a wait for a communication, of one in a save or load, and of the process group."""
BOUND_S, LIMIT_S = TIMEOUT_S + 35, 100
"""In which all are to have ended, and after which they are killed. torchrun gives a stopped rank 30 s to end."""
APART = ("--pid", "--fork", "--kill-child", "--mount", "--uts", "--mount-proc")
RANK_ALONE = {"exits", "exits_at_once", "killed", "stopped", "holds_the_interpreter", *ways.MADE}
"""Ways of which only the rank can be known."""


def run(name: str, seed: int, machines: int, undisturbed: dict[str, str]) -> dict:
    """What came of a way. `undisturbed`: by layout, what a training gives in which nothing happens; made here."""
    chance = random.Random(f"{seed} {name}")
    span = slice(1, 3) if name in ways.SHARDED else slice(3) if name in ways.SHARED else slice(None)
    layout = chance.choice(training.LAYOUTS[span])
    if layout not in undisturbed:
        with tempfile.TemporaryDirectory() as folder:
            text = started("nothing", layout, 0, folder, machines)[0]
        (undisturbed[layout],) = {*re.findall(r"digest ([0-9a-f]{64})", text)}
    culprit = chance.randrange(2)
    with tempfile.TemporaryDirectory() as folder:
        return judged(name, layout, culprit, undisturbed[layout], *started(name, layout, culprit, folder, machines))


def started(name: str, layout: str, culprit: int, folder: str, machines: int) -> tuple[str, list, float, list[int]]:
    """What was printed, exit statuses, when all had ended, and what is left."""
    mark = secrets.token_hex(8)
    env = os.environ | {
        "WATCHED": mark, "WATCHED_TIMEOUT_S": str(TIMEOUT_S), "VESCALE_HANG_SECONDS": str(HANG_S),
        "VESCALE_CHECKPOINT_PATIENCE_S": str(PATIENCE_S), "VESCALE_HANG_DIR": f"{folder}/hang", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", f"--nproc-per-node={2 // machines}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]  # fmt: skip
    agents, files = [], [Path(folder, f"said{machine}") for machine in range(machines)]
    for machine, path in enumerate(files):
        apart = f'hostname machine{machine}; mount -t tmpfs none /dev/shm; exec "$@"'
        alone = ["unshare", *APART, "sh", "-c", apart, "sh"] if machines > 1 else []
        with path.open("wb") as file:
            rank = [f"--local-addr=127.0.0.{machine + 1}", training.__file__, name, layout, str(culprit), folder]
            kwargs = {"env": env, "stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
            agents.append(subprocess.Popen([*alone, *command, *rank], **kwargs))
    until = time.monotonic() + LIMIT_S
    for agent in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(max(until - time.monotonic(), 0.1))
    ended, statuses = time.time(), [agent.poll() for agent in agents]
    time.sleep(0.5)
    left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in environment(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for agent in agents:
        agent.wait()
    return "\n".join(path.read_text(errors="replace") for path in files), statuses, ended, left


def environment(pid: int) -> str:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def judged(
    name: str, layout: str, culprit: int, undisturbed: str, text: str, statuses: list, ended: float, left: list
) -> dict:
    departed = [float(one) for one in re.findall(r"departs (\d+\.\d+)", text)]
    digests = {*re.findall(r"digest ([0-9a-f]{64})", text)}
    told = [line for line in text.splitlines() if re.search(rf"\brank ?{culprit}\b", line)]
    files = re.findall(r'watched_(ways|training)\.py(?::|", line )\d+', "\n".join(told))
    known = {
        "way": name, "layout": layout, "culprit": culprit, "statuses": statuses, "seconds": None, "left": len(left),
        "rank": bool(re.search(rf"\brank[ :]*{culprit}\b", text)),
        "line": "of the way" if "ways" in files else "later" if files else "",
        "cause": "; ".join(dict.fromkeys(re.findall(r"first cause: ([^\n]*)", text)))[:600], "tree": tree(),
    }  # fmt: skip
    if departed:
        known["seconds"] = round(ended - max(departed), 1)
    if name in ways.LEGAL or not any(statuses):
        known["holds"] = not any(statuses) and digests == {undisturbed}
    else:
        known["holds"] = None not in statuses and any(statuses) and known["rank"]
        known["holds"] &= bool(known["line"]) or name in RANK_ALONE
    known["holds"] &= not left and (known["seconds"] or 0) < BOUND_S
    return known | {"said": text[-6000:]}


def tell(lines: list[dict]) -> None:
    print("| way | layout | culprit | seconds | rank named | line named | holds |\n|---|---|---|---|---|---|---|")
    for one in lines:
        cells = (one[key] for key in ("way", "layout", "culprit", "seconds", "rank", "line", "holds"))
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("run", "tell"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=sorted(ways.WAYS), default=[*ways.WAYS])
    options = parser.parse_args()
    departs = partial(run, seed=options.seed, machines=options.machines, undisturbed={})
    lines = resumed(options.file, "way", options.only if options.do == "run" else (), departs, ("said", "tree"))
    if options.do == "tell":
        tell(lines)
    return not all(one["holds"] for one in lines)


if __name__ == "__main__":
    sys.exit(main())
