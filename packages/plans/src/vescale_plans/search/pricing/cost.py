"""Time of one training step of one candidate, in closed form.

Matrix multiplications by a roofline that small sizes do not reach, or by the terms that were measured; collectives by
latency and bandwidth of the link that their axis lies on, or by measured curves; the pipeline by its bubble (Narayanan
et al., arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil

from ..candidates import Candidate
from .context import meeting_seconds
from .hardware import Hardware
from .sizes import Sizes

OPERATORS = 12
"""Operators around one contraction in eager code."""
PASSES = 3
"""Forwards that a forward and a backward take as long as."""
REWRITTEN = 2
"""Times that the output of a recomputed module without a matrix goes over the memory's bus."""
STEPPED = 32
"""Bytes per parameter that a step of AdamW reads and writes."""
SHOWN = 0.1
"""Share of what is reduced or gathered beside computation that nothing hides."""
HOPS = 0.3
"""Share of a pipeline's transfers that computation does not hide, where it hides anything."""


@dataclass(frozen=True)
class Busy:
    """Seconds that grow with the parts of the model that a rank holds, by what they are spent on."""

    compute: float
    elementwise: float
    tensor: float
    experts: float
    context: float

    @property
    def busy(self) -> float:
        """All of them."""
        return sum(getattr(self, name) for name in BUSY)


BUSY = tuple(one.name for one in fields(Busy))


@dataclass(frozen=True)
class Cost(Busy):
    """Seconds of one step."""

    data: float
    pipeline: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.busy + self.data + self.pipeline + self.optimizer


@dataclass(frozen=True)
class Pass(Busy):
    """Seconds of one microbatch in one direction, over all that `Sizes` counts."""

    @property
    def both(self) -> float:
        """Forward and backward, nothing computed again."""
        sent = self.tensor + self.experts + self.context
        return PASSES * (self.compute + self.elementwise) + (PASSES - 1) * sent

    def plus(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, name) + getattr(other, name) for name in BUSY))


NOTHING = Pass(0.0, 0.0, 0.0, 0.0, 0.0)


def pass_of(sizes: Sizes, candidate: Candidate, hardware: Hardware, batch: int, seq: int) -> Pass:
    """Prices a pass; alike for all candidates of equal `tp`, `cp`, `ep`, `sp` and `positions_of`."""
    positions = positions_of(candidate, batch, seq)
    attended = _attention(sizes, hardware, positions, seq)
    compute = _matrices(sizes, candidate, hardware, positions) + attended
    elementwise = _elementwise(sizes, candidate, hardware, positions)
    tensor = _tensor(sizes, candidate, hardware, positions, compute + elementwise)
    context = meeting_seconds(sizes, candidate, hardware, positions, seq, attended)
    return Pass(compute, elementwise, tensor, _exchanges(sizes, candidate, hardware, positions), context)


def again_of(sizes: Sizes, candidate: Candidate, hardware: Hardware, batch: int, seq: int) -> Pass:
    """Cost of the parts of `sizes` that a candidate computes again: blocks, and no head. Modules are counted with their
    last product, which a recomputation ends before: what it gives nobody keeps."""
    if not candidate.checkpointing or sizes.within is None:
        return NOTHING
    if not candidate.inside:
        return pass_of(sizes.within, candidate, hardware, batch, seq)
    again, held = NOTHING, sizes.held_back.get(hardware.itemsize)
    positions = positions_of(candidate, batch, seq)
    for name in candidate.inside:
        inner = sizes.inside[name]
        again = again.plus(pass_of(inner, candidate, hardware, batch, seq))
        if held is not None and not inner.contractions:
            made = held.inside[name].made.at(positions, seq, candidate.tp, candidate.sp, candidate.cp)
            again = again.plus(replace(NOTHING, elementwise=REWRITTEN * made / hardware.bandwidth))
    return again


