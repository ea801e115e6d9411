"""Attributes that are others for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def meanwhile(owner: Any, **values: Any) -> Iterator[None]:
    """Within the block these attributes of an object, which it has itself, are these; after it what they were."""
    held = vars(owner)
    before = {name: held[name] for name in values}
    held.update(values)
    try:
        yield
    finally:
        held.update(before)
