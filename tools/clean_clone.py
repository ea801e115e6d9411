"""Runs `make test` on a clean clone of the commit at hand: what is not committed does not count.

    python tools/clean_clone.py                 # make test
    python tools/clean_clone.py --newcomer      # a newcomer's path: an empty HOME, make demo, then make test
    python tools/clean_clone.py --demo          # its first half: an empty HOME and make demo alone

`make test` includes the examples and the READMEs' snippets. The last line is JSON: the commit, and the counts of the
clone's closing line.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

TOP = Path(__file__).absolute().parents[1]
# Of this process's environment a newcomer has the search path less our virtual environment, and the way to a registry.
KEPT = re.compile(r"LANG|LC_.*|TERM|TMPDIR|.*_proxy|.*_PROXY|PIP_.*|SSL_.*|REQUESTS_CA_BUNDLE|PYENV_.*", re.IGNORECASE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newcomer", action="store_true", help="in an empty HOME: make demo, then make test")
    parser.add_argument("--demo", action="store_true", help="in an empty HOME: make demo alone")
    asked = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TOP, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="vescale-clone-") as scratch:
        clone = Path(scratch, "clone")
        subprocess.run(["git", "clone", "-q", str(TOP), str(clone)], check=True)
        if asked.newcomer or asked.demo:
            home = Path(scratch, "home")
            home.mkdir()
            status, closing = run(["make", "demo"], clone, newcomer(home))
            shown = sorted(path.name for path in (clone / "demo_output").glob("losses.*"))
            if status or shown != ["losses.json", "losses.png"]:
                print(f"clean-clone: make demo ended with {status}, and left {shown}")
                return 1
            if asked.demo:
                print(json.dumps({"commit": commit.stdout.strip(), "demo": closing}))
                return 0
            status, closing = run(["make", "test"], clone, newcomer(home))
        else:
            status, closing = run([clone / ".ci/run"], clone, os.environ)
    counts = re.fullmatch(r"(\d+) passed, (\d+) failed", closing)
    if counts is None:
        print(f"clean-clone: closed with {closing!r}")
        return 1
    print(json.dumps({"commit": commit.stdout.strip(), "passed": int(counts[1]), "failed": int(counts[2])}))
    return status


def run(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and last line; the output is passed on."""
    started = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    closing = ""
    assert started.stdout is not None
    for line in started.stdout:
        print(line, end="", flush=True)
        closing = line.strip() or closing
    return started.wait(), closing


def newcomer(home: Path) -> dict[str, str]:
    """The environment of somebody who has just logged in."""
    own = str(Path(sys.prefix, "bin"))
    path = os.pathsep.join(entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry != own)
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    return {**kept, "HOME": str(home), "PATH": path}


if __name__ == "__main__":
    sys.exit(main())
