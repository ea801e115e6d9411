"""Memory of a step as numbers: bytes of activations per position, and the worst moments of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Amount(NamedTuple):
    """Bytes of activations.

    Arguments:
        whole, split: per position, on every rank of the tensor axis or split by it.
        whole_meet, split_meet: per position and position that it meets.
        fixed: whatever rows and positions.
        meet: per pair of positions, whatever rows: a mask.
        gathered: per position, on every rank of the tensor axis even where what is whole is split by position: rows of
            experts, and what a product with a split parameter is given, which backward needs as it was gathered.
        repeated: per position, split, of keys that are repeated for a kernel, one for each head, beyond those that
            heads share.
        written: per position and position that it meets, split, of scores that a kernel of a CPU writes out.
        fixed_split: whatever rows and positions, and split: of parameters that the tensor axis splits.
        classes, classes_split: per position, of what a loss makes besides the gradient of its scores: over classes that
            the tensor axis could split, on one rank, and split.
    """

    whole: float = 0.0
    split: float = 0.0
    whole_meet: float = 0.0
    split_meet: float = 0.0
    fixed: float = 0.0
    meet: float = 0.0
    gathered: float = 0.0
    repeated: float = 0.0
    fixed_split: float = 0.0
    classes: float = 0.0
    classes_split: float = 0.0
    written: float = 0.0

    def plus(self, other: Amount, times: float = 1.0) -> Amount:
        return Amount(*(one + times * more for one, more in zip(self, other)))

    def at(self, positions: float, seq: int, tp: int, sp: bool = False, cp: int = 1, repeats: bool = True) -> float:
        """Bytes of one rank with so many positions, of rows of `seq` that are cut over `cp` ranks; under `sp` what is
        whole is split by position. `repeats`: kernels are a CPU's, which want a key for each head."""
        whole, split = self.whole + seq * self.whole_meet, self.split + seq * self.split_meet
        split += self.classes_split if tp > 1 else self.classes
        split += self.repeated + seq * self.written if repeats else 0.0
        each = whole / (tp if sp else 1) + self.gathered + split / tp
        return positions * each + self.fixed + self.fixed_split / tp + seq * seq / cp * self.meet


class Inside(NamedTuple):
    """A module that a block calls, once, as what may be computed again in place of the whole block.

    Arguments:
        saved: less kept for backward then; what it is called with is kept.
        made: all that its forward writes.
    """

    saved: Amount
    made: Amount


@dataclass(frozen=True)
class Block:
    """One kind of block.

    Arguments:
        kept: for backward.
        stream: what it hands on.
        backward: the worst moments of its backward, of what is held beyond what the blocks before it keep, each by the
            modules inside whose backward is to come.
        inside: modules by their names in the block.
        forward: the worst moments of its forward, of the same.
    """

    kept: Amount
    stream: Amount
    backward: Mapping[tuple[str, ...], tuple[Amount, ...]]
    inside: Mapping[str, Inside] = field(default_factory=dict)
    forward: tuple[Amount, ...] = ()


@dataclass(frozen=True)
class Holding:
    """Memory of a model: its blocks by name, and the worst moments beyond what they keep, between the last block's
    forward and its backward, and after the first block's backward."""

    blocks: Mapping[str, Block]
    loss: tuple[Amount, ...]
    tail: tuple[Amount, ...]


def summed(amounts: Iterable[Amount]) -> Amount:
    return Amount(*map(sum, zip(Amount(), *amounts)))
