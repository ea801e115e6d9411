"""Where the engine may be changed, and to what. Pure: from source text to places, and to the tree with one replaced.

A place is a call, a loop, a condition or a pair of statements that fits one of KINDS:

    wait      a wait is left out                         `work.wait()`, `reduction.finish()`, `link.flush()`
    write     a buffer is overwritten while in flight    after what starts a collective or a transfer
    skip      one rank leaves a collective out           a statement that communicates
    order     one rank does two in the other order       loops over, and pairs of, what communicates
    tag       one rank posts in an order that only tags would sort out: conditions on rank, peer or tags; sends held
              back until the next
    item      the host reads a number of what a call made, in every step
    host      a tensor is made on the host               calls with `device=`, `new_empty` and their like
    clone     `clone` or `contiguous` hands back its own input
    stream    a stream does not wait for another, or the host for it; memory that another stream reads is not kept
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

KINDS = ("wait", "write", "skip", "order", "tag", "item", "host", "clone", "stream")

WAITS = {"wait", "_wait", "flush", "advance", "finish", "end", "close"}
STARTS = {
    *("_start", "_started", "_run", "call", "send", "recv", "post", "swap", "fetch", "updated", "start", "exchange"),
    *("GatherInFlight", "ReductionInFlight", "RowsInFlight", "RunningReduction", "Usage"),
    *("_send", "_post", "_post_announced", "transfer"),
}
COMMUNICATES = (
    STARTS
    | WAITS
    | {
        *(
            "all_gather",
            "all_reduce",
            "reduce_scatter",
            "gather",
            "scatter",
            "broadcast",
            "gather_objects",
            "open",
            "tell",
        ),
        *(
            "_start_in_order",
            "send_object",
            "receive_object",
            "updated",
            "take_in",
            "greet",
            "sum_tied",
            "share_loss",
        ),
        *("share_buffers", "digest", "assert_ranks_agree", "step", "all_to_all", "reshard", "release"),
        *("allreduce", "_open"),
    }
)
SENDS = {"send", "_send", "send_object"}
STREAMS = {"wait_event", "wait_stream", "record_stream", "synchronize"}
MADE_ON_DEVICE = {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}
TAGGED = ("rank", "peer", "has_tags", "_words")
HELPER = "__mutants__"
# A name of the language, whose call means its own frame.
_OWN_FRAME = {"super", "locals", "globals", "vars", "isinstance", "_getframe"}


class Place(NamedTuple):
    """`number` counts the places of a file in the order of its text."""

    file: str
    number: int
    kind: str
    line: int
    function: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.function}: {self.kind}: {self.text}"


def places_of(file: str, source: str) -> list[Place]:
    """All places of a file, which lie in functions."""
    return [Place(file, n, kind, node.lineno, name, _text(node)) for n, (kind, node, name) in enumerate(_found(source))]


def changed(source: str, only: int | None = None, first: int = 0) -> ast.Module:
    """The file's tree with the helper in all places, or in one alone. The helper is called with the place's number,
    counted from `first`."""
    tree = ast.parse(source)
    wanted: dict[int, list[tuple[int, str]]] = {}
    for number, (kind, node, _) in enumerate(_walk(tree)):
        if only in (None, number):
            wanted.setdefault(id(node), []).append((first + number, kind))
    return ast.fix_missing_locations(_Put(wanted).visit(tree))


def _found(source: str) -> Iterator[tuple[str, ast.AST, str]]:
    yield from _walk(ast.parse(source))


def _walk(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, node, function) in an order that depends on the text alone."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, ast.Lambda):  # several may lie on one line: their code would be mistaken
            return
        if isinstance(node, ast.FunctionDef):
            function = node.name
            children: list[ast.AST] = list(node.body)
        else:
            children = list(ast.iter_child_nodes(node))
        if function:
            for kind in _kinds(node):
                yield kind, node, function
        for child in children:
            yield from within(child, function)

    yield from within(tree, "")


def _kinds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = _name(node)
        if name in WAITS:
            yield "wait"
        if name in STARTS:
            yield "write"
        if name in MADE_ON_DEVICE or name.endswith("_like") or any(k.arg == "device" for k in node.keywords):
            yield "host"
        if name in ("clone", "contiguous"):
            yield "clone"
        if name in STREAMS:
            yield "stream"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name(node.value)
        if name in COMMUNICATES:
            yield "skip"
        if name in SENDS:
            yield "tag"
    elif isinstance(node, ast.Assign | ast.Return) and isinstance(node.value, ast.Call):
        if _name(node.value) not in _OWN_FRAME:
            yield "item"
    elif isinstance(node, ast.For) and _communicates(node.body):
        yield "order"
    elif isinstance(node, ast.If) and _names(node.test) & set(TAGGED) and _communicates([*node.body, *node.orelse]):
        yield "tag"
    if any(_pairs(body) for body in _bodies(node)):
        yield "order"


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    if not isinstance(node, ast.FunctionDef | ast.With | ast.If | ast.Try):
        return []
    return [body for body in (node.body, getattr(node, "orelse", [])) if body]


def _pairs(body: list[ast.stmt]) -> list[int]:
    """Where two statements follow each other that both communicate, and the second needs nothing of the first."""
    return [at for at, pair in enumerate(pairwise(body)) if _may_swap(*pair)]


def _may_swap(first: ast.stmt, second: ast.stmt) -> bool:
    if not all(isinstance(one, ast.Expr | ast.Assign | ast.For) and _communicates([one]) for one in (first, second)):
        return False
    made = {node.id for node in ast.walk(first) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return not made & _names(second)


def _communicates(body: list[ast.stmt]) -> bool:
    return any(isinstance(n, ast.Call) and _name(n) in COMMUNICATES for one in body for n in ast.walk(one))


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names(node: ast.AST) -> set[str]:
    return {getattr(one, "attr", None) or getattr(one, "id", "") for one in ast.walk(node)}


def _text(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:90]


def _call(*arguments: ast.expr, keywords: tuple[ast.keyword, ...] = ()) -> ast.Call:
    return ast.Call(ast.Name(HELPER, ast.Load()), list(arguments), list(keywords))


class _Put(ast.NodeTransformer):
    """Puts the helper into places; what is within a place first."""

    def __init__(self, wanted: dict[int, list[tuple[int, str]]]) -> None:
        self.wanted = wanted

    def visit(self, node: ast.AST) -> ast.AST:
        mine = self.wanted.get(id(node), ())
        node = self.generic_visit(node)
        for number, kind in mine:
            node = self._put(node, ast.Constant(number), kind)
        return node

    def _put(self, node: ast.AST, number: ast.Constant, kind: str) -> ast.AST:
        if isinstance(node, ast.Call):  # wait, write, host, clone, stream
            held = _call(number, ast.Constant(kind), node.func, *node.args, keywords=tuple(node.keywords))
            return ast.copy_location(held, node)
        if isinstance(node, ast.Expr):  # skip, tag
            call = node.value
            node.value = ast.copy_location(
                _call(number, ast.Constant(kind), call.func, *call.args, keywords=tuple(call.keywords)), call
            )
        elif isinstance(node, ast.Assign | ast.Return):  # item
            node.value = ast.copy_location(_call(number, ast.Constant(kind), node.value), node.value)
        elif isinstance(node, ast.If) and kind == "tag":
            node.test = ast.copy_location(_call(number, ast.Constant("test"), node.test), node.test)
        elif isinstance(node, ast.For) and kind == "order":
            node.iter = ast.copy_location(_call(number, ast.Constant(kind), node.iter), node.iter)
        else:
            for body in _bodies(node):
                if pairs := _pairs(body):
                    self._swap(body, pairs[0], number)
                    break
        return node

    def _swap(self, body: list[ast.stmt], at: int, number: ast.Constant) -> None:
        """`if helper: second; first else: first; second`, which tells the helper when each is done."""
        first, second = body[at], body[at + 1]

        def mark(count: int) -> ast.Expr:
            return ast.Expr(_call(number, ast.Constant("mark"), ast.Constant(count)))

        test = _call(number, ast.Constant("swap"))
        both = ast.If(test, [second, first], [first, mark(1), second, mark(2)])
        body[at : at + 2] = [ast.copy_location(both, first)]
