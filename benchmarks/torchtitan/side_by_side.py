"""veScale and TorchTitan on the same Llama, sequence, batch, mesh, dtype, seed, optimizer and steps: `make torchtitan`.

    python benchmarks/torchtitan/side_by_side.py all
    python benchmarks/torchtitan/side_by_side.py host [--rounds N]    # host ms per step on a fake group, TP 8 + SP
    python benchmarks/torchtitan/side_by_side.py gloo [--rounds N]    # CPU ms per rank, and the losses of each layout
    python benchmarks/torchtitan/side_by_side.py profile [--only L]   # what each side calls in a step (TP 8 + SP)
    python benchmarks/torchtitan/side_by_side.py lines                # lines of code that a user writes

TorchTitan runs in an environment of its own: the Python that TORCHTITAN_PYTHON names, or `.venv-torchtitan/bin/python`
(`setup` makes it). Absent, its columns say "skipped". Contenders are processes that take turns within a round
(contender.py); a ratio is the median over the rounds of the ratio within a round, of CPU time, which a neighbour on the
machine disturbs least. Every line of figures is kept in results/ with `--write`; the last line is JSON. Exit status 1
when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from lines import lines
from setting import LAYOUTS

from vescale_testkit import free_port

HERE = Path(__file__).absolute().parent
TOP = HERE.parents[1]
THEIR_VERSION = "0.3.0"
ANSWER_S = 300  # of a contender, for its start or a round
OURS, PLAIN = "veScale", "plain, one rank's sizes"
SPMD, BARE, DTENSOR = "TorchTitan spmd_types", "TorchTitan spmd_types, no FSDP2", "TorchTitan partial_dtensor"
CONTENDERS = {
    PLAIN: ("ours.py", "plain"),
    OURS: ("ours.py", "eager"),
    BARE: ("theirs.py", "spmd_types/bare"),
    SPMD: ("theirs.py", "spmd_types"),
    DTENSOR: ("theirs.py", "partial_dtensor"),
}
# (layout, who, over whom) -> the most that the ratio of CPU time may be.
TARGETS = {
    ("TP 8", OURS, BARE): 0.85,
    ("ZeRO-3 2 x TP 8", OURS, SPMD): 0.55,
    **{(layout, OURS, SPMD): 1.0 for layout in ("FSDP 2", "TP 2", "PP 2")},
}


class Contender:
    """A layout's ranks on one side, as processes that answer."""

    def __init__(self, name: str, layout: str, python: str, scratch: str) -> None:
        script, mode = CONTENDERS[name]
        self.name, count = name, 1 if LAYOUTS[layout].fake else LAYOUTS[layout].ranks
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **address, "WORLD_SIZE": str(count), "TMPDIR": scratch}
        if script == "theirs.py":  # ours imports what this process would: another commit's sources, from bench-history
            environment.pop("PYTHONPATH", None)
        self.ranks = [
            subprocess.Popen(
                [python, str(HERE / script), mode, layout],
                env={**environment, "RANK": str(rank)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip

    def answers(self) -> list[dict[str, Any]]:
        lines = []
        for rank in self.ranks:
            if not select.select([rank.stdout], [], [], ANSWER_S)[0]:
                raise RuntimeError(f"{self.name} did not answer within {ANSWER_S} s")
            lines.append(rank.stdout.readline())
        if not all(lines):
            raise RuntimeError(f"{self.name} ended: run {CONTENDERS[self.name]} by hand to see why")
        return [json.loads(line) for line in lines]

    def asked(self, what: str | int) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.stdin.write(f"{what}\n")
            rank.stdin.flush()
        return self.answers()

    def stop(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def their_python() -> str | None:
    """The Python of an environment that holds TorchTitan; None: there is none here."""
    named = os.environ.get("TORCHTITAN_PYTHON") or str(TOP / ".venv-torchtitan/bin/python")
    try:
        found = subprocess.run([named, "-c", "import torchtitan"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return named if found.returncode == 0 else None


@contextmanager
def contenders(names: Sequence[str], layout: str) -> Iterator[dict[str, Contender]]:
    """Those that can run here, ready. Without TorchTitan's environment its contenders are left out."""
    theirs = their_python()
    with ExitStack() as stack:
        # What contenders leave there goes with them, however they end.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="side-by-side-", ignore_cleanup_errors=True))
        ready = {}
        for name in names:
            python = theirs if CONTENDERS[name][0] == "theirs.py" else sys.executable
            if python is None:
                continue
            ready[name] = Contender(name, layout, python, scratch)
            stack.callback(ready[name].stop)
        for one in ready.values():
            one.about = one.answers()
        yield ready


def raced(names: Sequence[str], layout: str, rounds: int, steps: int) -> dict[str, Any]:
    """CPU ms per step of every round and contender, the median of wall ms, and the losses of the first steps."""
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    with contenders(names, layout) as ready:
        for name, one in ready.items():
            losses[name] = one.asked(5)[-1]["losses"]  # a pipeline's loss is on its last rank
            one.asked(5)
        order = list(ready)
        for turn in range(rounds):
            start = turn % len(order)
            for name in order[start:] + order[:start]:
                answers = ready[name].asked(steps)
                cpu[name].append(sum(answer["cpu_ms"] for answer in answers) / len(answers))
                wall[name].append(max(answer["wall_ms"] for answer in answers))
        versions = {key: value for one in ready.values() for key, value in one.about[0].items() if key != "name"}
    return {
        "layout": layout,
        "rounds": rounds,
        "versions": versions,
        "skipped": [name for name in names if name not in losses],
        "cpu ms per step and rank": {name: round(median(cpu[name]), 2) for name in losses},
        "wall ms per step": {name: round(median(wall[name]), 2) for name in losses},
        "tokens per second": {name: round(tokens_of(layout) * 1000 / median(wall[name])) for name in losses},
        "tokens per second over": {
            other: {name: ratio(wall[other], wall[name]) for name in losses if name != other}
            for other in losses
            if other in (BARE, SPMD)
        },
        "cpu over": {
            other: {name: ratio(cpu[name], cpu[other]) for name in losses if name != other}
            for other in losses
            if other in (BARE, SPMD, PLAIN)
        },
        "losses": losses,
    }


def tokens_of(layout: str) -> int:
    """Of a step."""
    return LAYOUTS[layout].batch * LAYOUTS[layout].sequence


def ratio(ours: list[float], theirs: list[float]) -> float:
    return round(median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


def host(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    names = {"TP 8": list(CONTENDERS), "ZeRO-3 2 x TP 8": [PLAIN, OURS, SPMD, DTENSOR]}
    layouts = [layout for layout in names if layout == (asked.only or layout)]
    return (raced(judged(names[layout], layout, asked.brief), layout, asked.rounds, 3) for layout in layouts)


def gloo(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    names = [OURS, SPMD, DTENSOR]
    layouts = [name for name, layout in LAYOUTS.items() if not layout.fake and name == (asked.only or name)]
    for layout in layouts:
        here = [OURS, SPMD] if "one" in layout else judged(names, layout, asked.brief)
        yield raced(here, layout, asked.rounds, 2)


def judged(names: Sequence[str], layout: str, brief: bool) -> list[str]:
    """Of these the ones that a target speaks of, if only those are asked for; ours and theirs where none does."""
    spoken_of = {name for of, *pair in TARGETS if of == layout for name in pair} or {OURS, SPMD}
    return [name for name in names if not brief or name in spoken_of]


def profile(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layout = asked.only or "TP 8"
    names = [PLAIN, OURS, BARE, SPMD] if LAYOUTS[layout].fake else [OURS, SPMD]
    with contenders(names, layout) as ready:
        found = {}
        for name, one in ready.items():
            one.asked(10)
            found[name] = one.asked("profile")[0]
    yield {"layout": layout, "profile": found}


def counted(*_: Any) -> Iterator[dict[str, Any]]:
    yield {"lines": lines(their_python())}


def everything(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return chain(host(asked), gloo(asked), counted())


COMMANDS = {"all": everything, "host": host, "gloo": gloo, "profile": profile, "lines": counted}


def verdicts(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets that these figures speak of, with the figure."""
    rows = []
    for (layout, who, over), most in TARGETS.items():
        for figures in found:
            value = figures.get("cpu over", {}).get(over, {}).get(who)
            if figures.get("layout") == layout and value is not None:
                rows.append({"layout": layout, "who": who, "over": over, "at most": most, "is": value,
                             "holds": value <= most})  # fmt: skip
    return rows


def show(figures: dict[str, Any]) -> None:
    for side, files in figures.get("lines", {}).items():
        total = files if isinstance(files, str) else f"{sum(files.values())} lines: {files}"
        print(f"a user of {side} writes {total}")
    if "cpu ms per step and rank" not in figures:
        return
    print(f"\n{figures['layout']}: CPU ms per step and rank, and over TorchTitan's; step-1 loss")
    for name in (*figures["cpu ms per step and rank"], *figures["skipped"]):
        if name in figures["skipped"]:
            print(f"  {name:<34}skipped: no environment holds TorchTitan (see README.md)")
            continue
        over = [f"{other[name]:.2f}x {base}" for base, other in figures["cpu over"].items() if name in other]
        print(f"  {name:<34}{figures['cpu ms per step and rank'][name]:>8.2f}  "
              f"{figures['losses'][name][0]:.6f}  {', '.join(over)}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=[*COMMANDS, "setup"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="one layout, by its name")
    parser.add_argument("--brief", action="store_true", help="only the contenders that a target speaks of")
    parser.add_argument("--write", type=Path, help="keep the figures in this JSON file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders and their files go too
    if arguments.what == "setup":
        folder = TOP / ".venv-torchtitan"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = [f"torch=={metadata.version('torch').partition('+')[0]}", f"torchtitan=={THEIR_VERSION}", "triton"]
        return subprocess.run([str(folder / "bin/pip"), "install", "-q", *wanted]).returncode
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "cuda graphs": "none: CPU",
        "figures": [],
        "targets": [],
    }
    for figures in COMMANDS[arguments.what](arguments):
        show(figures)
        record["figures"].append(figures)
        for row in verdicts([figures]):
            print(f"{'ok  ' if row['holds'] else 'MISS'} {row['layout']}: {row['who']} over {row['over']}: "
                  f"{row['is']:.2f}, at most {row['at most']}", flush=True)  # fmt: skip
            record["targets"].append(row)
        if arguments.write:  # each layout as it is done: the rest may run out of time
            arguments.write.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return int(not all(row["holds"] for row in record["targets"]))


if __name__ == "__main__":
    sys.exit(main())
