"""Reads pickled data as data: a small machine for the opcodes that plain records need. Nothing is ever called.

torch's distributed checkpoints keep their metadata as a pickle. The pickle module
would import and call what the bytes name; here a name is only a name, and what it
is "called" with becomes a `Record` of that name and its arguments. An opcode or a
size that such records do not need is refused.

A few kilobytes can make a value that is larger than any memory, as parts may be shared,
and shared again. Inside the machine nothing walks over a value: keys are of kinds whose hash
takes no time. Who walks over what was read has `check_plain` count it first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..format._text import reason_of, shown

MOST_OPCODES = 8_000_000
MOST_STACK = 1_000_000
MOST_KEY_ITEMS = 64
MOST_LEVELS = 64
_MARK = object()


@dataclass(frozen=True)
class Global:
    """A name that the pickle mentions."""

    module: str
    name: str


class Record:
    """A would-be object: the name of its constructor, its arguments, its state. Compared by identity."""

    __slots__ = ("kind", "arguments", "state")

    def __init__(self, kind: Global, arguments: tuple) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None


class InertError(ValueError):
    """Raised for a pickle that is not of plain records."""


class Budget:
    """Budget of opcodes, and of items of plain values, for all pickles of one checkpoint together."""

    def __init__(self, opcodes: int = MOST_OPCODES, items: int = MOST_OPCODES) -> None:
        self.opcodes, self.items = opcodes, items


def read(data: bytes, budget: Budget | None = None) -> Any:
    """The value: numbers, texts, lists, dicts, tuples, `Global`s and `Record`s. Raises InertError."""
    try:
        return _Machine(data, budget or Budget()).run()
    except InertError:
        raise
    except (LookupError, ValueError, struct.error, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise InertError(f"it ends early or is malformed: {reason_of(error)}") from error


def check_plain(value: Any, budget: Budget) -> None:
    """Raises InertError unless the value is a tree of lists, tuples, dicts, numbers and texts, within the budget.

    What is shared counts each time that it is met; characters count as items.
    """
    waiting = [(value, 0)]
    while waiting:
        item, level = waiting.pop()
        kind = type(item)
        weight = 1
        if kind in (list, tuple, dict):
            weight += len(item)
            if level == MOST_LEVELS:
                raise InertError(f"a value is nested more than {MOST_LEVELS} deep")
        elif kind in (str, bytes):
            weight += len(item)
        elif not (item is None or kind in (bool, int, float)):
            raise InertError(f"{shown(item)} where a plain value was expected")
        budget.items -= weight
        if budget.items < 0:
            raise InertError("values that are larger than a checkpoint's may be")
        if kind is dict:
            waiting += [(part, level + 1) for pair in item.items() for part in pair]
        elif kind in (list, tuple):
            waiting += [(part, level + 1) for part in item]


class _Machine:
    def __init__(self, data: bytes, budget: Budget) -> None:
        self.data, self.at, self.budget = data, 0, budget
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        steps, data, stack, most = _STEPS, self.data, self.stack, self.budget.opcodes
        for count in range(most):
            code = data[self.at] if self.at < len(data) else -1
            self.at += 1
            step = steps.get(code)
            if step is None:
                if code == _STOP:
                    self.budget.opcodes -= count + 1
                    return stack.pop()
                what = "nothing" if code < 0 else f"opcode {bytes([code])!r}"
                raise InertError(f"{what} at byte {self.at - 1} is none that plain records need")
            step(self)
            if len(stack) > MOST_STACK:
                raise InertError(f"more than {MOST_STACK} values that belong to nothing yet")
        self.budget.opcodes = 0
        raise InertError(f"more than {MOST_OPCODES} opcodes, in all of the checkpoint's pickles")

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise InertError(f"{count} bytes are announced at byte {self.at}, of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise InertError("there is no mark")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not Global or type(arguments) is not tuple:
            raise InertError("something other than a name is called")
        self.push(Record(kind, arguments))

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Record:
            if target.state is None:
                target.state = {}
            target = target.state
        if type(target) is not dict:
            raise InertError("items are set in something that is not a dict")
        keys = items[::2]
        for key in keys:
            _check_key(key)
        target.update(zip(keys, items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise InertError("items are appended to something that is not a list")
        self.stack[-1].extend(items)

    def build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not Record:
            raise InertError("a state is given to something that is not a record")
        self.stack[-1].state = state

    def name_of_two(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise InertError("a name is no text")
        self.push(Global(module, name))

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise InertError("a tuple of more than there is")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(items)

    def long(self, form: str) -> None:
        self.push(int.from_bytes(self.take(self.number(form)), "little", signed=True))


_SCALARS = frozenset((str, bytes, int, float, bool, type(None), Global, Record))


def _check_key(key: Any) -> None:
    """A key whose hash takes no time: a hash of tuples in tuples visits what is shared again and again."""
    if type(key) in _SCALARS:
        return
    if type(key) is tuple and len(key) <= MOST_KEY_ITEMS and all(type(item) in _SCALARS for item in key):
        return
    raise InertError(f"the key {shown(key)} is none that plain records need")


def _texts(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(form)).decode("utf-8", "surrogatepass"))


_STOP = b"."[0]
_OPCODES: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),
    b"\x95": lambda m: m.take(8),
    b"(": lambda m: m.push(_MARK),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.long("<B"),
    b"G": lambda m: m.push(m.number(">d")),
    b"\x8c": _texts("<B"),
    b"X": _texts("<I"),
    b"C": lambda m: m.push(m.take(m.number("<B"))),
    b"B": lambda m: m.push(m.take(m.number("<I"))),
    b")": lambda m: m.push(()),
    b"]": lambda m: m.push([]),
    b"}": lambda m: m.push({}),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"a": lambda m: m.extend([m.stack.pop()]),
    b"e": lambda m: m.extend(m.since_mark()),
    b"s": lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    b"u": lambda m: m.set_items(m.since_mark()),
    b"\x94": lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    b"q": lambda m: m.memo.__setitem__(m.number("<B"), m.stack[-1]),
    b"r": lambda m: m.memo.__setitem__(m.number("<I"), m.stack[-1]),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
    b"c": lambda m: m.push(Global(m.line(), m.line())),
    b"\x93": _Machine.name_of_two,
    b"R": _Machine.make,
    b"\x81": _Machine.make,
    b"b": _Machine.build,
    b"Q": lambda m: m.push(Record(Global("", "persistent"), m.stack.pop())),
}
_STEPS = {code[0]: step for code, step in _OPCODES.items()}
