"""Decides which committed steps stay, and by which metric some are the best."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._errors import FormatError, MismatchError
from ..format._text import reason_of, shown
from ..format._values import decode, encode


@dataclass(frozen=True)
class Retention:
    """Rule for committed steps: every step that any rule names is kept, and the newest.

    Arguments:
        last: the number of newest steps to keep.
        every: keep every step that is a multiple of this.
        best: a metric's name (`save(..., metrics={"loss": 0.3})`); keep the `count` best steps by it.
        count: see `best`.
        largest: whether the best value is the largest instead of the smallest.
    """

    last: int = 1
    every: int | None = None
    best: str | None = None
    count: int = 1
    largest: bool = False

    def __post_init__(self) -> None:
        counts = (self.last, self.count, 1 if self.every is None else self.every)
        if not all(type(count) is int and count >= 1 for count in counts):
            given = f"last={shown(self.last)}, every={shown(self.every)}, count={shown(self.count)}"
            raise MismatchError("Retention", f"{given}: each is a number from 1 on", (), [("Retention(last=3)", "")])

    def kept(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the steps to keep, given each step's metrics."""
        steps = sorted(metrics)
        kept = set(steps[-self.last :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            found = {step: metrics[step].get(self.best) for step in steps}
            valued = [step for step in steps if isinstance(found[step], int | float) and not math.isnan(found[step])]
            valued.sort(key=lambda step: (found[step], -step), reverse=self.largest)
            kept |= set(valued[: self.count])
        return kept


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """A step's metrics as numbers; raises MismatchError for what is none, before anything is written."""
    found = {}
    for key, value in (metrics or {}).items():
        try:
            if type(key) is not str or key[:1] == "$":
                raise TypeError("its name is no text, or begins with '$'")
            found[key] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise MismatchError(
                "save", f"the metric {shown(key)} is {shown(value)}, which is not a number: {reason_of(error)}"
            ) from error
    return found


def unknown_metric(policy: Retention, given: list[str]) -> MismatchError:
    """The error for a policy's metric that no step has. `given`: those that steps have."""
    near = difflib.get_close_matches(str(policy.best), given, 1) or given[:1]
    return MismatchError(
        "save", f"best={policy.best!r} is a metric that no step was given, so that no step is the best",
        [f"metrics  {', '.join(given[:8])}"],
        [
            (f"Retention(best={near[0]!r})", "one that was given"),
            (f"metrics={{{policy.best!r}: ...}}", "with this save"),
            ("Retention(best=None)", "until it is given"),
        ],
    )  # fmt: skip


def metrics_json(metrics: Mapping[str, float]) -> Any:
    """Encodes metrics as a manifest holds them: NaN and infinities, too."""
    return encode(metrics, "metrics", lambda path, tensor: path)


def stored_metrics(found: Any) -> Mapping[str, float]:
    """Decodes the metrics of a manifest. Raises FormatError."""
    return decode(found, _no_tensor) if isinstance(found, dict) else {}


def _no_tensor(name: str) -> None:
    raise FormatError("load", f"a metric is the tensor {name!r}")
