"""What runs found, kept in outcomes.json, and as a page: docs/architectures.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import register
from .run import ALONE, CASES, RIGHT, TRAININGS

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
WANTED = 0.98
"""The share of the listed types that have to be right in each of `run.TRAININGS`."""
NEAR, FAR = 1.1, 2.0
"""Times the count: of decoders, of all."""
KEPT = ("outcome", "moved by scale", "collectives", "minimum", "day")

HEAD = """# Unmodified architectures under plans

Written by `python -m architectures table`; do not edit. The table has {count} types that build and train on one
device from a small configuration (`tools/architectures/types.json`: {causal} causal language models of transformers
{version}, {others} others; {left} more do not build this way, and are named there). The plan of each case is that of
`generate_plan` with these degrees.

- *Right* means equal to one device: three losses, all gradients of the first and of the last pass, and the parameters
  after two steps of SGD. Runs recorded before the last two comparisons existed lack them: {early} of the right ones
  under TP 2 and ZeRO-3.
- *Not run* means that there is no result.
- *Not on one device* means that the model generates nothing there.
- Under a pipeline, microbatches draw their own random numbers, and have their own statistics in batch normalization,
  as gradient accumulation on one device does. Models that draw or normalize this way (phimoe's router samples its
  experts) are compared with such a run.

Of the outcomes, {days}.

{summary}

*Sent* is the number of collectives in the last of three steps under TP 2, without gradient synchronisation. *By
count* is a number derived from the model and the plan (`Trace.least`):

- in the forward, one for each weight that is sharded along the dim that it sums over, and for an embedding that is
  sharded along its rows;
- in the backward, one for each value that is read by weights sharded along their output features, because its
  gradient is a sum over the ranks (Q, K and V read one value; the up projections of a latent attention read one
  each);
- convolutions count in the same way, by their channels, except for grouped ones, which are sharded by groups;
- in both directions, one for a norm over sharded features (of its squares: OLMo 2's queries and keys, BitNet's second
  norms), and for each gather at a boundary of the plan;
- in the backward, two for stacked experts: one of their rows, and one of the routing weights, whose gradient is a
  product with the output of the experts;
- two for a head that is sharded along the vocabulary, with its loss.

The count does not know recurrences, nor values that meet sharded tensors outside such modules, such as the rotary
part of a latent key, or B and C of a state-space layer. A count of 0 has no meaning. Sums that are added before they
are reduced need one collective (those of a shared expert and of the routed experts), so some models send less than
the count. It is a yardstick, not a bound. Parameters that the planner leaves whole do not count.
{within}

| type | {cases} | sent | by count |
| --- |{rules} --- | --- |
"""


def kept() -> dict[str, dict[str, Any]]:
    """Name -> case -> what was found there."""
    return json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def right(case: str) -> list[str]:
    """The listed types that a run found right in `case`."""
    found = kept()
    return [name for name in register.listed() if found.get(name, {}).get(case, {}).get("outcome") == RIGHT]


def merge(files: Iterable[str]) -> None:
    """Add what runs wrote as lines of JSON; a later outcome of the same type and case counts."""
    found = kept()
    for file in files:
        for one in map(json.loads, Path(file).read_text().splitlines()):
            found.setdefault(one["name"], {})[one["case"]] = {key: one[key] for key in KEPT if key in one}
    OUTCOMES.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def write() -> None:
    """The page."""
    names, found, listed = register.listed(), kept(), json.loads(register.TYPES.read_text())
    rows = [f"| case | {' | '.join(KINDS)} |", "| --- |" + " --- |" * len(KINDS)]
    for case in CASES:
        asked = [name for name in names if case != "generate" or not name.startswith("other: ")]
        kinds = Counter(_kind(found.get(name, {}).get(case)) for name in asked)
        rows.append(f"| {case} | " + " | ".join(str(kinds[k]) for k in KINDS) + " |")
    others = sum(name.startswith("other: ") for name in names)
    days = Counter(what.get("day", "an earlier day") for name in names for what in found.get(name, {}).values())
    early = sum(
        one.get("outcome") == RIGHT and "moved by scale" not in one
        for name in names
        for one in (found.get(name, {}).get(case, {}) for case in TRAININGS)
    )
    text = HEAD.format(
        early=early, days=", ".join(f"{n} are of {day}" for day, n in sorted(days.items())),
        count=len(names), causal=len(names) - others, others=others, left=len(listed["left_out"]),
        within=_within(names, found),
        version=listed["transformers"], summary="\n".join(rows), cases=" | ".join(CASES), rules=" --- |" * len(CASES),
    )  # fmt: skip
    said = []
    for name in names:
        one = found.get(name, {})
        figures = [str(one.get("tp 2", {}).get(key, "")) for key in ("collectives", "minimum")]
        text += f"| {name} | " + " | ".join([*(_kind(one.get(case)) for case in CASES), *figures]) + " |\n"
        said += [
            f"- {name}, {case}: {' '.join(what['outcome'].replace('|', '/').split())}"
            for case, what in one.items()
            if what["outcome"] != RIGHT
        ]
    PAGE.write_text(text + "\n## What the rest said\n\n" + ("\n".join(said) or "Nothing.") + "\n")


def _within(names: list[str], found: dict[str, dict[str, Any]]) -> str:
    """How many send little more than by count."""
    figures = {name: found.get(name, {}).get("tp 2", {}) for name in names}
    over = {name: one["collectives"] / one["minimum"] for name, one in figures.items() if one.get("minimum")}
    decoders = [times for name, times in over.items() if not name.startswith("other: ")]
    near, far = sum(times <= NEAR for times in decoders), [name for name, times in over.items() if times > FAR]
    return (
        f"Within {NEAR} times the count are {near} of {len(decoders)} causal language models; "
        f"above {FAR:g} times it {len(far)} of all {len(over)}{': ' * bool(far)}{', '.join(far)}."
    )


def short() -> list[str]:
    """What is missing to `WANTED`, a line a case."""
    count = len(register.listed())
    shares = {case: len(right(case)) for case in TRAININGS}
    return [f"{case}: {n} of {count} right" for case, n in shares.items() if n < WANTED * count]


KINDS = (RIGHT, "wrong", "raises", "no plan", ALONE, "not run")


def _kind(what: dict[str, Any] | None) -> str:
    return "not run" if what is None else next(kind for kind in KINDS if what["outcome"].startswith(kind))
