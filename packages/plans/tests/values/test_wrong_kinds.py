"""Values of a wrong kind, in every field of a plan and of a request for one: PlanError, and nothing of Python's own."""

import dataclasses

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Boundary, Pipeline, Plan, PlanError, Policy, Precision, generate_plan

VALUES = {
    "None": None, "an int": 3, "a negative": -1, "a float": 1.5, "nan": float("nan"), "a bool": True, "a word": "x",
    "no word": "", "bytes": b"dp", "a tuple": (), "a list": [], "numbers": [1], "words": ["dp"], "a dict": {},
    "a count by name": {"a": 1}, "counts": {3: 4}, "a glob of None": {"*": None}, "a glob of a number": {"*": 3},
    "a glob of a list": {"*": [1]}, "an axis of None": {"*": {"dp": None}}, "an axis by number": {"*": {3: Shard(0)}},
    "a glob that is none": {None: {}}, "a class": object, "a tensor": torch.ones(2), "a placement": Shard(0),
    "a function": len, "a set": {1, 2}, "a dtype": torch.bfloat16, "an iterator": iter(()),
    "a boundary of a number": {"0": Boundary(input=3)}, "a boundary of a list": {"0": Boundary(output=[Shard(0)])},
}  # fmt: skip
PLAN = Plan(mesh={"dp": 1}, parameters={"*": {}})


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def fits_or_is_refused(made):
    """Whether a plan came of it, which then fits the model or is refused."""
    try:
        made().validate(model())
    except PlanError as error:
        assert str(error).partition(":")[0] in (
            "Plan", "Plan.override", "Pipeline", "Boundary", "Policy", "Precision",
        )  # fmt: skip
        return False
    return True


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
def test_a_field_of_a_plan(name):
    fields = {"mesh": PLAN.mesh, "parameters": PLAN.parameters}
    new = [fits_or_is_refused(lambda value=value: Plan(**{**fields, name: value})) for value in VALUES.values()]
    changed = [fits_or_is_refused(lambda value=value: PLAN.override(**{name: value})) for value in VALUES.values()]
    assert not all(new) and not all(changed)  # most of them are of no field


@pytest.mark.parametrize("kind", [Pipeline, Boundary, Policy, Precision])
def test_a_field_of_a_part(kind):
    placed = {
        Pipeline: lambda part: Plan(mesh={"pp": 1}, parameters={"*": {}}, pipeline=part),
        Boundary: lambda part: PLAN.override(boundaries={"0": part}),
        Policy: lambda part: PLAN.override(policies={"*": part}),
        Precision: lambda part: PLAN.override(precision=part),
    }[kind]
    for field in dataclasses.fields(kind):
        found = [
            fits_or_is_refused(lambda value=value, name=field.name: placed(kind(**{name: value})))
            for value in VALUES.values()
        ]
        assert not all(found)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seq", ["a float", "a word", "nan", "words", "a tensor", "an iterator", "an int in text"]),
        ("hardware", ["a list", "a dict", "a set", "an int", "a dtype"]),
        ("memory", ["a word", "bytes", "nan", "a bool", "a list", "a class", "a dtype"]),
        ("pin", ["an int", "a word", "a list", "a bool", "an iterator", "a function"]),
        ("forbid", ["an int", "a word", "bytes", "numbers", "a dict", "a tensor", "a function"]),
        ("overrides", ["an int", "a word", "words", "a placement", "a tensor"]),
        ("precision", ["an int", "a word", "a dtype"]),
    ],
)
def test_a_constraint_of_generate_plan(name, values):
    for value in values:
        asked = {"world_size": 2, "batch": 8, "hardware": "h100", "sample": torch.randn(1, 6)}
        with pytest.raises(PlanError, match=f"^generate_plan: {name} is .*, not a"):
            generate_plan(model(), **{**asked, name: VALUES.get(value, "3")})
