"""Finds the part of a step's traffic that a boundary or a rule would save: by cause, with the line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..placement import Placement, Replicate
from .events import Event, Moved

ASKED = (
    "redistribute", "full_tensor", "gradient sync", "parameter gather", "regather", "item", "tolist", "numpy",
    "scales of linear",
)  # fmt: skip
"""Functions whose conversions were asked for, or are not a tensor axis's."""


@dataclass(frozen=True)
class Advice:
    """Collectives that one line causes and need not.

    Arguments:
        line, function, module: of the cause.
        kind, direction: of the collectives.
        count, received: how many, and the bytes that this rank received in them.
        reason: what is converted, and why that is more than it takes.
        remedy: what would save it.
    """

    line: str
    function: str
    module: str
    kind: str
    direction: str
    count: int
    received: int
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = "".join(f" {word} {text}" for word, text in (("in", self.module), ("at", self.line)) if text)
        head = f"{self.count} x {self.kind} ({self.direction}), {self.received:,} bytes: {self.function}{where}"
        return f"{head}\n    {self.reason}\n    fix: {self.remedy}"


@dataclass(frozen=True)
class Report:
    """Result of `Trace.advice()`; printed, it is the answer.

    Arguments:
        sent: collectives beside gradient syncs and gathers of sharded parameters.
        least: what the plan's cut weights need, None if the model is none that `parallelize` made.
        boundaries: glob of modules -> {axis: placement} of their outputs, which a plan would say.
        advice: most bytes first.
    """

    sent: int
    least: int | None
    boundaries: Mapping[str, Mapping[str, Placement]]
    advice: tuple[Advice, ...]

    def __str__(self) -> str:
        against = "" if self.least is None else f"; the plan's cut weights need {self.least}"
        lines = [f"{self.sent} collectives{against}"]
        if self.boundaries:
            lines.append("boundaries that save what sums left partial cost:")
            lines += [f"    {name!r}: Boundary(output={dict(said)!r})," for name, said in self.boundaries.items()]
        return "\n".join([*lines, *map(str, self.advice)]) if self.boundaries or self.advice else (
            lines[0] + ": nothing to save"
        )  # fmt: skip


def report(events: Iterable[Event], least: int | None, left: Mapping[str, tuple[str, ...]]) -> Report:
    """See `Trace.advice`. `left`: module -> axes over which it gives a sum of parts that no boundary makes whole."""
    events = [event for event in events if event.cause.function not in ASKED]
    sent = sum(event.count for event in events)
    if least is not None and sent <= least:
        return Report(sent, least, {}, ())
    open_sums = {glob: dict.fromkeys(axes, Replicate()) for glob, axes in _globs(left).items()}
    reduced: set[tuple] = set()
    found: dict[tuple, list[Event]] = {}
    for event in events:
        moved = event.cause.moved
        if moved is None or event.cause.function.endswith("boundary)"):
            continue
        told = _told(event, moved, reduced, left, open_sums)
        if told is not None:
            cause = event.cause
            key = (cause.line, cause.function, cause.module, event.kind, cause.direction)
            found.setdefault((*key, *told), []).append(event)
    made = (
        Advice(*key[:5], sum(one.count for one in some), sum(one.received for one in some), *key[5:])
        for key, some in found.items()
    )
    return Report(sent, least, open_sums, tuple(sorted(made, key=lambda one: -one.received)))


def _told(event: Event, moved: Moved, reduced: set, left: Mapping, open_sums: Mapping) -> tuple[str, str] | None:
    """Reason and remedy of a conversion that need not be; None of one that the cut weights take."""
    kinds = {moved.kinds.get(axis) for axis in event.axes}
    on = " and ".join(map(repr, event.axes))
    sums = "the boundaries above, at what leaves these sums partial" if open_sums else ""
    if moved.parameter:
        return (
            f"the weight {moved.parameter}, cut over {on}, is made to fit what it meets",
            sums or f"a boundary for the input of {event.cause.module!r}, or leave the weight whole in the plan",
        )
    key = (moved.value, event.axes, event.cause.direction)
    again = key in reduced
    reduced.add(key)
    if "P" in kinds and event.cause.direction == "forward":
        if again:
            maker = f"boundaries={{{moved.made_in!r}: Boundary(output=...)}}, " if moved.made_in else ""
            return f"a sum of parts over {on} is added up once more", sums or f"{maker}or plan.complete(model, batch)"
        if left:
            return f"a sum of parts over {on} that its maker left partial is added up by its readers", sums
        return None
    if again:
        maker = f" of {moved.made_in!r}" if moved.made_in else ""
        return (
            f"one value is converted once more over {on}, {moved.source} to {moved.target}",
            f"a boundary for the output{maker}, so that all its readers share one conversion",
        )
    if "S" in kinds:
        return (
            f"what is cut over {on} is needed otherwise: {moved.source} to {moved.target}",
            f"a rule of {event.cause.function} for that cut (register_rule), or a boundary where it is made"
            + (f": {moved.made_in!r}" if moved.made_in else ""),
        )
    return None


def _globs(named: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The same with numbers in names as "*"."""
    return {re.sub(r"(?<![^.])\d+(?![^.])", "*", name): axes for name, axes in named.items()}
