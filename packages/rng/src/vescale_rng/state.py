"""The state of the generator that sharded tensors are drawn from: the same on every rank and every world size.

Because every rank goes past the numbers of the others, the state is that of one
device: it may be saved on any rank and set on every rank of another mesh.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import VescaleError
from vescale_dtensor.engine import Mesh, first_apart, gather_objects, mesh_of
from vescale_trace.arguments import torch_call

from . import _journal
from ._cpu.mt19937 import generator_or_default, is_behind
from ._cuda import recorded as _graphs
from ._cuda.recorded import Recorded as Recorded
from ._cuda.recorded import recorded as recorded
from ._journal import Entry

_DISTANT = "a draw before those that are noted"


class RandomStateError(VescaleError):
    """The ranks' generators are not in the same state."""


def get_state(generator: Generator | None = None) -> Tensor:
    """Returns the state of torch's default CPU generator, or of `generator`, for `set_state`. No communication."""
    return generator_or_default(generator).get_state()


@torch_call
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
    generators = generators_of(mesh.device_type, generator)
    if first_apart(fingerprints(generators), mesh) is not None:
        raise drifted(generators, mesh, "check_in_step", "now")


def generators_of(device_type: str, generator: Generator | None = None) -> list[Generator]:
    """Returns torch's generators that sharded tensors are drawn from, the host's first; `generator` alone if given."""
    own = [generator_or_default(generator)]
    if generator is None and device_type != "cpu":
        module = torch.get_device_module(device_type)
        own.append(module.default_generators[module.current_device()])
    return own


def fingerprints(generators: Sequence[Generator]) -> tuple[int, ...]:
    """Returns a number for each one's state, the same on all ranks that are in step."""
    return tuple(map(_journal.fingerprint, generators))


def draws() -> int:
    """Returns how many draws of sharded tensors this rank has made."""
    return _journal._count


def moved() -> int:
    """Returns by how much draws of sharded tensors have moved CUDA's generators."""
    return _graphs.moved


def drifted(generators: list[Generator], mesh: Mesh, operation: str, when: str) -> RandomStateError:
    """Builds the error for ranks whose generators are apart, the same on all; `when` they were compared. Communication:
    some KB from every rank."""
    said = fingerprints(generators), generators[0].get_state(), list(_journal.entries)
    finals, hosts, logs = zip(*gather_objects(said, mesh))
    assert mesh.device_mesh is not None  # where nobody else is, nothing is apart
    ranks = mesh.device_mesh.mesh.flatten().tolist()
    usual = next((at for at, one in enumerate(hosts) if all(is_behind(one, other) for other in hosts)), 0)
    odd, before, after = _first_drift(finals, logs, usual)
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
    finals: Sequence[tuple[int, ...]], logs: Sequence[list[Entry]], usual: int
) -> tuple[list[int], str, str]:
    """The places in the mesh that differ first, and the draws before and after that, as text.

    That is since all were last in one state: an older drift may have been mended by a seed, and what was drawn under
    the same seed before has the same states.
    """
    places = [{entry.state: at - len(log) for at, entry in enumerate(log)} for log in logs]
    shared = set.intersection(*map(set, places))
    odd, before, after = _odd(finals, usual), _DISTANT, "this check"
    if not shared:
        return odd, before, after
    last = max(shared, key=lambda state: min(place[state] for place in places))
    for further in (1, 0):  # the draw after it; its own line, if one rank alone has drawn there
        pairs = [[None, *log, None][place[last] - 2 + further :][:2] for log, place in zip(logs, places)]
        apart = _odd([at and (at.name, at.state, os.path.basename(at.site)) for _, at in pairs], usual)
        if apart or further:
            odd = apart or odd
            first, second = pairs[odd[0]]
            before, after = str(first or before), str(second or after)
    return odd, before, after


def _odd(values: Sequence, usual: int) -> list[int]:
    """The places of the values that are not the most frequent one, in a tie not the one at the place `usual`."""
    counts = Counter(values)
    most = max(values, key=lambda value: (counts[value], value == values[usual]))
    return [place for place, value in enumerate(values) if value != most]
