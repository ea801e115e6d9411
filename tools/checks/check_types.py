"""Checks the types of what is public: the modules without an underscore and the facades, and users' code.

    python tools/checks/check_types.py [FILE ...]   mypy over the public modules of packages/, or over these

Private modules are followed for what they give to the public ones. In files that are wrong on purpose, a comment
`# error: CODE` says what mypy is to find in its line; nothing else may be found.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from package_tree import read_packages

TOP = Path(__file__).absolute().parents[2]
_FOUND = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: (?P<text>.+?)  \[(?P<code>[a-z-]+)\]$")
_EXPECTED = re.compile(r"# error: (?P<code>[a-z-]+)$")


def public_modules(top: Path) -> list[Path]:
    """What users import: facades, and modules whose name has no underscore."""
    return [
        path
        for package in read_packages(top)
        for path in sorted(package.source.glob("*.py"))
        if path.name == "__init__.py" or not path.name.startswith("_")
    ]


def findings(files: list[Path], top: Path = TOP) -> list[str]:
    """What mypy says of `files`, a line each, notes left out; a line that was expected to be wrong and is not, too."""
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(str(one.source.parent) for one in read_packages(top))}
    cache = os.environ.get("TEST_TMPDIR", str(top / ".mypy_cache"))
    options = ["--config-file", str(top / "pyproject.toml"), "--cache-dir", cache, "--no-error-summary", "--strict"]
    # mypy.api would collect garbage for half of the time, and at last tear everything down.
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files)], env=environment, capture_output=True, text=True
    )
    expected = {
        (str(file), number): match["code"]
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (match := _EXPECTED.search(line))
    }
    seen, lines = set(), ran.stderr.splitlines()
    for line in ran.stdout.splitlines():
        found = _FOUND.match(line)
        place = (str(Path(found["file"]).absolute()), int(found["line"])) if found else None
        if found and expected.get(place) == found["code"]:
            seen.add(place)
        elif ": note: " not in line:
            lines.append(line)
    missing = [f"{file}:{line}: mypy finds nothing, where {code} was expected"
               for (file, line), code in expected.items() if (file, line) not in seen]  # fmt: skip
    return lines + missing


def main() -> int:
    files = [Path(name).absolute() for name in sys.argv[1:]]
    files = files or public_modules(TOP)
    wrong = findings(files)
    print("\n".join(wrong) if wrong else f"types: {len(files)} files are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
