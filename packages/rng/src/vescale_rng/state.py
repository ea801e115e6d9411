"""The state of the generator that sharded tensors are drawn from: the same on every rank and every world size.

Because every rank goes past the numbers of the others, the state is that of one
device: it may be saved on any rank and set on every rank of another mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import VescaleError
from vescale_dtensor.engine import first_apart, gather_objects, mesh_of

from ._cpu.mt19937 import generator_or_default
from ._journal import Entry, entries, fingerprint


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
    own = [generator_or_default(generator)]
    if generator is None and mesh.device_type != "cpu":
        module = torch.get_device_module(mesh.device_type)
        own.append(module.default_generators[module.current_device()])
    state = tuple(map(fingerprint, own))
    if first_apart(state, mesh) is None:
        return
    reports = gather_objects((state, list(entries)), mesh)
    finals = [final for final, _ in reports]
    ranks = device_mesh.mesh.flatten().tolist()
    odd, before, after = _first_drift(finals, [{entry.number: entry for entry in log} for _, log in reports])
    names = ", ".join(str(ranks[place]) for place in odd)
    raise RandomStateError(
        "check_in_step",
        f"rank {ranks[odd[0]]} drifted first: its generator is not in the same state as those of most ranks",
        [f"on {mesh}, out of step  {names}", f"in step until  {before}", f"out of step at  {after}"],
        [
            ("draw on every rank or on none", "look between the two places for a draw that only some ranks make"),
            ("vescale_rng.set_state(state)", "the same state on every rank"),
        ],
    )


def _first_drift(finals: list[tuple[int, ...]], logs: list[dict[int, Entry]]) -> tuple[list[int], str, str]:
    """The places in the mesh that differ first, and the draws before and after that, as text.

    That is since all were last in step: an older drift may have been mended by a seed.
    """
    odd, after = _odd(finals), "this check"
    for number in sorted(set.intersection(*map(set, logs)), reverse=True):
        at = [log[number] for log in logs]
        odd_here = _odd([(entry.name, entry.state) for entry in at])
        if not odd_here:
            return odd, str(at[0]), after
        odd, after = odd_here, str(at[odd_here[0]])
    return odd, "a draw before those that are noted", after


def _odd(values: list) -> list[int]:
    """The places of the values that are not the most frequent one, the first of those in a tie."""
    usual, _ = Counter(values).most_common(1)[0]
    return [place for place, value in enumerate(values) if value != usual]
