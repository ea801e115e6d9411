"""Experts in a ModuleList, which the block's own forward calls in a loop: spread over an axis, the block unmodified.

The forward asks for experts one after the other, and each asks for rows of this rank's tokens; exchanged one by one,
that would be two all-to-alls per expert. So it runs twice, on plain tensors with this rank's tokens:

    first pass     whoever is called notes its rows and answers zeros
    between        all rows noted travel in one all-to-all, each rank's own experts compute, and all travel back
    second pass    the same calls are answered with what came back

What the forward calls besides (router, shared experts) computes once, on DTensors, and answers the second pass from
the first, unless it was given something else; random numbers are those of one device, drawn at the tokens' places.
Gradients flow through the first pass to the tokens, and through the second to the router: each path once.

That is right for a block that treats every token by itself, and calls experts with what does not depend on other
experts. The first calls are checked for it: the same forward over the tokens of all ranks, with a cheap function in
the place of the experts, must give what it gives over this rank's, and another function must not change what experts
are given (`check.py`). Writes of a block to its own input are not seen outside of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale_dtensor.engine import Mesh, check_order

from .._calls.chain import add_step
from .call import Call
from .check import check_token_wise
from .experts import total_load
from .members import Members

# The first calls of a block, in training and in evaluation each, are held against its forward over all tokens.
CHECKED_CALLS = 2


class ListBoundary(Members):
    """The step around a block that calls the members of a list of experts."""

    def __init__(self, block: nn.Module, name: str, count: int, mesh: Mesh, axis: str) -> None:
        super().__init__(block, name, count, mesh, axis)
        self._checks = {True: CHECKED_CALLS, False: CHECKED_CALLS}
        self._running: list[Call] = []
        add_step(block, "list", self._enter, self._leave)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        check_order("experts", f"{self.name}, whose experts are spread over an axis, computes")
        call = Call(self, block, args, kwargs)
        if self._checks[block.training] > 0:
            self._checks[block.training] -= 1
            check_token_wise(call)
        entered = call.begin()
        self._running.append(call)
        return entered

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        call = self._running.pop()
        call.close()
        return output if output is None else call.finish(output)

    def total_load(self) -> list[int]:
        """Rows that every expert received in the last forward. Cost: one small all-gather."""
        return total_load(self.spread, self.load, self.replicas)

    def total_dropped(self) -> list[int]:
        """None: a list's rows have no order that all meshes share, and so no capacity."""
        return [0] * self.spread.experts
