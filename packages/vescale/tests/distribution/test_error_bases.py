"""Every error of veScale that a user can fix has one base, in all packages, and travels between ranks."""

import importlib
import pickle

import pytest

import vescale
from vescale_pipeline import PipelineError, PipelineFailure, ScheduleError
from vescale_plans import PlanError

PACKAGES = [f"vescale_{name}" for name in ("trace", "dtensor", "rng", "plans", "pipeline", "checkpoint")]


def exported_errors():
    """The exception classes that the packages export, but for warnings and `InternalError`, which names no remedy."""
    things = [thing for name in [*PACKAGES, "vescale"] for thing in vars(importlib.import_module(name)).values()]
    errors = {thing for thing in things if isinstance(thing, type) and issubclass(thing, Exception)}
    return sorted((one for one in errors - {vescale.InternalError} if not issubclass(one, Warning)), key=str)


def test_every_error_is_caught_by_one_base():
    errors = exported_errors()
    assert {PipelineError, ScheduleError, PipelineFailure, PlanError, vescale.CheckpointError} <= set(errors)
    assert [one for one in errors if not issubclass(one, vescale.VescaleError)] == []
    assert not issubclass(vescale.VescaleError, TypeError | NotImplementedError)  # which operators swallow


@pytest.mark.parametrize("error", [vescale.VescaleError, PipelineError, ScheduleError, PlanError])
def test_an_error_travels(error):
    made = error("step", "a rule with 3 of 4", ["x  [4]"], [("one()", "no cost"), ("another(longer)", "")])
    got = pickle.loads(pickle.dumps(made))
    assert type(got) is error and str(got) == str(made)
    assert str(made) == (
        "step: a rule with 3 of 4\n  x  [4]\nfix one of: one()            # no cost\n            another(longer)"
    )
