"""What the packages import of each other, by name, and whether what an older release imports is still there.

    python tools/checks/sibling_names.py               which names of the releases noted are gone
    python tools/checks/sibling_names.py --note 0.1    notes today's names as those of a release, in released_names.json

A package works beside siblings one minor version newer than itself, so a minor release keeps every name that siblings
of the minor version before it import. Until a version is released, its names may be noted anew.
"""

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from package_tree import Package, read_packages

TOP = Path(__file__).absolute().parents[2]
NOTED = TOP / "tools/checks/released_names.json"


def used(package: Package, packages: list[Package]) -> list[str]:
    """Dotted names of its siblings that a package's sources import, of those that it pins none."""
    siblings = {other.module for other in packages if other != package and not package.pins(other)}
    names: set[str] = set()
    for path in package.source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(name for name in names if name.partition(".")[0] in siblings)


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something that one holds."""
    module, _, last = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return bool(module) and hasattr(importlib.import_module(module), last)
    return True


def gone(noted: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """Names that siblings of a noted release import, and that this tree has not."""
    for release, by_package in noted.items():
        for package, names in by_package.items():
            for name in names:
                if not is_there(name):
                    yield f"{name}: {package} of {release} imports it"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--note", metavar="RELEASE", help="note today's names as those of a release")
    release = parser.parse_args().note
    noted = json.loads(NOTED.read_text()) if NOTED.exists() else {}
    if release is not None:
        packages = read_packages(TOP)
        noted[release] = {package.distribution: used(package, packages) for package in packages}
        NOTED.write_text(json.dumps(noted, indent=1) + "\n")
    found = list(gone(noted))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
