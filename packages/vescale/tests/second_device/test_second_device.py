"""Trainings on a second device with NCCL's manners: one device's losses, no hang, no new wait of the host.

Where the host waits for the device in a step is kept in snapshots/host_waits.json, by call site, exactly: a wait that
is not there fails, and so does one that is there and is gone. With VESCALE_WRITE_WAITS=1 those of the cases that run
are written anew, of all cases with VESCALE_GRID=full.
"""

import json
import os
from pathlib import Path

import pytest

from sweeps.training_cases import CASES, train
from sweeps.training_verdict import bounds_of, other_waits, own_waits, waits_of, wanted_of, wrong_numbers
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

SNAPSHOT = Path(__file__).parents[1] / "snapshots" / "host_waits.json"
WRITE = os.environ.get("VESCALE_WRITE_WAITS") == "1"
# What fails today, and why: the finding of issue 19 that it shows, or the figure and what is suspected. A case that
# passes though it is listed here fails.
FAILING: dict[str, str] = {}
# Waits of veScale's own that a step may have: what a mixture of experts needs to know, once per layer, and what is done
# beside training. All others train without any.
OWN = {
    "mixtral-experts": 2, "mixtral-experts-zero2": 2, "mixtral-experts-streams": 2, "mixtral-capacity": 2,  # two layers
    "llama-offload": 1,  # until the gradients are on the host
    "llama-load": 27, "llama-reshard": 27,  # a new model's first calls compare inputs and weights between ranks
    "llama-record": 171,  # what is recorded is read
}  # fmt: skip


def known(name: str) -> dict[str, int]:
    return json.loads(SNAPSHOT.read_text()).get(name, {}) if SNAPSHOT.exists() else {}


def case_of(name: str):
    marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=FAILING[name])] if name in FAILING else []
    return pytest.param(name, marks=marks)


def test_what_is_known_of_cases_is_of_cases_that_there_are():
    assert set(json.loads(SNAPSHOT.read_text())) | set(FAILING) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_snapshot_holds_no_wait_of_our_own_but_those_that_are_meant(name):
    assert sum(own_waits(known(name)).values()) == OWN.get(name, 0)


@pytest.mark.parametrize("name", slice_of(map(case_of, CASES), 5))
def test_a_case_trains_as_on_one_device(name):
    case = CASES[name]
    outcomes = run_ranks(case.world, train, case, "second", device="second", timeout=240)
    assert not wrong_numbers(outcomes, wanted_of(case), bounds_of(case))
    if name in FAILING:
        return  # it passes, and so fails: where it waits is written once it is no longer listed
    waits = waits_of(outcomes)
    if WRITE:
        _write(name, waits)
    others = other_waits(waits, known(name))
    assert not others, f"the host waits for the device elsewhere, more often or less: {json.dumps(others, indent=2)}"


def _write(name, waits):
    known = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    known[name] = waits
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
