"""compare: the first place at which two recorded runs differ, on whatever meshes they ran."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import VescaleError

from ._pages.comparison_page import comparison_page
from ._recorded.difference import Difference as Difference
from ._recorded.difference import why_apart
from ._recorded.digest import first_index, hexadecimal
from .record import FORMAT, Place, place_name

_PHASES = ("forward", "backward", "update")


def compare(run_a: str | Path, run_b: str | Path, *, rtol: float = 0.0) -> Comparison:
    """Compares two runs that `vescale.record` wrote.

    Arguments:
        run_a, run_b: their folders.
        rtol: 0 compares every bit, between runs that reorder no sum, or in the reproducible mode. Otherwise, places
            differ if their tensors are farther apart than rtol times the larger norm (1e-4 for float32 on another mesh,
            1e-2 for bfloat16). The distance is estimated from sketches, usually within a quarter of its size.

    Places are compared in the order of computation: in each step all forwards, by call, then all backwards, then the
    results of the optimizer. A rank that holds another replica than the first is a difference, too. Places that only
    one run has (a root module under a pipeline) are listed, but are no difference by themselves.

    Raises VescaleError if a folder holds no record, or one of another format.

    Example:
        >>> print(vescale.compare("runs/one", "runs/tp4", rtol=1e-4))
    """
    if not rtol >= 0:
        raise VescaleError("compare", f"rtol is {rtol}, not a number from 0 on", (), [("rtol=0", "every bit")])
    folders = Path(run_a), Path(run_b)
    found: list[Difference] = []
    alone: list[str] = []
    steps, places = 0, 0
    for a, b in zip_longest(*map(_steps, folders)):
        if a is None or b is None:
            alone.append(f"step {(a or b)[0]} and what follows")
            break
        (step, ours), (_, theirs) = a, b
        steps += 1
        alone += [place_name(step, place) for place in (*ours, *theirs) if not (place in ours and place in theirs)]
        both = (place for place in ours if place in theirs)
        for place in sorted(both, key=lambda place: (_PHASES.index(place[0]), place[2])):
            places += 1
            why = why_apart(ours[place], theirs[place], rtol)
            if why:
                found.append(Difference(step, place, why, ours[place], theirs[place]))
    first = _first_value(folders, found[0], rtol) if found else ""
    return Comparison(str(run_a), str(run_b), rtol, steps, places, tuple(found), first, tuple(alone))


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; `str()` is the report."""

    run_a: str
    run_b: str
    rtol: float
    steps: int
    places: int
    differences: tuple[Difference, ...]
    first_value: str
    alone: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        measure = f"within {self.rtol:g}" if self.rtol else "to the bit"
        if self.first is None:
            lines = [f"no difference: {self.places} places of {self.steps} steps are equal {measure}"]
        else:
            within = sum(difference.step == self.first.step for difference in self.differences)
            lines = [
                f"the runs differ first at {self.first}",
                f"  {self.first.why}",
                f"  a  {_described(self.first.a)}  {self.run_a}",
                f"  b  {_described(self.first.b)}  {self.run_b}",
                f"  {self.first_value}",
                f"{len(self.differences)} of {self.places} places differ, {within} of them in step {self.first.step}",
            ]
        if self.alone:
            lines.append(f"{len(self.alone)} places are in one run only, such as {self.alone[0]}")
        return "\n".join(lines)

    def write_html(self, path: str | Path, most: int = 500) -> Path:
        """A page with the report, a chart of how far apart the runs are by step, and a table of the first `most`
        differences: the first of each direction in the first step, and folded what follows from them."""
        written = Path(path)
        written.write_text(comparison_page(str(self), self.differences, most))
        return written


def _described(entry: Mapping[str, Any]) -> str:
    shape = ", ".join(map(str, entry["shape"]))
    return f"{entry['dtype']}[{shape}]  digest {entry['digest']}  norm {entry['norm']:.9g}"


def _steps(folder: Path) -> Iterator[tuple[int, dict[Place, dict[str, Any]]]]:
    """Number and entries of each step, in the order recorded."""
    file = folder / "steps.jsonl"
    remedies = [("with vescale.record(model, folder, optimizer=optimizer): ...", "writes one")]
    try:
        with file.open() as lines:
            header = json.loads(next(lines, "{}"))
            if header.get("format") != FORMAT:
                rule = f"{file} has format {header.get('format')}; this version reads {FORMAT}"
                raise VescaleError("compare", rule, (), remedies)
            for line in lines:
                if not line.endswith("\n"):  # of a run that ended, or runs, while it wrote
                    return
                step = json.loads(line)
                yield step["step"], {tuple(entry["place"]): entry for entry in step["entries"]}
    except (OSError, ValueError) as error:
        raise VescaleError("compare", f"{file} cannot be read: {error}", (), remedies) from error


def _first_value(folders: tuple[Path, Path], difference: Difference, rtol: float) -> str:
    """The first index and both values, where both runs kept them; otherwise how to."""
    if "values" not in difference.a or "values" not in difference.b:
        name = place_name(difference.step, difference.place)
        return f"to see the first index and values: record both again with keep={name!r}"
    a, b = (_read(folder, entry) for folder, entry in zip(folders, (difference.a, difference.b)))
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return "values of other dtypes or shapes"
    at = first_index(a, b, rtol)
    if at is None:
        return "no element by itself is that far apart"
    index = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), a.shape))
    return f"first at [{index}]: a {hexadecimal(a, at)}, b {hexadecimal(b, at)}"


def _read(folder: Path, entry: Mapping[str, Any]) -> Tensor:
    try:
        data = bytearray((folder / entry["values"]).read_bytes())
    except OSError as error:
        raise VescaleError("compare", f"kept values cannot be read: {error}") from error
    dtype = getattr(torch, entry["dtype"])
    return (
        torch.frombuffer(data, dtype=dtype).view(entry["shape"]) if data else torch.empty(entry["shape"], dtype=dtype)
    )
