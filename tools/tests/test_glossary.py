"""The glossary's last column names what the code holds: a name, a module or a folder that is gone fails."""

import re
from pathlib import Path

import pytest

from package_tree import read_packages

TOP = Path(__file__).absolute().parents[2]
ROWS = re.findall(r"^\| (.+) \|$", (TOP / "docs/glossary.md").read_text(), re.MULTILINE)
NAMED = sorted({span for row in ROWS for span in re.findall(r"`([^`]+)`", row.split(" | ")[-1])})


@pytest.fixture(scope="module")
def tree():
    """The sources' text, and their files and folders."""
    files = [file for package in read_packages(TOP) for file in package.source.rglob("*.py")]
    return "\n".join(file.read_text() for file in files), {file.relative_to(TOP).as_posix() for file in files}


def test_there_are_rows_with_names():
    assert len(ROWS) > 40 and len(NAMED) > 30


@pytest.mark.parametrize("named", NAMED)
def test_what_the_glossary_names_is_in_the_code(named, tree):
    text, files = tree
    if "/" in named or named.endswith(".py"):
        assert any(f"/{named.strip('/')}" in f"/{file}" for file in files)
    else:
        last = re.findall(r"\w+", named.partition("(")[0])[-1]
        assert re.search(rf"\b(def|class) {last}\b|^\s*{last}\b[^=\n]*=|\b{last}: ", text, re.MULTILINE)
