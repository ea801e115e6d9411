"""Items of what a forward reads, and what it writes to containers: each read of what outlives the call is noted."""

from __future__ import annotations

import ast
from collections import OrderedDict
from types import FunctionType
from typing import Any

from torch import nn

from ..values import (
    ANY,
    SOMETHING,
    TENSOR,
    Held,
    Items,
    Iterator,
    Made,
    OneOf,
    Value,
    constant,
    is_plain,
    is_scalar,
    is_tensor,
    isa,
    joined,
)
from .names import MISSING, Names
from .state import Died

_LONG = 1024
_LISTS, _DICTS, _SETS = (list,), (dict, OrderedDict), (set, frozenset)
_OPEN = (*_LISTS, *_DICTS, *_SETS, tuple)
_MODULE_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Parts(Names):
    """Reads of items, and writes."""

    def opened(self, value: Value) -> Value:
        """A standard container that somebody holds, its parts read; other values as they are."""
        if not isinstance(value, Held) or is_scalar(value.it):
            return value
        it = value.it
        if type(it) in _OPEN and len(it) > _LONG:
            raise self.unseen(f"goes over a {type(it).__name__} of {len(it)} elements that outlives the call")
        if type(it) in _DICTS:
            keys = self.reads.parts(it)
            if not all(map(_is_key, keys)):
                raise self.unseen("goes over a dict whose keys are not compared by value")
            return Items(dict, {key: self.opened(Held(self.reads.item(it, key))) for key in keys}, given=True)
        if type(it) in _LISTS:
            return Items(list, [self.opened(Held(one)) for one in self.reads.parts(it)], given=True)
        if type(it) in _SETS:
            if not all(map(_is_key, it)):
                raise self.unseen("goes over a set of what is not compared by value")
            return Items(set, [Held(one) for one in self.reads.parts(it)], given=True)
        if isa(it, tuple) and type(it).__iter__ is tuple.__iter__:
            return Items(tuple, [self.opened(Held(one)) for one in it])
        if isa(it, _MODULE_LISTS):
            for name in ("__iter__", "__len__", "__getitem__"):
                if self.on_class(self.kind(it), name) not in [vars(base).get(name) for base in _MODULE_LISTS]:
                    return value
            held = it._modules
            if id(it) not in self.inside:
                self.reads.parts(held)
                held = {name: self.reads.item(held, name) for name in held}
            if isa(it, nn.ModuleDict):
                return Items(dict, {name: Held(one) for name, one in held.items()}, given=True)
            return Items(list, [Held(one) for one in held.values()], given=True)
        return value

    def elements(self, value: Value) -> list[Value] | None:
        """What going over a value gives; None where it is not known how much."""
        value = self.opened(value)
        if isinstance(value, Items):
            if value.every is not None:
                return None
            found = list(map(Held, value.parts)) if isinstance(value.parts, dict) else list(value.parts)
            if value.type is Iterator:
                value.blur()  # what comes the next time is not followed
            return found
        if constant(value) and isa(value.it, (str, range, tuple)):
            return [Held(one) for one in value.it]
        if isinstance(value, Held) and not is_tensor(value.it):
            over = self.on_class(self.kind(value.it), "__iter__")
            if isa(over, FunctionType):
                return self.elements(self.call(Held(over), [value], {}))
            raise self.unseen(f"goes over a {type(value.it).__name__}, which may move")
        if isinstance(value, (Made, Held)) or (isinstance(value, OneOf) and is_plain(value, given=True)):
            return None
        raise self.unseen(f"goes over {self.words(value)}")

    def part(self, value: Value) -> Value:
        """What is known of each element of a value."""
        value = self.opened(value)
        if isinstance(value, Items):
            if isinstance(value.parts, dict):
                return SOMETHING
            return value.every if value.every is not None else joined(value.values)
        if isinstance(value, OneOf):
            return joined([self.part(one) for one in value.values])
        return TENSOR if value is TENSOR or (isinstance(value, Held) and is_tensor(value.it)) else ANY

    def item(self, owner: Value, index: Value) -> Value:
        """`owner[index]`."""
        if isinstance(owner, OneOf):
            return joined([self.item(one, index) for one in owner.values])
        if isinstance(owner, Held) and not is_scalar(owner.it):
            if is_tensor(owner.it):
                return self.computed([index], "an index", tensor=True)
            found = self._item_of_held(owner, index)
            if found is not None:
                return found
        owner = self.opened(owner)
        if isinstance(owner, Items):
            return self._item_of_items(owner, index)
        if constant(owner) and constant(index):
            return self.folded(lambda it, at: it[at], owner.it, index.it)
        self.computed([owner, index], "an index")
        return TENSOR if owner is TENSOR else ANY

    def _item_of_held(self, owner: Held, index: Value) -> Value | None:
        it = owner.it
        known = isinstance(index, Held) and _is_key(index.it)
        if type(it) in _DICTS and known:
            if index.it in it:
                return Held(self.reads.item(it, index.it))
            self.reads.lacks(it, index.it)
            raise Died
        if type(it) in _LISTS and constant(index) and isa(index.it, int):
            if not -len(it) <= index.it < len(it):
                raise Died
            return Held(self.reads.item(it, index.it))
        if type(it) in _OPEN or isa(it, (tuple, *_MODULE_LISTS)):
            return None
        getter = self.on_class(self.kind(it), "__getitem__")
        if isa(getter, FunctionType) and not isa(it, type):
            return self.call(Held(getter), [owner, index], {})
        raise self.unseen(f"reads an item of a {type(it).__name__}, which cannot be seen into")

    def _item_of_items(self, owner: Items, index: Value) -> Value:
        if isinstance(owner.parts, dict):
            if owner.every is None and isinstance(index, Held) and _is_key(index.it):
                if index.it in owner.parts:
                    return owner.parts[index.it]
                raise Died
        elif owner.every is None and constant(index) and isa(index.it, (int, slice)):
            try:
                found = owner.parts[index.it]
            except IndexError:
                raise Died from None
            return self.made(owner.type, found) if isa(index.it, slice) else found
        self.computed([index], "an index")
        if not owner.values:
            raise Died
        part = joined(owner.values)
        if not isinstance(owner.parts, dict) and not (isinstance(index, Held) and isa(index.it, int)):
            if is_plain(part):
                return ANY  # a slice as well
            if not isinstance(owner.parts, dict) and isinstance(index, Held) and isa(index.it, slice):
                raise self.unseen("takes a slice of what is not known")
        return part

    def contains(self, container: Value, element: Value) -> bool | None:
        """`element in container`, where it is known."""
        if isinstance(container, Held) and not is_scalar(container.it) and not is_tensor(container.it):
            it = container.it
            if type(it) in _DICTS and isinstance(element, Held) and _is_key(element.it):
                if element.it in it:
                    self.reads.item(it, element.it)
                    return True
                self.reads.lacks(it, element.it)
                return False
            if not isinstance(self.opened(container), Items):
                inside = self.on_class(self.kind(it), "__contains__")
                if not isa(inside, FunctionType):
                    raise self.unseen(f"looks for something in a {type(it).__name__}, which cannot be seen into")
                return self.truth(self.call(Held(inside), [container, element], {}))
        container = self.opened(container)
        if isinstance(container, Items) and container.type is Iterator:
            raise self.unseen("looks for something in an iterator")
        if isinstance(container, Items) and container.every is None:
            parts = list(map(Held, container.parts)) if isinstance(container.parts, dict) else container.parts
            if constant(element) and all(map(constant, parts)):
                return element.it in [part.it for part in parts]
            if all(isinstance(one, Held) and type(one.it).__eq__ is object.__eq__ for one in (element, *parts)):
                return any(element.it is part.it for part in parts)
        if constant(container) and constant(element):
            found = self.folded(lambda it, one: one in it, container.it, element.it)
            return found.it if isinstance(found, Held) else None
        self.computed([container, element], "a search")
        return None

    def truth_of_held(self, value: Held) -> bool | None:
        opened = self.opened(value)
        if isinstance(opened, Items):
            return bool(opened.parts)
        kind = self.kind(value.it)
        for name in ("__bool__", "__len__"):
            asked = self.on_class(kind, name)
            if isa(asked, FunctionType):
                return self.truth(self.call(Held(asked), [value], {}))
            if asked is not MISSING:
                raise self.unseen(f"asks whether a {kind.__name__} is true, which cannot be seen into")
        return True

    # --- writes ------------------------------------------------------------------------

    def set_item(self, owner: Value, index: Value, value: Value, target: ast.expr) -> None:
        if isinstance(owner, Made) or (isinstance(owner, Held) and is_tensor(owner.it)):
            self.computed([index, value], "a write")
            return
        if not isinstance(owner, Items):
            raise self.unseen(f"sets `{ast.unparse(target)}`")
        if isinstance(owner.parts, dict):
            self.put(owner, index, value)
        elif self.written(owner) and constant(index) and isa(index.it, int):
            if not -len(owner.parts) <= index.it < len(owner.parts):
                raise Died
            owner.parts[index.it] = value
        elif constant(index) and isa(index.it, int):
            owner.blur(value)
        else:
            items = self.elements(value) if isinstance(self.opened(value), Items) else None
            owner.blur(value, *(items or [self.part(value)] if not isinstance(value, Held) else [value]))

    def set_attribute(self, owner: Value, name: str, value: Value, target: ast.expr) -> None:
        raise self.unseen(f"sets `{ast.unparse(target)}`")

    def put(self, made: Items, key: Value, value: Value) -> None:
        """`made[key] = value`, of a dict."""
        if self.written(made) and isinstance(key, Held) and _is_key(key.it):
            made.parts[key.it] = value
        else:
            self.computed([key], "a key")
            made.blur(value)

    def grown(self, made: Value, more: Value) -> Value:
        """A list, set or dict that takes the elements of another value."""
        more = self.opened(more)
        if isinstance(made.parts, dict):
            if self.written(made) and isinstance(more, Items) and more.every is None and isinstance(more.parts, dict):
                made.parts.update(more.parts)
            elif isinstance(more, Items) and isinstance(more.parts, dict):
                made.blur(*more.values)
            else:
                raise self.unseen("fills a dict in a way that is not followed")
            return made
        items = self.elements(more)
        if made.type in (set, frozenset):
            self.computed(items if items is not None else [self.part(more)], "a set")
        if self.written(made) and items is not None:
            made.parts += items
        else:
            made.blur(*(items if items is not None else [self.part(more)]))
        return made

    def merged_dict(self, known: list[Value]) -> Items:
        made = self.made(dict, {})
        for one in known:
            self.grown(made, one)
        return made


def _is_key(it: Any) -> bool:
    """Whether looking for it in a dict runs nobody's code."""
    return is_scalar(it) or type(it).__hash__ is object.__hash__ or isa(it, (type, FunctionType))
