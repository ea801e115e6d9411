"""Trainings on a second device with NCCL's manners: one device's losses, no hang, no new wait of the host.

Where the host waits for the device in a step is kept in snapshots/host_waits.json, by call site. A wait that is not
there fails; with VESCALE_WRITE_WAITS=1 those of the cases that run are written anew, of all cases with
VESCALE_GRID=full.
"""

import json
import os
from pathlib import Path

import pytest

from training_cases import CASES, train
from training_verdict import more_waits, waits_of, wanted_of, wrong_numbers
from vescale_dtensor.testing import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers")

SNAPSHOT = Path(__file__).parents[1] / "snapshots" / "host_waits.json"
WRITE = os.environ.get("VESCALE_WRITE_WAITS") == "1"
# What fails today, and why: the finding of issue 19 that it shows, or the figure and what is suspected. A case that
# passes though it is listed here fails.
FAILING: dict[str, str] = {}


def known(name: str) -> dict[str, int]:
    return json.loads(SNAPSHOT.read_text()).get(name, {}) if SNAPSHOT.exists() else {}


def case_of(name: str):
    marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=FAILING[name])] if name in FAILING else []
    return pytest.param(name, marks=marks)


def test_what_is_known_of_cases_is_of_cases_that_there_are():
    assert set(json.loads(SNAPSHOT.read_text())) | set(FAILING) == set(CASES)


@pytest.mark.parametrize("name", slice_of(map(case_of, CASES), 5))
def test_a_case_trains_as_on_one_device(name):
    case = CASES[name]
    outcomes = run_ranks(case.world, train, case, "second", device="second", timeout=240)
    assert not wrong_numbers(outcomes, wanted_of(case))
    if name in FAILING:
        return  # it passes, and so fails: where it waits is written once it is no longer listed
    waits = waits_of(outcomes)
    if WRITE:
        _write(name, waits)
    more = more_waits(waits, known(name))
    assert not more, f"the host waits for the device where it did not, or more often: {json.dumps(more, indent=2)}"


def _write(name, waits):
    known = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    known[name] = waits
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
