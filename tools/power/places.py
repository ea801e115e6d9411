"""Where the packages may be changed, and to what; and the copy of the sources that holds all mutants behind a switch.

A place lies in a function's body and fits one of KINDS:

    comparison  `<` for `<=`, `==` for `!=`, `in` for `not in`, `is` for `is not`, and back; `and` for `or`
    constant    a number plus one; True for False
    statement   a call, or an assignment to an attribute or an item, is left out
    operands    of `-`, `/`, `//`, `%`, `**`, `<<`, `>>` in the other order
"""

from __future__ import annotations

import ast
import json
import random
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).absolute().parents[2]
KINDS = ("comparison", "constant", "statement", "operands")
AREAS = {
    "layouts": "packages/dtensor/src/vescale_dtensor/_layouts",
    "conversions": "packages/dtensor/src/vescale_dtensor/_conversions",
    "rules": "packages/dtensor/src/vescale_dtensor/_rules",
    "dispatch": "packages/dtensor/src/vescale_dtensor/_dispatch",
    "tensors": "packages/dtensor/src/vescale_dtensor/_tensor",
    "communication": "packages/dtensor/src/vescale_dtensor/_communication",
    "context": "packages/dtensor/src/vescale_dtensor/_context",
    "debugger": "packages/dtensor/src/vescale_dtensor/_debugger",
    "reproducible": "packages/dtensor/src/vescale_dtensor/_reproducible",
    "zero": "packages/plans/src/vescale_plans/_zero",
    "apply": "packages/plans/src/vescale_plans/_apply",
    "planner": "packages/plans/src/vescale_plans/search",
    "compile": "packages/plans/src/vescale_plans/_capture",
    "experts": "packages/plans/src/vescale_plans/_experts",
    "plan": "packages/plans/src/vescale_plans/_plan",
    "pipelines": "packages/pipeline/src/vescale_pipeline",
    "rng": "packages/rng/src/vescale_rng",
    "checkpoints": "packages/checkpoint/src/vescale_checkpoint",
    "trace": "packages/trace/src/vescale_trace",
    "training": "packages/vescale/src/vescale",
}
PACKAGES = sorted(source.parent.name for source in TOP.glob("packages/*/src"))
_OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)
_SWITCH = "_vescale_power_is_on"
_IMPORT = f"from vescale_power import is_on as {_SWITCH}"


class Place(NamedTuple):
    """`at` counts the places of a file in the order of its text. `is_held_out`: with its whole file."""

    file: str
    at: int
    kind: str
    line: int
    function: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.file.encode()) % 3 == 0

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind} in {self.function}: {self.text}"


def places_of(file: str, source: str) -> list[Place]:
    return [
        Place(file, at, kind, node.lineno, function, ast.unparse(node).splitlines()[0][:90])
        for at, (kind, node, function) in enumerate(_walk(ast.parse(source)))
    ]


def drawn(areas: Sequence[str], each: int, seed: int) -> list[Place]:
    """Returns so many places of each area or package, these and kinds in turn, by chance from the seed."""
    found: list[list[Place]] = []
    for area in areas:
        folder = TOP / AREAS.get(area, f"packages/{area}/src")
        all_places = [
            place
            for path in sorted(folder.rglob("*.py"))
            for place in places_of(str(path.relative_to(TOP)), path.read_text())
        ]
        chance = random.Random(f"{seed} {area}")
        chance.shuffle(all_places)
        turns = sorted(all_places, key=_turn({kind: iter(range(len(all_places))) for kind in KINDS}))
        found.append(turns[:each])
    return [place for turn in zip_longest(*found) for place in turn if place]


def _turn(counts: Mapping[str, Iterator[int]]):
    return lambda place: (next(counts[place.kind]), KINDS.index(place.kind))


def write_tree(folder: Path, places: Sequence[Place]) -> None:
    """Copies the packages' sources with the mutants in them, numbered from 1 in the order of `places`."""
    shutil.rmtree(folder, ignore_errors=True)
    for source in TOP.glob("packages/*/src"):
        shutil.copytree(source, folder / source.relative_to(TOP), ignore=shutil.ignore_patterns("__pycache__"))
    numbers: dict[str, dict[int, int]] = {}
    for number, place in enumerate(places, 1):
        numbers.setdefault(place.file, {})[place.at] = number
    for file, wanted in numbers.items():
        (folder / file).write_text(ast.unparse(mutated((TOP / file).read_text(), wanted)))
    shutil.copy(Path(__file__).with_name("switch.py"), folder / "vescale_power.py")
    (folder / "places.json").write_text(json.dumps(places))


def mutated(source: str, numbers: Mapping[int, int]) -> ast.Module:
    """The tree with mutants: the number in `numbers` of a place's own number."""
    tree = ast.parse(source)
    wanted = {id(node): (kind, numbers[at]) for at, (kind, node, _) in enumerate(_walk(tree)) if at in numbers}
    tree = _Put(wanted).visit(tree)
    first = next(
        (
            at
            for at, node in enumerate(tree.body)
            if not (isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"))
        ),
        len(tree.body),
    )
    tree.body.insert(first, ast.parse(_IMPORT).body[0])
    return ast.fix_missing_locations(tree)


def _walk(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """(kind, node, function) in an order that depends on the text alone."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, str]]:
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, children = node.name, list(node.body)  # defaults and decorators are evaluated once
        elif isinstance(node, ast.Lambda):
            children = [node.body]
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        elif isinstance(node, ast.JoinedStr | ast.match_case):
            children = list(node.body) if isinstance(node, ast.match_case) else []
        if function and (kind := _kind(node)):
            yield kind, node, function
        for child in children:
            yield from within(child, function)

    yield from within(tree, "")


def _kind(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _OTHER:
            return "comparison"
        case ast.BoolOp():
            return "comparison"
        case ast.Constant(value=bool() | int()):
            return "constant"
        case ast.BinOp(op=operator) if isinstance(operator, _ORDERED) and not isinstance(
            node.left, ast.Constant | ast.JoinedStr
        ):
            return "operands"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "statement"
    return None


class _Put(ast.NodeTransformer):
    """Puts the switch around places; what is within a place first."""

    def __init__(self, wanted: Mapping[int, tuple[str, int]]) -> None:
        self._wanted = wanted

    def visit(self, node: ast.AST) -> ast.AST:
        mine = self._wanted.get(id(node))
        node = self.generic_visit(node)
        if mine is None:
            return node
        kind, number = mine
        asked = ast.parse(f"{_SWITCH}({number})", mode="eval").body
        if kind == "statement":
            return ast.If(ast.UnaryOp(ast.Not(), asked), [node], [])
        return ast.IfExp(asked, _changed(node), node)


def _changed(node: ast.AST) -> ast.expr:
    match node:
        case ast.Compare():
            return ast.Compare(node.left, [_OTHER[type(node.ops[0])]()], node.comparators)
        case ast.BoolOp():
            return ast.BoolOp(_OTHER[type(node.op)](), node.values)
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant():
            return ast.Constant(node.value + 1)
        case ast.BinOp():
            return ast.BinOp(node.right, node.op, node.left)
    raise AssertionError(ast.dump(node))
