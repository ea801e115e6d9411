"""Shape: the numbers that a schedule is generated for, and where its stages lie."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Arguments: ranks p, microbatches m, stages per rank v, and whether stages run down the ranks and back up.

    Looped placement puts stage s on rank s mod p; the V of two stages per rank
    puts stages r and 2p - 1 - r on rank r, so that the rank of the first stage
    also has the last.
    """

    ranks: int
    microbatches: int
    virtual: int = 1
    v_shaped: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def placement(self) -> tuple[int, ...]:
        if self.v_shaped:
            return (*range(self.ranks), *reversed(range(self.ranks)))
        return tuple(range(self.ranks)) * self.virtual

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]
