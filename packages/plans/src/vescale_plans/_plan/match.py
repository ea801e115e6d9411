"""Patterns against names. Pure: what a plan's globs decide, and how a wrong one is reported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from .parts import PlanError, misfit

T = TypeVar("T")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def check_names(names: Iterable[str]) -> None:
    """Raises PlanError for a name with control characters: a terminal would obey them in each report that has it."""
    for name in names:
        if _CONTROL.search(name):
            rule = f"a name in the model, {name!r}, has control characters, which reports would send to the terminal"
            raise misfit(rule, [], [("a name without them", "as the key of a ModuleDict, or in add_module")])


def match(patterns: Mapping[str, T], names: Iterable[str], what: str, *, complete: bool) -> dict[str, T]:
    """name -> the value of the first pattern that matches it.

    Raises PlanError for a pattern (a bare "*" excepted) that matches no name, or none
    that is not decided before it, and, if `complete`, for a name that no pattern
    matches; they name the nearest.
    """
    names = list(names)
    deciding = {name: first_match(patterns, name) for name in names}
    used = set(deciding.values())
    for pattern in patterns:
        if pattern not in used and pattern != "*":
            raise _unused(pattern, names, deciding, what)
    if complete:
        for name, pattern in deciding.items():
            if pattern is None:
                near = nearest(name, list(patterns))
                raise misfit(
                    f"no pattern decides the {what} {name!r}",
                    [f"nearest pattern  {near[0]!r}"] if near else (),
                    [(f'add "{name}": {{...}}', "places it"), ('end with "*": {}', "replicates the rest")],
                )
    return {name: patterns[pattern] for name, pattern in deciding.items() if pattern is not None}


def match_inside(patterns: Mapping[str, T], names: Iterable[str], what: str) -> dict[str, T]:
    """Like `match`, for what holds inside a module: a pattern also decides all names under one that it matches."""
    names = list(names)
    match(patterns, names, what, complete=False)
    decided = {}
    for name in names:
        parts = name.split(".")
        inside_of = [".".join(parts[: i + 1]) for i in range(len(parts))]
        pattern = next((p for p in patterns if any(fnmatchcase(one, p) for one in inside_of)), None)
        if pattern is not None:
            decided[name] = patterns[pattern]
    return decided


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """The pattern that decides `name`."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def decided(patterns: Mapping[str, T], name: str, otherwise: T) -> T:
    """The value of the pattern that decides `name`; `otherwise` where none does."""
    pattern = first_match(patterns, name)
    return otherwise if pattern is None else patterns[pattern]


def covers(pattern: str, other: str) -> bool:
    """True if `pattern` surely matches whatever `other` matches."""
    return "?" not in pattern and "[" not in pattern and fnmatchcase(other, pattern)


def nearest(name: str, among: Sequence[str]) -> list[str]:
    """The most similar names, numbers and stars counting almost as equal, at most three."""
    masked: dict[str, list[str]] = {}
    for candidate in among:
        masked.setdefault(_masked(candidate), []).append(candidate)
    close = difflib.get_close_matches(_masked(name), list(masked), n=3, cutoff=0.4)
    return [max(masked[one], key=lambda c: difflib.SequenceMatcher(a=c, b=name).ratio()) for one in close]


def nearest_globs(pattern: str, names: Sequence[str]) -> list[str]:
    """Like `nearest`; for "*.x.y" what comes back are globs, of the ends of names, or names that
    are too short for one."""
    if not pattern.startswith("*."):
        return nearest(pattern, names)
    parts = pattern.count(".")
    ends = [".".join(["*", *name.split(".")[-parts:]]) if name.count(".") >= parts else name for name in names]
    return nearest(pattern, list(dict.fromkeys(ends)))


def _masked(name: str) -> str:
    return "".join("*" if c.isdigit() else c for c in name)


def _unused(pattern: str, names: list[str], deciding: Mapping[str, str | None], what: str) -> PlanError:
    before = list(dict.fromkeys(deciding[name] for name in names if fnmatchcase(name, pattern)))
    if before:
        return misfit(
            f"the pattern {pattern!r} decides no {what}: all its names match earlier patterns, "
            f"{', '.join(map(repr, before))}, and the first match decides",
            (),
            [(f"write {pattern!r} first", ""), ("remove it", "")],
        )
    near = nearest_globs(pattern, names)
    shown = ", ".join(near or list({_masked(name): name for name in names}.values())[:6])
    return misfit(
        f"the pattern {pattern!r} matches no {what} of the model",
        [f"{'nearest' if near else 'there are'}  {shown}"],
        [(f"use {near[0]!r}" if near else "remove the pattern", "")],
    )
