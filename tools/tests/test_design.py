"""The design stays one that a person reads to the end, and what refers to a part of it finds that part."""

import re
from pathlib import Path

TOP = Path(__file__).absolute().parents[2]
TEXT = (TOP / "docs/design.md").read_text()
SECTIONS = set(re.findall(r"^## (\d+)\.", TEXT, re.MULTILINE))
CONTRACTS = set(re.findall(r"^(\d+)\. ", TEXT.partition("### Contracts")[2].partition("\n## ")[0], re.MULTILINE))
REFERENCE = re.compile(r"design(?:\.md)?\]?(?:\([^)]*\))?,?\s+section\s+(\d+)(?:,\s+contract\s+(\d+))?")
FOLDERS = ("packages", "tools", "benchmarks", "examples", "docs")


def files():
    """Yields the texts that may refer to the design."""
    for folder in FOLDERS:
        for path in sorted((TOP / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".toml") and path.name != Path(__file__).name:
                yield path, path.read_text()


def test_it_is_at_most_25_kib():
    assert len(TEXT.encode()) <= 25 * 1024


def test_sections_and_contracts_that_are_referred_to_are_there():
    lost = []
    for path, text in files():
        for found in REFERENCE.finditer(text):
            if found[1] not in SECTIONS or found[2] and found[2] not in CONTRACTS:
                lost.append(f"{path.relative_to(TOP)}: {found[0]}")
    assert len(SECTIONS) == 12 and len(CONTRACTS) == 10 and not lost
