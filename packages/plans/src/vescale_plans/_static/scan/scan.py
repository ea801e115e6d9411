"""What a forward, and all the Python code that it calls, can read: found by looking through it, not by running it.

The forward's syntax tree is followed with what is known of each value (`_static/values.py`).
What is known decides branches, so that only what this call can come to is looked at; where
it is not known both ways are. Everything read from an object that outlives the call is
noted as a read, to be guarded; everything that could change such an object, and everything
that cannot be followed, ends the scan with `Unseen`: the module stays eager.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..reads import Changed, Reads
from ..values import Dark, Held, Value, alike, joined, value_of
from .calls import Calls
from .state import Died, Scope, Unseen

_ROUNDS, _UNROLLED = 8, 4096


def scan(frame: Any) -> tuple[Reads, Value]:
    """All reads of a recorded call's own code, and what is known of its result. Raises Unseen."""
    looking = Scan(frame)
    if frame.site.own is None:
        looking.on_class(looking.kind(frame.module), "forward")
    args = [value_of(arg) for arg in frame.args]
    kwargs = {name: value_of(arg) for name, arg in frame.kwargs.items()}
    try:
        return looking.reads, looking.call(Held(frame.site.forward), args, kwargs)
    except Died:
        why = "is not seen to return"
    except Changed as changed:
        why = f"changes {changed} while it runs"
    except RecursionError:
        why = "calls itself too deeply to be looked through"
    except (Unseen, KeyboardInterrupt):
        raise
    except Exception as error:  # of an object that answers in a way that nobody thought of
        why = f"has something that cannot be looked through ({type(error).__name__}: {error})"
    raise looking.unseen(why)


@dataclass
class _Loop:
    broken: list[dict] = field(default_factory=list)
    continued: list[dict] = field(default_factory=list)


