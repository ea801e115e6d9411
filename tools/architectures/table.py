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

Written by `python -m architectures table`; do not edit. {count} types that build and train on one device from a small
configuration (`tools/architectures/types.json`: {causal} causal language models of transformers {version}, {others}
others; {left} more do not build so, and are named there). The plan of each case is `generate_plan`'s with these
degrees. Compared with one device are three losses, all gradients of the first and of the last pass, and what two steps
of SGD made of the parameters; the last two were not compared in runs recorded before that was done: {early} of the
right ones under TP 2 and ZeRO-3. *Not run* says nothing of either. Static mode is held to eager mode bitwise, but for a
model that is not bitwise alike in two eager runs either (reformer). *Not on one device*: it generates nothing there.
Microbatches of a pipeline draw their own random numbers, and have their own statistics in batch normalization, as
accumulation on one device does: models that draw or normalize so (phimoe's router samples its experts) are held
against that.
Of the outcomes, {days}.

{summary}

*Sent* is the collectives of the last of three steps under TP 2, without gradient syncs. *By count* is a count from the
model and the plan (`Trace.least`): in forward one for each weight cut along what it sums over, and for an embedding cut
along its rows; in backward one for each value that weights cut along their out features read, for its gradient is a sum
over the ranks (Q, K and V read one, a latent attention's up projections one each); of convolutions, by their channels,
alike, but for grouped ones, which are cut by groups; one in both for a norm of features that are cut (of its squares:
OLMo 2's queries and keys, BitNet's second norms), and for what a boundary of the plan gathers; two in backward for
experts in stacks, of their rows and of the routing weights, whose gradient is a product with what the experts give; two
for a head cut along the vocabulary with its loss. It knows no recurrence, and no value that meets what is cut outside
of such modules, as the rotary part of a latent key, or B and C of a state-space layer; where it is 0 it says nothing.
Sums that are added before they are summed over ranks need one, a shared expert's beside the routed ones', so that some
send less. It is a yardstick, not a bound. Parameters that the planner leaves whole count nothing, however many.
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
