"""Runs `make test` on a clean clone of the commit at hand: what is not committed does not count.

The last line is JSON: the commit, and the counts of the clone's closing line.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).absolute().parents[1]


def main() -> int:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TOP, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="vescale-clone-") as scratch:
        clone = Path(scratch, "clone")
        subprocess.run(["git", "clone", "-q", str(TOP), str(clone)], check=True)
        test = subprocess.Popen([clone / ".ci/run"], cwd=clone, stdout=subprocess.PIPE, text=True)
        closing = ""
        assert test.stdout is not None
        for line in test.stdout:
            print(line, end="", flush=True)
            closing = line.strip() or closing
        status = test.wait()
    counts = re.fullmatch(r"(\d+) passed, (\d+) failed", closing)
    if counts is None:
        print(f"clean-clone: closed with {closing!r}")
        return 1
    print(json.dumps({"commit": commit.stdout.strip(), "passed": int(counts[1]), "failed": int(counts[2])}))
    return status


if __name__ == "__main__":
    sys.exit(main())
