"""A plan as an aligned table, the difference of two, and sizes as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from math import prod
from typing import Any

from .fields import PlanFields
from .json import placement_text
from .parts import Boundary, Pipeline, Placements, Policy, Precision

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def amount(size: float, sign: str = "") -> str:
    """Bytes in a unit in which they can be told from nothing; `sign`: of the number's format."""
    for unit, name in _UNITS:
        if abs(size) >= unit / 20:
            return f"{size / unit:{sign}.2f} {name}"
    return f"{size:{sign}.0f} B"


def table(plan: PlanFields) -> str:
    """`str(plan)`: what is decided for the whole, then one line per glob and one column per mesh axis."""
    axes = list(plan.mesh)
    sizes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = [f"Plan on {sizes} = {prod(plan.mesh.values())} ranks"]
    settings = [(label, text) for label, text in _settings(plan) if text]
    lines += aligned(settings)
    rows = [("parameters", *axes)]
    rows += [(f"  {glob}", *_cells(places, axes, ".")) for glob, places in plan.parameters.items()]
    if plan.boundaries:
        rows += [("boundaries", *axes)]
        for glob, boundary in plan.boundaries.items():
            rows += [(f"  {glob} {side}", *_cells(places, axes, "")) for side, places in _sides(boundary)]
    lines += aligned(rows)
    return "\n".join(line.rstrip() for line in lines)


def _settings(plan: PlanFields) -> Iterator[tuple[str, str]]:
    yield "batch", f"sharded over {', '.join(plan.data_axes)}" if plan.data_axes else "the same on all ranks"
    how = "".join(f", {said}" for said in (plan.context, plan.context_layout) if said != "auto")
    yield "sequences", f"cut over {plan.context_axis}{how}" if plan.context_axis else ""
    if plan.zero:
        parts = ("optimizer states", "gradients", "parameters")[: plan.zero]
        yield "zero", f"{plan.zero}: {', '.join(parts)} sharded over {plan.zero_axis}"
    yield "pipeline", _text(plan.pipeline) if plan.pipeline else ""
    yield "accumulation", f"{plan.accumulation} backwards a step" if plan.accumulation > 1 else ""
    yield "precision", _text(plan.precision) if plan.precision else ""
    yield "gradients", "summed by one all-reduce" if plan.sums == "all_reduce" else ""
    yield "gathered ahead", _ahead(plan) if (plan.prefetch, plan.ahead_bytes) != (1, None) else ""
    hosted = ["optimizer states in host memory"] * plan.offload
    hosted += [f"activations of {glob} {_text(value)}" for glob, value in plan.offload_activations.items()]
    yield "offload", ", ".join(hosted)
    capacity = f", capacity factor {plan.capacity_factor}" if plan.capacity_factor is not None else ""
    declared = "".join(f", {glob} told by {form}" for glob, form in plan.experts.items())
    yield "experts", f"spread over {plan.expert_axis}{capacity}{declared}" if plan.expert_axis else ""
    for name in ("checkpointing", "regather", "blocks", "policies"):
        yield name, ", ".join(f"{glob} {_text(value)}" for glob, value in getattr(plan, name).items())


def _ahead(plan: PlanFields) -> str:
    within = "" if plan.ahead_bytes is None else f", within {plan.ahead_bytes} bytes"
    return f"{plan.prefetch} block{'' if plan.prefetch == 1 else 's'}{within}"


def _sides(boundary: Boundary) -> Iterator[tuple[str, Placements]]:
    for side in ("input", "output"):
        if places := getattr(boundary, side):
            yield side, places
    for name, places in boundary.arguments.items():
        yield f"({name}=)", places


def _cells(placements: Placements, axes: Sequence[str], absent: str) -> list[str]:
    return [placement_text(placements[axis]) if axis in placements else absent for axis in axes]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)) for row in rows]


def _text(value: Any) -> str:
    """Any value of a plan in a few words."""
    match value:
        case Pipeline():
            name = value.schedule if isinstance(value.schedule, str) else value.schedule.get("name", "a schedule")
            begins = ", ".join(("the model", *value.cuts))
            virtual = f", {value.virtual} per rank" if value.virtual > 1 else ""
            stages = f"{value.stages} stages over {value.axis}{virtual}"
            loss = f", losses' {value.loss}" if value.loss else ""
            return f"{stages}, {value.microbatches} microbatches{loss}, {name}; stages begin at {begins}"
        case Precision():
            compute, reduce = (str(dtype).removeprefix("torch.") for dtype in (value.compute, value.reduce))
            sent = f", sends {str(value.sent).removeprefix('torch.')}" if value.sent else ""
            output = f", returns {str(value.output).removeprefix('torch.')}" if value.output else ""
            inputs = "" if value.cast_inputs else ", casts no inputs"
            products = f", linear layers multiply in {value.products}" if value.products else ""
            return f"computes in {compute}, reduces in {reduce}{sent}{output}{inputs}{products}"
        case Policy():
            said = {"zero": value.zero, "prefetch": value.prefetch, "precision": value.precision}
            return "; ".join(f"{name} {_text(one)}" for name, one in said.items() if one is not None) or "as all"
        case Boundary():
            return ", ".join(f"{side} {_text(places)}" for side, places in _sides(value)) or "nothing"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return ", ".join(f"{name}: {placement_text(place)}" for name, place in value.items()) or "Replicate()"
        case tuple():
            return ", ".join(map(_text, value))
        case _:
            return str(value)


@dataclass(frozen=True)
class Change:
    """One difference of two plans: a field, or one name of a mapping; None if a side has no such name."""

    where: str
    before: Any
    after: Any

    def cells(self) -> tuple[str, str, str]:
        before, after = ("absent" if side is None else _text(side) for side in (self.before, self.after))
        return self.where, before, f"-> {after}"

    def __str__(self) -> str:
        return "  ".join(self.cells())


class PlanDiff(tuple):
    """Result of `Plan.diff`: `Change`s, none for equal plans; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in aligned([c.cells() for c in self])) or "no difference"


def diff(before: PlanFields, after: PlanFields) -> PlanDiff:
    """See `Plan.diff`."""
    return PlanDiff(_changes(before, after))


def _changes(before: PlanFields, after: PlanFields) -> Iterator[Change]:
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if not isinstance(old, Mapping):
            if old != new:
                yield Change(field.name, old, new)
            continue
        for name in (*old, *(name for name in new if name not in old)):
            if old.get(name) != new.get(name):
                yield Change(f"{field.name}[{name!r}]", old.get(name), new.get(name))
        yield from _moved(field.name, [name for name in old if name in new], [name for name in new if name in old])


def _moved(field: str, before: list[str], after: list[str]) -> Iterator[Change]:
    """The names, of those in both, whose place among them is another: the fewest that explain the new order."""
    blocks = SequenceMatcher(a=before, b=after, autojunk=False).get_matching_blocks()
    stayed = {name for block in blocks for name in before[block.a : block.a + block.size]}
    for name in before:
        if name not in stayed:
            yield Change(f"{field}[{name!r}] (place)", before.index(name) + 1, after.index(name) + 1)
