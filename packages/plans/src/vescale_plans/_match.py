"""Patterns against names. Pure: what a plan's globs decide, and how a wrong one is reported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from .plan import PlanError

T = TypeVar("T")


def match(patterns: Mapping[str, T], names: Iterable[str], what: str, *, complete: bool) -> dict[str, T]:
    """name -> the value of the first pattern that matches it.

    Raises PlanError for a pattern that matches no name (a bare "*" excepted), and, if
    `complete`, for a name that no pattern matches; both name the nearest.
    """
    names = list(names)
    decided: dict[str, T] = {}
    used: set[str] = set()
    for name in names:
        for pattern, value in patterns.items():
            if fnmatchcase(name, pattern):
                used.add(pattern)
                decided.setdefault(name, value)
    for pattern in patterns:
        if pattern not in used and pattern != "*":
            near = nearest(pattern, names)
            raise PlanError(
                "parallelize",
                f"the pattern {pattern!r} matches no {what} of the model",
                [f"nearest  {', '.join(near) or 'none'}"],
                [(f"use {near[0]!r}" if near else "remove the pattern", "")],
            )
    if complete:
        for name in names:
            if name not in decided:
                near = nearest(name, list(patterns))
                raise PlanError(
                    "parallelize",
                    f"no pattern decides the {what} {name!r}",
                    [f"nearest pattern  {near[0]!r}"] if near else (),
                    [(f'add "{name}": {{...}}', "places it"), ('end with "*": {}', "replicates the rest")],
                )
    return decided


def nearest(name: str, among: list[str]) -> list[str]:
    """The most similar names, numbers and stars counting as equal, at most three."""
    plain = {candidate: "".join("*" if c.isdigit() else c for c in candidate) for candidate in among}
    wanted = "".join("*" if c.isdigit() else c for c in name)
    close = difflib.get_close_matches(wanted, list(dict.fromkeys(plain.values())), n=3, cutoff=0.4)
    return [next(candidate for candidate, text in plain.items() if text == one) for one in close]
