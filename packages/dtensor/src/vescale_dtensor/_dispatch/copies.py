"""Views that had to be copies, so that a write which would not reach the other of the two raises.

On one device a view shares memory with its base. Where the shard of a view lies on
another rank it is a copy, and a write to either, or to any further view of either,
must not go through in silence (design section 3, contract 7). A copy and its bases (a copy of
a copy has two) are known by their storages, weakly: once no tensor of one is left, the other may
be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._communication import events
from .._communication.events import function_name
from .._conversions.convert import describe, own_copy, shares_storage
from .._conversions.memo import forget
from .._errors import ViewError
from .._layouts.layout import Layout
from .._layouts.strides import cut_to_one, global_stride
from .._tensor.tensor import DTensor, local_only
from .._torch_private import _is_alias_of

# storage of a copy -> (the copy, its bases); storage of a base -> storages of its copies
_base_of: dict[int, tuple[StorageWeakRef, tuple[StorageWeakRef, ...]]] = {}
_copies_of: dict[int, list[int]] = {}
_sweep_at = 64
PATIENCE_S = 0.1
"""Seconds that a write waits for a transfer's thread to release a view that is gone."""


def mark_copy(copy: Tensor, base: Tensor, cut_out: bool = False, index: Any = None) -> Tensor:
    """Notes that `copy` would be a view of `base` on one device, and if it is a part of it, which has the strides of
    the whole there. Returns it, with its own storage.

    index: `copy` is `base[index]`, so that what is written to it can be written there."""
    global _sweep_at
    with local_only():
        mine, theirs = copy.untyped_storage(), base.untyped_storage()
        if mine._cdata == theirs._cdata:  # a slice of the base: a write would reach it on some ranks only
            copy = _copied_apart(copy)
            mine = copy.untyped_storage()
    if len(_base_of) >= _sweep_at:
        _sweep()
        _sweep_at = 64 + 2 * len(_base_of)
    known = _base_of.get(theirs._cdata)
    further = known[1] if known is not None and not known[0].expired() else ()
    bases = (StorageWeakRef(theirs), *(one for one in further if not one.expired()))
    _base_of[mine._cdata] = (StorageWeakRef(mine), bases)
    for base_storage in bases:
        _copies_of.setdefault(base_storage.cdata, []).append(mine._cdata)
    if cut_out:
        copy._is_cut_out = True
        with local_only():
            if copy._is_view():  # further views have the same base
                copy._base._is_cut_out = True
    if index is not None and type(base) is DTensor:
        copy._taken = base, index
    return copy


def _copied_apart(tensor: Tensor, row_major: bool = False) -> Tensor:
    """A clone for the sake of later writes alone, or of the order in memory."""
    events.copying = True
    try:
        return tensor.clone(memory_format=torch.contiguous_format) if row_major else own_copy(tensor)
    finally:
        events.copying = False


def is_copy(tensor: Tensor) -> bool:
    """True if `tensor` lies in a copied view."""
    with local_only():
        return tensor.untyped_storage()._cdata in _base_of


def copied_side(tensor: Tensor) -> str:
    """'copy' when `tensor` is a copied view of a live base, 'base' when a live copied view of it exists, else ''."""
    if not _base_of:
        return ""
    with local_only():
        key = tensor.untyped_storage()._cdata
    known = _base_of.get(key)
    if known is not None and not known[0].expired() and not all(base.expired() for base in known[1]):
        return "copy"
    return "base" if any(_is_live(copy, key) for copy in _copies_of.get(key, ())) else ""


def check_writable(function: object, tensor: Tensor, through: bool = False) -> None:
    """A view that had to be redistributed is a copy: a write to it, or to its base, would not reach the other.

    Conversions of the tensor that are remembered end here.

    through: the caller calls `write_through` afterwards.
    """
    if type(tensor) is not DTensor:
        return
    forget(tensor)
    side = copied_side(tensor)
    if side == "copy" and through and "_taken" in tensor.__dict__:
        with _unmarked(tensor):
            check_writable(function, tensor._taken[0], through)
    elif side and not _ends_soon(tensor):
        rule, remedies = _COPIED[side]
        raise ViewError(function_name(function), rule, [describe("tensor", tensor, tensor._layout)], remedies)


def write_through(tensor: Tensor) -> None:
    """Writes what was written to a copy of `base[index]` there, too."""
    taken = tensor.__dict__.get("_taken")
    if taken is not None and copied_side(tensor) == "copy":
        base, index = taken
        with _unmarked(tensor):
            base[index] = tensor


def is_there(base: Tensor, index: Any, value: Any) -> bool:
    """Returns whether `value` is a copy of `base[index]`, as in `base[index] += 1`, so that it says nothing new."""
    taken = value.__dict__.get("_taken") if type(value) is DTensor else None
    return taken is not None and taken[0] is base and taken[1] is index and copied_side(value) == "copy"


