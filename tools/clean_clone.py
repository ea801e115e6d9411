"""Runs `make test` on a clean clone of the commit at hand: what is not committed does not count.

    python tools/clean_clone.py                           # make test
    python tools/clean_clone.py --newcomer                # a newcomer's path: every part of it, in this order
    python tools/clean_clone.py --newcomer demo examples  # some of its parts

A newcomer has an empty HOME and nothing of this process's environment but the way to a registry. The parts: `demo` and
`test` are the two commands; `examples` runs every example as its README says, on one process, then on four beside it,
then on two from the checkpoint of the four; `snippets` runs the blocks of every README and guide. `--folder` names a
place for the clone, which then stays. The last line is JSON: the commit, and what each part came to.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

TOP = Path(__file__).absolute().parents[1]
# Of this process's environment a newcomer has the search path less our virtual environment, and the way to a registry.
KEPT = re.compile(r"LANG|LC_.*|TERM|TMPDIR|.*_proxy|.*_PROXY|PIP_.*|SSL_.*|REQUESTS_CA_BUNDLE|PYENV_.*", re.IGNORECASE)
FAMILIES = {"nanogpt": ("--pp 2 --tp 2", 4), "llama": ("--dp 2 --tp 2 --zero 3", 8), "mixtral": ("--ep 2 --tp 2", 4)}
LOSS = 1e-5  # relative, of every step


class Failed(Exception):
    """A part did not come to what it should."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--newcomer", nargs="*", choices=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)}; or all"
    )
    parser.add_argument("--folder", type=Path, help="an empty or absent folder for the clone, which stays")
    asked = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TOP, check=True, capture_output=True, text=True)
    record = {"commit": commit.stdout.strip()}
    with ExitStack() as stack:
        scratch = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vescale-clone-")))
        clone, home = scratch.absolute() / "clone", scratch.absolute() / "home"
        home.mkdir(parents=True)
        subprocess.run(["git", "clone", "-q", str(TOP), str(clone)], check=True)
        try:
            if asked.newcomer is None:
                record.update(counts([clone / ".ci/run"], clone, os.environ))
            for part in (asked.newcomer or PARTS) if asked.newcomer is not None else ():
                record[part] = PARTS[part](clone, newcomer(home))
        except Failed as failed:
            print(f"clean-clone: {failed}")
            return 1
    print(json.dumps(record))
    return 0


def demo(clone: Path, environment: Mapping[str, str]) -> str:
    closing = run(["make", "demo"], clone, environment)
    shown = sorted(path.name for path in (clone / "demo_output").glob("losses.*"))
    if shown != ["losses.json", "losses.png"]:
        raise Failed(f"make demo left {shown}")
    return closing


def test(clone: Path, environment: Mapping[str, str]) -> dict[str, int]:
    return counts(["make", "test"], clone, environment)


def examples(clone: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """The largest relative difference of a loss to one device's, of each family."""
    run(["make", "setup"], clone, environment)
    found = {}
    for family, (flags, ranks) in FAMILIES.items():
        started = lambda count: [clone / ".venv/bin/torchrun", "--standalone", "--nproc-per-node", str(count)]
        runs = {name: clone / "outputs" / family / name for name in ("one", "four", "two")}
        program = ["-m", f"{family}.pretrain", "--out"]
        folder = clone / "examples"
        run([clone / ".venv/bin/python", *program, runs["one"], "--steps", "40"], folder, environment)
        run([*started(4), *program, runs["four"], *flags.split(), "--against", runs["one"]], folder, environment)
        run([*started(2), *program, runs["two"], "--tp", "2", "--resume", runs["four"], "--steps", "40"],
            folder, environment)  # fmt: skip
        run([*started(ranks), "-m", f"{family}.train_parallel"], folder, environment)
        one, two = (json.loads((runs[name] / "losses.json").read_text())["losses"] for name in ("one", "two"))
        found[family] = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
        if not (runs["four"] / "losses.png").exists() or found[family] > LOSS:
            raise Failed(f"{family}: losses of four and of two ranks are {found[family]:.1e} off one device's")
    return found


def snippets(clone: Path, environment: Mapping[str, str]) -> str:
    run(["make", "setup"], clone, environment)
    pytest = [clone / ".venv/bin/python", "-m", "pytest", "-q", "packages/vescale/tests/distribution/test_readme.py"]
    return run(pytest, clone, {**environment, "PYTHONPATH": str(clone / "tools")})


PARTS = {"demo": demo, "test": test, "examples": examples, "snippets": snippets}


def counts(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> dict[str, int]:
    found = re.fullmatch(r"(\d+) passed, (\d+) failed", closing := run(command, folder, environment))
    if found is None:
        raise Failed(f"closed with {closing!r}")
    return {"passed": int(found[1]), "failed": int(found[2])}


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """Its last line; the output is passed on."""
    started = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    closing = ""
    assert started.stdout is not None
    for line in started.stdout:
        print(line, end="", flush=True)
        closing = line.strip() or closing
    if status := started.wait():
        raise Failed(f"{' '.join(Path(word).name for word in command)} ended with status {status}: {closing}")
    return closing


def newcomer(home: Path) -> dict[str, str]:
    """The environment of somebody who has just logged in."""
    own = str(Path(sys.prefix, "bin"))
    path = os.pathsep.join(entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry != own)
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    return {**kept, "HOME": str(home), "PATH": path}


if __name__ == "__main__":
    sys.exit(main())
