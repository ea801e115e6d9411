"""Text for people: an escape sequence in a name that somebody else chose must not reach a terminal."""

from __future__ import annotations

from typing import Any

_MOST_ITEMS, _MOST_LEVELS, _MOST_BITS = 6, 3, 512


def printable(text: str, *, lines: bool = False) -> str:
    """The text, its control characters escaped.

    Arguments: `lines` leaves line feeds: for what is a text of several lines, and no name.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any, most: int = 200, level: int = 0) -> str:
    """Returns a value in bounded length and time, whatever it is, and the same on every rank: as its repr where that is
    short."""
    kind = type(value)
    if value is None or kind in (bool, float):
        return repr(value)
    if kind is int:
        return repr(value) if value.bit_length() <= _MOST_BITS else f"an int of {value.bit_length()} bits"
    if kind in (str, bytes):
        text = repr(value[:most])
        return text if len(value) <= most else f"{text}..."
    if kind in (list, tuple, dict):
        if level == _MOST_LEVELS:
            return "..."
        pairs = kind is dict
        items = [item for _, item in zip(range(_MOST_ITEMS), value.items() if pairs else value)]
        parts = [": ".join(shown(part, most, level + 1) for part in (item if pairs else (item,))) for item in items]
        text = ", ".join(parts) + (f", ... {len(value)} in all" if len(value) > len(items) else "")
        opened, closed = ("{", "}") if pairs else ("[", "]") if kind is list else ("(", ")")
        return f"{opened}{text}{',' if kind is tuple and len(value) == 1 else ''}{closed}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"{'an' if kind.__qualname__[0] in 'AEIOUaeiou' else 'a'} {kind.__qualname__}"
