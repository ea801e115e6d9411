"""Writes docs/evidence.md: what holds, the newest figures in results/, and the command that shows each.

    python tools/evidence.py            # writes it
    python tools/evidence.py --check    # status 1 if it is not what results/ says

The rows are in evidence.toml. There, `{kind: key > key | .2f}` is a figure of results/<date>-<kind>.json (of
results/<date>.json for the kind "day"): the newest that has it. What holds or not, part by part, is counted. The files
are named in the last column.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = Path(__file__).absolute().parents[1]
PAGE, ROWS = "docs/evidence.md", Path(__file__).with_suffix(".toml")
FIGURE = re.compile(r"\{(?P<kind>[\w-]+): (?P<path>[^{}|]+?)(?: \| (?P<form>[^{}]+))?\}")


def files_of(folder: Path, kind: str) -> list[Path]:
    """Returns the files of a kind, the newest first; one of the same day's night is newer."""
    end = "" if kind == "day" else f"-{kind}"
    found = re.compile(rf"\d{{4}}-\d\d-\d\d{end}(-night)?\.json")
    files = [path for path in folder.glob("*.json") if found.fullmatch(path.name)]
    return sorted(files, key=lambda path: (path.name[:10], len(path.name)), reverse=True)


def _at(record: Any, path: list[str]) -> Any:
    for key in path:
        record = record[int(key) if isinstance(record, list) else key]
    return record


def figure(folder: Path, kind: str, path: str, form: str) -> tuple[str, str]:
    """Returns a figure as text, and the file that it is of. Raises LookupError if no file has it."""
    for file in files_of(folder, kind):
        try:
            value = _at(json.loads(file.read_text()), path.split(" > "))
        except (LookupError, ValueError, TypeError):
            continue
        if isinstance(value, dict):
            value = f"{sum(part.get('holds', False) for part in value.values())} of {len(value)}"
        return format(value, form), file.name
    raise LookupError(f"no file of results/ of the kind {kind!r} has {path!r}")


def _rows(folder: Path, rows: list[dict[str, str]]) -> Iterator[str]:
    for row in rows:
        used: list[str] = []

        def told(found: re.Match[str], used: list[str] = used) -> str:
            text, file = figure(folder, found["kind"], found["path"], found["form"] or "")
            used.append(f"`results/{file}`")
            return text

        cells = [FIGURE.sub(told, row[name]) for name in ("claim", "measured")]
        files = f" ({', '.join(dict.fromkeys(used))})" if used else ""
        yield f"| {' | '.join(cells)} | {row['shown']}{files} |"


def page(top: Path = TOP) -> str:
    """Returns the text of docs/evidence.md."""
    data = tomllib.loads(ROWS.read_text())
    table = ["| | measured | shown by |", "|---|---|---|", *_rows(top / "results", data["row"])]
    return "\n\n".join((data["head"].strip(), "\n".join(table), data["tail"].strip())) + "\n"


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description="write docs/evidence.md from the newest results/")
    parser.add_argument("--check", action="store_true", help="write nothing")
    target, text = TOP / PAGE, page()
    if parser.parse_args().check:
        return int(target.read_text() != text)
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
