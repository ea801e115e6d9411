"""The glossary's last column names what the code holds: a name, a module or a folder that is gone fails."""

import ast
import re
from pathlib import Path

import pytest

from package_tree import read_packages

TOP = Path(__file__).absolute().parents[2]
PAGES = [
    *(TOP / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted((TOP / "docs").rglob("*.md")) if page.name != "glossary.md"),
    *sorted(TOP.glob("packages/*/README.md")),
]

# Words that were given up, for the field's: pages do not use them, nor does the code for its names.
NOT_ON_PAGES = {
    r"borders?": "boundary",
    r"settled?": "reduced",
    r"(?:re)?stamp(?:s|ed|ing)?": "attach a layout",
    r"severs?|severed": "copy",
    r"steady|steadied": "position-independent",
    r"composites?": "decomposition",
    r"lets? go of": "reshard",
    r"masters": "full-precision shards",
    r"no room": "exceeds the capacity",
}
NOT_IN_NAMES = {
    r"sever(?:s|ed|ing)?": "copy, copied",
    r"(?:un)?stead(?:y|ied)": "independent (of positions)",
    r"composites?": "decomposed; `rules.composite` stays, for rules that were written with it",
    r"(?:is_)?pending": "partial; in flight, of a collective; `PendingSave` stays, for it is public",
    r"settled?": "reduced",
    r"(?:re)?stamp(?:s|ed|ing)?": "attach, attached",
    r"borders?": "boundary",
    r"masters": "full-precision shards",
    r"lets?_go": "reshard, release",
    r"erased?": "unwrap",
    r"VARYING": "REPLICATE, the state R",
}
# Nor are functions and classes called so; public names stay, and the codec of a pipeline, which two packages share.
NOT_DEFINED = {r"wholes?": "full (of values), global (of shapes)", r"(?-i:Unit)": "FSDPUnit"}
DEFINED = {("huggingface.py", "whole_state_dict"), ("_stages.py", "whole"), ("stage.py", "whole")}
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TOP).as_posix())
def test_no_page_uses_a_word_that_was_given_up(page):
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)  # names and commands apart
    words = [word for word in NOT_ON_PAGES if re.search(rf"\b(?:{word})\b", text, re.IGNORECASE)]
    found = {word: NOT_ON_PAGES[word] for word in words}
    assert not found


def test_no_name_of_the_code_uses_a_word_that_was_given_up():
    given_up = re.compile(rf"(?:^|_)(?:{'|'.join(NOT_IN_NAMES)})(?:_|$)", re.IGNORECASE)
    undefined = re.compile(rf"(?:^|_)(?:{'|'.join(NOT_DEFINED)})(?:_|$)", re.IGNORECASE)
    found, defined = set(), set()
    for package in read_packages(TOP):
        for file in package.source.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(), file)):
                names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")]
                found |= {(file.name, name) for name in names if isinstance(name, str) and given_up.search(name)}
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and undefined.search(node.name):
                    defined.add((file.name, node.name))
    assert found == {("rules.py", "composite")}
    assert defined == DEFINED
