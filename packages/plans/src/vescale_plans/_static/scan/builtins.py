"""Python's own functions, and the methods of its containers, as a forward calls them."""

from __future__ import annotations

import copy as _copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..pure import CONTAINERS, FOLDING, READING, WRITING
from ..values import (
    ANY,
    SOMETHING,
    TENSOR,
    Bound,
    Code,
    Held,
    Items,
    Iterator,
    Made,
    OneOf,
    Value,
    constant,
    is_scalar,
    is_tensor,
    isa,
    joined,
)
from .expressions import Expressions
from .names import METACLASSES
from .state import Died

_LONG = 4096
_Args, _Kwargs = list[Value], dict[str, Value]


class Builtins(Expressions):
    """What builtins give, and what methods of standard containers do."""

    # --- methods ---------------------------------------------------------------------

    def method(self, name: str, owner: Value, args: _Args, kwargs: _Kwargs) -> Value:
        """A method of a tensor, a scalar or a standard container, by its name."""
        if isinstance(owner, OneOf):
            return joined([self.method(name, one, args, kwargs) for one in owner.values])
        if isinstance(owner, Held) and not is_scalar(owner.it) and not is_tensor(owner.it):
            return self._of_held_container(name, owner, args, kwargs)
        if isinstance(owner, Items):
            return self._of_items(name, owner, args, kwargs)
        values = [*args, *kwargs.values()]
        if constant(owner) and all(map(constant, values)):
            found = {key: value.it for key, value in kwargs.items()}
            return self.folded(lambda it, *rest: getattr(it, name)(*rest, **found), owner.it, *(a.it for a in args))
        self.computed([owner, *values], f"`{name}`")
        return ANY if name in ("get", "pop") or name in WRITING else SOMETHING

    def _of_held_container(self, name: str, owner: Held, args: _Args, kwargs: _Kwargs) -> Value:
        it = owner.it
        if name in WRITING or name.startswith("__"):
            raise self.unseen(f"calls `{name}` of a {type(it).__name__} that outlives the call")
        if isa(it, (dict, OrderedDict)) and name == "get" and type(it).get is dict.get and not kwargs:
            return self._get(owner, args)
        opened = self.opened(owner)
        if not isinstance(opened, Items):
            raise self.unseen(f"calls `{name}` of a {type(it).__name__}, which cannot be seen into")
        return self._of_items(name, opened, args, kwargs)

    def _get(self, owner: Value, args: _Args) -> Value:
        try:
            return self.item(owner, args[0])
        except Died:
            return args[1] if len(args) > 1 else Held(None)

    def _of_items(self, name: str, owner: Items, args: _Args, kwargs: _Kwargs) -> Value:
        known = _ITEM_METHODS.get((dict if isinstance(owner.parts, dict) else list, name))
        if known is not None and not kwargs:
            return known(self, owner, args)
        if name == "update" and isinstance(owner.parts, dict):
            for more in args:
                self.grown(owner, more)
            return self.grown(owner, self.made(dict, dict(kwargs))) if kwargs else Held(None)
        if name in WRITING:
            self.written(owner)
            values = [*owner.values, *args, *kwargs.values()]
            self.computed(values, f"`{name}`")
            owner.blur(*args)
            return ANY
        if name not in READING.get(owner.type, ()):
            raise Died
        return self.computed([owner, *args, *kwargs.values()], f"`{name}`")

    def _dict_get(self, owner: Items, args: _Args) -> Value:
        if owner.every is not None or not isinstance(args[0], Held):
            return joined([*owner.values, args[1] if len(args) > 1 else Held(None)])
        return self._get(owner, args)

    def _dict_pop(self, owner: Items, args: _Args) -> Value:
        found = self._dict_get(owner, args)
        if self.written(owner) and constant(args[0]):
            if args[0].it not in owner.parts and len(args) < 2:
                raise Died
            owner.parts.pop(args[0].it, None)
        elif owner.every is None:
            owner.blur()
        return found

    def _dict_setdefault(self, owner: Items, args: _Args) -> Value:
        found = self._dict_get(owner, args)
        self.put(owner, args[0], found)
        return found

    def _keys(self, owner: Items, args: _Args) -> Value:
        if owner.every is not None:
            return self._unknown([SOMETHING])
        return self.made(tuple, list(map(Held, owner.parts)))

    def _values(self, owner: Items, args: _Args) -> Value:
        return self.made(tuple, list(owner.values)) if owner.every is None else self._unknown(owner.values)

    def _items(self, owner: Items, args: _Args) -> Value:
        if owner.every is not None:
            return self._unknown([self.made(tuple, [SOMETHING, owner.every])])
        return self.made(tuple, [self.made(tuple, [Held(key), value]) for key, value in owner.parts.items()])

    def _copied(self, owner: Items, args: _Args) -> Value:
        made = self.made(owner.type, _copy.copy(owner.parts))
        made.every = owner.every
        return made

    def _append(self, owner: Items, args: _Args) -> Value:
        self.grown(owner, self.made(tuple, args[:1]))
        return Held(None)

    def _extend(self, owner: Items, args: _Args) -> Value:
        self.grown(owner, args[0])
        return Held(None)

    def _list_pop(self, owner: Items, args: _Args) -> Value:
        sure = self.written(owner) and all(map(constant, args))
        if sure:
            try:
                return owner.parts.pop(*(arg.it for arg in args))
            except IndexError:
                raise Died from None
        found = joined(owner.values) if owner.values else ANY
        owner.blur()
        return found

    def _once(self, items: Items) -> Items:
        """An iterator over items that were just made."""
        items.type = Iterator
        return items

    def _unknown(self, values: list[Value]) -> Items:
        made = self.made(tuple, list(values))
        made.blur()
        return made

    # --- functions -------------------------------------------------------------------

    def _isinstance(self, args: _Args, kwargs: _Kwargs) -> Value:
        value, of = args
        kinds = self.elements(of) if not (isinstance(of, Held) and isa(of.it, type)) else [of]
        if kinds is None or not all(isinstance(one, Held) and isa(one.it, type) for one in kinds):
            raise self.unseen("asks for a type that is not known")
        known = tuple(one.it for one in kinds)
        if not all(type(kind) in METACLASSES for kind in known):
            raise self.unseen("asks for a class whose own class may answer")
        if value is TENSOR or (isinstance(value, Held) and is_tensor(value.it)):
            if Tensor in known or object in known:
                return Held(True)
            return SOMETHING if any(issubclass(kind, Tensor) for kind in known) else Held(False)
        if isinstance(value, Items):
            return SOMETHING if value.type is Iterator else Held(issubclass(value.type, known))
        if isinstance(value, Held):
            self.kind(value.it)
            return Held(isa(value.it, known))
        if isinstance(value, OneOf):
            return joined([self._isinstance([one, of], {}) for one in value.values])
        return SOMETHING

    def _issubclass(self, args: _Args, kwargs: _Kwargs) -> Value:
        if all(isinstance(arg, Held) and type(arg.it) in METACLASSES for arg in args):
            return Held(issubclass(args[0].it, args[1].it))
        raise self.unseen("asks for a class that is not known")

    def _len(self, args: _Args, kwargs: _Kwargs) -> Value:
        value = self.opened(args[0])
        if isinstance(value, Items):
            if value.type is Iterator:
                raise Died
            return Held(len(value.parts)) if value.every is None else SOMETHING
        if constant(value):
            return self.folded(len, value.it)
        if isinstance(value, Held) and not is_tensor(value.it):
            return self.special(value, "__len__")
        return self.computed([value], "len")

    def special(self, value: Held, name: str) -> Value:
        asked = self.on_class(self.kind(value.it), name)
        if not hasattr(asked, "__code__"):
            raise self.unseen(f"asks for `{name}` of a {type(value.it).__name__}, which cannot be seen into")
        return self.call(Held(asked), [value], {})

    def _getattr(self, args: _Args, kwargs: _Kwargs) -> Value:
        owner, name, *default = args
        if not constant(name):
            raise self.unseen("reads an attribute whose name is not known")
        try:
            return self.attribute(owner, name.it)
        except Died:
            if not default:
                raise
            return default[0]

    def _hasattr(self, args: _Args, kwargs: _Kwargs) -> Value:
        owner, name = args
        if isinstance(owner, (Made, Items, OneOf)) or (isinstance(owner, Held) and is_tensor(owner.it)):
            raise self.unseen(f"asks whether {self.words(owner)} has an attribute")
        return Held(self._getattr([owner, name, _NONE], {}) is not _NONE)

    def _type(self, args: _Args, kwargs: _Kwargs) -> Value:
        if len(args) != 1:
            raise self.unseen("makes a class")
        value = args[0]
        if isinstance(value, Items) and value.type is not Iterator:
            return Held(value.type)
        if isinstance(value, Held) and not is_tensor(value.it):
            return Held(self.kind(value.it))
        return SOMETHING

    def _callable(self, args: _Args, kwargs: _Kwargs) -> Value:
        if isinstance(args[0], Held) and not is_tensor(args[0].it):
            self.kind(args[0].it)
            return Held(callable(args[0].it))
        return Held(True) if isinstance(args[0], (Code, Bound)) else SOMETHING

    def _vars(self, args: _Args, kwargs: _Kwargs) -> Value:
        if len(args) != 1:
            raise self.unseen("reads its local variables as a dict")
        return self.attribute(args[0], "__dict__")

    def _range(self, args: _Args, kwargs: _Kwargs) -> Value:
        if all(map(constant, args)):
            found = range(*(arg.it for arg in args))
            if len(found) <= _LONG:
                return self.made(tuple, list(map(Held, found)))
        return self.computed(args, "range")

    def _enumerate(self, args: _Args, kwargs: _Kwargs) -> Value:
        items, start = self.elements(args[0]), [*args[1:], *kwargs.values()]
        if items is None or (start and not constant(start[0])):
            return self._once(self._unknown([self.made(tuple, [SOMETHING, self.part(args[0])])]))
        at = start[0].it if start else 0
        return self._once(self.made(tuple, [self.made(tuple, [Held(at + i), item]) for i, item in enumerate(items)]))

    def _zip(self, args: _Args, kwargs: _Kwargs) -> Value:
        columns = [self.elements(arg) for arg in args]
        if any(column is None for column in columns):
            return self._once(self._unknown([self.made(tuple, [self.part(arg) for arg in args])]))
        return self._once(self.made(tuple, [self.made(tuple, list(row)) for row in zip(*columns)]))

    def _map(self, args: _Args, kwargs: _Kwargs) -> Value:
        columns = [self.elements(arg) for arg in args[1:]]
        if any(column is None for column in columns):
            found = self.perhaps(lambda: self.call(args[0], [self.part(arg) for arg in args[1:]], {}))
            return self._once(self._unknown([found] if found is not None else [ANY]))
        return self._once(self.made(tuple, [self.call(args[0], list(row), {}) for row in zip(*columns)]))

    def _filter(self, args: _Args, kwargs: _Kwargs) -> Value:
        part = self.part(args[1])
        if not (isinstance(args[0], Held) and args[0].it is None):
            self.perhaps(lambda: self.call(args[0], [part], {}))
        return self._once(self._unknown([part]))

    def _sorted(self, args: _Args, kwargs: _Kwargs) -> Value:
        part = self.part(args[0])
        key = kwargs.get("key")
        self.computed([part if key is None else self.perhaps(lambda: self.call(key, [part], {})) or ANY], "sorted")
        made = self.made(list, [part])
        made.blur()
        return made

    def _reversed(self, args: _Args, kwargs: _Kwargs) -> Value:
        items = self.elements(args[0])
        return self._once(self._unknown([self.part(args[0])]) if items is None else self.made(tuple, items[::-1]))

    def _iter(self, args: _Args, kwargs: _Kwargs) -> Value:
        items = self.elements(args[0])
        return self._once(self._unknown([self.part(args[0])]) if items is None else self.made(tuple, items))

    def _next(self, args: _Args, kwargs: _Kwargs) -> Value:
        if isinstance(args[0], Held):
            raise self.unseen(f"moves a {type(args[0].it).__name__}")
        if not isinstance(args[0], Items):
            raise self.unseen("moves what is not known")
        found = list(args[0].values)
        args[0].blur()
        if not found:
            return args[1] if len(args) > 1 else self._die()
        return found[0] if len(found) == 1 and len(args) == 1 else joined([*found, *args[1:]])

    def _die(self) -> Value:
        raise Died

    def _any_or_all(self, stops: bool, args: _Args) -> Value:
        items = self.elements(args[0])
        if items is None:
            self.truth(self.part(args[0]))
            return SOMETHING
        found = [self.truth(item) for item in items]
        if stops in found:
            return Held(stops)
        return SOMETHING if None in found else Held(not stops)

    def _folding(self, function: Callable, args: _Args, kwargs: _Kwargs) -> Value:
        if function in (min, max, sum) and len(args) == 1 and "key" not in kwargs:
            items = self.elements(args[0])
            if items is not None and items and all(map(constant, items)) and not kwargs:
                return self.folded(function, [item.it for item in items])
        if "key" in kwargs:
            part = joined(args) if len(args) > 1 else self.part(args[0])
            self.perhaps(lambda: self.call(kwargs["key"], [part], {}))
            return part
        if args and not kwargs and all(map(constant, args)):
            return self.folded(function, *(arg.it for arg in args))
        if function is bool and len(args) == 1:
            known = self.truth(args[0])
            return SOMETHING if known is None else Held(known)
        return self.computed([*args, *kwargs.values()], function.__name__)

    def _container(self, kind: type, args: _Args, kwargs: _Kwargs) -> Value:
        made = self.made(kind, {} if kind is dict else [])
        for arg in args:
            opened = self.opened(arg)
            if kind is dict and not (isinstance(opened, Items) and isinstance(opened.parts, dict)):
                for pair in self.elements(arg) or [self.part(arg)]:
                    parts = self.elements(pair)
                    if parts is None or len(parts) != 2:
                        raise self.unseen("makes a dict of what is not known")
                    self.put(made, *parts)
                if self.elements(arg) is None:
                    made.blur()
            else:
                self.grown(made, arg)
        if kwargs:
            self.grown(made, self.made(dict, dict(kwargs)))
        return made


