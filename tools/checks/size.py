"""Counts what the packages' sources hold, and names what the design wants few of.

    python tools/checks/size.py           a line per package, a line per kind of mechanism, the totals last
    python tools/checks/size.py --names   and each mechanism, by file and name

Code lines are lines with code on them: no docstrings, comments or blanks. Runtime is all packages without the test kit.
The kinds are told by syntax alone:

    modes         classes below torch's TorchFunctionMode or TorchDispatchMode, subclasses of such classes too
    frame walks   files that read Python's stack
    class swaps   assignments to an object's `__class__`
    patches       assignments to attributes of torch's modules and classes
    containers    functions that descend into dicts and into lists or tuples, and call themselves or keep a worklist
    snapshots     classes and functions that are named so: snapshot, restore, undo
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from package_tree import KIT

TOP = Path(__file__).absolute().parents[2]
MODES = ("TorchFunctionMode", "TorchDispatchMode")
WALKS = re.compile(r"_getframe|f_back|currentframe|inspect\.stack")
SNAPSHOTS = re.compile(r"snapshot|restore|undo", re.IGNORECASE)
ODD = ("What", "Whether", "Of", "From", "In", "Which", "Whose")
"""First words of docstrings that begin with a clause in place of a verb or a noun."""
_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
Defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Counted:
    """The sources of one package."""

    files: int = 0
    lines: int = 0
    code: int = 0
    size: int = 0  # bytes
    words: Counter[str] = field(default_factory=Counter)  # first words of docstrings
    found: dict[str, list[str]] = field(default_factory=dict)  # kind of mechanism -> file:line name


def code_lines(text: str, tree: ast.Module) -> int:
    """Returns how many lines have code on them; bare strings, under assignments too, are documentation."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                documentation.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def first_words(tree: ast.Module) -> Iterator[str]:
    """Yields the first word of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (*Defined, ast.Module)) and (text := ast.get_docstring(node)):
            yield text.split()[0].strip(",.:;")


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


def modes_in(trees: dict[Path, ast.Module]) -> dict[Path, list[ast.ClassDef]]:
    """Returns the classes below torch's modes, by file; classes are told apart by name alone."""
    nodes = ((path, node) for path, tree in trees.items() for node in ast.walk(tree))
    classes = [(path, node) for path, node in nodes if isinstance(node, ast.ClassDef)]
    names, found = set(MODES), {}
    while new := [(path, node) for path, node in classes if node.name not in names and names & {*_bases(node)}]:
        for path, node in new:
            names.add(node.name)
            found.setdefault(path, []).append(node)
    return found


def _walks_containers(node: ast.AST) -> bool:
    """Whether a function asks for dicts and for lists or tuples, and descends into what they hold."""
    if not isinstance(node, ast.FunctionDef):
        return False
    asked: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "isinstance":
            asked |= {name.id for name in ast.walk(one.args[-1]) if isinstance(name, ast.Name)}
        elif isinstance(one, ast.Compare) and ast.unparse(one.left).startswith("type("):
            asked |= {name.id for name in ast.walk(one) if isinstance(name, ast.Name)}
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    again = any(ast.unparse(call).rpartition(".")[2] == node.name for call in calls)
    again = again or any(isinstance(one, ast.While) for one in ast.walk(node))
    return bool(asked & {"dict", "Mapping"}) and bool(asked & {"list", "tuple", "Sequence"}) and again


def _patched(node: ast.AST) -> str:
    """Returns the attribute of torch's that a statement assigns to, "" for none."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and re.match(r"torch\.\w", text := ast.unparse(target)):
                return text
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
        return text if (text := ast.unparse(node.args[0])).split(".")[0] == "torch" else ""
    return ""


def mechanisms(path: Path, text: str, tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yields kind, line and name of each mechanism in a file, modes apart."""
    if match := WALKS.search(text):
        yield "frame walks", text[: match.start()].count("\n") + 1, path.stem
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "__class__" for target in node.targets
        ):
            yield "class swaps", node.lineno, ast.unparse(node)
        if what := _patched(node):
            yield "patches", node.lineno, what
        if _walks_containers(node):
            yield "containers", node.lineno, node.name
        if isinstance(node, Defined) and SNAPSHOTS.search(node.name):
            yield "snapshots", node.lineno, node.name


def counted(top: Path = TOP) -> dict[str, Counted]:
    """Returns the counts by package."""
    found: dict[str, Counted] = {}
    texts = {path: path.read_text() for path in sorted(top.glob("packages/*/src/**/*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    modes = modes_in(trees)
    for path, text in texts.items():
        package = path.relative_to(top).parts[1]
        into = found.setdefault(package, Counted())
        into.files += 1
        into.lines += text.count("\n")
        into.code += code_lines(text, trees[path])
        into.size += len(text.encode())
        into.words.update(first_words(trees[path]))
        kinds = [("modes", node.lineno, node.name) for node in modes.get(path, ())]
        for kind, line, name in (*kinds, *mechanisms(path, text, trees[path])):
            into.found.setdefault(kind, []).append(f"{path.relative_to(top)}:{line} {name}")
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="count the packages' sources")
    parser.add_argument("--names", action="store_true", help="name each mechanism")
    given = parser.parse_args()
    found = counted()
    runtime = [one for name, one in found.items() if name != KIT]
    for name, one in found.items():
        print(f"{name:<12}{one.code:>7} code lines{one.lines:>8} lines{one.files:>5} files")
    for kind in ("modes", "frame walks", "class swaps", "patches", "containers", "snapshots"):
        names = [where for one in runtime for where in one.found.get(kind, [])]
        print(f"{kind:<12}{len(names):>7}")
        for where in names if given.names else ():
            print(f"    {where}")
    code, size = sum(one.code for one in runtime), sum(one.size for one in runtime)
    words = sum((one.words for one in found.values()), Counter())
    odd = sum(words[word] for word in ODD)
    print(f"docstrings that begin with {', '.join(ODD)}: {odd} of {words.total()}")
    print(f"runtime: {code} code lines, {sum(one.lines for one in runtime)} lines, {size / code:.1f} bytes a code line")


if __name__ == "__main__":
    main()
