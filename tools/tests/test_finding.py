"""What leads to the code leads to what is there: CONTRIBUTING.md's files and names, and those in docstrings."""

import ast
import re
import tokenize
from collections import defaultdict
from pathlib import Path

from package_tree import read_packages

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


OBJECTS = {"decision", "model", "steps", "tensor"}  # words for values in docstrings, that are names of modules, too


def documented(path):
    """(line, text between backquotes) of strings and comments."""
    with path.open("rb") as text:
        for token in tokenize.tokenize(text.readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                yield from ((token.start[0], span) for span in re.findall(r"`([^`\n]+)`", token.string))


def test_docstrings_name_what_is_there():
    """Files (`name.py`), and names of modules (`module.name`), are where the sources' docstrings and comments say."""
    sources = [path for package in read_packages(TOP) for path in package.source.rglob("*.py")]
    files = {path.as_posix() for path in TOP.rglob("*.py") if ".venv" not in path.parts}
    modules = defaultdict(set)
    for path in sources:
        tree = ast.parse(path.read_text())
        names = {getattr(node, field, None) for node in ast.walk(tree) for field in ("name", "attr", "id", "asname")}
        folder = path.parent.name
        modules[folder if path.stem == "__init__" else path.stem] |= names
        modules[folder].add(path.stem)
        modules[path.parent.parent.name].add(folder)
    missing = []
    for path in sources:
        for line, span in documented(path):
            if re.fullmatch(r"(\w+/)*\w+\.py", span):
                is_there = any(file.endswith(f"/{span}") for file in files)
            elif found := re.fullmatch(r"(\w+)\.(\w+)(\(.*\))?", span):
                module, name = found[1], found[2]
                is_private = module[0] == "_" and module[1:2].isalpha() and module.islower() and module != "_C"
                if module in OBJECTS or not (is_private or module in modules):
                    continue
                is_there = name in modules[module]
            else:
                continue
            if not is_there:
                missing.append((path.relative_to(TOP).as_posix(), line, span))
    assert missing == []
