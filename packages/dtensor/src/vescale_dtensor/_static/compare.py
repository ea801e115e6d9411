"""Whether two passes over the same data did the same: the same local operators on the same tensors, the same graph.

Two tapes of one pass on DTensors and one on plain tensors are held against each other,
operator by operator. Storages are paired as they appear: one that both passes found
outside is the same object, one that they made is the result of the same operator. So
equal tapes mean equal dataflow, sizes and scalars included, and with it equal values.
Strides of dims of one index, which dispatch sets so that they tell one device's order,
change no operator's values: they must be equal only where a value leaves the module's own
code, for what is drawn there may follow them. The autograd graphs are compared from the
results back to nodes that both share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._conversions.convert import Alias, Convert
from .._conversions.steps import Route
from .._tensor.bits import bits_of
from .tape import Conversion, Crossing, Op, Ref, Tape

_CLONE = "CloneBackward0"
# They give another object for the same values; whether gradients pass is the graph's matter.
_SILENT = frozenset({"aten::detach", "aten::alias"})
_LAYS = "aten::as_strided"
# Sizes may be written with -1: what counts is the result.
_SIZES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::expand", "aten::_reshape_alias"})


@dataclass(frozen=True)
class Difference:
    """Where two passes part: what, and the user's line."""

    what: str
    line: str = ""


class Pairs:
    """Which storage of the second pass stands for which of the first."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._taken: set[int] = set()

    def same(self, a: Any, b: Any) -> bool:
        """Whether two argument trees are equal; unknown storages must be one and the same."""
        return self._same(a, b, _place)

    def same_values(self, a: Any, b: Any) -> bool:
        """The same, whatever the strides of dims of one index are."""
        return self._same(a, b, _place_of_values)

    def _same(self, a: Any, b: Any, place: Callable[[Ref], tuple]) -> bool:
        if isinstance(a, Ref) and isinstance(b, Ref):
            return place(a) == place(b) and self._of.get(a.storage, a.storage) == b.storage
        if isinstance(a, tuple) and isinstance(b, tuple) and not isinstance(a, Ref) and not isinstance(b, Ref):
            return len(a) == len(b) and all(self._same(one, other, place) for one, other in zip(a, b))
        return type(a) is type(b) and (a == b or (a != a and b != b))

    def alias(self, a: Any, b: Any) -> None:
        """From now on storage `a` of the first pass is what `b`, of the first pass too, stands for."""
        if isinstance(a, Ref) and isinstance(b, Ref):
            self._of[a.storage] = self._of.get(b.storage, b.storage)

    def made(self, a: Any, b: Any) -> bool:
        """Pairs the results of one operator."""
        if isinstance(a, Ref) and isinstance(b, Ref):
            if a.storage in self._of or a.storage == b.storage:
                return self.same_values(a, b)
            if b.storage in self._taken or _place_of_values(a) != _place_of_values(b):
                return False
            self._of[a.storage] = b.storage
            self._taken.add(b.storage)
            return True
        if isinstance(a, tuple) and isinstance(b, tuple) and not isinstance(a, Ref) and not isinstance(b, Ref):
            return len(a) == len(b) and all(map(self.made, a, b))
        return self.same(a, b)


def _place(ref: Ref) -> tuple:
    return ref[1:]


def _place_of_values(ref: Ref) -> tuple:
    strides = tuple([stride for stride, size in zip(ref.stride, ref.shape) if size != 1])
    return ref.offset, ref.shape, strides, ref.dtype


class Comparison:
    """A second tape held against a first one, item by item, while it is being written. Fills `pairs`."""

    def __init__(self, done: Tape, pairs: Pairs) -> None:
        self._rest = iter([item for item in done if _is_audible(item)])
        self._next: Any = None
        self._pairs = pairs
        self._advance()

    def _advance(self) -> None:
        """To what the second pass has to do next. What only keeps writes apart it does not do."""
        self._next = next(self._rest, None)
        while type(self._next) is Op and self._next.copying:
            self._pairs.alias(self._next.out, self._next.args[0])
            self._next = next(self._rest, None)

    def foreseen(self, op: Op) -> Difference | None:
        """Whether an operator of the second pass that has yet to run is another one than the first pass had there."""
        one = self._next
        if op.name in _SILENT or op.name == _LAYS:
            return None
        if type(one) is not Op:
            return self._other_kind(op)
        why = _begun_otherwise(one, op, self._pairs)
        return Difference(why, one.line) if why else None

    def add(self, item: Any) -> Difference | None:
        """Whether the next item of the second tape is another one than the first tape has there."""
        one = self._next
        if not _is_audible(item):
            return None
        if type(one) is not type(item):
            return self._other_kind(item)
        why = _COMPARE[type(one)](one, item, self._pairs)
        self._advance()
        return Difference(why, one.line) if why else None

    def _other_kind(self, item: Any) -> Difference:
        one = self._next
        if one is None:
            return Difference(f"{_what(item)} on plain tensors only", item.line)
        return Difference(f"{_what(one)} in place of {_what(item)}", one.line)

    def end(self) -> Difference | None:
        """What the first pass did beyond the second, which has ended."""
        one = self._next
        return None if one is None else Difference(f"{_what(one)} of the shards only", one.line)


def _is_audible(item: Any) -> bool:
    return not (type(item) is Op and (item.name in _SILENT or _only_lays(item)))


def _only_lays(op: Op) -> bool:
    """Whether it gives other strides to dims of one index, and is nothing else."""
    return (
        op.name == _LAYS
        and op.args[0].storage == op.out.storage
        and _place_of_values(op.args[0]) == _place_of_values(op.out)
    )


def _begun_otherwise(a: Op, b: Op, pairs: Pairs) -> str:
    """Why two operators, of which the second may have yet to run, are not one and the same."""
    if a.function is not b.function:
        return f"{_what(a)} in place of {_what(b)}"
    if a.constant is not None or b.constant is not None:
        return "a constant has another value" if a.constant != b.constant else ""
    skip = 1 if a.name in _SIZES else None
    if not pairs.same_values(a.args[:skip], b.args[:skip]) or not pairs.same_values(a.kwargs, b.kwargs):
        return f"{_what(a)} has other arguments"
    return ""


def _compare_ops(a: Op, b: Op, pairs: Pairs) -> str:
    why = _begun_otherwise(a, b, pairs)
    if why or pairs.made(a.out, b.out):
        return why
    return "a constant has another place" if a.constant is not None else f"{_what(a)} has another result"


def _compare_conversions(a: Conversion, b: Conversion, pairs: Pairs) -> str:
    same = a.by is b.by and pairs.same(a.refs[0], b.refs[0]) and pairs.made(a.refs[1], b.refs[1])
    return "" if same else "a boundary has another input"


def _compare_crossings(a: Crossing, b: Crossing, pairs: Pairs) -> str:
    return "" if a.frame is b.frame and pairs.same(a.inputs, b.inputs) else "a module is called with other arguments"


_COMPARE: dict[type, Callable[[Any, Any, Pairs], str]] = {
    Op: _compare_ops,
    Conversion: _compare_conversions,
    Crossing: _compare_crossings,
}


def _what(item: Any) -> str:
    if type(item) is Op:
        return item.name.removeprefix("aten::")
    return "a conversion" if type(item) is Conversion else "a module call"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits. Call with dispatch disabled."""
    if a.is_meta or a is b:
        return True
    return torch.equal(bits_of(a), bits_of(b))


