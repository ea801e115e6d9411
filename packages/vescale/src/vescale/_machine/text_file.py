"""Text files that users name: read within bounds, so that a device, which has no end, is an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vescale_dtensor import VescaleError

MOST = 2**26
"""Characters of a configuration, a plan or a schedule."""


def text_of(
    path: Path, error: type[VescaleError], operation: str, remedies: Sequence[tuple[str, str]] = ()
) -> str:
    """Returns the text of a file. Raises `error` for what cannot be read, is no text, or has no end."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST + 1)
    except (OSError, ValueError) as problem:
        raise error(operation, f"{path} cannot be read: {problem}", (), remedies) from problem
    if len(text) > MOST:
        raise error(operation, f"{path} is longer than {MOST:,} characters", (), remedies)
    return text
