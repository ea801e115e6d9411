"""Rows that are put in the order of a key of theirs, and back: tokens sorted by their experts.

Of what is sorted by a key, row by row, each entry is still computed from its own row of the batch; only where it lies
depends on the others. So a tag `Order` is carried on through what looks at one entry at a time, and is the batch's rows
again where they return to their places:

    values, places = ids.sort()       "rows" and "places" of the key
    x[places // k]                    "rows", of k entries for each row of x
    bincount(values).cumsum(0)        "counts", "ends" of equal keys, by which a grouped product knows its groups
    y[places.argsort()]               the batch's rows; so are out[places] = y and out.index_add_(0, places // k, y)

Anything else on such a value is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .notes import Note, Ref, Step
from .places import NUMBERS

SORTS = frozenset(("sort", "argsort", "msort"))
_COUNTS = frozenset(("histc", "bincount"))
INDEXING = frozenset(("getitem", "setitem", "index_select", "index_add", "index_put", "gather"))
_GROUPED = frozenset(("grouped_mm", "grouped_mm_fallback"))
_CASTS = frozenset(("to", "int", "long", "float", "type", "contiguous", "clone", "detach"))
_MOVES = SORTS | {"topk", "flip", "flipud", "roll", "rot90", "gather", "scatter", "scatter_add", "unique", "kthvalue"}
_ADDS = frozenset(("index_add", "index_put"))


@dataclass(frozen=True)
class Order:
    """A value's relation to the rows in the order of a key.

    Arguments:
        key: the number of the value by which they were sorted.
        kind: "rows", "keys" (rows that are the sorted key itself), "places", "inverse", "counts" or "ends".
        each: of "places", so many neighbours are of one row of the batch.
    """

    key: int
    kind: str
    each: int = 1


def sorted_by(step: Step, place: int) -> Order | None:
    """Describes the output at `place` of an ascending sort of one dim of the batch's rows."""
    if len(step.refs) != 1 or len(step.refs[0].shape) != 1 or step.outs[place] != 0 or not _ascends(step.note):
        return None
    return Order(step.refs[0].number, "places" if place or step.note.name == "argsort" else "keys")


def _ascends(note: Note) -> bool:
    return len(note.args) == 1 and not note.kwargs.get("descending")


def reordered(step: Step, out: Ref) -> Any:
    """The tag of what a function makes of values one of which is in an Order: an Order, "rows" where all are at their
    places again, or None if that is not known."""
    note, refs, given = step.note, step.refs, ["rows" if tag == NUMBERS else tag for tag in step.tags]
    name = note.name
    orders = [tag for tag in given if isinstance(tag, Order)]
    keys = {order.key for order in orders}
    if len(keys) != 1:
        return None
    is_key = [tag.kind for tag in orders] == ["keys"] and len(refs) == 1
    kinds = [tag if not isinstance(tag, Order) else "rows" if tag.kind == "keys" else tag.kind for tag in given]
    order, first = orders[0], kinds[0]
    size = refs[next(i for i, tag in enumerate(given) if isinstance(tag, Order))].shape
    if name in ("getitem", "index_select", "setitem", *_ADDS):
        return _indexed(step, given, kinds)
    if set(kinds) == {"places"} and len(refs) == 1:
        if name == "argsort":
            return Order(order.key, "inverse") if _ascends(note) and order.each == 1 else None
        if name in ("floordiv", "floor_divide", "div", "divide") and order.each == 1:
            number = note.args[1] if len(note.args) == 2 else None
            floors = name.startswith("floor") or note.kwargs == {"rounding_mode": "floor"}
            return Order(order.key, "places", number) if floors and type(number) is int and number > 0 else None
    if len(refs) == 1 and (is_key or first != "rows") and name in _CASTS:
        return order
    if name in _COUNTS and is_key:
        return Order(order.key, "counts") if name == "bincount" or _from_zero(note) else None
    if name == "cumsum" and kinds == ["counts"]:
        return Order(order.key, "ends")
    if name in _GROUPED:
        return Order(order.key, "rows") if kinds == ["rows", "constant", "ends"] else None
    if set(kinds) <= {"constant", "rows"} and "rows" not in given and name not in _MOVES and out.shape[:1] == size[:1]:
        return Order(order.key, "rows")
    return None


def _from_zero(note: Note) -> bool:
    """True if a histogram begins at 0: without limits it begins at the least key of the batch."""
    limits = dict(zip(("bins", "min", "max"), note.args[1:])) | note.kwargs
    return limits.get("min") == 0 and limits.get("max", 0) > 0


def _indexed(step: Step, given: list[Any], kinds: list[Any]) -> Any:
    """Reads and writes by index along the first dim."""
    note, refs, name = step.note, step.refs, step.note.name
    if name in ("index_select", "index_add"):
        dim, rest = note.args[1], (note.args[0], *note.args[2:])
        if dim != 0 or any(value != 1 for value in note.kwargs.values()):
            return None
    elif name == "index_put":
        rest = (note.args[0], note.args[1][0], note.args[2]) if len(note.args[1]) == 1 else ()
        if note.kwargs.get("accumulate") is not True:
            return None
    else:
        rest = (note.args[0], _first(note.args[1]), *note.args[2:])
    if len(rest) != len(refs) or any(a is not b for a, b in zip(rest, refs)):
        return _sliced(note, given, refs)
    if len(refs) == 2:
        target, index = given
        if isinstance(index, Order) and index.kind == "places" and target == "rows":
            fits = refs[0].shape[0] * index.each == refs[1].shape[0]
            return Order(index.key, "rows") if fits else None
        if isinstance(index, Order) and index.kind == "inverse" and kinds[0] == "rows" and isinstance(target, Order):
            return "rows" if refs[0].shape[0] == refs[1].shape[0] else None
        return Order(index.key, "rows") if kinds == ["constant", "rows"] else None  # a table's entry for each
    if len(refs) == 3 and isinstance(given[1], Order) and given[1].kind == "places" and given[0] == "rows":
        order, fits = given[1], refs[0].shape[0] * given[1].each == refs[1].shape[0]
        if name == "setitem" and step.tags[2] == NUMBERS and order.each == 1 and fits:
            return Order(order.key, "inverse")
        own = isinstance(given[2], Order) and kinds[2] == "rows" and refs[2].shape[0] == refs[1].shape[0]
        return "rows" if own and fits and (name != "setitem" or order.each == 1) else None
    return None


def _first(index: Any) -> Any:
    """Returns the first of `places, None` and `places, ...`, which alone says which rows are taken."""
    if isinstance(index, tuple) and index and all(one is None or one is Ellipsis for one in index[1:]):
        return index[0]
    return index


def _sliced(note: Note, given: list[Any], refs: list[Ref]) -> Any:
    """`y[:, 2:]`, `y[..., None]`: the rows are left as they are."""
    if note.name != "getitem" or len(refs) != 1 or not isinstance(note.args[1], tuple):
        return None
    begins = note.args[1][:1]
    whole = begins in ((slice(None),), (Ellipsis,)) and given[0].kind in ("rows", "keys")
    return Order(given[0].key, "rows") if whole else None