# --- autograd graphs -----------------------------------------------------------------


def graph_difference(
    done: Iterable[Tensor], tried: Iterable[Tensor], copied: bool = False, moved: frozenset[Route] = frozenset()
) -> Difference | None:
    """Whether gradients would flow the same ways. Call with dispatch disabled; the tensors are paired in order.

    copied: the first pass has clones that the second does without, through which gradients pass as they are.
    moved: conversions that the second pass makes of a parameter itself, and the first of what was computed from
    it. Every way that has one in the first pass must have the same one in the second, and end there.
    """
    waiting = []
    for one, other in zip(done, tried):
        if one.requires_grad != other.requires_grad:
            return Difference("gradients flow in one pass only")
        waiting.append((_node(one), _node(other), one.output_nr, other.output_nr, None))
    seen: set[tuple] = set()
    kept = []  # nodes are known by identity only while somebody holds them
    while waiting:
        a, b, at, bt, owed = waiting.pop()
        (a, at), (b, bt) = _behind_aliases(a, at), _behind_aliases(b, bt)
        while copied and _node_name(a) == _CLONE and _node_name(b) != _CLONE:
            a, at = _behind_aliases(*a.next_functions[0])
        if owed is None and _route_of(a) in moved and _route_of(b) not in moved:
            owed = _route_of(a)
            a, at = _behind_aliases(*a.next_functions[0])
        elif owed is not None and _route_of(b) is owed:
            owed = None
            b, bt = _behind_aliases(*b.next_functions[0])
            if a is not b:
                return Difference("a conversion of a parameter does not end there")
        kept.append((a, b))
        if a is b:
            if at != bt or (owed is not None and a is not None):
                return Difference("gradients flow through another output")
            continue
        leaf = isinstance(a, Tensor) or isinstance(b, Tensor)
        if leaf or a is None or b is None or type(a).__name__ != type(b).__name__ or at != bt:
            return Difference(f"autograd node {_node_name(a)} in place of {_node_name(b)}")
        if is_foreign(b):
            return Difference(f"the autograd Function {type(b)._forward_cls.__qualname__} may keep what it was given")
        if (id(a), id(b), owed) in seen:
            continue
        seen.add((id(a), id(b), owed))
        if len(a.next_functions) != len(b.next_functions):
            return Difference(f"autograd node {_node_name(a)} has other inputs")
        for (x, i), (y, j) in zip(a.next_functions, b.next_functions):
            waiting.append((x, y, i, j, owed))
    return None


def _route_of(node: Any) -> Route | None:
    """The route of a conversion's node."""
    return node.way[0] if getattr(type(node), "_forward_cls", None) is Convert else None


def _node(tensor: Tensor) -> Any:
    return tensor.grad_fn if tensor.grad_fn is not None or not tensor.requires_grad else tensor


def _behind_aliases(node: Any, output: int) -> tuple[Any, int]:
    while node is not None and getattr(type(node), "_forward_cls", None) is Alias:
        node, output = node.next_functions[0]
    return node, output


def is_foreign(node: Any) -> bool:
    """Whether the node is of an autograd Function that is neither torch's nor ours."""
    forward = getattr(type(node), "_forward_cls", None)
    return forward is not None and forward.__module__.split(".")[0] not in ("torch", "vescale_dtensor")


def _node_name(node: Any) -> str:
    return "nothing" if node is None else type(node).__name__
