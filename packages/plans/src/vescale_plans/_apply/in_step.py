"""Checks that ranks are in step: their generators in one state, replicas and inputs alike.

A rank that draws a number alone (`if rank == 0: sample()`) draws other masks than the others from then on, and replicas
part, without an error anywhere; where memory loses a bit, they do, too. So before the first calls of a model, and then
every so many, ranks exchange a few numbers: of their generators' states, of the bits of all that several ranks hold
alike, of those of the inputs, and of the time of their own. Calls without gradients are counted among the first alone,
for one rank may evaluate by itself what sends nothing.

Generators are compared once the model draws, or a sharded tensor has been drawn: before that each rank may use torch's
own as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import Mesh, line_numbers
from vescale_rng.state import draws, drifted, fingerprints, generators_of
from vescale_trace.in_step import EVERY, first_bits
from vescale_trace.values import tensors_in

from ..installed._replicas import Replicas
from ..installed._stragglers import Stragglers, Told, slowest

_DRAWS, _DRIFTED, _APART = 1, 2, 4


class InStep:
    """The checks of one model's calls."""

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        self._mesh, self._replicas, self._stragglers = mesh, Replicas(root, mesh), Stragglers(mesh)
        self._draws, self._drawn, self._last, self._alike = False, -1, 0, 0
        self.entered: tuple[int, ...] = ()  # the states before the call that runs, if its end is looked at

    def enter(self, given: Any, call: int) -> bool:
        """Compares the ranks before a call of the model. True, on all ranks alike, if parameters or inputs differ.

        Raises RandomStateError, on all ranks alike, and where a rank that is slow ends the job, CommunicationError.
        Cost: an all-gather per axis, of 56 bytes along the last and 8 more along each before, for which the host waits;
        all that is held alike is read once.
        """
        if max(self._mesh.sizes, default=1) == 1:
            return False
        generators = generators_of(self._mesh.device_type)
        self.entered, before, self._drawn = fingerprints(generators), self._drawn, draws()
        self._draws |= before not in (-1, self._drawn)
        own, held = self._stragglers.own(call, EVERY), self._replicas.digests()
        flags, told = _compared(self._mesh, hash(self.entered), _DRAWS * self._draws, given, held, own)
        self._stragglers.judge(told, call)
        if not flags & _DRIFTED:
            self._last = call
        elif flags & _DRAWS:
            when = f"at call {call} of the model" + (f", in step at call {self._last}" if self._last else "")
            raise drifted(generators, self._mesh, "model", when)
        if not flags & _APART:
            self._alike = call
        return bool(flags & _APART)

    def check_replicas(self, call: int) -> None:
        """Raises PlainTensorError, on all ranks alike, if ranks hold other values of what is the same."""
        when = f" (at call {call} of the model" + (f", alike at call {self._alike})" if self._alike else ")")
        self._replicas.check(when)

    def leave(self) -> None:
        """The call is over: has it drawn?"""
        if self.entered:
            self._draws |= fingerprints(generators_of(self._mesh.device_type)) != self.entered


def differ(given: Any, mesh: Mesh) -> bool:
    """True, on all ranks alike, if their plain tensors differ. Cost: as of `InStep.enter`."""
    return bool(_compared(mesh, 0, 0, given)[0] & _APART)


def _compared(
    mesh: Mesh, state: int, flags: int, given: Any, held: Sequence[int] | None = None, told: Told = (0, 0, 0)
) -> tuple[int, Told]:
    """Ors all ranks' flags, with those of what is apart; and the slowest rank. `held`: per axis, what ranks along it
    have alike."""
    held = [0] * mesh.ndim if held is None else held
    plain = [tensor for tensor in tensors_in(given) if type(tensor) is not DTensor]
    batch = hash((*(tuple(one.shape) for one in plain), *first_bits(plain)))
    for axis in range(mesh.ndim):
        line = line_numbers([state, batch, flags, *told, *held], mesh, axis)
        states, batches, found, most, places, medians, alike, *later = zip(*line)
        told = slowest([*zip(most, places, medians)])
        flags = reduce(or_, found) | _DRIFTED * (len({*states}) > 1)
        flags |= _APART * (len({*batches}) > 1 or len({*alike}) > 1)
        held = [*map(hash, later)]  # a line stands for one from here on: what is found along an axis, all ranks find
    return flags, told
