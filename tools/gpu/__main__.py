"""Runs the parts; see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

TOP = Path(__file__).absolute().parents[2]


class Bounded(NamedTuple):
    """A part and the seconds that it may take; all that run without being named fit in 20 minutes."""

    name: str
    seconds: float
    is_default: bool = True


PARTS = (
    Bounded("random_numbers", 120), Bounded("training", 300), Bounded("host_waits", 90), Bounded("block_ratios", 90),
    Bounded("memory", 90), Bounded("calibration", 90), Bounded("premise", 90), Bounded("one_device", 180),
    Bounded("attention", 150), Bounded("nccl", 540, False),
    Bounded("graphs", 300, False), Bounded("peers", 540, False),
)  # fmt: skip
GRACE = 30  # a part that does not stop by itself is ended


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[part.name for part in PARTS] + [[]], help="these alone")
    parser.add_argument("--device", default="cuda", choices=["cuda", "second"])
    parser.add_argument("--again", action="store_true", help="forget what earlier runs of today found")
    parser.add_argument("--into", type=Path, default=TOP, help="the folder of results/ and of what is kept")
    parser.add_argument("--share", type=float, default=1.0, help="of each part's time: a short rehearsal")
    parser.add_argument("--most", type=int, help="questions that each part may ask: a short rehearsal, too")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("make gpu: torch sees no GPU here; `python -m gpu --device second` rehearses without one")
        return 2
    lacks = _lacks()
    if lacks:
        print(f"make gpu: {sys.executable} cannot run veScale: {lacks}; PYTHONPATH may name a folder that has it")
        return 2
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    kept = given.into / ".gpu" / f"{day}-{given.device}"
    kept.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in PARTS:
        if part.name not in given.parts if given.parts else not part.is_default:
            continue
        path = kept / f"{part.name}.json"
        if given.again:
            path.unlink(missing_ok=True)
        print(f"{part.name}:", flush=True)
        status = _run(part, given.device, path, part.seconds * given.share, given.most)
        if status:
            failed.append(f"{part.name} ({status})")
    name = f"{day}-gpu.json" if given.device == "cuda" else f"{day}-gpu-rehearsal.json"
    found = {part.name: json.loads(path.read_text()) for part in PARTS if (path := kept / f"{part.name}.json").exists()}
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **_facts(given.device), "parts": found}
    if failed:
        report["cut off"] = failed
    (given.into / "results").mkdir(exist_ok=True)
    (given.into / "results" / name).write_text(json.dumps(report, indent=1) + "\n")
    bad = [f"{part}: {key}" for part, all_ in found.items() for key, said in all_.items() if _is_bad(said)]
    missing = {part: all_["not reached"] for part, all_ in found.items() if "not reached" in all_}
    late = [f"{part}: not reached: {', '.join(names)}" for part, names in missing.items()]
    print(f"make gpu: results/{name}; {len(bad)} finding(s) to look at", *bad, *failed, *late, sep="\n  ")
    return bool(bad or failed or late)


def _run(part: Bounded, device: str, path: Path, seconds: float, most: int | None) -> str:
    """ "" when the part came to its end."""
    command = [sys.executable, "-m", f"gpu.{part.name}", "--device", device, "--out", str(path)]
    began = time.monotonic()
    command += ["--seconds", str(seconds)] + ([] if most is None else ["--most", str(most)])
    process = subprocess.Popen(command, env=_environment(), cwd=TOP, start_new_session=True)
    try:
        status = process.wait(seconds + GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
        process.wait()
        return f"ended after {time.monotonic() - began:.0f} s"
    return f"exit status {status}" if status else ""


def _environment() -> dict[str, str]:
    sources = [str(TOP / "packages" / name / "src") for name in os.listdir(TOP / "packages")]
    sources += [str(TOP / "tools"), str(TOP / "examples"), str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}


def _lacks() -> str:
    """What keeps this Python from running any part: a package that it lacks. Said once, before all parts fail by it."""
    command = [sys.executable, "-c", "import vescale, vescale_testkit, transformers"]
    done = subprocess.run(command, env=_environment(), cwd=TOP, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def _is_bad(said: Any) -> bool:
    return isinstance(said, dict) and ("failed" in said or said.get("holds") is False)


def _facts(device: str) -> dict[str, Any]:
    facts = {"device": "the second device, on the CPU: a rehearsal", "torch": torch.__version__}
    if device == "cuda":
        facts["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    commit = ""
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, cwd=TOP, check=False).stdout.strip()
    return facts | {"python": platform.python_version(), "commit": commit or "unknown"}


if __name__ == "__main__":
    sys.exit(main())
