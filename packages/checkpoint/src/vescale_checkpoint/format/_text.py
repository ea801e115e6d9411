"""Text for people: what others named is printed without control characters, and what others made in bounded length.

Names, paths and values of a checkpoint may come from anybody. An escape sequence in
a name must not reach a terminal, and the repr of a value of a few kilobytes may be
longer than any memory, where parts are shared.
"""

from __future__ import annotations

from typing import Any

from vescale_trace.text import printable as escaped

MOST_CHARACTERS = 4000
_MOST_ITEMS, _MOST_LEVELS, _MOST_BITS = 6, 3, 512


def printable(text: str, most: int = MOST_CHARACTERS, *, lines: bool = False) -> str:
    """The text, its control characters escaped, its middle left out beyond `most` characters.

    Arguments: `lines` leaves line feeds: for what is a text of several lines, and no name.
    """
    if len(text) > most:
        text = f"{text[: most * 3 // 4]} ... {text[-most // 4 :]}"
    return escaped(text, lines=lines)


def shown(value: Any, most: int = 200, level: int = 0) -> str:
    """A value in bounded length and time, whatever it is: as its repr where that is short."""
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
        opened, closed = {list: "[]", tuple: "()", dict: "{}"}[kind]
        return printable(f"{opened}{text}{',' if kind is tuple and len(value) == 1 else ''}{closed}", most)
    return f"a {kind.__qualname__}"


def reason_of(error: BaseException) -> str:
    """An exception's type and text in bounded length, even if it has none to give."""
    kind = type(error).__name__
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"{kind}: {shown(error.args[0])}"
    try:
        return printable(f"{kind}: {error}", lines=True)
    except Exception as second:
        return f"{kind}, whose text raises {type(second).__name__}"
