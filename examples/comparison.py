"""Two runs of the same training, step by step: how far apart are they?"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The project's standard tolerance for a step's loss in float32 (docs/design.md, section 11).
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Comparison:
    """The losses of one model on one process and on many.

    Arguments:
        name: short, for file names and JSON.
        title: for people.
        layout: what the parallel run was, e.g. "4 processes, dp=2 x tp=2".
        single, parallel: the loss of each step; equally many.

    Example:
        >>> runs = Comparison("gpt", "GPT", "2 processes", (5.0, 4.0), (5.0, 4.00002))
        >>> runs.worst_step, f"{runs.largest:.0e}", runs.agrees
        (1, '5e-06', True)
    """

    name: str
    title: str
    layout: str
    single: tuple[float, ...]
    parallel: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.single) != len(self.parallel) or not self.single:
            raise ValueError(
                f"{self.title}: {len(self.single)} steps on one process and "
                f"{len(self.parallel)} in parallel; equally many, and at least one, are needed"
            )

    @property
    def differences(self) -> tuple[float, ...]:
        """Per step, |parallel - single| / |single|; infinite where either is not finite."""
        pairs = zip(self.single, self.parallel, strict=True)
        return tuple(abs(b - a) / abs(a) if math.isfinite(a) and math.isfinite(b) and a else math.inf for a, b in pairs)

    @property
    def worst_step(self) -> int:
        """The step of the largest relative difference, counted from 0."""
        differences = self.differences
        return differences.index(max(differences))

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max(self.differences)

    @property
    def agrees(self) -> bool:
        """Whether every step is within TOLERANCE."""
        return self.largest <= TOLERANCE
