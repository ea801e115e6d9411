"""CONTRIBUTING.md leads to what is there: its files exist, and "Where is it?" names what its files define."""

import ast
import re
from pathlib import Path

TOP = Path(__file__).absolute().parents[2]
TEXT = (TOP / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"^\| (?P<what>[^|]+) \| (?P<files>\[[^|]+) \| (?P<names>`[^|]+) \|$", TEXT, re.MULTILINE)


def linked(text):
    return [TOP / path for path in re.findall(r"\]\(([^):#]+)\)", text)]


def defined(path):
    """Names of functions, classes and fields, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_every_file_is_there():
    assert [path for path in linked(TEXT) if not path.exists()] == []


def test_every_row_names_what_its_files_define():
    assert len(ROWS) >= 10
    for what, files, names in ROWS:
        known = {name for path in linked(files) for name in defined(path)}
        missing = set(re.findall(r"`(\w+)`", names)) - known
        assert not missing, (what, missing)
