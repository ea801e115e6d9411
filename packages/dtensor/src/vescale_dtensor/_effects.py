"""Collectives and draws as operators of a graph: while a program is captured, nothing is sent, and nothing drawn.

What is captured becomes `vescale::effect`. Its order is data: each takes the token that the one before gave, so that a
compiler can neither exchange two of them nor drop one, whatever the sizes on one rank. What it does is looked up by its
number in the table of the graph that runs, so that a compiled artefact holds nothing of a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ._communication import events

Effect = Callable[..., Sequence[Tensor]]


class Effects:
    """Those of one graph, by number, each with its cause."""

    def __init__(self) -> None:
        self._table: list[tuple[Effect, object, str]] = []
        self._token: Tensor | None = None

    def forget(self) -> None:
        """Forgets what was captured."""
        self._table.clear()
        self._token = None

    def end_pass(self) -> Tensor | None:
        """Returns the token of the last effect of a forward or backward, None if it has none."""
        token, self._token = self._token, None
        return token

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Within the block effects become operators, each after the one before."""
        global captured
        before, captured = captured, self
        try:
            yield
        finally:
            captured = before

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        """Within the block the operators do what this table says."""
        global _running
        before, _running = _running, self
        try:
            yield
        finally:
            _running = before

    def operator(self, call: Effect, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Returns what stands for the results of `call(*given)`: contiguous, of these shapes and the dtype of what is
        given."""
        sizes = [number for shape in shapes for number in (len(shape), *shape)]
        token = given[0].new_empty((), dtype=torch.uint8) if self._token is None else self._token
        self._table.append((call, *events.saved_cause()))
        self._token, made = torch.ops.vescale.effect(token, list(given), sizes, len(self._table) - 1)
        return made

    def run(self, number: int, given: Sequence[Tensor]) -> list[Tensor]:
        call, *cause = self._table[number]
        events.take_up_cause(*cause)
        return list(call(*(one.contiguous() for one in given)))


captured: Effects | None = None
_running: Effects | None = None


def capturing() -> Effects | None:
    """The effects of the graph that is captured now, if any."""
    return captured


def _run(token: Tensor, given: list[Tensor], sizes: list[int], number: int) -> tuple[Tensor, list[Tensor]]:
    if _running is None:
        return _shown(token, given, sizes, number)
    return torch.empty_like(token), _running.run(number, given)


def _shown(token: Tensor, given: list[Tensor], sizes: list[int], number: int) -> tuple[Tensor, list[Tensor]]:
    """Results without values: zeros, which are indices, too."""
    shapes, at = [], 0
    while at < len(sizes):
        shapes.append(sizes[at + 1 : at + 1 + sizes[at]])
        at += 1 + sizes[at]
    return torch.empty_like(token), [given[0].new_zeros(shape) for shape in shapes]


_library = torch.library.Library("vescale", "DEF")
_library.define("effect(Tensor token, Tensor[] given, int[] sizes, int number) -> (Tensor, Tensor[])")
_library.impl("effect", _run, "CompositeExplicitAutograd")
torch.library.register_fake("vescale::effect", _shown, lib=_library)
