"""Calls that a forward makes, looked through: Python functions by their source, others by what is listed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..guard import HOOKS
from ..pure import ASKED, CONTEXTS, PURE
from ..values import (
    ANY,
    TENSOR,
    Bound,
    Code,
    Held,
    Items,
    Iterator,
    OneOf,
    Spread,
    Super,
    Value,
    constant,
    is_scalar,
    isa,
    joined,
)
from .builtins import BUILTIN_CALLS, Builtins
from .names import METACLASSES, _is_site, is_builtin
from .source import tree_of
from .state import Died, Scope

_DEPTH = 48
_GENERATES = 0x20 | 0x80 | 0x200  # of a code object: a generator, a coroutine, both
CONTEXT = Bound("a context", [])
_UNNAMED = ""  # the key of `**` arguments whose names are not known


class Calls(Builtins):
    """Calls of all that can be called."""

    def call_of(self, node: ast.Call, scope: Scope) -> Value:
        function = self.value(node.func, scope)
        if isinstance(function, Held) and function.it is super and not node.args:
            return self._super(scope)
        if isinstance(function, Held) and function.it is globals:
            return Held(scope.real.__globals__)
        args: list[Value] = []
        self.direct.update(id(arg.value if isinstance(arg, ast.Starred) else arg) for arg in node.args)
        for arg in node.args:
            if not isinstance(arg, ast.Starred):
                args.append(self.value(arg, scope))
                continue
            over = self.value(arg.value, scope)
            items = self.elements(over)
            args += items if items is not None else [Spread(self.part(over))]
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
                continue
            more = self.opened(value)
            if isinstance(more, Items) and isinstance(more.parts, dict) and more.every is None:
                kwargs.update(more.parts)
            else:
                kwargs[_UNNAMED] = self.part(more) if isinstance(more, Items) else value
        self.at(node)
        if id(node) not in self.direct and _is_lazy(function, args):
            raise self.unseen("keeps an iterator over what may change")
        return self.call(function, args, kwargs)

    def _super(self, scope: Scope) -> Value:
        function = scope.real
        if "__class__" not in function.__code__.co_freevars or scope.function is None:
            raise self.unseen("calls super() where it is not followed")
        kind = self.name("__class__", scope)
        me = scope.names.get(function.__code__.co_varnames[0])
        if not isinstance(me, Held):
            raise self.unseen("calls super() of what was made here")
        return Super(kind.it, me)

    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What a call gives. Raises Died where it only raises."""
        if isinstance(function, Bound):
            if isinstance(function.function, str):
                return self.method(function.function, function.args[0], args, kwargs)
            return self.call(function.function, [*function.args, *args], {**function.kwargs, **kwargs})
        if isinstance(function, Code):
            names = self._bound(function.tree, args, kwargs, function.defaults.get)
            return self._run(function.tree, Scope(names, function.file, None, function.scope))
        if isinstance(function, OneOf):
            found = [self.perhaps(lambda one=one: self.call(one, args, kwargs)) for one in function.values]
            if not any(found):
                raise Died
            return joined([value for value in found if value is not None])
        if isinstance(function, Held):
            return self._call_held(function.it, args, kwargs)
        raise self.unseen(f"calls {self.words(function)}")

    def perhaps(self, see: Callable[[], Value]) -> Value | None:
        """The value of what may not be run; None where it can only raise."""
        with self.branch():
            try:
                return see()
            except Died:
                return None

    def _call_held(self, it: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if _is_site(it):
            return self._crossed(it)
        if isa(it, nn.Module):
            return self._call_module(it, args, kwargs)
        if isa(it, MethodType):
            return self.call(Held(it.__func__), [Held(it.__self__), *args], kwargs)
        if type(it) is functools.partial:
            first = [Held(one) for one in self.reads.attr(it, "args")]
            named = self.opened(Held(self.reads.attr(it, "keywords")))
            return self.call(Held(self.reads.attr(it, "func")), [*first, *args], {**named.parts, **kwargs})
        if _is_in(it, CONTEXTS):
            self.computed([*args, *kwargs.values()], it.__name__)
            return CONTEXT
        if _is_in(it, BUILTIN_CALLS):
            return BUILTIN_CALLS[it](self, args, kwargs)
        if _is_in(it, ASKED):
            return Held(self.reads.asked(it))
        if _is_in(it, PURE):
            return self._pure(it, args, kwargs)
        if isa(it, FunctionType):
            return self._function_call(it, args, kwargs)
        if isa(it, type):
            return self._construct(it, args, kwargs)
        return self._call_other(it, args, kwargs)

    def _pure(self, it: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if args and not kwargs and all(map(constant, args)) and getattr(it, "__module__", "") in ("math", "_operator"):
            return self.folded(it, *(arg.it for arg in args))
        return self.computed([*args, *kwargs.values()], getattr(it, "__name__", "a function"))

    def _call_other(self, it: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if isa(it, BuiltinMethodType) and not isa(it.__self__, (ModuleType, type(None), type)):
            owner = Held(it.__self__)
            if is_scalar(owner.it) or isinstance(self.opened(owner), Items):
                return self.method(it.__name__, owner, args, kwargs)
        if isa(it, MethodDescriptorType) and it.__objclass__ in (list, dict, set, tuple, str) and args:
            return self.method(it.__name__, args[0], args[1:], kwargs)
        if it is object.__getattribute__ and len(args) == 2 and constant(args[1]) and isinstance(args[0], Held):
            return self.generic(args[0].it, self.kind(args[0].it), args[1].it)
        if not isa(it, BuiltinMethodType):
            own = self.on_class(self.kind(it), "__call__")
            if isa(own, FunctionType):
                return self.call(Held(own), [Held(it), *args], kwargs)
        name = getattr(it, "__qualname__", None) or type(it).__name__
        raise self.unseen(f"calls {name}, which cannot be seen into")

    def _construct(self, kind: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if kind is functools.partial and args:
            return Bound(args[0], args[1:], kwargs)
        if issubclass(kind, BaseException):
            return Bound("an exception", [])
        raise self.unseen(f"makes a {kind.__name__}")

    def context(self, value: Value) -> None:
        """`with value:`"""
        if value is CONTEXT or (isinstance(value, Held) and type(value.it) in CONTEXTS):
            return
        raise self.unseen(f"stands in a block of {self.words(value)}, which cannot be seen into")

    # --- modules -----------------------------------------------------------------------

    def _call_module(self, module: nn.Module, args: list[Value], kwargs: dict[str, Value]) -> Value:
        own = self.on_class(self.kind(module), "__call__")
        if own is not nn.Module.__call__:
            if not isa(own, FunctionType):
                raise self.unseen(f"calls a {type(module).__name__} in a way that is not followed")
            return self.call(Held(own), [Held(module), *args], kwargs)
        return self.call_plainly(module, args, kwargs)

    def call_plainly(self, module: nn.Module, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """What `nn.Module.__call__` does: a crossing into another frame, or the forward of a module from elsewhere."""
        site = module.__dict__.get("forward")
        if _is_site(site) and id(module) in self.inside:
            return self._crossed(site)
        for name in HOOKS:
            if self.reads.parts(module.__dict__[name]):
                raise self.unseen(f"calls a {type(module).__name__} of another model, which has hooks")
        self.reads.lacks(module.__dict__, "_compiled_call_impl")
        return self.call(self.attribute(Held(module), "forward"), args, kwargs)

    def _crossed(self, site: Any) -> Value:
        found = self._returns.get(site)
        return joined([ANY if one is None else one for one in found]) if found else ANY

    # --- functions with source -----------------------------------------------------------

    def _function_call(self, it: FunctionType, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if it is checkpoint:
            raise self.unseen("runs a part of itself again in backward (a checkpoint)")
        if it is nn.Module.__call__ and args and isinstance(args[0], Held):
            return self.call_plainly(args[0].it, args[1:], kwargs)
        if it is nn.Module.__getattr__ and len(args) == 2 and all(isinstance(arg, Held) for arg in args):
            return self.in_tables(args[0].it, args[1].it)
        if it in _WALKS and args and isinstance(args[0], Held) and id(args[0].it) in self.inside:
            return self.made(tuple, [TENSOR for _ in it(args[0].it)])
        code = self.reads.attr(it, "__code__")
        if code.co_flags & _GENERATES:
            raise self.unseen(f"calls {it.__qualname__}, a generator")
        tree = tree_of(code)
        if tree is None:
            raise self.unseen(f"calls {it.__qualname__}, whose source is not at hand")
        defaults = self.reads.attr(it, "__defaults__") or ()
        named = self.reads.attr(it, "__kwdefaults__") or {}
        positional = [one.arg for one in (*tree.args.posonlyargs, *tree.args.args)]
        by_name = dict(zip(positional[len(positional) - len(defaults) :], map(Held, defaults))) if defaults else {}

        def default(name: str) -> Value | None:
            return by_name.get(name) or (Held(self.reads.item(named, name)) if name in named else None)

        names = self._bound(tree, args, kwargs, default)
        return self._run(tree, Scope(names, code.co_filename, it, None))

    def _run(self, tree: ast.FunctionDef | ast.Lambda, scope: Scope) -> Value:
        if self.depth > _DEPTH:
            raise self.unseen("calls itself too deeply to be looked through")
        with self.within(scope.file):
            if isinstance(tree, ast.Lambda):
                return self.value(tree.body, scope)
            found = _declared(tree)
            if found is None:
                raise self.unseen(f"calls {tree.name}, a generator")
            scope.declared = found
            if self.block(tree.body, scope):
                scope.returned.append(Held(None))
        if not scope.returned:
            raise Died
        return joined(scope.returned)

    def _bound(
        self,
        tree: ast.FunctionDef | ast.Lambda,
        args: list[Value],
        kwargs: dict[str, Value],
        default: Callable[[str], Value | None],
    ) -> dict[str, Value]:
        """The parameters of a function by name. Raises Died where the arguments do not fit."""
        named, names = tree.args, {}
        positional = [*named.posonlyargs, *named.args]
        fixed = args[: len(positional)]
        if _UNNAMED in kwargs or any(isinstance(one, Spread) for one in fixed):
            raise self.unseen("calls a function with arguments whose number or names are not known")
        rest, kwargs = args[len(positional) :], dict(kwargs)
        if rest and named.vararg is None:
            raise Died
        for parameter, value in zip(positional, fixed):
            names[parameter.arg] = value
        for parameter in (*positional[len(fixed) :], *named.kwonlyargs):
            value = kwargs.pop(parameter.arg, None) or default(parameter.arg)
            if value is None:
                raise Died
            names[parameter.arg] = value
        if named.vararg is not None:
            more = self.made(tuple, [one.part if isinstance(one, Spread) else one for one in rest])
            if any(isinstance(one, Spread) for one in rest):
                more.blur()
            names[named.vararg.arg] = more
        if named.kwarg is not None:
            names[named.kwarg.arg] = self.made(dict, kwargs)
        elif kwargs:
            raise Died
        return names


_WALKS = frozenset({nn.Module.parameters, nn.Module.buffers})


def _is_lazy(function: Value, args: list[Value]) -> bool:
    """Whether a call gives something that looks at what is made here only later."""
    if isinstance(function, Bound) and function.function in ("keys", "values", "items"):
        return isinstance(function.args[0], Items) and not function.args[0].given
    if not isinstance(function, Held) or not _is_in(function.it, _LAZY):
        return False
    changing = [one for one in args if isinstance(one, Items) and one.type not in (tuple, Iterator) and not one.given]
    return bool(changing) or function.it in (map, filter)


_LAZY = frozenset({map, filter, zip, enumerate, reversed, iter})


def _is_in(it: Any, table: Any) -> bool:
    """Whether a function or a class is listed. What is of somebody's own class, or has one, is not asked."""
    kind = type(it)
    listed = kind in METACLASSES or kind is FunctionType or (is_builtin(kind) and callable(it))
    return listed and it in table


@functools.lru_cache(maxsize=4096)
def _declared(tree: ast.FunctionDef) -> frozenset[str] | None:
    """Names that a function declares to be another's; None for a generator."""
    found, waiting = set(), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return None
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.update(node.names)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return frozenset(found)