@contextmanager
def _unmarked(copy: DTensor) -> Iterator[None]:
    """Takes `copy` for nobody's view, within it."""
    with local_only():
        key = copy.untyped_storage()._cdata
    known = _base_of.pop(key)
    try:
        yield
    finally:
        _base_of[key] = known


def _ends_soon(tensor: Tensor) -> bool:
    """True if nothing but a transfer held the other of the two, as ranks must agree: a backend's thread lets go of what
    it sent a moment after it was waited for."""
    until = monotonic() + PATIENCE_S
    while monotonic() < until:
        sleep(PATIENCE_S / 200)
        if not copied_side(tensor):
            return True
    return False


_COPIED = {
    "copy": (
        "in-place write to a view that had to be redistributed, so that it is a copy and not a view",
        [
            ("tensor[1] += 1", "an index of the tensor itself, which is written through"),
            ("build the value: torch.where / torch.cat", ""),
        ],
    ),
    "base": (
        "in-place write to a tensor of which a view had to be redistributed, so that it is a copy and not a view",
        [
            ("view.clone()", "in place of the view: tensor[1] = tensor[0].clone()"),
            ("write before the view is taken, or to tensor.clone()", ""),
        ],
    ),
}


# What copies on one device when the tensor is permuted, and else hands back its memory.
_COPY_IF_PERMUTED = {Tensor.contiguous, Tensor.to, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
# The order that these give where they are told none.
_LAYS = {Tensor.contiguous: torch.contiguous_format, Tensor.to: torch.preserve_format}
_CHANNELS_LAST = {torch.channels_last, torch.channels_last_3d}


def as_on_one_device(function: object, run: Callable, layout: Layout) -> Callable:
    """`run`, made to copy where one device would though the shard need not.

    A dim that is cut down to one index, or to none, leaves a permuted shard contiguous, which the whole tensor is not.
    Its strides still tell. `contiguous` then copies, and a reshape where one of the whole tensor would. In the same way
    one index leaves a row-major shard in the order of `channels_last`, and none leaves no order.
    """
    if function not in _COPY_IF_PERMUTED or not (cut_to_one(layout) or 0 in layout.local_shape):
        return run
    copied: dict[tuple[int, ...], bool | None] = {}
    in_order: set[tuple[int, ...]] = set()  # strides of what is given, of which nothing more is asked

    def copies(tensor: Tensor, args: tuple, kwargs: dict) -> bool | None:
        strides = tensor.stride()
        if strides not in copied:
            copied[strides] = _copies(function, tensor, layout, args, kwargs)
        return copied[strides]

    def checked(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        out = run(tensor, *args, **kwargs)
        if tensor.stride() in in_order:
            return out
        order = kwargs.get("memory_format", _LAYS.get(function))
        shares = shares_storage(out, tensor)
        if order in _CHANNELS_LAST:
            apart = copies(tensor, (), {"memory_format": order})
            if shares:
                return _copied_apart(out) if apart else out
            return tensor if apart is False and not args and len(kwargs) == 1 else out
        if order is torch.preserve_format or not shares:
            return out
        if _is_in_order(tensor, layout.shape):
            in_order.add(tensor.stride())
            return out
        if order is torch.contiguous_format:
            return _copied_apart(out)
        return _copied_apart(out, row_major=True) if copies(tensor, args, kwargs) else out

    return checked


def _copies(function: Callable, tensor: Tensor, layout: Layout, args: tuple, kwargs: dict) -> bool | None:
    """True if `function` of one device's tensor, which has these sizes, would be no view of it. None if its strides
    are not known."""
    strides = global_stride(tensor.stride(), tensor.shape, layout)
    if strides is None:
        return None
    whole = torch.empty_strided(layout.shape, strides, dtype=tensor.dtype, device="meta")
    out = function(whole, *args, **kwargs)
    return not _is_alias_of(out, whole)


def _is_in_order(local: Tensor, shape: tuple[int, ...]) -> bool:
    """True if the strides are row-major, dims of one local index included that have more on the whole."""
    expected = 1
    for size, stride, whole in zip(reversed(local.shape), reversed(local.stride()), reversed(shape)):
        if whole > 1:
            if stride != expected:
                return False
            expected *= max(size, 1)
    return True


def _is_live(copy: int, base: int) -> bool:
    known = _base_of.get(copy)
    return known is not None and not known[0].expired() and any(one.cdata == base for one in known[1])


def _sweep() -> None:
    for key, (copy, bases) in list(_base_of.items()):
        if copy.expired() or all(base.expired() for base in bases):
            del _base_of[key]
    for base, copies in list(_copies_of.items()):
        left = [copy for copy in copies if _is_live(copy, base)]
        if left:
            _copies_of[base] = left
        else:
            del _copies_of[base]