class Scan(Calls):
    """Statements. Each says whether the next one can be reached."""

    def block(self, statements: list[ast.stmt], scope: Scope) -> bool:
        for statement in statements:
            run = _STATEMENTS.get(type(statement))
            self.at(statement)
            if run is None:
                raise self.unseen(f"has a {type(statement).__name__.lower()}, which is not followed")
            try:
                if not run(self, statement, scope):
                    return False
            except Died:
                return False
        return True

    # --- simple statements -------------------------------------------------------------

    def _expression(self, node: ast.Expr, scope: Scope) -> bool:
        self.value(node.value, scope)
        return True

    def _pass(self, node: ast.stmt, scope: Scope) -> bool:
        return True

    def _return(self, node: ast.Return, scope: Scope) -> bool:
        scope.returned.append(self.value(node.value, scope) if node.value else Held(None))
        return False

    def _raise(self, node: ast.Raise, scope: Scope) -> bool:
        return False

    def _assign(self, node: ast.Assign, scope: Scope) -> bool:
        if len(node.targets) == 1 and isinstance(node.targets[0], (ast.Tuple, ast.List)):
            self.direct.add(id(node.value))  # an iterator is gone over, all of it, and kept by nobody
        value = self.value(node.value, scope)
        for target in node.targets:
            self.store(target, value, scope)
        return True

    def _annotated(self, node: ast.AnnAssign, scope: Scope) -> bool:
        if node.value is not None:
            self.store(node.target, self.value(node.value, scope), scope)
        return True

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> bool:
        old = self.value(_loaded(node.target), scope)
        self.store(node.target, self.augmented(node.op, old, self.value(node.value, scope)), scope)
        return True

    def _delete(self, node: ast.Delete, scope: Scope) -> bool:
        for target in node.targets:
            if not isinstance(target, ast.Name) or target.id in scope.declared:
                raise self.unseen(f"deletes `{ast.unparse(target)}`")
            scope.names.pop(target.id, None)
        return True

    def _assert(self, node: ast.Assert, scope: Scope) -> bool:
        return self.truth(self.value(node.test, scope)) is not False

    def _function(self, node: ast.FunctionDef, scope: Scope) -> bool:
        function = self.code(node, scope)
        for decorator in reversed(node.decorator_list):
            function = self.call(self.value(decorator, scope), [function], {})
        self.store(ast.copy_location(ast.Name(node.name, ast.Store()), node), function, scope)
        return True

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> bool:
        for alias in node.names:
            name = ast.Name(alias.asname or alias.name.partition(".")[0], ast.Store())
            self.store(ast.copy_location(name, node), self.imported(node, alias, scope), scope)
        return True

    # --- branches ----------------------------------------------------------------------

    def _if(self, node: ast.If, scope: Scope) -> bool:
        known = self.truth(self.value(node.test, scope))
        if known is not None:
            return self.block(node.body if known else node.orelse, scope)
        return self.either(scope, lambda: self.block(node.body, scope), lambda: self.block(node.orelse, scope))

    def either(self, scope: Scope, *ways: Callable[[], bool]) -> bool:
        """Goes each way from here, not knowing which is taken."""
        start, ends = scope.names, []
        for way in ways:
            scope.names = dict(start)
            with self.branch():
                if way():
                    ends.append(scope.names)
        if len(ends) < len(ways):  # the rest of this function may not be reached
            self.uncertain()
        scope.names = _merged(ends) if ends else start
        return bool(ends)

    def _try(self, node: ast.Try, scope: Scope) -> bool:
        start = dict(scope.names)
        with self.branch():
            alive = self.block(node.body, scope) and self.block(node.orelse, scope)
        ends = [scope.names] if alive else []
        touched = {one.id for part in node.body for one in ast.walk(part)
                   if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}  # fmt: skip
        for handler in node.handlers:
            if handler.type is not None:
                self.value(handler.type, scope)
            scope.names = {**start, **{name: Dark("a name set where an error may come") for name in touched}}
            if handler.name in scope.declared:
                raise self.unseen(f"sets the variable {handler.name} around it")
            if handler.name:
                scope.names[handler.name] = Dark("an exception")
            with self.branch():
                if self.block(handler.body, scope):
                    ends.append(scope.names)
        self.uncertain()
        scope.names = _merged(ends) if ends else start
        return self.block(node.finalbody, scope) and bool(ends)

    def _with(self, node: ast.With, scope: Scope) -> bool:
        for item in node.items:
            self.context(self.value(item.context_expr, scope))
            if item.optional_vars is not None:
                self.store(item.optional_vars, Dark("what a block is given"), scope)
        return self.block(node.body, scope)

    # --- loops -------------------------------------------------------------------------

    def _for(self, node: ast.For, scope: Scope) -> bool:
        self.direct.add(id(node.iter))
        over = self.value(node.iter, scope)
        items = self.elements(over)
        if items is None:
            part = self.part(over)
            return self._repeated(node, scope, lambda: self.store(node.target, part, scope) or None)
        loop = _Loop()
        for item in items:
            self.store(node.target, item, scope)
            if not self._body(node, scope, loop):
                return self._after(node, scope, loop, reached=False)
        return self._after(node, scope, loop, reached=True)

    def _while(self, node: ast.While, scope: Scope) -> bool:
        loop = _Loop()
        for _ in range(_UNROLLED):
            known = self.truth(self.value(node.test, scope))
            if known is None:
                return self._repeated(node, scope, lambda: self.truth(self.value(node.test, scope)), loop)
            if not known:
                return self._after(node, scope, loop, reached=True)
            if not self._body(node, scope, loop):
                return self._after(node, scope, loop, reached=False)
        raise self.unseen("has a loop too long to be looked through")

    def _body(self, node: ast.For | ast.While, scope: Scope, loop: _Loop) -> bool:
        """Once through a loop's body. Whether the next time can be reached."""
        loop.continued = []
        self.loops.append(loop)
        try:
            ends = [scope.names] if self.block(node.body, scope) else []
            ends = [scope.names] if ends else []
        finally:
            self.loops.pop()
        ends += loop.continued
        if ends:
            scope.names = _merged(ends)
        return bool(ends)

    def _repeated(self, node: Any, scope: Scope, begin: Callable, loop: _Loop | None = None) -> bool:
        """A loop of which it is not known how often it runs: until nothing new is found."""
        loop = loop or _Loop()
        with self.branch():
            for _ in range(_ROUNDS):
                before = dict(scope.names)
                begin()
                scope.names = _merged([before, scope.names])
                self._body(node, scope, loop)
                scope.names = _merged([before, scope.names])
                if _reduced(before, scope.names):
                    break
            else:
                raise self.unseen("has a loop that never comes to rest")
        self.uncertain()
        return self._after(node, scope, loop, reached=True)

    def _after(self, node: Any, scope: Scope, loop: _Loop, reached: bool) -> bool:
        ends = list(loop.broken)
        if reached and self.block(node.orelse, scope):
            ends.append(scope.names)
        if ends:
            scope.names = _merged(ends)
        return bool(ends)

    def _break(self, node: ast.Break, scope: Scope) -> bool:
        self.loops[-1].broken.append(scope.names)
        return False

    def _continue(self, node: ast.Continue, scope: Scope) -> bool:
        self.loops[-1].continued.append(scope.names)
        return False


def _merged(ends: list[dict[str, Value]]) -> dict[str, Value]:
    """What is known of names where several ways meet; one that is set on some of them only is dark."""
    if len(ends) == 1:
        return ends[0]
    unset = Dark("a name that is not always set")
    return {name: joined([end.get(name, unset) for end in ends]) for name in dict.fromkeys(k for e in ends for k in e)}


def _reduced(before: dict[str, Value], after: dict[str, Value]) -> bool:
    return before.keys() == after.keys() and all(alike(before[name], after[name]) for name in before)


def _loaded(target: ast.expr) -> ast.expr:
    """A target, to be read."""
    read = type(target)(**{name: getattr(target, name) for name in target._fields})
    read.ctx = ast.Load()
    return ast.copy_location(read, target)


_STATEMENTS: dict[type, Callable[[Scan, Any, Scope], bool]] = {
    ast.Expr: Scan._expression,
    ast.Pass: Scan._pass,
    ast.Global: Scan._pass,
    ast.Nonlocal: Scan._pass,
    ast.Return: Scan._return,
    ast.Raise: Scan._raise,
    ast.Assign: Scan._assign,
    ast.AnnAssign: Scan._annotated,
    ast.AugAssign: Scan._augmented,
    ast.Delete: Scan._delete,
    ast.Assert: Scan._assert,
    ast.FunctionDef: Scan._function,
    ast.Import: Scan._import,
    ast.ImportFrom: Scan._import,
    ast.If: Scan._if,
    ast.Try: Scan._try,
    ast.With: Scan._with,
    ast.For: Scan._for,
    ast.While: Scan._while,
    ast.Break: Scan._break,
    ast.Continue: Scan._continue,
}
