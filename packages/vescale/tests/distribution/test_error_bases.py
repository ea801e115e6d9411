"""Errors of pipelines have a base of their own, for their package imports torch only: the core's in all but name."""

import inspect
import pickle

import pytest

from vescale_dtensor import VescaleError
from vescale_pipeline import PipelineError

ARGUMENTS = [
    ("step", "a rule with 3 of 4", (), ()),
    ("step", "a rule", ["x  [4]", "y  [6]"], [("one()", "no cost")]),
    ("step", "a rule", ("x  [4]",), [("one()", "no cost"), ("another(longer)", ""), ("three()", "an all-gather")]),
]


@pytest.mark.parametrize("given", ARGUMENTS)
def test_the_pipelines_base_says_the_same_and_travels(given):
    core, other = VescaleError(*given), PipelineError(*given)
    assert str(other) == str(core)
    assert [getattr(other, name) for name in ("operation", "rule", "operands", "remedies")] == [
        getattr(core, name) for name in ("operation", "rule", "operands", "remedies")
    ]
    assert str(pickle.loads(pickle.dumps(other))) == str(core)
    assert inspect.signature(PipelineError) == inspect.signature(VescaleError)
    assert issubclass(PipelineError, RuntimeError)  # no TypeError or NotImplementedError, which operators swallow
