"""Filling a shard with random numbers, over stock torch's fill: of the whole for the `torch` stream, else of a shard.

8 ranks, float32, one thread; `torch` as rank 0 sees it, whose share is no smaller than any other's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cases._pairwise import Race, race, timer

SHAPE = (1024, 8192)
FILLS = ("uniform_", "normal_", "bernoulli_", "exponential_")
ARGUMENTS = {"bernoulli_": (0.1,)}
LAYOUTS = ("Shard(0)", "Shard(1)")
# The contender that each stream is held against.
BASELINES = {"torch": "torch, the whole", "philox": "torch, the shard"}


def cases() -> Iterator[tuple[str, str]]:
    return ((fill, layout) for fill in FILLS for layout in LAYOUTS)


def run(mesh: DeviceMesh, fill: str, layout: str, rounds: int = 40) -> Race:
    """Everyone's seconds per fill."""
    import vescale_rng
    from vescale_dtensor import Shard, empty

    shard = empty(*SHAPE, device_mesh=mesh, placements=[{"Shard(0)": Shard(0), "Shard(1)": Shard(1)}[layout]])
    whole, alone = torch.empty(SHAPE), torch.empty(shard.to_local().shape)
    arguments = ARGUMENTS.get(fill, ())
    contenders = {
        name: timer(f"x.{fill}(*arguments)", x=x, arguments=arguments)
        for name, x in (("torch, the whole", whole), ("torch, the shard", alone), ("torch", shard))
    }

    def philox() -> None:
        with vescale_rng.use_stream("philox"):
            getattr(shard, fill)(*arguments)

    return race(contenders | {"philox": timer(philox)}, rounds=rounds, calls=1)
