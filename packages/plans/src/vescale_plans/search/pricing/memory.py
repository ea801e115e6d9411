"""Memory of one rank, by formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from ..candidates import Candidate
from ..held import Amount, Block
from ..stages import Load, held_at, moments
from .context import meeting_bytes
from .hardware import Hardware
from .sizes import Sizes

KEPT_OF_INPUT, KEPT_OF_STREAM = 1, 6
"""Activations kept per position: of a split contraction's input, once; of the stream around a group, in its width."""
KEPT_OF_ROW = 3
"""Rows sorted by expert, in the stream's width, that are kept: what enters the experts, leaves them, and is weighed."""
UNDER_WAY = 2
"""Sums of gradients at most (`_zero/running_reductions.py`); of torch's FSDP one."""
BUCKET_BYTES = 25 << 20
"""Most bytes of gradients that are summed together, but for ZeRO-3's (`_zero/units.py`)."""
LOGITS = 3
"""Copies of the last contraction's result that a loss keeps, in fp32."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step, by what they are for.

    Arguments:
        gathered: parameters that are gathered or made narrow, gradients on their way, what the optimizer takes.
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
    """The fullest rank of the first stage, which holds most microbatches; AdamW on parameters in fp32.

    Activations are what a step without values held on to, in numbers of the hardware's training dtype, position by
    position; of a model that did not run without values, what contractions of these widths keep (arXiv 2205.05198,
    section 4, counts the same way).
    """
    held = Held(sizes, candidate, hardware, batch, seq)
    return held.in_stages() if candidate.pp > 1 else held.alone()


class Held:
    """Memory of one rank, and when: of a model dealt out evenly over the candidate's stages, or of a `part` of it."""

    def __init__(
        self, sizes: Sizes, candidate: Candidate, hardware: Hardware, batch: int, seq: int, part: bool = False
    ) -> None:
        self.sizes, self.candidate, self.hardware, self.seq = sizes, candidate, hardware, seq
        self.numbers = hardware.numbers
        self.positions = ceil(batch / candidate.dp / candidate.microbatches) * ceil(seq / candidate.cp)
        self.meeting = int(meeting_bytes(sizes, candidate, hardware, self.positions, seq))
        stages = 1 if part else candidate.pp
        self.spread = ceil(sizes.experts / candidate.ep / stages)
        self.dense = ceil((sizes.held - sizes.experts) / stages)
        self.back = sizes.held_back.get(hardware.itemsize)
        self.outside = int(sizes.outside)
        self.block = int(sizes.spread(candidate.ep) - sizes.outside) // max(1, sizes.blocks)
        own = int(sizes.experts / candidate.ep) // max(1, sizes.blocks)  # experts, of a block
        self.summed_over = self.block - own * (candidate.ep == candidate.replicas > 1)
        lies_apart = candidate.ep > 1 and not self.numbers.everywhere  # ZeRO shards no expert that is spread
        self.comes = self.block - own * (lies_apart and not self.narrow)  # of a block, before it computes

    def part(self, stage: int, size: int) -> int:
        """Bytes of the parameters, `size` each, if ZeRO shards them from `stage` on."""
        if self.candidate.zero < stage:
            return (self.dense + self.spread) * size
        if self.numbers.everywhere:
            every = self.candidate.replicas
            return self.dense * size // every + self.spread * size // (every // self.candidate.ep)
        again = 1 if self.candidate.ep > 1 else self.candidate.sharded  # ZeRO goes over the axis experts are spread on
        return self.dense * size // self.candidate.sharded + self.spread * size // again

    def summed(self) -> int:
        """Gradients that are held from one microbatch to the next; those of a pipeline if they are from the start."""
        if self.candidate.pp > 1:
            whole = (self.dense + self.spread) * self.numbers.gradients
            sharded = self.part(2, self.numbers.gradients) if self.numbers.summed_sharded else whole
            return 0 if self.fresh() else self.numbers.sums * sharded
        return self.part(2, self.numbers.gradients) if self.candidate.microbatches > 1 else 0

    def fresh(self) -> int:
        """Gradients that a backward of a pipeline makes, to be added when it is through."""
        comes = self.candidate.pp > 1 and self.numbers.sums > 1
        return (self.dense + self.spread) * self.numbers.gradients if comes else 0

    def unsharded(self) -> int:
        """Parameters that a pipeline has gathered for the whole step, beside their shards."""
        size = self.narrow or self.numbers.parameters
        return (self.dense + self.spread) * size if self.candidate.zero == 3 else 0

    def in_flight(self) -> int:
        """Gradients of a pipeline's blocks that are whole yet, on their way to sums that are sharded."""
        sharded = self.numbers.summed_sharded and self.candidate.zero > 1
        return 2 * self.block * self.numbers.gradients if sharded else 0

    @property
    def narrow(self) -> int:
        """Bytes of a parameter as it is computed with, where that is narrower than what the optimizer steps; else 0."""
        return self.hardware.itemsize if self.hardware.itemsize < self.numbers.parameters else 0

    @property
    def offloads(self) -> bool:
        """True if states go to a host that is not the device."""
        return self.candidate.offload and self.hardware.host_link is not None

    def parameters(self) -> int:
        """Bytes of parameters between steps. Narrow copies are whole, for good, before ZeRO-3; the wide ones, which the
        optimizer steps, sharded from ZeRO-1 on, and on the host if states are."""
        if self.narrow and self.candidate.zero < 3:
            stepped = 0 if self.offloads else self.part(1, self.numbers.parameters)
            return stepped + (self.dense + self.spread) * self.narrow
        return 0 if self.offloads and self.candidate.zero == 3 else self.part(3, self.numbers.parameters)

    def states(self) -> int:
        """Bytes of the optimizer, on the device."""
        return 0 if self.offloads else self.part(1, self.numbers.states)

    def static(self) -> int:
        """Bytes that are held whatever runs."""
        gathered = self.unsharded() if self.candidate.pp > 1 else 0
        return self.parameters() + self.states() + self.summed() + gathered

    def in_stages(self) -> Memory:
        """Memory of a pipeline's first rank or its last, whichever is fuller, with blocks dealt out evenly."""
        one, stages = self.candidate, self.candidate.pp * self.candidate.virtual
        kept, again, received = self.kept(), self.again(), self.received()
        first = self._ends(again + kept / self.sizes.blocks, received)  # as the last block, and with what that kept
        inside = Load(int(kept / stages) + received, int(again), first, self.fresh() // one.virtual)
        last = inside._replace(begins=self._begins(again))
        ends = ((0, [inside] * one.virtual), (one.pp - 1, [*[inside] * (one.virtual - 1), last]))
        fullest = max(
            found
            for rank, loads in ends
            for found in held_at(loads, moments(one.pp, one.virtual, one.microbatches, rank))
        )
        return Memory(
            parameters=self.parameters(),
            gradients=self.summed() + fullest.gradients,
            states=self.states(),
            activations=fullest.total - fullest.gradients,
            gathered=self.working() + self.unsharded(),
        )

    def working(self) -> int:
        """Working memory of a pipeline, whatever the stage."""
        return self.meeting + self.in_flight()

    def received(self) -> int:
        """Bytes of a stage's input per microbatch: as much as a block hands on."""
        if self.back is not None:
            return int(self._at(self.back.first.stream))
        width = max((branch.stream for branch in self.sizes.branches), default=0)
        return int(self.positions * width * self.hardware.itemsize / (self.candidate.tp if self.candidate.sp else 1))

    def at_ends(self) -> dict[str, int]:
        """Bytes that a stage of a pipeline holds beyond what its blocks keep, as in `Part`."""
        received = self.received()
        return {
            "received": received,
            "begins": self._begins(self.again()),
            "ends": self._ends(self.first(), received),
        }

    def _begins(self, again: float) -> int:
        """Bytes when a stage's backward begins: of the last one with the loss, and then the head's gradient."""
        loss = self.loss()
        head = self.outside * self.numbers.gradients if loss and self.fresh() else 0
        return int(max(loss, again) + head)

    def _ends(self, first: float, received: int) -> int:
        """Bytes when it ends: in that of its first block, or when gradients are added one by one."""
        each = self.numbers.gradients if self.fresh() else 0
        return received + int(max(first - (self.block + self.outside) * each, self.sizes.largest * each))

    def alone(self) -> Memory:
        """Memory of the worst moment: at the loss, in a block's backward, after all these, where the last gradients are
        summed, and in the optimizer, which on a GPU makes roots of all second moments at once."""
        numbers, blocks = self.numbers, self.sizes.blocks
        gloo = self.hardware.backend == "gloo"
        there = self.summed() if self.candidate.zero < 2 else 0  # whole since the first microbatch
        head = min(self.sizes.largest, self.outside) * numbers.gradients
        outside = 0 if there or self.candidate.replicas == 1 else self.outside * numbers.gradients + head
        stepped = 0 if gloo or self.offloads else self.part(1, numbers.stepping)
        if gloo and self.candidate.zero in (1, 2) and not self.narrow:
            dense, kept = self.dense * numbers.parameters, self.dense * numbers.gradients
            kept //= self.candidate.sharded if self.candidate.zero == 2 else 1
            stepped = (1 + self._scratch) * dense - kept
        held, under_way = self._reduced(blocks)
        moments = [
            # The head's gradient comes first, and is copied to where all of the root's are summed, if they are not yet.
            (self.summed(), self.kept() + self.loss(), self._gathered(1) + outside),
            (self.summed(), self.kept() + self.forward(), self._gathered(1)),
            (held, self._most(self.back.tail) if self.back is not None else 0.0, self._gathered(1) + under_way),
            (self.part(2, numbers.gradients), 0.0, max(stepped, self._on_the_way())),
            (self.part(2, numbers.gradients), 0.0, self._gathered(1) + self._last_sums()),
        ]
        for through in {0, min(UNDER_WAY, blocks - 1), blocks - 1}:  # between these what is held changes evenly
            held, under_way = self._reduced(through)
            before = self.kept() * (blocks - 1 - through) / blocks
            kept = before + self.first() if through else self.kept() + self.again()
            moments.append((held, kept, self._gathered(min(2, blocks - through)) + under_way))
        held, kept, more = max(moments, key=sum)
        return Memory(self.parameters(), int(held), self.states(), int(kept), int(more))

    def _on_the_way(self) -> int:
        """Bytes that AdamW makes of the parameter at hand, if it goes over them one by one."""
        one, largest = self.candidate, self.sizes.largest * self.numbers.parameters
        part = int(2 * largest / (one.sharded if one.zero or one.ep > 1 else 1))
        return part if self.hardware.backend == "gloo" else 0

    def _gathered(self, blocks: int) -> int:
        """Bytes of gathered parameters, with so many blocks; in a backward the next one comes while one is computed."""
        each = self.hardware.itemsize if self.candidate.zero == 3 else 0
        return (blocks * self.comes + self.outside) * each + self.meeting

    @property
    def _scratch(self) -> int:
        """Gloo adds up in as much again, and gathers so; two ranks exchange."""
        return int(self.hardware.backend == "gloo" and self.candidate.replicas > 2)

    def _last_sums(self) -> float:
        """Bytes when a backward is through and gloo makes whole sums: of those that are not waited for yet what it
        gathers in, of the root's what has arrived, and of all this rank's parts."""
        if self.candidate.zero > 1:
            return 0.0
        numbers = self.numbers.gradients
        whole, bucket = self.part(2, numbers), min(self.summed_over * numbers, BUCKET_BYTES)
        arriving = min(whole, UNDER_WAY * bucket + self.outside * numbers)
        return self._scratch * (arriving + whole / self.candidate.replicas)

    def _reduced(self, through: int) -> tuple[float, float]:
        """Bytes of gradients that stay, and of whole ones that do not yet, in the backward of a block after so many
        others: its own, the root's, which are summed last, and of the blocks before it those whose sums are under way
        (`_zero/reductions.py`)."""
        numbers, blocks, one = self.numbers, self.sizes.blocks, self.candidate
        block, outside = self.block * numbers.gradients, self.outside * numbers.gradients
        through_block = self.part(2, numbers.gradients) if through >= blocks else outside + block * through
        if one.replicas == 1:
            return self.summed() or through_block, 0.0
        alike = self.summed_over * numbers.gradients
        bucket = alike if one.zero == 3 else min(alike, BUCKET_BYTES)
        most = UNDER_WAY if numbers.sums > 1 else 1
        own, under_way = block * (through < blocks), min(most, through) * bucket
        scratch = self._scratch * (under_way + alike * (through < blocks))
        if one.zero < 2:
            done = self.summed() or min(self.part(2, numbers.gradients), through_block + own)
            if self.hardware.backend != "gloo":  # this rank's parts of sums, until all are whole
                return done, done / one.replicas * (numbers.sums > 1)
            return done, scratch
        made = self.part(2, numbers.gradients)  # with the root's, at the end
        if through < blocks:
            made *= self.block * through / max(1, self.block * blocks + self.outside)
        if one.microbatches > 1:  # what a backward has reduced is added to what the ones before left at its end
            made = self.summed() + (numbers.sums - 1) * made
        return made, outside + own + under_way + scratch

    def kept(self) -> float:
        """Bytes that all blocks keep."""
        if self.back is None:
            return self.positions * _kept_per_position(self.sizes, self.candidate) * self.hardware.itemsize
        if self.candidate.checkpointing and not self.candidate.inside:
            return self._at(self.back.streams)
        return self._at(self.back.kept) - sum(self._at(self.back.inside[name].saved) for name in self.candidate.inside)

    def loss(self) -> float:
        """Beyond what blocks keep, until the last one's backward."""
        if self.back is None:
            return self.positions * self.sizes.entries // self.candidate.tp * 4 * LOGITS
        return self._most(self.back.loss)

    def forward(self) -> float:
        """Bytes of the last block's forward, beyond what blocks keep, with a sum over the tensor axis."""
        if self.back is None:
            return 0.0
        last, whole = self.back.last, self.candidate.checkpointing and not self.candidate.inside
        if whole:  # and its backward runs it again
            return 0.0
        saved = sum(map(self._at, self._saved(last, self.candidate.inside)))
        return self._most(last.forward) - self._at(last.kept) + saved + self._at(last.stream) * self._tensor_sums

    @property
    def _tensor_sums(self) -> float:
        """Gloo's scratch per summed byte: what arrives, the rank's part, the whole and what that is gathered in
        (`all_reduce`); two ranks add in place."""
        one = self.candidate
        if self.hardware.backend != "gloo" or one.tp < 3 or one.sp:
            return 0.0
        return 2 + 1 / one.tp

    def again(self) -> float:
        """Bytes of the last block's backward, beyond what blocks keep."""
        if self.back is not None:
            last, whole = self.back.last, self.candidate.checkpointing and not self.candidate.inside
            kept = self._at(last.stream if whole else last.kept)
            return self._backward(last) - kept + sum(map(self._at, self._saved(last, self.candidate.inside)))
        if not self.candidate.checkpointing:
            return 0.0
        whole = _kept_per_position(self.sizes, replace(self.candidate, checkpointing=False, inside=()))
        return self.positions * whole * self.hardware.itemsize / max(1, self.sizes.blocks)

    def first(self) -> float:
        """Bytes of the first block's backward."""
        return self.again() + self.kept() / self.sizes.blocks if self.back is None else self._backward(self.back.first)

    def _backward(self, block: Block) -> float:
        """Bytes of a block's backward, beyond what those before it keep; what modules compute again is there when they
        begin."""
        return max(
            (
                self._most(amounts) - sum(map(self._at, self._saved(block, set(self.candidate.inside) & set(to_come))))
                for to_come, amounts in block.backward.items()
            ),
            default=0.0,
        )

    @staticmethod
    def _saved(block: Block, names: Iterable[str]) -> Iterator[Amount]:
        return (block.inside[name].saved for name in names if name in block.inside)

    def _at(self, amount: Amount) -> float:
        one, repeats = self.candidate, self.hardware.backend == "gloo"
        if self.hardware.once:  # each tensor rank sends its positions, to experts that are whole
            amount = amount._replace(whole=amount.whole + amount.gathered, gathered=0.0)
        return amount.at(self.positions, self.seq, one.tp, one.sp, one.cp, repeats)

    def _most(self, amounts: tuple[Amount, ...]) -> float:
        return max(map(self._at, amounts), default=0.0)


def _kept_per_position(sizes: Sizes, candidate: Candidate) -> float:
    """Numbers that backward needs per position, over all blocks."""
    stream = candidate.tp if candidate.sp else 1
    kept = 0.0
    for branch, times in sizes.branches.items():
        if candidate.checkpointing and not candidate.inside:  # what modules inside would save is not known here
            kept += times * branch.stream / stream
            continue
        inner = branch.inner + KEPT_OF_INPUT * branch.features
        if branch.chosen:  # a grouped product gathers what the tensor axis splits: its rows are whole
            inner = branch.chosen * (inner + KEPT_OF_ROW * branch.stream)
        elif branch.split:
            inner /= candidate.tp
        kept += times * (KEPT_OF_STREAM * branch.stream / stream + inner)
    return kept
