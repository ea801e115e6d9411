"""Memory of one rank, by formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ..candidates import Candidate
from .hardware import Hardware
from .sizes import Sizes

STATES = 8
"""Bytes per parameter of the optimizer's states: two fp32 moments."""
KEPT_OF_INPUT, KEPT_OF_STREAM = 1, 6
"""Activations kept per position: of a split contraction's input, once; of the stream around a group, in its width."""
KEPT_OF_ROW = 3
"""Of the rows sorted by expert, in the stream's width: what enters the experts, leaves them, and is weighed."""
SUMMED = 2
"""Gradients of all that a stage computes with, in a pipeline: the sum over microbatches, and what is added to it."""
LOGITS = 3
"""Copies of the last contraction's result that a loss keeps, in fp32."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step, by what they are for.

    Arguments:
        gathered: parameters that ZeRO-3 gathers, and what a block takes while it is computed again.
    """

    parameters: int
    gradients: int
    states: int
    activations: int
    gathered: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states + self.activations + self.gathered


def memory_of(sizes: Sizes, candidate: Candidate, hardware: Hardware, batch: int, seq: int) -> Memory:
    """The fullest rank of the first stage, which holds most microbatches.

    AdamW on parameters in fp32; activations in the hardware's training dtype (arXiv 2205.05198, section 4, counts
    the same way; here the widths are those that probing found).
    """
    spread = ceil(sizes.experts / candidate.ep / candidate.pp)
    dense = ceil((sizes.held - sizes.experts) / candidate.pp)
    again = 1 if candidate.ep > 1 else candidate.sharded  # ZeRO goes over the axis that the experts are spread over

    def part(stage: int, size: int) -> int:
        if candidate.zero < stage:
            return (dense + spread) * size
        return dense * size // candidate.sharded + spread * size // again

    positions = ceil(batch / candidate.dp / candidate.microbatches) * seq
    in_flight = min(candidate.microbatches, candidate.pp)
    kept = _kept_per_position(sizes, candidate) * hardware.itemsize
    logits = positions * sizes.entries // candidate.tp * 4 * LOGITS
    gathered = (dense + spread) * 4 if candidate.zero == 3 else 0  # a stage gathers a block once a step, and keeps it
    if candidate.pp == 1:
        gathered = 2 * gathered // max(1, sizes.blocks)
    if candidate.checkpointing:
        whole = _kept_per_position(sizes, replace(candidate, checkpointing=False)) * hardware.itemsize
        block = int(positions * whole / max(1, sizes.blocks))
        gathered += block if candidate.pp > 1 else max(0, block - logits)  # the loss is behind by then
    return Memory(
        parameters=part(3, 4),
        gradients=part(2, 4) if candidate.pp == 1 else SUMMED * (dense + spread) * 4,
        states=part(1, STATES),
        activations=int(positions * in_flight * kept / candidate.pp) + logits,
        gathered=gathered,
    )


def _kept_per_position(sizes: Sizes, candidate: Candidate) -> float:
    """Numbers that backward needs per position, over all blocks."""
    stream = candidate.tp if candidate.sp else 1
    kept = 0.0
    for branch, times in sizes.branches.items():
        if candidate.checkpointing:
            kept += times * branch.stream / stream
            continue
        inner = branch.inner + KEPT_OF_INPUT * branch.features
        if branch.chosen:  # a grouped product gathers what the tensor axis splits: its rows are whole
            inner = branch.chosen * (inner + KEPT_OF_ROW * branch.stream)
        elif branch.split:
            inner /= candidate.tp
        kept += times * (KEPT_OF_STREAM * branch.stream / stream + inner)
    return kept
