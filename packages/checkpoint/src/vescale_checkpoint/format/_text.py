"""Text for people: what others named is printed without control characters, and what others made in bounded length.

Names, paths and values of a checkpoint may come from anybody. An escape sequence in
a name must not reach a terminal, and the repr of a value of a few kilobytes may be
longer than any memory, where parts are shared.
"""

from __future__ import annotations

from typing import Any

from vescale_trace.text import printable as escaped
from vescale_trace.text import shown as shown

MOST_CHARACTERS = 4000


def printable(text: str, most: int = MOST_CHARACTERS, *, lines: bool = False) -> str:
    """The text, its control characters escaped, its middle left out beyond `most` characters.

    Arguments: `lines` leaves line feeds: for what is a text of several lines, and no name.
    """
    if len(text) > most:
        text = f"{text[: most * 3 // 4]} ... {text[-most // 4 :]}"
    return escaped(text, lines=lines)


def text_of(value: Any) -> str:
    """Returns a text. Raises ValueError for anything else."""
    if type(value) is not str:
        raise ValueError(f"{shown(value)} is no text")
    return value


def natural(value: Any) -> int:
    """Returns a size. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{shown(value)} is not a size")
    return value


def reason_of(error: BaseException) -> str:
    """An exception's type and text in bounded length, even if it has none to give."""
    kind = type(error).__name__
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"{kind}: {shown(error.args[0])}"
    try:
        return printable(f"{kind}: {error}", lines=True)
    except Exception as second:
        return f"{kind}, whose text raises {type(second).__name__}"
