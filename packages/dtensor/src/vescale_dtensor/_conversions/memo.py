"""Conversions remembered on their source, so that q, k and v share one all-gather.

A memo lives on the tensor that was converted, and only while a module's forward
runs: a scope is opened when a module that has children is entered, and what was
remembered inside is forgotten when it returns. Without that bound a memo on a leaf
would be a reference cycle through autograd's graph, which Python cannot see. A memo
holds for one grad mode, and for one version of its source and of itself.

What moves nothing in forward holds longer: in the scope in which its source was
computed. Modules inside that read one value, each in a scope of its own (projections
that adapters wrap, attention beside a feed-forward part, decoder blocks that read an
encoder), then add up its gradient once, and no memory is kept for it: the memory is the
source's, which the scope does not hold.
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import ref

from torch import Tensor, is_grad_enabled

from .._layouts.layout import Layout
from .._layouts.state import INVARIANT, PARTIAL, REPLICATE
from .._torch_private import _get_sequence_nr


class Scope:
    """Memory of conversions while a module runs: sources, and of which target; None for slices that were counted."""

    __slots__ = ("cut", "first_node", "kept")

    def __init__(self, cut: Collection[int] = ()) -> None:
        self.cut = cut
        self.first_node = _get_sequence_nr()
        self.kept: list[tuple] = []

    def forget(self) -> None:
        for held, key in self.kept:
            source = held() if type(held) is ref else held
            if source is None:
                continue
            names = source.__dict__
            if key is None:
                names.pop("_sliced", None)
            elif (known := names.get("_conversions")) is not None:
                known.pop(key, None)
                if not known:
                    del names["_conversions"]
        self.kept.clear()


_scopes: list[Scope] = []


def open_scope(cut: Collection[int] = ()) -> None:
    """Begin to remember; pairs with `close_scope`.

    cut: mesh axes that cut weights of the module that is entered, or of a child of it.
    """
    _scopes.append(Scope(cut))


def cut_here() -> Collection[int]:
    """The axes that cut weights of the module that runs, or of a child of it."""
    return _scopes[-1].cut if _scopes else ()


def close_scope() -> None:
    """Forget what was remembered since the matching `open_scope`."""
    if _scopes:
        scope = _scopes.pop()
        if scope.kept:
            scope.forget()


def forget(source: Tensor) -> None:
    """Forget the conversions of one tensor: it was, or is about to be, written."""
    source.__dict__.pop("_conversions", None)
    source.__dict__.pop("_sliced", None)


def forget_all() -> None:
    """Forget everything: after an optimizer step, or when a forward was left by an exception."""
    while _scopes:
        close_scope()


def recall(source: Tensor, target: Layout) -> Tensor | None:
    """The conversion of `source` to `target` that an open scope remembers, if it still holds. Call with dispatch
    disabled."""
    known = source.__dict__.get("_conversions")
    if known is None:
        return None
    entry = known.get((target, is_grad_enabled() and source.requires_grad))
    if entry is None or entry[:2] != (version(source), version(entry[2])):
        return None
    return entry[2]


def already_summed(source: Tensor, layout: Layout) -> Layout | None:
    """Returns the layout in which an open scope remembers a partial tensor's sum: who asks next need not add up again
    what comes of its parts. Call with dispatch disabled."""
    if "_conversions" not in source.__dict__:
        return None
    for whole in (INVARIANT, REPLICATE):
        target = layout.with_states([whole if state is PARTIAL else state for state in layout.states])
        if recall(source, target) is not None:
            return target
    return None


def remember(source: Tensor, target: Layout, result: Tensor, moves: bool = True) -> None:
    """Keep `result`; nothing outside any scope. Call with dispatch disabled.

    moves: whether it has other memory than the source: then it goes with the innermost scope.
    """
    if not _scopes:
        return
    known = source.__dict__.get("_conversions")
    if known is None:
        known = source._conversions = {}
    key = (target, is_grad_enabled() and source.requires_grad)
    known[key] = (version(source), version(result), result)
    sliced = source.__dict__.get("_sliced")
    if sliced is not None:
        sliced[3].kept.append((source, key))
    elif moves or source.grad_fn is None:
        _scopes[-1].kept.append((source, key))
    else:
        _computed_in(source).kept.append((ref(source), key))


def _computed_in(source: Tensor) -> Scope:
    """The scope in which autograd noted the source; the outermost for what is older than all."""
    node = source.grad_fn._sequence_nr()
    return next((scope for scope in reversed(_scopes) if scope.first_node <= node), _scopes[0])


def times_seen(base: Tensor, what: object) -> int:
    """Returns how often the innermost scope, or one around it, was asked this of the same version of `base`; 0 outside.

    What is remembered of the base from then on holds as long as that scope.
    """
    if not _scopes:
        return 0
    seen = base.__dict__.get("_sliced")
    scope = _scopes[-1]
    if seen is None:
        scope.kept.append((base, None))
    else:
        scope = seen[3]
    count = seen[2] if seen is not None and seen[:2] == (what, version(base)) else 0
    base._sliced = what, version(base), count + 1, scope
    return count + 1


def version(source: Tensor) -> int:
    """Returns how often it was written. Call with dispatch disabled."""
    return -1 if source.is_inference() else source._version
