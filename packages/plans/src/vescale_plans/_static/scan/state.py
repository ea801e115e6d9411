"""Where a scan is: the line, the branches around it, the names of the function that it looks through."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from ..reads import Reads
from ..values import Items, Value

_branches = itertools.count()
_STEPS = 60_000  # expressions and statements of one scan


class Unseen(Exception):
    """Something that is not known to be guarded or free; `what`, and the `line` where it stands."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(what)
        self.what, self.line = what, line


class Died(Exception):
    """What is looked at raises, as far as is known: nothing after it runs."""


@dataclass(eq=False)
class Scope:
    """The names of one call of a function. `function` is None for one that was defined in the scan."""

    names: dict[str, Value]
    file: str
    function: FunctionType | None = None
    outer: Scope | None = None
    returned: list[Value] = field(default_factory=list)
    declared: frozenset[str] = frozenset()  # names that are another function's, or the module's

    @property
    def real(self) -> FunctionType:
        """The innermost function around that exists: of its globals and cells."""
        scope: Any = self
        while scope.function is None:
            scope = scope.outer
        return scope.function


class State:
    """What every part of a scan shares."""

    def __init__(self, frame: Any) -> None:
        self.frame, self.reads = frame, Reads()
        self.loops: list[Any] = []
        self.where: tuple[int, ...] = ()
        self.depth = 0
        self.direct: set[int] = set()  # expressions whose value is gone over at once
        self._steps, self._line, self._file = 0, frame.site.line, ""
        self._returns: dict[Any, list[Value]] = {}
        for child in frame.children:
            self._returns.setdefault(child.site, []).append(child.returns)

    def at(self, node: ast.AST) -> None:
        """The scan has come to a node."""
        self._steps += 1
        if self._steps > _STEPS:
            raise self.unseen("is too long to be looked through")
        if self._file and hasattr(node, "lineno"):
            self._line = f"{self._file}:{node.lineno}"

    def unseen(self, what: str) -> Unseen:
        return Unseen(what, self._line)

    @contextlib.contextmanager
    def within(self, file: str) -> Iterator[None]:
        """In the body of a function written there."""
        before = self._file, self._line, self.where, self.loops
        self._file, self.loops, self.depth = file, [], self.depth + 1
        try:
            yield
        finally:
            self._file, self._line, self.where, self.loops = before
            self.depth -= 1

    @contextlib.contextmanager
    def branch(self) -> Iterator[None]:
        """What is done here may not be done."""
        before = self.where
        self.uncertain()
        try:
            yield
        finally:
            self.where = before

    def uncertain(self) -> None:
        """From here to the function's end, what is done may not be done."""
        self.where = (*self.where, next(_branches))

    def made(self, kind: type, parts: list[Value] | dict[Any, Value]) -> Items:
        return Items(kind, parts, self.where)

    def written(self, items: Items) -> bool:
        """Whether a container's parts stay known when something is written to it here."""
        if items.given:
            raise self.unseen("writes to a container that it was given")
        return items.where == self.where and items.every is None
