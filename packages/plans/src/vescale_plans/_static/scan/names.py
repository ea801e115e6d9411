"""Names and attributes that a forward reads, looked through: each that outlives the call becomes a read."""

from __future__ import annotations

import abc
import ast
import enum
import functools
from collections import OrderedDict
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ..pure import BUILTINS, MADE_METHODS, MADE_VALUES, READING, TENSOR_METHODS, TENSOR_VALUES, WRITING
from ..reads import Changed
from ..values import (
    SOMETHING,
    TENSOR,
    Bound,
    Code,
    Dark,
    Held,
    Items,
    Made,
    OneOf,
    Super,
    Value,
    is_scalar,
    is_tensor,
    isa,
    joined,
)
from .state import Died, Scope, State

MISSING = object()
METACLASSES = frozenset({type, abc.ABCMeta, enum.EnumMeta, type(nn.Parameter), type(nn.Buffer)})
_OF_A_CLASS = frozenset({"__name__", "__qualname__", "__module__", "__mro__", "__doc__", "__dict__"})
_GENERIC = frozenset(
    kind.__getattribute__ for kind in (object, tuple, list, dict, set, str, int, float, SimpleNamespace, OrderedDict)
)
_LISTS, _DICTS, _SETS = (list,), (dict, OrderedDict), (set, frozenset)
_OPEN = (*_LISTS, *_DICTS, *_SETS, tuple)
_TABLES = ("_parameters", "_buffers", "_modules")


