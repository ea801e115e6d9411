"""Trains on two nodes of two ranks, loses a rank, then a node, gets it back, and shows that nothing of it is seen in
the losses.

    python examples/elastic/train.py outputs/elastic      # a second argument: the ranks of a node

A node is an agent of torchrun on this machine. Nothing here is veScale's but `vescale train` and its configuration:
torchrun finds out who is lost and starts the ranks that are left, which generate a plan for as many and go on from the
newest step, which is in the memory of the nodes (here a folder for each), each part also on the other one.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).with_name("config.toml")
PATIENCE_S = 240.0


def main(folder: Path, ranks: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = (f"{i * i} is the square of {i}, which is {i % 7} more than sevens. " for i in range(3000))
    (folder / "book.txt").write_text("".join(text))
    port = random.randrange(15000, 30000)  # below those that a system gives to connections
    run = folder / "run"
    nodes = [started(folder, run, port, ranks) for _ in range(2)]
    try:
        wait_for(run, 10, nodes)
        os.kill(ranks_of(nodes[1])[0], signal.SIGKILL)
        print("a rank was killed", flush=True)
        wait_for(run, 18, nodes)
        for process in (*ranks_of(nodes[1]), nodes[1].pid):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder / "memory-1")
        print("a node was killed, and its memory is gone", flush=True)
        wait_for(run, 26, nodes[:1])
        nodes.append(started(folder, run, port, ranks))
        print("a node came", flush=True)
        if nodes[0].wait():
            raise SystemExit(f"torchrun ended with {nodes[0].returncode}: see {folder}/node-*.log")
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
            node.wait()
    subprocess.run([sys.executable, *command(folder, folder / "alone")], check=True, stderr=subprocess.DEVNULL)
    across, alone = losses(run), losses(folder / "alone")
    print(*[line for log in sorted(folder.glob("node-*.log")) for line in told(log)], sep="\n")
    same = sum(across[step] == alone[step] for step in alone)
    print(f"{same} of {len(alone)} losses are those of one device that nobody disturbed, to the bit")
    if same < len(alone) or len(across) != len(alone):
        raise SystemExit("they are not all")
    if left := [*folder.glob("memory-*/*")]:
        raise SystemExit(f"left in memory: {left}")


def command(folder: Path, run: Path) -> list[str]:
    given = {"data.text": folder / "book.txt", "data.cache": folder / "tokens", "checkpoint.folder": run}
    return ["-m", "vescale", "train", str(CONFIG), *(f"{key}={value}" for key, value in given.items())]


def started(folder: Path, run: Path, port: int, ranks: int) -> subprocess.Popen:
    """An agent of torchrun with its ranks; the first hosts the place where agents meet, and must live."""
    options = ["--nnodes=1:2", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    options += ["--rdzv-id=elastic", "--rdzv-backend=c10d"]
    place = len(list(folder.glob("node-*.log")))
    options += [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf=last_call_timeout=5,is_host={int(place == 0)}"]
    log = folder / f"node-{place}.log"
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    more["VESCALE_PROTECT_DIR"] = str(folder / f"memory-{place}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *command(folder, run)]
    return subprocess.Popen(torchrun, stdout=log.open("w"), stderr=subprocess.STDOUT, env=os.environ | more)


def ranks_of(node: subprocess.Popen) -> list[int]:
    return [int(one) for one in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]


def wait_for(run: Path, step: int, nodes: list[subprocess.Popen]) -> None:
    until = time.monotonic() + PATIENCE_S
    while max(losses(run), default=0) < step:
        if time.monotonic() > until or any(node.poll() is not None for node in nodes):
            raise SystemExit(f"step {step} does not come: see {run.parent}/node-*.log")
        time.sleep(0.02)


def losses(run: Path) -> dict[int, float]:
    """Step -> loss; a line that is being written is left out."""
    lines = (run / "metrics.jsonl").read_text().splitlines(True) if (run / "metrics.jsonl").exists() else []
    return {told["step"]: told["loss"] for line in lines if line.endswith("\n") for told in [json.loads(line)]}


def told(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "vescale train:" in line or " is back from memory" in line]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
