"""Every change of a package's code has an entry in the package's CHANGELOG.md: `make check`, where git's history is.

For each commit after SINCE and each package whose code it changed (docstrings and comments apart), one of these is so:

- the commit, or a later one, edits the package's CHANGELOG.md;
- the commit's message has a line "Changelog: none", followed by why: nothing that a user or a sibling meets changed.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).absolute().parents[2]
SINCE = "65878f56669215b0de549b27fd50a9fe9800fd14"
NONE = "Changelog: none"


class NoHistory(Exception):
    """The tree has no git history that reaches back to the commit asked for."""


def commits(top: Path, since: str) -> list[str]:
    """Those after `since`, newest first, merges apart."""
    if _git(top, "merge-base", "--is-ancestor", since, "HEAD", may_fail=True) is None:
        raise NoHistory
    return _git(top, "rev-list", "--no-merges", f"{since}..HEAD").split()


def check(top: Path, since: str = SINCE) -> Iterator[str]:
    """Commits that changed a package's code, and of which its CHANGELOG says nothing."""
    told: set[str] = set()  # packages whose CHANGELOG this commit or a later one edits
    for commit in commits(top, since):
        files = _git(top, "diff-tree", "-r", "--no-commit-id", "--name-only", "--no-renames", commit).split()
        files = [file for file in files if file.startswith("packages/")]
        told |= {file.split("/")[1] for file in files if file.endswith("/CHANGELOG.md")}
        sources = [file for file in files if "/src/" in file and file.endswith(".py")]
        changed = {file.split("/")[1] for file in sources if is_other_code(top, commit, file)}
        if changed - told and NONE not in _git(top, "show", "-s", "--format=%B", commit):
            subject = _git(top, "show", "-s", "--format=%h %s", commit).strip()
            for package in sorted(changed - told):
                yield f"packages/{package}/CHANGELOG.md: says nothing of {subject}"


def is_other_code(top: Path, commit: str, file: str) -> bool:
    """Whether a commit changed what a file does, not only what it says."""
    before, after = (_code(_git(top, "show", f"{one}:{file}", may_fail=True)) for one in (f"{commit}^", commit))
    return before != after


def _code(text: str | None) -> str | None:
    """The syntax tree without docstrings; None for no file."""
    if text is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _git(top: Path, *command: str, may_fail: bool = False) -> str | None:
    run = subprocess.run(["git", "-C", str(top), *command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if run.returncode and not may_fail:
        raise NoHistory(run.stderr)
    return None if run.returncode else run.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("since", nargs="?", default=SINCE)
    since = parser.parse_args().since
    try:
        findings = list(check(TOP, since))
    except (NoHistory, FileNotFoundError):
        print(f"changelogs: not looked at, for this tree has no git history back to {since}")
        return 0
    for finding in findings:
        print(f"changelogs: {finding}")
    if findings:
        print(f"changelogs: add an entry now, or write a line '{NONE} (why)' into the commit's message")
    else:
        print("changelogs: every change of a package's code has its entry")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