def positions_of(candidate: Candidate, batch: int, seq: int) -> int:
    """Positions of one microbatch on one rank."""
    return ceil(batch / candidate.dp / candidate.microbatches) * ceil(seq / candidate.cp)


def cost_of(
    sizes: Sizes,
    candidate: Candidate,
    hardware: Hardware,
    batch: int,
    seq: int,
    one: Pass | None = None,
    again: Pass | None = None,
) -> Cost:
    """Cost of the slowest rank; `batch` rows of `seq` positions on all ranks together; `one` is `pass_of` the same, and
    `again` that of recomputation, if they are known.

    What a rank is busy with (compute, elementwise, tensor, experts, context) is a sum over the parts that it holds, and
    that of `sizes` over candidate.pp: blocks dealt out evenly. `pipeline` is waiting, pp - 1 microbatches long, and
    transfers.
    """
    one = one or pass_of(sizes, candidate, hardware, batch, seq)
    again = again or again_of(sizes, candidate, hardware, batch, seq)
    passes = {"compute": PASSES, "elementwise": PASSES}  # what is sent is not sent for gradients of weights
    busy = {name: passes.get(name, PASSES - 1) * getattr(one, name) + getattr(again, name) for name in BUSY}
    share = candidate.microbatches / candidate.pp
    waits = sum(busy.values()) / candidate.pp * (candidate.pp - 1) / candidate.virtual
    return Cost(
        **{name: seconds * share for name, seconds in busy.items()},
        data=_data(sizes, candidate, hardware, PASSES * one.compute * share),
        pipeline=waits + _hops(sizes, candidate, hardware, positions_of(candidate, batch, seq)),
        optimizer=_optimizer(sizes, candidate, hardware),
    )


def _matrices(sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int) -> float:
    time = 0.0
    for one, times in sizes.contractions.items():
        rows, experts = positions, 1.0
        if one.experts:  # spread, each rank has fewer, to each of which more ranks send
            rows, experts = positions * candidate.ep * one.chosen / one.experts, one.experts / candidate.ep
        time += times * experts * hardware.product_seconds(rows, one.outward, one.inward)
    return time


def _attention(sizes: Sizes, hardware: Hardware, positions: int, seq: int) -> float:
    width = sum(
        times * branch.features / (sizes.tp if branch.split else 1)
        for branch, times in sizes.branches.items()
        if branch.positions_meet
    )
    scores = hardware.scores * hardware.itemsize / hardware.bandwidth
    return positions * seq * width * (4 / (hardware.flops * hardware.attention) + scores)


def _elementwise(sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int) -> float:
    stream = candidate.tp if candidate.sp else 1
    moved = 0.0
    for branch, times in sizes.branches.items():
        inner = branch.features * max(1, branch.chosen) / (sizes.tp if branch.split else 1)
        moved += times * (hardware.stream * branch.stream / stream + 4 * inner)
    operators = OPERATORS * sum(sizes.contractions.values())
    each = hardware.launch + (hardware.host if hardware.at_once else 0.0)
    return positions * moved * hardware.itemsize / hardware.bandwidth + operators * each


def _tensor(sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int, computed: float) -> float:
    """One direction, which takes so many seconds of computation: an all-reduce per split group, or an all-gather and
    a reduce-scatter, which move the same; ranks wait for each other at one of the two."""
    split = {branch: times for branch, times in sizes.branches.items() if branch.split}
    if candidate.tp == 1 or not split:
        return 0.0
    calls, kind = (2, "reduce_scatter") if candidate.sp else (1, "all_reduce")
    moved = 2 / calls * (candidate.tp - 1) / candidate.tp * positions * hardware.itemsize
    wait = hardware.wait_seconds(computed / sum(split.values()))
    return sum(
        times * (wait + calls * hardware.collective_seconds(kind, candidate.tp, moved * branch.stream))
        for branch, times in split.items()
    )


