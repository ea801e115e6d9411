"""A run under a pipeline records what each rank did and when, and its timeline is drawn."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import vescale
from vescale_pipeline import Event, draw, generate, record_events
from vescale_testkit import run_ranks, warm_up

warm_up("vescale")

CUTS = ("1", "2", "3")


def _recorded(kind, microbatches):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipeline = vescale.Pipeline(cuts=CUTS, schedule=kind, microbatches=microbatches, virtual=2)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, data_axis=None, pipeline=pipeline)
    loss_of = lambda out, batch: (out - batch).square().mean()
    model, _ = vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn=loss_of)
    batch = torch.randn(2 * microbatches, 4)
    model(batch).backward()
    with record_events() as events, record_events() as again:
        model(batch).backward()
    model(batch).backward()
    assert again == events
    return [tuple(event) for event in events]


@pytest.mark.parametrize("kind", ["interleaved", "zbv"])
def test_every_action_is_recorded_when_it_ran(kind, tmp_path):
    schedule = generate(kind, 2, 4, 2)
    ranks = run_ranks(2, _recorded, kind, 4)
    ends = {}
    for rank, (actions, events) in enumerate(zip(schedule.actions, ranks)):
        events = [Event(*event) for event in events]
        assert [event.action for event in events] == list(actions)
        assert {event.rank for event in events} == {rank}
        assert all(event.start <= event.end for event in events)
        assert all(before.end <= after.start for before, after in pairwise(events))
        ends |= {tuple(event.action[:3]): event.end for event in events}
    # The ranks' clock is one: nothing computes before what it consumes was made, on whichever rank.
    for event in (Event(*event) for events in ranks for event in events):
        name, stage, microbatch, _ = event.action
        if name == "F" and stage:
            assert event.start >= ends["F", stage - 1, microbatch]
    trace = json.loads(draw([event for events in ranks for event in events], tmp_path / "trace.json").read_text())
    assert sum(row["ph"] == "X" for row in trace["traceEvents"]) == sum(map(len, schedule.actions))
