"""A rejected schedule never starts: parallelize raises on all ranks, before it touches the model."""

import pytest
import torch
from torch import nn

import vescale
from vescale._stages import schedule_of
from vescale_pipeline import Schedule, ScheduleError, generate
from vescale_testkit import raises_on_all, warm_up

warm_up("vescale")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x)).sum()


def _plan(schedule, microbatches=4):
    pipeline = vescale.Pipeline(cuts=("second",), schedule=schedule, microbatches=microbatches)
    return vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, data_axis=None, pipeline=pipeline)


def _edited(kind, change):
    """A generated schedule's JSON, with the actions of rank 1 changed."""
    value = generate(kind, 2, 4).to_json()
    change(value["actions"][1])
    return value


REJECTED = {
    "dropped": (lambda actions: actions.remove(["B", 1, 2]), r"B\(1, 2\) is there 0 times, not 1"),
    "twice": (lambda actions: actions.append(["B", 1, 2]), r"B\(1, 2\) is there 2 times, not 1"),
    "early": (lambda actions: actions.reverse(), "stands before"),
    "crossed": (
        lambda actions: actions.sort(key=lambda action: (action[0] != "RECV_F", action[0] == "RECV_F" and -action[2])),
        "not of the same tensor",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_verify_rejects_is_not_run(name):
    change, says = REJECTED[name]
    with pytest.raises(ScheduleError, match=says):
        schedule_of(_plan(_edited("1f1b", change)), "cpu")


def test_what_a_transport_cannot_buffer_is_rejected_there():
    """Both ranks send first: tagged messages pass each other, one stream per pair of ranks cannot."""
    value = generate("1f1b", 2, 4).to_json()
    value["actions"][1] = _just_in_time(value["actions"][1])
    assert schedule_of(_plan(value), "cpu") == Schedule.from_json(value)
    with pytest.raises(ScheduleError, match="deadlock under the model 'pair'"):
        schedule_of(_plan(value), "cuda")


def _just_in_time(actions):
    """Every receive directly before the forward that needs it."""
    receives = {action[2]: action for action in actions if action[0] == "RECV_F"}
    others = [action for action in actions if action[0] != "RECV_F"]
    return [each for a in others for each in ([receives[a[2]], a] if a[0] == "F" else [a])]


def _parallelize_rejected():
    model = Net()
    before = [parameter.clone() for parameter in model.parameters()]
    try:
        vescale.parallelize(_plan(_edited("1f1b", REJECTED["dropped"][0])), model)
    finally:
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert all(map(torch.equal, model.parameters(), before))


def test_every_rank_says_so_and_the_model_is_as_before():
    text = raises_on_all(2, ScheduleError, _parallelize_rejected)
    assert "coverage: B(1, 2) is there 0 times, not 1" in text
