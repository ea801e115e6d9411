"""Expressions of a forward, looked through: what is known of their values."""

from __future__ import annotations

import ast
import enum
import operator
from collections.abc import Callable
from typing import Any

import torch

from ..values import (
    SOMETHING,
    TENSOR,
    Code,
    Dark,
    Held,
    Items,
    Iterator,
    Made,
    OneOf,
    Value,
    constant,
    is_plain,
    is_scalar,
    is_something,
    is_tensor,
    isa,
    joined,
)
from .items import Parts
from .state import Died, Scope

_BINARY: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY: dict[type, Callable] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
_COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_LARGE = 10**6


class Expressions(Parts):
    """`value` of each kind of expression."""

    def value(self, node: ast.expr, scope: Scope) -> Value:
        see = _EXPRESSIONS.get(type(node))
        self.at(node)
        if see is None:
            raise self.unseen(f"has a {type(node).__name__.lower()}, which is not followed")
        found = see(self, node, scope)
        if isinstance(found, Dark):
            raise self.unseen(f"uses {found.why}: `{ast.unparse(node)}`")
        return found

    def _constant(self, node: ast.Constant, scope: Scope) -> Value:
        return Held(node.value)

    def _name(self, node: ast.Name, scope: Scope) -> Value:
        return self.name(node.id, scope)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        owner = self.value(node.value, scope)
        name = node.attr
        if name.startswith("__") and not name.endswith("__"):
            raise self.unseen(f"reads the private `{ast.unparse(node)}`")
        return self.attribute(owner, name)

    def _named(self, node: ast.NamedExpr, scope: Scope) -> Value:
        value = self.value(node.value, scope)
        self.store(node.target, value, scope)
        return value

    # --- operators ---------------------------------------------------------------------

    def _binary(self, node: ast.BinOp, scope: Scope) -> Value:
        return self.binary(node.op, self.value(node.left, scope), self.value(node.right, scope))

    def binary(self, op: ast.operator, left: Value, right: Value) -> Value:
        if constant(left) and constant(right):
            return self.folded(_BINARY[type(op)], left.it, right.it)
        known = [self.opened(left), self.opened(right)]
        if isinstance(op, ast.Add) and all(isinstance(one, Items) and one.every is None for one in known):
            left, right = known
            if left.type is right.type and left.type in (tuple, list):
                return self.made(left.type, [*left.parts, *right.parts])
        if isinstance(op, ast.BitOr) and all(isinstance(one, Items) and one.type is dict for one in known):
            return self.merged_dict(known)
        return self.computed(known, f"an operator ({type(op).__name__.lower()})", tensor=TENSOR in (left, right))

    def augmented(self, op: ast.operator, left: Value, right: Value) -> Value:
        """`left op= right`: in place on a list that was made here; a tensor's are on the tape."""
        if isinstance(left, Items) and left.type in (list, dict, set):
            return self.grown(left, right)
        if isinstance(left, Held) and not (is_scalar(left.it) or isinstance(left.it, tuple) or is_tensor(left.it)):
            raise self.unseen(f"changes a {type(left.it).__name__} in place")
        return self.binary(op, left, right)

    def computed(self, values: list[Value], what: str, tensor: bool = False) -> Value:
        """The result of a function that only reads what it is given, and keeps nothing."""
        for value in values:
            if not is_plain(self.opened(value), given=True):
                raise self.unseen(f"gives {self.words(value)} to {what}, which cannot be seen into")
        return TENSOR if tensor else SOMETHING

    def folded(self, function: Callable, *args: Any) -> Value:
        """A builtin of scalars that are known."""
        if function in (operator.pow, pow, operator.lshift) and any(
            isinstance(a, int) and abs(a) > 64 for a in args[1:]
        ):
            return SOMETHING
        if function is operator.mul and any(isinstance(a, int) and abs(a) > _LARGE for a in args):
            return SOMETHING
        try:
            found = function(*args)
        except Exception:
            raise Died from None
        return Held(found) if is_scalar(found) else SOMETHING

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Value:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            known = self.truth(value)
            return SOMETHING if known is None else Held(not known)
        if constant(value):
            return self.folded(_UNARY[type(node.op)], value.it)
        return self.computed([value], "an operator", tensor=value is TENSOR)

    def _compare(self, node: ast.Compare, scope: Scope) -> Value:
        left, known = self.value(node.left, scope), True
        for op, other in zip(node.ops, node.comparators):
            right = self.value(other, scope)
            found = self.compared(op, left, right)
            if found is False:
                return Held(False)
            known = None if found is None or known is None else known
            left = right
        return SOMETHING if known is None else Held(True)

    def compared(self, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        """True or False where it is known. Runs no code of anybody's."""
        if isinstance(op, (ast.Is, ast.IsNot)):
            same = self.identical(left, right)
            return same if same is None or isinstance(op, ast.Is) else not same
        if isinstance(op, (ast.In, ast.NotIn)):
            found = self.contains(right, left)
            return found if found is None or isinstance(op, ast.In) else not found
        if constant(left) and constant(right):
            found = self.folded(_COMPARE[type(op)], left.it, right.it)
            return found.it if isinstance(found, Held) else None
        by_identity = isinstance(left, Held) and isinstance(right, Held)
        by_identity = by_identity and all(type(one.it).__eq__ is object.__eq__ for one in (left, right))
        if by_identity and isinstance(op, (ast.Eq, ast.NotEq)):
            return (left.it is right.it) == isinstance(op, ast.Eq)
        self.computed([left, right], "a comparison")
        return None

    def identical(self, left: Value, right: Value) -> bool | None:
        if isinstance(left, Held) and isinstance(right, Held):
            if constant(left) and constant(right) and not (_is_single(left.it) or _is_single(right.it)):
                return None  # another object of the same value may have come
            return left.it is right.it
        for one, other in ((left, right), (right, left)):
            if isa(other, Held) and (other.it is None or isinstance(other.it, bool)):
                if other.it is None and is_something(one):
                    return False
                if isinstance(one, (Items, Code)) or one is TENSOR:
                    return False
        return None

    def truth(self, value: Value) -> bool | None:
        """Whether a value counts as true, where that is known. Runs no code but what it looks through."""
        if isinstance(value, Items):
            if value.type is Iterator:
                return True
            return bool(value.parts) if value.every is None else None
        if constant(value):
            return bool(value.it)
        if isinstance(value, Held) and not is_tensor(value.it):
            return self.truth_of_held(value)
        if isinstance(value, OneOf):
            found = {self.truth(one) for one in value.values}
            return found.pop() if len(found) == 1 else None
        return None if isinstance(value, Made) or is_plain(value) else True

    def _bool(self, node: ast.BoolOp, scope: Scope) -> Value:
        found: list[Value] = []
        stops = isinstance(node.op, ast.Or)
        for at, part in enumerate(node.values):
            value = self._perhaps(part, scope) if found else self.value(part, scope)
            if value is None:
                break
            known = self.truth(value)
            if known is None or at == len(node.values) - 1:
                found.append(value)
            elif known is stops:
                found.append(value)
                break
        return joined(found) if found else Held(not stops)

    def _perhaps(self, node: ast.expr, scope: Scope) -> Value | None:
        """The value of what may not be run; None where it can only raise."""
        with self.branch():
            try:
                return self.value(node, scope)
            except Died:
                return None

    def _conditional(self, node: ast.IfExp, scope: Scope) -> Value:
        known = self.truth(self.value(node.test, scope))
        if known is not None:
            return self.value(node.body if known else node.orelse, scope)
        found = [self._perhaps(part, scope) for part in (node.body, node.orelse)]
        if not any(found):
            raise Died
        return joined([value for value in found if value is not None])

    # --- containers, subscripts ----------------------------------------------------------

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Value:
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        parts, sure = [], True
        for part in node.elts:
            if not isinstance(part, ast.Starred):
                parts.append(self.value(part, scope))
                continue
            over = self.value(part.value, scope)
            items = self.elements(over)
            sure = sure and items is not None
            parts += items if items is not None else [self.part(over)]
        if kind is set:
            self.computed(parts, "a set")
        made = self.made(kind, parts)
        if not sure:
            made.blur()
        return made

    def _dict(self, node: ast.Dict, scope: Scope) -> Value:
        made = self.made(dict, {})
        for key, part in zip(node.keys, node.values):
            if key is None:
                made = self.merged_dict([made, self.opened(self.value(part, scope))])
            else:
                self.put(made, self.value(key, scope), self.value(part, scope))
        return made

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        return self.item(self.value(node.value, scope), self.value(node.slice, scope))

    def _slice(self, node: ast.Slice, scope: Scope) -> Value:
        bounds = [self.value(one, scope) if one else Held(None) for one in (node.lower, node.upper, node.step)]
        if all(map(constant, bounds)):
            return Held(slice(*(one.it for one in bounds)))
        return self.computed(bounds, "a slice")

    def _starred(self, node: ast.Starred, scope: Scope) -> Value:
        raise self.unseen("has a star where it is not followed")

    def _joined(self, node: ast.JoinedStr, scope: Scope) -> Value:
        for part in ast.walk(node):
            if isinstance(part, ast.FormattedValue):
                self.computed([self.value(part.value, scope)], "a text")
        return SOMETHING

    # --- functions and comprehensions ----------------------------------------------------

    def _lambda(self, node: ast.Lambda, scope: Scope) -> Value:
        return self.code(node, scope)

    def _comprehension(self, node: Any, scope: Scope) -> Value:
        kind = {ast.ListComp: list, ast.SetComp: set, ast.DictComp: dict, ast.GeneratorExp: Iterator}[type(node)]
        if kind is Iterator and id(node) not in self.direct:
            raise self.unseen("keeps a generator")
        made = self.made(kind, {} if kind is dict else [])
        inner = Scope({}, scope.file, None, scope)
        self._each(node, 0, inner, made)
        return made

    def _each(self, node: Any, level: int, scope: Scope, made: Items) -> None:
        if level == len(node.generators):
            if isinstance(node, ast.DictComp):
                self.put(made, self.value(node.key, scope), self.value(node.value, scope))
            else:
                self.grown(made, self.made(tuple, [self.value(node.elt, scope)]))
            return
        generator = node.generators[level]
        if generator.is_async:
            raise self.unseen("is asynchronous")
        over = self.value(generator.iter, scope)
        items = self.elements(over)
        if items is None:
            with self.branch():
                self._one(node, level, scope, made, self.part(over))
            return
        for item in items:
            self._one(node, level, scope, made, item)

    def _one(self, node: Any, level: int, scope: Scope, made: Items, item: Value) -> None:
        generator = node.generators[level]
        self.store(generator.target, item, scope)
        with_branch = False
        for test in generator.ifs:
            known = self.truth(self.value(test, scope))
            if known is False:
                return
            with_branch = with_branch or known is None
        if not with_branch:
            self._each(node, level + 1, scope, made)
            return
        with self.branch():
            self._each(node, level + 1, scope, made)

    # --- stores --------------------------------------------------------------------------

    def store(self, target: ast.expr, value: Value, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            if target.id in scope.declared:
                raise self.unseen(f"sets the variable {target.id} around it")
            scope.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpacked(target.elts, value, scope)
        elif isinstance(target, ast.Starred):
            self.store(target.value, value, scope)
        elif isinstance(target, ast.Subscript):
            self.set_item(self.value(target.value, scope), self.value(target.slice, scope), value, target)
        elif isinstance(target, ast.Attribute):
            self.set_attribute(self.value(target.value, scope), target.attr, value, target)
        else:
            raise self.unseen(f"sets `{ast.unparse(target)}`")

    def _unpacked(self, targets: list[ast.expr], value: Value, scope: Scope) -> None:
        items = self.elements(value)
        starred = [at for at, target in enumerate(targets) if isinstance(target, ast.Starred)]
        if items is None:
            part = self.part(value)
            for target in targets:
                if isinstance(target, ast.Starred):
                    made = self.made(list, [part])
                    made.blur()
                    self.store(target, made, scope)
                else:
                    self.store(target, part, scope)
            return
        if starred:
            at, after = starred[0], len(targets) - starred[0] - 1
            if len(items) < at + after:
                raise Died
            end = len(items) - after
            items = [*items[:at], self.made(list, items[at:end]), *items[end:]]
        if len(items) != len(targets):
            raise Died
        for target, item in zip(targets, items):
            self.store(target, item, scope)


def _is_single(it: Any) -> bool:
    """Whether there is but one object of this value."""
    return it is None or it is Ellipsis or isa(it, (bool, enum.Enum, torch.dtype))


_EXPRESSIONS: dict[type, Callable[[Expressions, Any, Scope], Value]] = {
    ast.Constant: Expressions._constant,
    ast.Name: Expressions._name,
    ast.Attribute: Expressions._attribute,
    ast.NamedExpr: Expressions._named,
    ast.BinOp: Expressions._binary,
    ast.UnaryOp: Expressions._unary,
    ast.Compare: Expressions._compare,
    ast.BoolOp: Expressions._bool,
    ast.IfExp: Expressions._conditional,
    ast.Tuple: Expressions._sequence,
    ast.List: Expressions._sequence,
    ast.Set: Expressions._sequence,
    ast.Dict: Expressions._dict,
    ast.Subscript: Expressions._subscript,
    ast.Slice: Expressions._slice,
    ast.Starred: Expressions._starred,
    ast.JoinedStr: Expressions._joined,
    ast.Lambda: Expressions._lambda,
    ast.ListComp: Expressions._comprehension,
    ast.SetComp: Expressions._comprehension,
    ast.DictComp: Expressions._comprehension,
    ast.GeneratorExp: Expressions._comprehension,
    ast.Call: lambda self, node, scope: self.call_of(node, scope),
}
