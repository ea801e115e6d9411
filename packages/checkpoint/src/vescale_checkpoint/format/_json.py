"""JSON of unknown origin: as data of bounded size and depth, or a ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

MOST_LEVELS = 256  # of a value; deeper ones exhaust the stack of whoever walks over them
MOST_ITEMS = 20_000_000  # lists, objects and their items: what bounds the memory that a text of so many bytes takes


def parse_json(data: bytes, *, unique: bool = False) -> Any:
    """The value of a text. Raises ValueError for what is no JSON, has too many items, or constants such as NaN.

    Arguments: `unique` refuses an object that has a name twice.
    """
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    if items > MOST_ITEMS:
        raise ValueError(f"about {items} items, more than {MOST_ITEMS}")
    try:
        hook = _without_repeats if unique else None
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def check_levels(values: Iterable[Any], most: int = MOST_LEVELS) -> None:
    """Raises ValueError where lists and objects are nested deeper than `most`."""
    level = [value for value in values if isinstance(value, dict | list)]
    for _ in range(most):
        if not level:
            return
        items = [value.values() if isinstance(value, dict) else value for value in level]
        level = [item for inner in items for item in inner if isinstance(item, dict | list)]
    raise ValueError(f"values are nested more than {most} deep")
