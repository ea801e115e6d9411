"""The axes over which plans cut sequences, each with the way in which attention goes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from .._layouts.mesh import Mesh

pins: WeakKeyDictionary[Mesh, dict[int, str]] = WeakKeyDictionary()


def pinned_at(mesh: Mesh, axis: int) -> bool:
    """True if a plan cuts sequences over that axis."""
    return axis in pins.get(mesh, ())
