"""The tests of other libraries in full, in an environment that has them: .venv-ecosystem, made of tools/ecosystem.txt.

    python tools/ecosystem.py                 every file of packages/vescale/tests/integrations
    python tools/ecosystem.py test_trl        some of them; `-k` and what else pytest knows follows them

torch and all else are lent by the running environment, so that no package of tools/ecosystem.txt replaces them. The
last line is JSON: the packages' versions, and of each file how many tests passed, failed and were skipped.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from fresh_install import lend_third_party

TOP = Path(__file__).absolute().parents[1]
FOLDER = TOP / ".venv-ecosystem"
WANTED = TOP / "tools" / "ecosystem.txt"
TESTS = TOP / "packages" / "vescale" / "tests" / "integrations"
TOLD = ("torch", "transformers", "accelerate", "peft")
"""Of the running environment's packages, those whose versions are told beside WANTED's."""


def make() -> Path:
    """The environment's python; made where it is not there, or was made of another list."""
    python, attach = FOLDER / "bin" / "python", FOLDER / "made-of.txt"
    wanted = WANTED.read_text()
    if not attach.is_file() or attach.read_text() != wanted:
        venv.EnvBuilder(symlinks=True, clear=True).create(FOLDER)
        lend_third_party(FOLDER)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as kept:
            kept.writelines(f"{one.name}=={one.version}\n" for one in importlib.metadata.distributions())
            kept.flush()
            command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*command, "-r", WANTED, "-c", kept.name], check=True)
        attach.write_text(wanted)
    return python


def versions(python: Path) -> dict[str, str]:
    """Of the packages that the tests are of."""
    names = [*TOLD, *(line.split("==")[0] for line in WANTED.read_text().splitlines() if "==" in line)]
    program = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    return json.loads(subprocess.run([python, "-c", program, *names], check=True, capture_output=True).stdout)


def run(python: Path, files: list[str], options: list[str]) -> tuple[int, dict[str, dict[str, float]]]:
    """pytest's status, and per file the tests that passed, failed and were skipped, and the seconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sorted(TOP.glob("packages/*/src"))))}
    environment = {"VESCALE_GRID": "full", "HF_HUB_OFFLINE": "1", **environment}
    counts: dict[str, dict[str, float]] = {}
    worst = 0
    for file in files:
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.xml"
            command = [python, "-m", "pytest", "-q", f"--junitxml={report}", TESTS / f"{file}.py", *options]
            began = time.monotonic()
            worst = max(worst, subprocess.run(command, cwd=TOP, env=environment).returncode)
            found = Counter(_outcome(case) for case in ET.parse(report).iter("testcase"))
            counts[file] = {**found, "seconds": round(time.monotonic() - began, 1)}
    return worst, counts


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main() -> int:
    named = [part for part in sys.argv[1:] if part.startswith("test_")]
    options = [part for part in sys.argv[1:] if not part.startswith("test_")]
    python = make()
    status, counts = run(python, named or sorted(path.stem for path in TESTS.glob("test_*.py")), options)
    if any(one.get("skipped") for one in counts.values()):
        status = status or 1  # there is what they need
    print(json.dumps({"versions": versions(python), "tests": counts}))
    return status


if __name__ == "__main__":
    sys.exit(main())
