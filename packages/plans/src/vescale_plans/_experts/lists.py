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
are given (`listed/check.py`). Writes of a block to its own input are not seen outside of it.

A block that writes state of its own (`self.bias += ...`) would do so twice, and from one rank's rows. The first calls
watch for that, too (`state.py`): such a block computes on the whole batch from then on (`listed/whole.py`).
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from vescale_dtensor.engine import Mesh, check_order

from .._calls.chain import add_step
from .._plan.parts import PlanError
from .listed.call import Call
from .listed.check import check_experts, check_token_wise, written_by
from .listed.members import Members
from .listed.whole import WholeCall
from .route import of_any_rank, total_load
from .state import Kept

# The first calls of a block, in training and in evaluation each, are held against its forward over all tokens.
CHECKED_CALLS = 2


class ListBoundary(Members):
    """The step around a block that calls the members of a list of experts."""

    def __init__(self, block: nn.Module, name: str, count: int, mesh: Mesh, axis: str) -> None:
        super().__init__(block, name, count, mesh, axis)
        self._checks = {True: CHECKED_CALLS, False: CHECKED_CALLS}
        self._writes: tuple[str, ...] = ()
        self._running: list[Call | WholeCall] = []
        add_step(block, "list", self._enter, self._leave)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        check_order("experts", f"{self.name}, whose experts are spread over an axis, computes")
        self.state.is_checked = self._checks[block.training] > 0
        self._checks[block.training] -= self.state.is_checked
        entered = None if self._writes else self._in_two_passes(block, args, kwargs)
        if entered is None:
            self._running.append(WholeCall(self, block))
        return entered

    def _in_two_passes(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Returns the arguments of the second pass; None for a block that turns out to write state of its own."""
        call, checked = Call(self, block, args, kwargs), self.state.is_checked
        if checked:
            self._writes = written_by(call)
            if not self._writes:
                check_token_wise(call)
        if not self._writes:
            kept = Kept(self.around(), deep=checked)
            call.note()
            written = kept.written()
            if checked:  # what it writes only while gradients are recorded
                self._writes = of_any_rank(written, call.members.mesh)
            elif written:
                raise self._began_to_write(written)
            if not self._writes:
                self._running.append(call)
                return call.begin()
            kept.restore()
            call.forget()
        check_experts(call)
        self._say()
        return None

    def _say(self) -> None:
        if not any(self.mesh.coordinate):
            warnings.warn(
                f"vescale_plans: the block of experts in a list {type(self.block).__name__} writes {self._writes[0]!r} "
                "of itself in its forward, so it computes on the whole batch, its experts one by one. Two all-to-alls "
                "of all rows are enough where that is written outside of the forward, or the experts are stacked.",
                stacklevel=2,
            )

    def _began_to_write(self, written: tuple[str, ...]) -> PlanError:
        return PlanError(
            self.name,
            f"the block of this list writes {written[0]!r} of itself in its forward, from this rank's rows, and did "
            f"not in its first {CHECKED_CALLS} calls: otherwise it would have computed on the whole batch",
            [f"written  {', '.join(written)}"],
            [self.on_every_rank(), ("write it from the first call on", "the block computes on the whole batch")],
        )

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        running = self._running.pop()
        running.close()
        return output if output is None or isinstance(running, WholeCall) else running.finish(output)

    def total_load(self) -> list[int]:
        """Rows that every expert received in the last forward. Cost: one small all-gather."""
        return total_load(self.spread, self.load, self.replicas)

    def total_dropped(self) -> list[int]:
        """Returns zeros: a list's rows have no order that all meshes share, and so no capacity."""
        return [0] * self.spread.experts
