"""What the interpreter does where tensors do not lie on the CPU, in which order it posts, and what it tells of a
message; the rest of it is tested by running pipelines."""

import pytest
import torch

from vescale_pipeline import generate
from vescale_pipeline._runtime import random_order
from vescale_pipeline._runtime.call import Call
from vescale_pipeline._runtime.interpreter import _like
from vescale_pipeline._runtime.random_order import RandomOrder
from vescale_pipeline._transport.p2p import Part, header_of, part_of
from vescale_pipeline.action import COMPUTE
from vescale_pipeline.schedules.generate import GENERATORS


def test_what_stands_for_a_gradient_lies_on_the_pipelines_device():
    told, device = Part((2, 3), (3, 1), torch.float32, False), torch.device("meta")
    (nothing,) = _like((told,), (None,), [None], "B", 0, device)
    (turned,) = _like((told,), (told._replace(stride=(1, 2)),), [torch.ones(3, 2).t()], "F", 1, device)
    assert nothing.device == turned.device == device and turned.stride() == (3, 1)


def test_random_numbers_off_the_cpu_are_told_to_be_others(monkeypatch):
    monkeypatch.setattr(random_order, "states", lambda device: ())  # meta has no generator
    with pytest.warns(UserWarning, match="on meta may not be those of one device"):
        RandomOrder(torch.device("meta"))


@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_receives_are_posted_one_computation_ahead_of_their_turn(kind):
    schedule = generate(kind, 4, 8, 2 if kind in ("interleaved", "zbv", "dualpipe-v") else 1)
    for rank, actions in enumerate(schedule.actions):
        in_turn = Call(None, None).turns(schedule, rank, True, posts_ahead=False)
        turns = Call(None, None).turns(schedule, rank, True, posts_ahead=True)
        assert in_turn == tuple((action, ()) for action in actions)
        assert tuple(action for action, _ in turns) == actions
        posted = []  # in order, and how many computations were done by then
        for action, ahead in turns:
            done = sum(a.kind in COMPUTE for a in actions[: actions.index(action)])
            receives = [*ahead, *([action] if action.kind.startswith("RECV") else [])]
            posted += [(one, done) for one in receives if one not in dict(posted)]
        assert [one for one, _ in posted] == [a for a in actions if a.kind.startswith("RECV")]
        for receive, done in posted:
            assert done == max(sum(a.kind in COMPUTE for a in actions[: actions.index(receive)]) - 1, 0)


def test_a_header_is_made_anew_where_a_message_differs_from_the_one_before():
    x, form = torch.ones(4, 6), (None, "form")
    before = header_of([x, x], form, None)
    assert before == (part_of(x), part_of(x, "form"))
    assert header_of([torch.zeros(4, 6), torch.zeros(4, 6)], form, before) is before
    others = {
        "shape": torch.ones(6, 4), "strides": torch.ones(6, 4).t(), "dtype": x.double(), "none": None,
        "gradient": torch.ones(4, 6, requires_grad=True), "gaps": torch.ones(4, 12)[:, ::2],
    }  # fmt: skip
    for name, other in others.items():
        found = header_of([x, other], form, before)
        assert found is not before and found[0] == before[0], name
        assert found[1] == (None if other is None else part_of(other, "form")), name
    assert header_of([None, x], form, (None, before[1])) == (None, before[1])
    assert header_of([x, x], (None, "another"), before)[1] == part_of(x, "another")
    assert header_of([x], form[:1], before) == before[:1]
