"""A plan as JSON, and back. Pure.

Everything in which order counts (mesh axes; globs, of which the first match decides)
is written as a list of pairs: JSON objects have no order. A placement is written as
in Python, `"Shard(0)"`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from vescale_dtensor import InterleavedShard, Partial, Placement, RaggedShard, Replicate, Shard

from .fields import PlanFields
from .match import nearest
from .parts import Boundary, Pipeline, Placements, PlanError, Policy, Precision

VERSION = 1

# Name -> class, and the attributes that its arguments are.
_PLACEMENTS: dict[str, tuple[type[Placement], tuple[str, ...]]] = {
    "Shard": (Shard, ("dim",)),
    "Replicate": (Replicate, ()),
    "Partial": (Partial, ("reduce_op",)),
    "InterleavedShard": (InterleavedShard, ("dim", "groups", "order")),
    "RaggedShard": (RaggedShard, ("dims", "local_units")),
}


def placement_text(placement: Placement) -> str:
    """A placement as a person writes it: "Shard(0)", "InterleavedShard(0, 3)", "Partial()"."""
    found = _PLACEMENTS.get(type(placement).__name__)
    if found is None or found[0] is not type(placement):
        raise PlanError(
            "Plan.to_json",
            f"{placement!r} is not a placement that a plan is written with",
            (),
            [(f"use one of {', '.join(_PLACEMENTS)}", "")],
        )
    arguments = [repr(value) for attribute in found[1] if (value := getattr(placement, attribute)) is not None]
    return f"{type(placement).__name__}({'' if placement == Partial() else ', '.join(arguments)})"


def parse_placement(text: Any) -> Placement:
    """The inverse of `placement_text`. Raises PlanError."""
    matched = re.fullmatch(r"(\w+)\((.*)\)", text) if isinstance(text, str) else None
    kind = _PLACEMENTS.get(matched[1]) if matched else None
    try:
        return kind[0](*ast.literal_eval(f"({matched[2]},)" if matched[2] else "()"))
    except (TypeError, ValueError, SyntaxError):
        remedies = [('"Shard(0)", "Replicate()", "InterleavedShard(0, 3)"', "are placements")]
        raise PlanError("Plan.from_json", f"{text!r} is not a placement", (), remedies) from None


def to_json(plan: PlanFields) -> str:
    """See `Plan.to_json`."""
    written = {name: codec.write(getattr(plan, name)) for name, codec in _FIELDS.items()}
    return _pretty({"version": VERSION, **written})


def from_json(text: str | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the plan. See `Plan.from_json`."""
    try:
        record = json.loads(text) if isinstance(text, (str, bytes)) else dict(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise PlanError("Plan.from_json", f"the text is not JSON: {error.msg} at {where}") from None
    if not isinstance(record, dict):
        raise PlanError("Plan.from_json", f"the text holds a {type(record).__name__}, not an object")
    version = record.pop("version", None)
    if version != VERSION:
        raise PlanError(
            "Plan.from_json",
            f"the plan has format version {version!r}, but this veScale reads {VERSION}",
            (),
            [("read it with the veScale that wrote it", "")],
        )
    arguments = {}
    for name, value in record.items():
        if name not in _FIELDS:
            near = nearest(name, list(_FIELDS))
            remedies = [(f"use {near[0]!r}", "")] if near else [("remove it", "")]
            raise PlanError("Plan.from_json", f"a plan has no field {name!r}", (), remedies)
        try:
            arguments[name] = _FIELDS[name].read(value)
        except (TypeError, ValueError, AttributeError, KeyError):
            rule, remedies = f"the field {name!r} cannot be read", [(_FIELDS[name].example, "")]
            raise PlanError("Plan.from_json", rule, [f"{name}  {value!r}"], remedies) from None
    for name in ("mesh", "parameters"):
        if name not in arguments:
            remedies = [(_FIELDS[name].example, "")]
            raise PlanError("Plan.from_json", f"the field {name!r} is missing", (), remedies)
    return arguments


class _Codec(NamedTuple):
    """Codec of one field of a plan, to and from JSON values."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    example: str


def _pairs(write: Callable[[Any], Any] = lambda value: value) -> Callable[[Mapping], list]:
    return lambda mapping: [[name, write(value)] for name, value in mapping.items()]


def _mapping(read: Callable[[Any], Any] = lambda value: value) -> Callable[[list], dict]:
    def parse(pairs: list) -> dict:
        if not isinstance(pairs, list):
            raise TypeError("a list of pairs is what keeps its order")
        return {name: read(value) for name, value in pairs}

    return parse


def _places_out(placements: Placements) -> dict:
    return {axis: placement_text(placement) for axis, placement in placements.items()}


def _places_in(written: Mapping[str, str]) -> dict:
    return {axis: parse_placement(text) for axis, text in written.items()}


def _boundary_out(boundary: Boundary) -> dict:
    parts = {"input": _places_out(boundary.input), "output": _places_out(boundary.output)}
    parts["arguments"] = {name: _places_out(places) for name, places in boundary.arguments.items()}
    return {name: part for name, part in parts.items() if part}


def _boundary_in(written: Mapping[str, Any]) -> Boundary:
    arguments = {name: _places_in(places) for name, places in written.get("arguments", {}).items()}
    sides = {name: _places_in(places) for name, places in written.items() if name != "arguments"}
    return Boundary(**sides, arguments=arguments)


def _pipeline_out(pipeline: Pipeline | None) -> dict | None:
    if pipeline is None:
        return None
    written = {field.name: getattr(pipeline, field.name) for field in fields(Pipeline)} | {"cuts": list(pipeline.cuts)}
    return {name: value for name, value in written.items() if name != "owners" or value}


def _precision_out(precision: Precision | None) -> dict | None:
    if precision is None:
        return None
    values = {field.name: getattr(precision, field.name) for field in fields(Precision)}
    if precision.products is None:
        del values["products"]
    return {n: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for n, v in values.items()}


def _precision_in(written: Mapping[str, Any] | None) -> Precision | None:
    if written is None:
        return None
    named = {n: getattr(torch, v) for n, v in written.items() if isinstance(v, str) and n != "products"}
    return Precision(**{**written, **named})


def _policy_out(policy: Policy) -> dict:
    return {"zero": policy.zero, "precision": _precision_out(policy.precision), "prefetch": policy.prefetch}


def _policy_in(written: Mapping[str, Any]) -> Policy:
    return Policy(**{**written, "precision": _precision_in(written.get("precision"))})


_PLAIN = _Codec(lambda value: value, lambda value: value, "")
_CODECS: dict[str, _Codec] = {
    "mesh": _Codec(_pairs(), _mapping(), '"mesh": [["dp", 2], ["tp", 4]]'),
    "parameters": _Codec(
        _pairs(_places_out), _mapping(_places_in), '"parameters": [["*.up.weight", {"tp": "Shard(0)"}], ["*", {}]]'
    ),
    "boundaries": _Codec(
        _pairs(_boundary_out), _mapping(_boundary_in), '"boundaries": [["*.mlp", {"input": {"tp": "Replicate()"}}]]'
    ),
    "data_axis": _Codec(
        lambda axes: list(axes) if isinstance(axes, tuple) else axes,
        lambda axes: tuple(axes) if isinstance(axes, list) else axes,
        '"data_axis": "dp"',
    ),
    "pipeline": _Codec(
        _pipeline_out,
        lambda written: None if written is None else Pipeline(**written),
        '"pipeline": {"axis": "pp", "cuts": ["layers.4"], "schedule": "1f1b", "microbatches": 8, "virtual": 1}',
    ),
    "checkpointing": _Codec(_pairs(), _mapping(), '"checkpointing": [["layers.*", true]]'),
    "regather": _Codec(_pairs(), _mapping(), '"regather": [["layers.*", true]]'),
    "precision": _Codec(_precision_out, _precision_in, '"precision": {"compute": "bfloat16", "reduce": "float32"}'),
    "blocks": _Codec(_pairs(), _mapping(), '"blocks": [["*.weight", 128]]'),
    "offload_activations": _Codec(_pairs(), _mapping(), '"offload_activations": [["layers.*", true]]'),
    "experts": _Codec(_pairs(), _mapping(), '"experts": [["*.experts", "counts"]]'),
    "policies": _Codec(_pairs(_policy_out), _mapping(_policy_in), '"policies": [["head", {"zero": 2}]]'),
}
_FIELDS = {one.name: _CODECS.get(one.name, _PLAIN) for one in fields(PlanFields)}


def _pretty(record: Mapping[str, Any]) -> str:
    """One field a line, one glob a line."""
    lines = []
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], list) and name != "mesh":
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            lines.append(f'  "{name}": [\n{rows}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}"