_NONE = Held(None)
_ITEM_METHODS: dict[tuple[type, str], Callable[[Builtins, Items, _Args], Value]] = {
    (dict, "get"): Builtins._dict_get,
    (dict, "pop"): Builtins._dict_pop,
    (dict, "setdefault"): Builtins._dict_setdefault,
    (dict, "keys"): Builtins._keys,
    (dict, "values"): Builtins._values,
    (dict, "items"): Builtins._items,
    (dict, "copy"): Builtins._copied,
    (list, "copy"): Builtins._copied,
    (list, "append"): Builtins._append,
    (list, "add"): Builtins._append,
    (list, "extend"): Builtins._extend,
    (list, "pop"): Builtins._list_pop,
}


def _named(function: Callable, run: Callable) -> Callable[[Builtins, _Args, _Kwargs], Value]:
    return lambda scan, args, kwargs: run(scan, function, args, kwargs)


BUILTIN_CALLS: dict[Any, Callable[[Builtins, _Args, _Kwargs], Value]] = {
    **{function: _named(function, Builtins._folding) for function in FOLDING},
    **{kind: _named(kind, Builtins._container) for kind in CONTAINERS},
    isinstance: Builtins._isinstance,
    issubclass: Builtins._issubclass,
    len: Builtins._len,
    getattr: Builtins._getattr,
    hasattr: Builtins._hasattr,
    type: Builtins._type,
    callable: Builtins._callable,
    vars: Builtins._vars,
    range: Builtins._range,
    enumerate: Builtins._enumerate,
    zip: Builtins._zip,
    map: Builtins._map,
    filter: Builtins._filter,
    sorted: Builtins._sorted,
    reversed: Builtins._reversed,
    iter: Builtins._iter,
    next: Builtins._next,
    any: lambda scan, args, kwargs: scan._any_or_all(True, args),
    all: lambda scan, args, kwargs: scan._any_or_all(False, args),
}
