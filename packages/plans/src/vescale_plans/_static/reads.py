"""What a forward has read from objects that outlive it, each with what it found: asked again before each call.

    items    container[key], also of a namespace (an object's __dict__, a module's globals)
    attrs    getattr(object, name): of classes, of functions, of slots
    absent   keys that a namespace must not have, for then something else would be found
    whole    tuple(container): its length, or the order of its keys, was read
    answers  function(): of a few that only look at how the process runs

Found again is the same object, or for immutable scalars the same value. Loops are C's: a read costs 40 ns.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, contains, getitem, is_
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from vescale_dtensor import DTensor

from .values import is_scalar

_requires_grad = attrgetter("requires_grad")
_spaces: WeakKeyDictionary[type, Any] = WeakKeyDictionary()


class Changed(Exception):
    """Something was read twice while a forward was looked through, and was not the same."""


class Reads:
    """The reads of one forward, or of all that a region runs."""

    def __init__(self) -> None:
        self.items: dict[tuple, tuple[Any, Any, Any]] = {}
        self.attrs: dict[tuple, tuple[Any, Any, Any]] = {}
        self.absent: dict[tuple, tuple[Any, Any]] = {}
        self.whole: dict[int, tuple[Any, tuple]] = {}
        self.answers: dict[Callable, Any] = {}

    def space(self, kind: type) -> Any:
        """A class's `vars`: one object, for each class, that others' reads can be told to be of."""
        return _spaces.setdefault(kind, vars(kind))

    def kind(self, it: Any) -> type:
        """The class of an object, from then on guarded. Asks the object nothing."""
        return self.attrs.setdefault((id(it), "__class__"), (it, "__class__", type(it)))[2]

    def item(self, container: Any, key: Any) -> Any:
        """Reads `container[key]`, from then on guarded."""
        return self._noted(self.items, getitem, container, key, (id(container), type(key), key))

    def attr(self, it: Any, name: str) -> Any:
        """Reads `it.name`, which must run no Python code; from then on guarded."""
        return self._noted(self.attrs, getattr, it, name, (id(it), name))

    def lacks(self, namespace: Any, key: Any) -> None:
        """Notes that `key` is not in a namespace."""
        self.absent[id(namespace), type(key), key] = namespace, key

    def parts(self, container: Any) -> tuple:
        """Reads `tuple(container)`, from then on guarded."""
        found = tuple(container)
        self.whole.setdefault(id(container), (container, found))
        return found

    def asked(self, function: Callable[[], Any]) -> Any:
        """Calls a function that only looks, from then on guarded."""
        return self.answers.setdefault(function, function())

    def plain_tensors(self) -> list[Tensor]:
        """Of what was read, in items of containers, too."""
        found = [read[-1] for reads in (self.items, self.attrs) for read in reads.values()]
        found += [one for _, contents in self.whole.values() for one in contents]
        return list({id(one): one for one in found if isinstance(one, Tensor) and type(one) is not DTensor}.values())

    def merge(self, other: Reads) -> None:
        """Adds another's. Raises Changed where something was found to be two things."""
        for mine, theirs in ((self.items, other.items), (self.attrs, other.attrs), (self.whole, other.whole)):
            for at, read in theirs.items():
                if not _same(mine.setdefault(at, read)[-1], read[-1]):
                    raise Changed(str(read[1]))
        self.absent.update(other.absent)
        self.answers.update(other.answers)

    def _noted(self, kind: dict, read: Callable, it: Any, name: Any, at: tuple) -> Any:
        found = read(it, name)
        known = kind.setdefault(at, (it, name, found))[2]
        if not _same(known, found):
            raise Changed(str(name))
        return known


class Unchanged:
    """Whether all that was read would be found again. A scalar found to be another object of the same value is
    taken from then on."""

    def __init__(self, reads: Reads) -> None:
        self._of, self._keys, self._found = _columns(list(reads.items.values()), 3)
        kinds = [(it, kind) for it, name, kind in reads.attrs.values() if name == "__class__"]
        self._objects, self._kinds = _columns(kinds, 2)
        attrs = [read for read in reads.attrs.values() if read[1] != "__class__"]
        self._owners, self._names, self._values = _columns(attrs, 3)
        self._without, self._lacking = _columns(list(reads.absent.values()), 2)
        self._containers, self._contents = _columns(list(reads.whole.values()), 2)
        self._answers = list(reads.answers.items())
        tensors = [one for one in (*self._found, *self._values) if type(one) is DTensor]
        self._tensors = {id(one): one for one in tensors}.values()
        self._layouts = [one._layout for one in self._tensors]
        self._plain = reads.plain_tensors()
        self._trained = list(map(_requires_grad, self._plain))  # whose gradients are summed over ranks

    def __call__(self) -> bool:
        try:
            return (
                (all(map(is_, map(getitem, self._of, self._keys), self._found)) or self._taken(getitem))
                and all(map(is_, map(type, self._objects), self._kinds))
                and (all(map(is_, map(getattr, self._owners, self._names), self._values)) or self._taken(getattr))
                and not any(map(contains, self._without, self._lacking))
                and (not self._containers or all(map(_holds, self._containers, self._contents)))
                and all(function() is answer for function, answer in self._answers)
                and [one._layout for one in self._tensors] == self._layouts
                and (not self._plain or list(map(_requires_grad, self._plain)) == self._trained)
            )
        except (LookupError, AttributeError, TypeError, ValueError):  # something was taken away
            return False

    def _taken(self, read: Callable) -> bool:
        """The slow way: by value, where that is what counts."""
        columns = (self._of, self._keys, self._found) if read is getitem else (self._owners, self._names, self._values)
        found = list(map(read, *columns[:2]))
        if not all(map(_same, columns[2], found)):
            return False
        columns[2][:] = found
        return True

    @property
    def size(self) -> int:
        """How many reads are asked for."""
        return len(self._of) + len(self._objects) + len(self._owners) + len(self._without) + len(self._containers)


def _columns(rows: list[tuple], number: int) -> list[list]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(number)]


def _holds(container: Any, contents: tuple) -> bool:
    return len(container) == len(contents) and all(map(_same, container, contents))


def _same(one: Any, other: Any) -> bool:
    """Whether two finds are one: an object, or a value, -0.0 and 0.0 apart."""
    if one is other:
        return True
    return type(one) is type(other) and is_scalar(one) and repr(one) == repr(other)
