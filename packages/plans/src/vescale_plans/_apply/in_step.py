"""Checks, while the program goes on, that ranks are in step: their generators in one state, and replicas alike.

A rank that draws a number alone (`if rank == 0: sample()`) draws other masks than the others from then on, and replicas
part, without an error anywhere. So every so many calls of a model each rank sends some numbers, its generators' state
and the bits of one parameter and of the inputs, along one axis after the other. Nobody waits: what a call starts a
later one reads, which all ranks come to. Calls without gradients are not counted, for one rank may evaluate alone what
sends nothing.

Generators are compared once the model draws, or a sharded tensor has been drawn: before that each rank may use torch's
own as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, PlainTensorError
from vescale_dtensor.engine import Mesh, NumbersInFlight, sends_on_host
from vescale_rng import RandomStateError
from vescale_rng.state import draws, drifted, fingerprints
from vescale_trace.values import tensors_in

from ..installed._replicas import check_replicas, first_bits, replica

CHECK_EVERY = 10
"""Calls of a model that record gradients, from one check to the next."""
DRAWS, DRIFTED, PARTED, GIVEN = 1, 2, 4, 8
ALIKE = [
    ("model(plan.local_batch(batch))", "when every rank loads its own part of the batch"),
    ("seed the loader alike on all ranks", "when every rank loads the global batch"),
]


class Compared(NamedTuple):
    """The generators of this rank before a call of the model, of which there were `number` before it."""

    state: tuple[int, ...]
    number: int
    is_drawn: bool


class InStep:
    """The checks of one model's calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._checks: bool | None = None  # whether there is somebody to compare with
        self._counted, self._last = 0, 0  # calls that record gradients; the last number at which ranks were in step
        self._draws, self._drawn_before = False, -1
        self._entered: tuple[int, ...] | None = None  # the state before the call that runs, if its end is looked at
        self._running: tuple[Iterator[None], Compared] | None = None

    def look(self, number: int) -> Compared:
        """A call begins, at whose end is seen whether it has drawn."""
        drawn = draws()
        self._draws = self._draws or drawn != self._drawn_before != -1
        self._drawn_before, self._entered = drawn, fingerprints(self._mesh.device_type)
        return Compared(self._entered, number, self._draws)

    def enter(self, root: nn.Module, number: int, given: tuple[tuple, dict]) -> None:
        """A call begins that records gradients. Raises RandomStateError or PlainTensorError, on all ranks alike, for
        what the last check has found. Cost, now and then: 32 bytes along an axis, and sums of parts of tensors."""
        self._entered = None
        if self._checks is None:
            self._checks = sends_on_host(self._mesh)
        if not self._checks:
            return
        self._counted += 1
        if self._running is None and self._counted % CHECK_EVERY == 0:
            found = self.look(number)
            one, copied = replica(root, self._mesh, self._counted // CHECK_EVERY)
            plain = [tensor for tensor in tensors_in(given) if type(tensor) is not DTensor]
            self._running = _rounds(self._mesh, found, first_bits(one), copied, first_bits(plain)), found
        if self._running is not None:
            rounds, compared = self._running
            try:
                next(rounds)
            except StopIteration as end:
                self._running = None
                if end.value & DRIFTED and end.value & DRAWS:
                    raise self.drifted(compared) from None
                if end.value & GIVEN:
                    rule = (
                        f"plain tensors that entered call {compared.number + 1} differ between ranks of {self._mesh}: "
                        "they are the global batch, the same on every rank"
                    )
                    raise PlainTensorError("model", rule, (), ALIKE) from None
                if end.value & PARTED:
                    check_replicas(root, self._mesh)
                self.passed(compared)

    def leave(self) -> None:
        """The call is over."""
        if self._entered is not None:
            self._draws = self._draws or fingerprints(self._mesh.device_type) != self._entered
            self._entered = None

    def passed(self, compared: Compared) -> None:
        """All ranks have said the same."""
        if compared.is_drawn:
            self._last = compared.number + 1

    def drifted(self, compared: Compared) -> RandomStateError:
        """Builds the error for ranks whose generators are apart."""
        before = f", in step at call {self._last}" if self._last else ""
        return drifted(compared.state, self._mesh, "model", f"at call {compared.number + 1} of the model{before}")


def _rounds(
    mesh: Mesh, compared: Compared, held: Sequence[Tensor], copied: Sequence[int], given: Sequence[Tensor]
) -> Iterator[None]:
    """One check, whose rounds begin and end in different calls; returns what any rank has found. On several axes they
    go round twice: what one line of ranks has found the others hear."""
    if mesh.device_type != "cpu":
        arrived = torch.accelerator.current_stream().record_event()
        yield
        arrived.synchronize()
    bits, inputs, found = sum(map(int, held)), hash(tuple(map(int, given))), DRAWS * compared.is_drawn
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    for axis in axes * min(2, len(axes)):
        numbers = [hash(compared.state), bits if axis in copied else 0, inputs, found]
        line = NumbersInFlight(numbers, mesh, axis)
        yield
        *told, others = zip(*line.read())
        apart = [len(set(one)) > 1 for one in told]
        found = reduce(or_, others) | sum(flag * odd for flag, odd in zip((DRIFTED, PARTED, GIVEN), apart))
    return found
