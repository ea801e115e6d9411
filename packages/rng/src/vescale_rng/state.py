"""The state of the generator that sharded tensors are drawn from: the same on every rank and every world size.

Because every rank goes past the numbers of the others, the state is that of one
device: it may be saved on any rank and set on every rank of another mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import VescaleError
from vescale_dtensor.engine import Mesh, first_apart, gather_objects, mesh_of

from . import _journal
from ._cpu.mt19937 import generator_or_default
from ._journal import Entry, fingerprint

_COUNTED = 16
"""Bytes of a device's state: a seed, and how far it has come."""
_LOOKED_AHEAD = 10_000


class RandomStateError(VescaleError):
    """The ranks' generators are not in the same state."""


def get_state(generator: Generator | None = None) -> Tensor:
    """Returns the state of torch's default CPU generator, or of `generator`, for `set_state`. No communication."""
    return generator_or_default(generator).get_state()


def set_state(state: Tensor, generator: Generator | None = None) -> None:
    """Sets the default CPU generator, or `generator`, to a state returned by `get_state` under any mesh."""
    generator_or_default(generator).set_state(state)


@contextmanager
def fork(seed: int | None = None, generator: Generator | None = None) -> Iterator[Generator]:
    """Gives the generator its own state inside the block, seeded with `seed` if given, and restores the earlier state
    afterwards.

        with vescale_rng.fork(seed=7):
            x = vescale_rng.randn(4, 4, device_mesh=mesh, placements=[Shard(0)])
    """
    own = generator_or_default(generator)
    kept = own.get_state()
    try:
        if seed is not None:
            own.manual_seed(seed)
        yield own
    finally:
        own.set_state(kept)


def check_in_step(device_mesh: DeviceMesh, generator: Generator | None = None) -> None:
    """Checks that the generators of all ranks of the mesh, on the host and on the device, are in the same state. Call
    it on every rank.

    Raises RandomStateError, on every rank alike, which names the first rank that deviates and the two draws between
    which it deviated. Communication: some KB from every rank.
    """
    mesh = mesh_of(device_mesh)
    state = fingerprints(mesh.device_type, generator)
    if first_apart(state, mesh) is not None:
        raise drifted(state, mesh, "check_in_step", "now", generator)


def fingerprints(device_type: str, generator: Generator | None = None) -> tuple[int, ...]:
    """Returns a number for the state of the host's generator and one for the device's, or one for `generator`: the same
    on all ranks that are in step."""
    return tuple(map(fingerprint, _generators(device_type, generator)))


def _generators(device_type: str, generator: Generator | None) -> list[Generator]:
    own = [generator_or_default(generator)]
    if generator is None and device_type != "cpu":
        module = torch.get_device_module(device_type)
        own.append(module.default_generators[module.current_device()])
    return own


def draws() -> int:
    """Returns how many draws of sharded tensors this rank has made."""
    return _journal._count


def drifted(
    state: tuple[int, ...], mesh: Mesh, operation: str, when: str, generator: Generator | None = None
) -> RandomStateError:
    """Builds the error for ranks that are not in step, the same on all; `state`: of this rank's generators, `when`
    they were compared, from `fingerprints`. Communication: some KB from every rank."""
    now = [one.get_state() for one in _generators(mesh.device_type, generator)]
    finals, logs, states = zip(*gather_objects((state, list(_journal.entries), now), mesh))
    assert mesh.device_mesh is not None  # where nobody else is, nothing is apart
    ranks = mesh.device_mesh.mesh.flatten().tolist()
    odd, before, after = _first_drift(finals, states, [{entry.number: entry for entry in log} for log in logs])
    names = ", ".join(str(ranks[place]) for place in odd)
    others = "those of most ranks" if len(ranks) > 2 else "that of the other rank"
    return RandomStateError(
        operation,
        f"rank {ranks[odd[0]]} drifted first: its generator is not in the same state as {others}",
        [f"on {mesh}, {when}, out of step  {names}", f"in step until  {before}", f"out of step at  {after}"],
        [
            ("draw on every rank or on none", "look between the two places for a draw that only some ranks make"),
            ("torch.rand(1, generator=torch.Generator())", "what one rank draws alone, from a generator of its own"),
            ("torch.manual_seed(seed)", "the same on every rank, or vescale_rng.set_state(state)"),
        ],
    )


def _first_drift(
    finals: Sequence[tuple[int, ...]], states: Sequence[list[Tensor]], logs: list[dict[int, Entry]]
) -> tuple[list[int], str, str]:
    """The places in the mesh that differ first, and the draws before and after that, as text.

    That is since all were last in step: an older drift may have been mended by a seed.
    """
    usual = _behind(finals, states)
    odd, after = _odd(finals, usual), "this check"
    for number in sorted(set.intersection(*map(set, logs)), reverse=True):
        at = [log[number] for log in logs]
        odd_here = _odd([(entry.name, entry.state) for entry in at], usual)
        if not odd_here:
            return odd, str(at[0]), after
        odd, after = odd_here, str(at[odd_here[0]])
    return odd, "a draw before those that are noted", after


def _odd(values: Sequence, usual: int) -> list[int]:
    """The places of the values that are not the most frequent one, in a tie not the one at the place `usual`."""
    counts = Counter(values)
    most = max(values, key=lambda value: (counts[value], value == values[usual]))
    return [place for place, value in enumerate(values) if value != most]


def _behind(finals: Sequence[tuple[int, ...]], states: Sequence[list[Tensor]]) -> int:
    """The place of a rank whose generators come to where the others' are if they draw on: the others have drawn what
    it has not. The first place if there is none."""
    places = {final: place for place, final in reversed(list(enumerate(finals)))}.values()
    return next((place for place in places if all(_reaches(states[place], states[one]) for one in places)), 0)


def _reaches(states: list[Tensor], others: list[Tensor]) -> bool:
    """True if generators in these states come to the others, the host's within some thousand numbers."""
    for state, other in zip(states, others):
        if len(state) == _COUNTED:
            if (state.view(torch.int64) > other.view(torch.int64)).any():
                return False
            continue
        generator, left = Generator(), _LOOKED_AHEAD
        generator.set_state(state)
        while left and not torch.equal(generator.get_state(), other):
            torch.empty((), dtype=torch.int32).random_(generator=generator)
            left -= 1
        if not left:
            return False
    return True