class Names(State):
    """Reads of names, attributes, items."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self.inside = {id(module) for module in frame.module.modules()}  # their tables have a guard of their own

    # --- names -----------------------------------------------------------------------

    def name(self, name: str, scope: Scope) -> Value:
        here: Scope | None = scope
        while here is not None:
            if name in here.names and name not in here.declared:
                return here.names[name]
            if here.function is not None:
                break
            here = here.outer
        function = scope.real
        if name in function.__code__.co_freevars:
            cell = function.__closure__[function.__code__.co_freevars.index(name)]
            try:
                return Held(self.reads.attr(cell, "cell_contents"))
            except ValueError:
                raise Died from None
        variables = function.__globals__
        if name in variables:
            return Held(self.reads.item(variables, name))
        if name not in BUILTINS:
            raise Died
        self.reads.lacks(variables, name)
        return Held(self.reads.item(BUILTINS, name))

    def imported(self, node: ast.Import | ast.ImportFrom, alias: ast.alias, scope: Scope) -> Value:
        """A name from an import within a function: of a module that is there already."""
        import sys

        path = alias.name if isinstance(node, ast.Import) else node.module or ""
        if isinstance(node, ast.ImportFrom) and node.level:
            package = scope.real.__globals__.get("__package__") or ""
            path = ".".join(filter(None, [package.rsplit(".", node.level - 1)[0] if node.level > 1 else package, path]))
        if isinstance(node, ast.Import) and alias.asname is None:
            path = path.partition(".")[0]
        if alias.name == "*" or path not in sys.modules:
            raise self.unseen(f"imports {alias.name}")
        module = Held(self.reads.item(sys.modules, path))
        return module if isinstance(node, ast.Import) else self.attribute(module, alias.name)

    def code(self, node: ast.FunctionDef | ast.Lambda, scope: Scope) -> Value:
        """A function that is defined here."""
        named = node.args
        positional = [*named.posonlyargs, *named.args]
        values = [self.value(one, scope) for one in named.defaults]
        defaults = dict(zip([one.arg for one in positional[len(positional) - len(values) :]], values))
        for one, default in zip(named.kwonlyargs, named.kw_defaults):
            if default is not None:
                defaults[one.arg] = self.value(default, scope)
        return Code(node, scope, defaults, scope.file)

    # --- attributes ------------------------------------------------------------------

    def attribute(self, owner: Value, name: str) -> Value:
        """`owner.name`. Raises Died where there is none."""
        if isinstance(owner, Held):
            return self._of_held(owner, name)
        if isinstance(owner, OneOf):
            return joined([self.attribute(one, name) for one in owner.values])
        if isinstance(owner, Items):
            if name in READING.get(owner.type, ()) or name in WRITING:
                return Bound(name, [owner])
            raise Died
        if isinstance(owner, Super):
            return self._of_super(owner, name)
        if isinstance(owner, Made):
            tensor = owner is TENSOR
            if name in (TENSOR_METHODS if tensor else MADE_METHODS):
                self._of_tensors(name)
                return Bound(name, [owner])
            if name in (TENSOR_VALUES if tensor else MADE_VALUES):
                return SOMETHING
        raise self.unseen(f"reads `{name}` of {self.words(owner)}")

    def _of_held(self, owner: Held, name: str) -> Value:
        it = owner.it
        if is_tensor(it):
            return self._of_tensor(it, name)
        if isa(it, ModuleType):
            if name not in vars(it):
                if "__getattr__" in vars(it):
                    raise self.unseen(f"reads {it.__name__}.{name}, which is made when it is asked for")
                raise Died
            return Held(self.reads.item(vars(it), name))
        if isa(it, type):
            return self._of_class(it, name)
        if isa(it, (FunctionType, MethodType, functools.partial)) and hasattr(it, name):
            return Held(self.reads.attr(it, name))
        if isa(it, enum.Enum) and name in ("value", "name", "_value_", "_name_"):
            return Held(self.reads.attr(it, f"_{name.strip('_')}_"))
        if type(it) in READING:
            if name in READING[type(it)] or (name in WRITING and not is_scalar(it)):
                return Bound(name, [owner])
            if is_scalar(it) and hasattr(it, name) and not callable(getattr(it, name)):
                return Held(getattr(it, name))
        if type(it) is OrderedDict and name in READING[dict]:
            return Bound(name, [owner])
        return self._of_object(it, name)

    def _of_tensor(self, it: Any, name: str) -> Value:
        if name in TENSOR_METHODS:
            self._of_tensors(name)
            return Bound(name, [TENSOR])
        if name in TENSOR_VALUES:
            return SOMETHING
        if name == "requires_grad":
            return Held(self.reads.attr(it, name))
        if name in it.__dict__ and not name.startswith("_"):
            return Held(self.reads.item(it.__dict__, name))
        raise self.unseen(f"reads `{name}` of a tensor")

    def _of_tensors(self, name: str) -> None:
        """A method of tensors is what it was."""
        if name in TENSOR_METHODS:
            self.reads.attr(Tensor, name)

    def on_class(self, kind: type, name: str, after: type | None = None) -> Any:
        """What stands under a name in a class or its bases (those `after` one); MISSING where nothing does."""
        bases = self.reads.attr(kind, "__mro__")
        for base in bases[bases.index(after) + 1 if after else 0 :]:
            space = self.reads.space(base)
            if name in space:
                return space[name] if is_builtin(base) else self.reads.item(space, name)
            if not is_builtin(base):
                self.reads.lacks(space, name)
        return MISSING

    def has(self, raw: Any) -> bool:
        return raw is not MISSING

    def _of_class(self, kind: type, name: str) -> Value:
        if type(kind) not in METACLASSES:
            raise self.unseen(f"reads {kind.__name__}.{name}, of a class with a class of its own")
        if name in _OF_A_CLASS:
            return Held(getattr(kind, name))
        if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
            return Held(self.reads.attr(kind, name))
        raw = self.on_class(kind, name)
        if raw is MISSING:
            raise Died
        if isa(raw, staticmethod):
            return Held(raw.__func__)
        if isa(raw, classmethod):
            return Bound(Held(raw.__func__), [Held(kind)])
        if isa(raw, (FunctionType, property)) or not hasattr(type(raw), "__get__") or is_builtin(type(raw)):
            return Held(raw)
        return self._described(raw, Held(None), Held(kind))

    def kind(self, it: Any) -> type:
        """The class of an object, from then on guarded."""
        return type(it) if is_scalar(it) else self.reads.kind(it)

    def _of_object(self, it: Any, name: str) -> Value:
        kind = self.kind(it)
        if kind is not type(it):
            raise Changed(f"the class of a {kind.__name__}")
        if name == "__class__":
            return Held(kind)
        getter = self.on_class(kind, "__getattribute__")
        if getter not in _GENERIC:
            if isa(getter, FunctionType):
                return self.call(Held(getter), [Held(it), Held(name)], {})
            raise self.unseen(f"reads `{name}` of a {kind.__name__}, which answers in its own way")
        return self.generic(it, kind, name)

    def generic(self, it: Any, kind: type, name: str) -> Value:
        """What `object.__getattribute__` finds, and `__getattr__` after it."""
        space = self.space(it)
        if name == "__dict__" and space is not None:
            return Held(space)
        raw = self.on_class(kind, name)
        if raw is not MISSING and _is_data(raw):
            return self._described(raw, Held(it), Held(kind))
        if space is not None:
            if name in space:
                found = space[name]
                return Held(found if _is_site(found) else self.reads.item(space, name))
            if name != "forward":
                self.reads.lacks(space, name)
        if raw is not MISSING:
            return self._described(raw, Held(it), Held(kind))
        other = self.on_class(kind, "__getattr__")
        if other is nn.Module.__getattr__:
            return self.in_tables(it, name)
        if isa(other, FunctionType):
            return self.call(Held(other), [Held(it), Held(name)], {})
        if other is not MISSING:
            raise self.unseen(f"reads `{name}` of a {kind.__name__}, which answers in its own way")
        raise Died

    def space(self, it: Any) -> dict | None:
        """An object's `__dict__`; that it is this one is guarded."""
        return self.reads.attr(it, "__dict__") if type(getattr(it, "__dict__", None)) is dict else None

    def in_tables(self, it: Any, name: str) -> Value:
        for table in _TABLES:
            held = it.__dict__.get(table)
            if held is None:
                raise Died
            if name in held:
                return Held(held[name] if id(it) in self.inside else self.reads.item(held, name))
            if id(it) not in self.inside:
                self.reads.lacks(held, name)
        raise Died

    def _of_super(self, owner: Super, name: str) -> Value:
        it = owner.of.it
        is_class = isa(it, type)
        raw = self.on_class(it if is_class else self.kind(it), name, owner.after)
        if raw is MISSING:
            raise Died
        if raw is object.__getattribute__ or raw is nn.Module.__getattr__:
            return Bound(Held(raw), [owner.of])
        if is_class and isa(raw, FunctionType):
            return Held(raw)
        return self._described(raw, owner.of, Held(it if is_class else type(it)))

    def _described(self, raw: Any, it: Held, kind: Held) -> Value:
        """What something in a class is, seen from an object of it."""
        if isa(raw, FunctionType):
            return Bound(Held(raw), [it])
        if isa(raw, staticmethod):
            return Held(raw.__func__)
        if isa(raw, classmethod):
            return Bound(Held(raw.__func__), [kind])
        if type(raw) is property:
            if raw.fget is None:
                raise Died
            return self.call(Held(raw.fget), [it], {})
        if isa(raw, MemberDescriptorType):
            try:
                return Held(self.reads.attr(it.it, raw.__name__))
            except AttributeError:
                raise Died from None
        if type(raw).__name__ == "_tuplegetter" and isa(it.it, tuple):
            return Held(raw.__get__(it.it))
        if not hasattr(type(raw), "__get__"):
            return Held(raw)
        getter = self.on_class(type(raw), "__get__")
        if isa(getter, FunctionType) and not isa(raw, functools.cached_property):
            return self.call(Held(getter), [Held(raw), it, kind], {})
        if type(it.it) in _OPEN or isa(it.it, tuple):
            return Bound(getattr(raw, "__name__", ""), [it])
        raise self.unseen(
            f"reads `{getattr(raw, '__name__', '')}` of a {type(it.it).__name__}, which cannot be seen into"
        )

    def words(self, value: Value) -> str:
        """A value in a reason."""
        if isinstance(value, Held):
            kind = value.it.__name__ if isa(value.it, (type, FunctionType)) else type(value.it).__name__
            return f"a {kind}" if not isa(value.it, (type, FunctionType)) else kind
        if isinstance(value, Dark):
            return value.why
        return value.kind if isinstance(value, Made) else f"a {type(value).__name__.lower()}"


def is_builtin(kind: type) -> bool:
    return not kind.__flags__ & (1 << 9)  # not made by a class statement: it cannot change


def _is_data(raw: Any) -> bool:
    kind = type(raw)
    return hasattr(kind, "__set__") or hasattr(kind, "__delete__")


def _is_site(it: Any) -> bool:
    return type(it).__name__ == "Site" and hasattr(it, "has_foreign_hooks")
