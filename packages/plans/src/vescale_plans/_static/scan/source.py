"""The syntax tree of a code object, where it is certain that the one is made from the other.

Bytecode is another in every version of Python; its source is not. So static mode reads
source, and believes it only if it compiles to the very code that will run: the file as
`linecache` knows it is compiled, and the code found in it must be equal, instructions,
constants and names alike. Code without source, from another source than its file's, or
rewritten since, has no tree.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

Function = ast.FunctionDef | ast.Lambda
_KINDS = (ast.FunctionDef, ast.Lambda)


@dataclass(frozen=True)
class _File:
    """A source file: what its functions compile to, and their trees, by first line and name."""

    lines: list[str]
    codes: dict[tuple[int, str], list[CodeType]]
    trees: dict[tuple[int, str], list[Function]]


_files: dict[str, _File | None] = {}


def tree_of(code: CodeType) -> Function | None:
    """The definition that `code` was compiled from; None where that is not certain."""
    name = code.co_filename
    lines = linecache.getlines(_path(name))
    known = _files.get(name)
    if known is None or known.lines is not lines:
        known = _files[name] = _file(lines, name)
    if known is None:
        return None
    place = code.co_firstlineno, code.co_name
    if code not in known.codes.get(place, ()):
        return None
    trees = known.trees.get(place, [])
    if len(trees) > 1:  # lambdas on one line: the innermost that holds all that the code stands for
        here = [position for position in code.co_positions() if position[0] and position[2] is not None]
        here = [(line, start) for line, _, start, _ in here if (line, start) != (code.co_firstlineno, 0)]
        trees = [tree for tree in trees if all(_spans(tree, position) for position in here)]
        trees.sort(key=lambda tree: (tree.lineno, tree.col_offset), reverse=True)
    return trees[0] if trees else None


def _path(name: str) -> str:
    """Where the source of a file is; some of Python's own modules are frozen into it, and know their file."""
    if not name.startswith("<frozen "):
        return name
    return getattr(sys.modules.get(name[len("<frozen ") : -1]), "__file__", None) or name


def _file(lines: list[str], name: str) -> _File | None:
    try:
        tree = ast.parse("".join(lines), name)
        module = compile("".join(lines), name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    codes: dict[tuple[int, str], list[CodeType]] = {}
    for code in _codes_in(module):
        codes.setdefault((code.co_firstlineno, code.co_name), []).append(code)
    trees: dict[tuple[int, str], list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            line = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            trees.setdefault((line, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            trees.setdefault((node.lineno, "<lambda>"), []).append(node)
    return _File(lines, codes, trees)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _spans(tree: ast.AST, position: tuple[int, int]) -> bool:
    start, end = (tree.lineno, tree.col_offset), (tree.end_lineno, tree.end_col_offset)
    return start <= position <= end
