"""Checks that ranks are in step: their generators in one state, replicas and inputs alike.

A rank that draws a number alone (`if rank == 0: sample()`) draws other masks than the others from then on, and replicas
part, without an error anywhere. So before the first calls of a model, and then every so many, ranks exchange a few
numbers: of their generators' states, of the bits of one parameter, and of those of the inputs. Calls without gradients
are counted among the first alone, for one rank may evaluate by itself what sends nothing.

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
from vescale_trace.values import tensors_in

from ..installed._replicas import first_bits, replica

FIRST, EVERY, FULL = 3, 10, 100
"""Calls of which each is checked in full; then one of how many is checked, and one of how many in full."""
_DRAWS, _DRIFTED, _APART = 1, 2, 4


def is_full(number: int) -> bool:
    """True for the calls that are checked in full, counted from 0."""
    return number < FIRST or number % FULL == 0


def is_turn(number: int, mesh: Mesh) -> bool:
    """True for the calls that are checked. The numbers that ranks tell each other come from the device: one that runs
    behind the host would be waited for, so there only those that are checked in full are."""
    return is_full(number) or (mesh.device_type == "cpu" and number % EVERY == 0)


class InStep:
    """The checks of one model's calls."""

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        self._root, self._mesh, self._checked = root, mesh, 0
        self._draws, self._drawn, self._last = False, -1, 0
        self.entered: tuple[int, ...] = ()  # the states before the call that runs, if its end is looked at

    def enter(self, given: Any, call: int) -> bool:
        """Compares the ranks before a call of the model. True, on all ranks alike, if parameters or inputs differ.

        Raises RandomStateError, on all ranks alike. Cost: an all-gather of 32 bytes per axis, which the host waits for.
        """
        if max(self._mesh.sizes, default=1) == 1:
            return False
        generators = generators_of(self._mesh.device_type)
        self.entered, before, self._drawn = fingerprints(generators), self._drawn, draws()
        self._draws |= before not in (-1, self._drawn)
        self._checked += 1
        one, copied = replica(self._root, self._mesh, self._checked)
        flags = _compared(self._mesh, hash(self.entered), _DRAWS * self._draws, given, hash(tuple(one)), copied)
        if not flags & _DRIFTED:
            self._last = call
        elif flags & _DRAWS:
            when = f"at call {call} of the model" + (f", in step at call {self._last}" if self._last else "")
            raise drifted(generators, self._mesh, "model", when)
        return bool(flags & _APART)

    def leave(self) -> None:
        """The call is over: has it drawn?"""
        if self.entered:
            self._draws |= fingerprints(generators_of(self._mesh.device_type)) != self.entered


def differ(given: Any, mesh: Mesh) -> bool:
    """True, on all ranks alike, if their plain tensors differ. Cost: as of `InStep.enter`."""
    return bool(_compared(mesh, 0, 0, given) & _APART)


def _compared(mesh: Mesh, state: int, flags: int, given: Any, bits: int = 0, copied: Sequence[int] = ()) -> int:
    """Ors all ranks' flags, with those of what is apart. `copied`: the axes along which `bits` are the same; along
    another they are of different parts, whose ranks stand for one from there on."""
    plain = [tensor for tensor in tensors_in(given) if type(tensor) is not DTensor]
    batch = hash((*(tuple(one.shape) for one in plain), *first_bits(plain)))
    for axis in reversed(range(mesh.ndim)):
        states, batches, parts, found = zip(*line_numbers([state, batch, bits, flags], mesh, axis))
        flags = reduce(or_, found) | _DRIFTED * (len({*states}) > 1) | _APART * (len({*batches}) > 1)
        flags |= _APART * (axis in copied and len({*parts}) > 1)
        bits = parts[0] if axis in copied else hash(parts)
    return flags
