"""The conversions between placements, each against who could do the same."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cases._pairwise import race, timer

SIZE = 64
# Placements by their short names, as both libraries write them; the last two are ours alone.
PLACEMENTS = {
    "R": "Replicate()",
    "S(0)": "Shard(0)",
    "S(1)": "Shard(1)",
    "P": "Partial()",
    "Interleaved(0, 2)": "InterleavedShard(0, 2)",
    "Ragged": "RaggedShard((0,), (1, 2, 1, 1, 1, 1, 1, 0))",
}
# Every pair, and those among them that torch has too: it converts nothing to Partial.
CASES = {f"{a} -> {b}": (PLACEMENTS[a], PLACEMENTS[b]) for a, b in itertools.permutations(PLACEMENTS, 2)}
SHARED = {f"{a} -> {b}" for a in ("R", "S(0)", "S(1)", "P") for b in ("R", "S(0)", "S(1)") if a != b}


def ratio(name: str, mesh: DeviceMesh, rounds: int = 40) -> float:
    """Our time over torch's, or where torch has no such conversion, over our own of Shard(0) to Replicate()."""
    before, after = CASES[name]
    contenders = {"ours": _ours(before, after, mesh)}
    contenders["baseline"] = _theirs(before, after, mesh) if name in SHARED else _ours("Shard(0)", "Replicate()", mesh)
    return race(contenders, rounds=rounds).ratio("ours", "baseline").median


def _ours(before: str, after: str, mesh: DeviceMesh):
    import vescale_dtensor

    source, target = (eval(words, vars(vescale_dtensor)) for words in (before, after))
    tensor = vescale_dtensor.distribute_tensor(torch.ones(SIZE, SIZE), mesh, (vescale_dtensor.Shard(0),))
    tensor = tensor.redistribute((source,))
    # A conversion is remembered on its source until that changes; a fresh source is what a training step has.
    return timer("fresh(x, placements, mesh).redistribute(to)", x=tensor.to_local(), mesh=mesh, to=(target,),
                 placements=(source,), fresh=_fresh(vescale_dtensor.DTensor))  # fmt: skip


def _theirs(before: str, after: str, mesh: DeviceMesh):
    from torch.distributed import tensor as theirs

    source, target = (eval(words, vars(theirs)) for words in (before, after))
    local = [SIZE, SIZE]
    if isinstance(source, theirs.Shard):
        local[source.dim] //= mesh.size()
    return timer("fresh(x, placements, mesh).redistribute(placements=to)", x=torch.ones(local), mesh=mesh,
                 to=(target,), placements=(source,), fresh=_fresh(theirs.DTensor))  # fmt: skip


def _fresh(kind):
    """A tensor of the kind over a local one, the cheapest way that users have."""
    shape, stride = torch.Size((SIZE, SIZE)), (SIZE, 1)
    if kind.__module__.startswith("vescale"):
        return lambda x, placements, mesh: kind.from_local(x, mesh, placements, shape=shape)
    return lambda x, placements, mesh: kind.from_local(
        x, mesh, placements, run_check=False, shape=shape, stride=stride
    )
