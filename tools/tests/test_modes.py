"""docs/design.md has a row for every mode of torch's that veScale's packages define, and for no other."""

import ast
import re
from pathlib import Path

from package_tree import read_packages

TOP = Path(__file__).absolute().parents[2]
KINDS = {"TorchFunctionMode": "functions", "TorchDispatchMode": "operators"}


def defined():
    """(file, class, what it sees) of every class that is a mode by its bases' names."""
    for package in read_packages(TOP):
        for path in package.source.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for base in node.bases if isinstance(node, ast.ClassDef) else ():
                    if (name := ast.unparse(base).rpartition(".")[2]) in KINDS:
                        yield path.relative_to(package.source).as_posix(), node.name, KINDS[name]


def test_every_mode_has_its_row():
    rows = re.findall(r"^\| `([\w/]+\.py)` `(\w+)` \| (\w+) \|", (TOP / "docs/design.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(defined())
