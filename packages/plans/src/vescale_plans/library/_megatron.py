"""Megatron-LM's tensor parallelism (arXiv 1909.08053) and sequence parallelism (arXiv 2205.05198), as placements."""

from __future__ import annotations

from typing import NamedTuple

from vescale_dtensor import Replicate, Shard

from ..plan import Placements


class Megatron(NamedTuple):
    """Placements that the plan of a decoder is written with.

    Communication per block and direction over the tensor axis: two all-reduces, or
    with sequence parallelism two all-gathers and two reduce-scatters.
    """

    columns: Placements
    """Placements of a weight [out, in] or bias [out] whose outputs are spread over the axis."""
    rows: Placements
    """Placements of a weight [out, in] whose inputs are spread over the axis."""
    whole: Placements
    """Placements of activations that enter a column-sharded layer."""
    stream: Placements
    """Placements of the residual stream between blocks, [batch, position, channel]."""


def megatron(axis: str, sequence_parallel: bool) -> Megatron:
    whole = {axis: Replicate()}
    return Megatron({axis: Shard(0)}, {axis: Shard(1)}, whole, {axis: Shard(1)} if sequence_parallel else whole)
