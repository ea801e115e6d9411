"""Conversions remembered on their source, so that q, k and v share one all-gather.

A memo lives on the tensor that was converted, and only while a module's forward
runs: a scope is opened when a module that has children is entered, and what was
remembered inside is forgotten when it returns. Without that bound a memo on a leaf
would be a reference cycle through autograd's graph, which Python cannot see. A memo
holds for one grad mode, and for one version of its source and of itself.
"""

from __future__ import annotations

from torch import Tensor, is_grad_enabled

from .._layouts.layout import Layout

_scopes: list[list[Tensor]] = []


def open_scope() -> None:
    """Begin to remember; pairs with `close_scope`."""
    _scopes.append([])


def close_scope() -> None:
    """Forget what was remembered since the matching `open_scope`."""
    if _scopes:
        for source in _scopes.pop():
            forget(source)


def forget(source: Tensor) -> None:
    """Forget the conversions of one tensor: it was, or is about to be, written."""
    source.__dict__.pop("_conversions", None)
    source.__dict__.pop("_sliced", None)


def forget_all() -> None:
    """Forget everything: after an optimizer step, or when a forward was left by an exception."""
    while _scopes:
        close_scope()


def recall(source: Tensor, target: Layout) -> Tensor | None:
    """The conversion of `source` to `target` that this scope made, if it still holds. Call with dispatch disabled."""
    known = source.__dict__.get("_conversions")
    if known is None:
        return None
    entry = known.get((target, is_grad_enabled() and source.requires_grad))
    if entry is None or entry[:2] != (version(source), version(entry[2])):
        return None
    return entry[2]


def remember(source: Tensor, target: Layout, result: Tensor) -> None:
    """Keep `result` for the rest of the innermost scope; nothing outside any scope."""
    if not _scopes:
        return
    known = source.__dict__.get("_conversions")
    if known is None:
        known = source._conversions = {}
        _scopes[-1].append(source)
    key = (target, is_grad_enabled() and source.requires_grad)
    known[key] = (version(source), version(result), result)


def times_seen(base: Tensor, what: object) -> int:
    """How often the innermost scope, or one around it, was asked this of the same version of `base`; 0 outside.

    What is remembered of the base from then on holds as long as that scope.
    """
    if not _scopes:
        return 0
    seen = base.__dict__.get("_sliced")
    count = seen[2] if seen is not None and seen[:2] == (what, version(base)) else 0
    base._sliced = what, version(base), count + 1
    if "_conversions" not in base.__dict__:
        base._conversions = {}
        _scopes[-1].append(base)
    return count + 1


def version(source: Tensor) -> int:
    """How often it was written. Call with dispatch disabled."""
    return -1 if source.is_inference() else source._version
