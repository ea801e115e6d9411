"""A place at which two recorded runs differ, by how much, and why that is a difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ..record import Place
from .digest import Summary


@dataclass(frozen=True)
class Difference:
    """A place at which two runs differ: `module` is a path, "" the root; `direction` forward, backward or update."""

    step: int
    place: Place
    why: str
    a: Mapping[str, Any]
    b: Mapping[str, Any]

    @property
    def direction(self) -> str:
        return self.place[0]

    @property
    def module(self) -> str:
        return self.place[1]

    @property
    def call(self) -> int:
        """Call of the module within the step: the microbatch."""
        return self.place[2]

    @property
    def tensor(self) -> str:
        return self.place[3]

    @property
    def distance(self) -> float:
        """Estimates the distance of the two, relative to the larger norm; inf for other shapes or dtypes."""
        if any(self.a[what] != self.b[what] for what in ("dtype", "shape")):
            return inf
        return _summary(self.a).distance(_summary(self.b))

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call else ""
        return f"step {self.step}, {self.direction}, {self.module or '(root)'}: {self.tensor}{call}"


def why_apart(a: Mapping[str, Any], b: Mapping[str, Any], rtol: float) -> str:
    """Says why the entries of one place differ, or nothing."""
    for what in ("dtype", "shape"):
        if a[what] != b[what]:
            return f"{what} {a[what]} and {b[what]}"
    distance = _summary(a).distance(_summary(b))
    if a["digest"] != b["digest"] and (not rtol or not distance <= rtol):
        return f"apart by {distance:.2g} of the norm" if distance else "other bits"
    for name, entry in (("a", a), ("b", b)):
        odd = {rank: apart for rank, apart in entry.get("odd", {}).items() if not rtol or not apart <= rtol}
        if odd:
            return f"replicas differ in {name}: rank {', '.join(odd)}, by up to {max(odd.values()):.2g} of the norm"
    return ""


def _summary(entry: Mapping[str, Any]) -> Summary:
    return Summary(int(entry["digest"], 16), entry["norm"], entry["largest"], tuple(entry["sketch"]))
