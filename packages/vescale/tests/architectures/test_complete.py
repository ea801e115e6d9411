"""The parameters of the `tp_plan`s that transformers ships, without boundaries: completed they send no more than with.

A few of them; all with VESCALE_GRID=full.
"""

from dataclasses import replace

import pytest
import torch

import vescale
from architectures.outcome import quiet
from architectures.register import build, inputs_of
from vescale_testkit import slice_of

NAMES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "bamba", "beam", "exaone_moe", "flex_olmo", "glm"),
    *("gpt_neox", "granite", "granite_swa", "granitemoe_swa", "inkling2_text", "minicpm3", "nemotron_h"),
    *("phi3", "qwen2"),
)
"""One of each set of styles that a `tp_plan` has, and that a dry run takes."""


def sent(plan, name):
    """Collectives of a step beside gradient syncs, and the bytes of them."""
    with quiet():
        run = vescale.dry_run(plan, build(name), inputs_of(name), torch.optim.SGD)
    events = [event for event in run.collectives if event.cause.function != "gradient sync"]
    return sum(event.count for event in events), sum(event.received for event in events)


@pytest.mark.parametrize("name", slice_of(NAMES, 4))
def test_parameters_alone_are_completed_to_what_boundaries_take(name):
    shipped = vescale.Plan.from_huggingface(build(name), mesh={"tp": 2})
    with quiet():
        completed = replace(shipped, boundaries={}).complete(build(name), inputs_of(name))
    wanted, found = sent(shipped, name), sent(completed, name)
    assert found[0] <= 1.02 * wanted[0] and found[1] <= 1.02 * wanted[1], (found, wanted)
