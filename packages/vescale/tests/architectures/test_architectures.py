"""Unmodified architectures of transformers against one device: a handful of what runs found right.

With VESCALE_GRID=full all of these. A step under TP 2 sends no more than the page says. The list is
tools/architectures/types.json, what each said docs/architectures.md; `python -m architectures check` says whether
enough of the whole list are right.
"""

import json

import pytest
import transformers

from architectures import outcome, register, run, table
from vescale_testkit import slice_of

CASES = [(name, case) for case in run.CASES for name in table.right(case)]


def test_the_list_is_of_this_transformers_and_names_what_it_leaves_out():
    listed = json.loads(register.TYPES.read_text())
    assert listed["transformers"] == transformers.__version__
    assert {*listed["types"], *listed["left_out"]} == register.candidates().keys()
    assert sum(name.startswith("other: ") for name in listed["types"]) >= 30


def test_a_wrong_number_is_told():
    found = dict.fromkeys(outcome.BOUNDS, 0.0) | {"by scale": 2e-5, "moved by scale": float("nan")}
    assert outcome.wrong(found).keys() == {"by scale", "moved by scale"}


@pytest.mark.parametrize("name, case", slice_of(CASES, 80))
def test_it_is_right(name, case):
    found = run.tried(name, case)
    assert found["outcome"] == run.RIGHT, found
    assert case != "tp 2" or found["collectives"] <= allowed(name, found["minimum"]), found


def allowed(name, minimum):
    """Collectives of a step: what the page says of the type, or little more than by count."""
    return max(table.kept()[name]["tp 2"]["collectives"], table.NEAR * minimum)
