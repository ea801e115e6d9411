"""Text for people: an escape sequence in a name that somebody else chose must not reach a terminal."""

from __future__ import annotations


def printable(text: str, *, lines: bool = False) -> str:
    """The text, its control characters escaped.

    Arguments: `lines` leaves line feeds: for what is a text of several lines, and no name.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)