def _exchanges(sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int) -> float:
    """One direction: each stack of experts is sent the rows chosen for it, and sends back as many."""
    if candidate.ep == 1:
        return 0.0
    nodes = candidate.tp * candidate.ep // hardware.node
    time = 0.0
    for branch, times in sizes.branches.items():
        copies = branch.chosen * (candidate.ep - 1) / candidate.ep
        if hardware.once:
            copies = (min(branch.chosen, nodes) * (nodes - 1) / nodes if nodes > 1 else copies) / candidate.tp
        if copies:
            moved = copies * positions * hardware.itemsize * branch.stream
            time += times * 2 * hardware.collective_seconds("all_to_all", candidate.ep, moved, candidate.tp)
    return time


def _data(sizes: Sizes, candidate: Candidate, hardware: Hardware, compute: float) -> float:
    """Seconds that computation does not hide: gathers before the loss behind the forward, those after it and reductions
    behind the backward, which has one link for both. `compute` is without what is computed again, for how much that is
    the cut decides later, and no plan may be cheaper for what it might compute again and does not."""
    if candidate.replicas == 1:
        return 0.0
    copies = candidate.replicas // candidate.ep  # of each expert
    dense = (sizes.held - sizes.experts) * (candidate.replicas - 1) / candidate.replicas
    part = 4 / candidate.pp * (dense + sizes.experts / candidate.ep * (copies - 1) / copies)
    backwards = candidate.microbatches if candidate.pp == 1 and candidate.zero > 1 else 1  # see `Plan.parts`
    kind, moved = ("reduce_scatter", part) if candidate.zero == 3 else ("all_reduce", 2 * part)
    reduce = backwards * hardware.collective_seconds(kind, candidate.replicas, moved, candidate.tp)
    forward, backward = compute / PASSES, compute * (PASSES - 1) / PASSES
    if candidate.zero < 3:
        return _exposed(reduce, hardware, backward)
    group, apart = candidate.sharded if candidate.cp > 1 else candidate.dp, candidate.tp
    if candidate.cp > 1:
        part *= (group - 1) / group * candidate.replicas / (candidate.replicas - 1)
        apart *= candidate.replicas // group
    gather = hardware.collective_seconds("all_gather", group, part * hardware.itemsize / 4, apart)
    if candidate.pp > 1:  # kept for all microbatches, until their backwards are through
        return _exposed(gather, hardware, forward) + _exposed(reduce, hardware, backward)
    gathers = candidate.microbatches * gather
    return _exposed(gathers, hardware, forward) + _exposed(gathers + reduce, hardware, backward)


def _optimizer(sizes: Sizes, candidate: Candidate, hardware: Hardware) -> float:
    """A step of AdamW over its part of the parameters. On the host it is given gradients by the host's link, and what
    it stepped comes back: once, and under ZeRO-3 with each gather."""
    numbers = sizes.spread(candidate.ep) / candidate.pp / (candidate.sharded if candidate.zero else 1)
    if not candidate.offload or hardware.host_link is None:
        return numbers * STEPPED / hardware.bandwidth
    back = 2 * candidate.microbatches if candidate.zero == 3 and candidate.pp == 1 else 1
    return numbers * (STEPPED / hardware.host_bandwidth + 4 * (1 + back) / hardware.host_link)


def _exposed(seconds: float, hardware: Hardware, beside: float) -> float:
    """Exposed seconds of what is sent beside so many seconds of computation."""
    if hardware.hidden < 0:
        return seconds * (1 - hardware.hidden)
    return max(SHOWN * seconds, seconds - hardware.hidden * beside)


def _hops(sizes: Sizes, candidate: Candidate, hardware: Hardware, positions: int) -> float:
    if candidate.pp == 1:
        return 0.0
    width = max((branch.stream for branch in sizes.branches), default=0)
    moved = positions * width * hardware.itemsize
    hop = hardware.collective_seconds("send", 2, moved, candidate.ranks // 2)
    shown = HOPS if hardware.hidden else 1.0
    return 2 * candidate.microbatches * candidate.virtual * hop * shown
