"""Schedules as JSON: what is written is read back, and nothing of another shape is."""

import json

import pytest

from vescale_pipeline import Action, Schedule, ScheduleError, generate


def test_json_round_trip_keeps_content_and_hash():
    schedule = generate("1f1b", 3, 4)
    text = json.dumps(schedule.to_json())
    assert Schedule.from_json(text) == schedule == Schedule.from_json(json.loads(text))
    assert Schedule.from_json(text).hash == schedule.hash


def test_hash_tells_any_two_schedules_apart():
    schedules = [generate(kind, ranks, 4) for kind in ("gpipe", "1f1b") for ranks in (2, 3)]
    actions = schedules[0].actions
    swapped = (actions[0][1::-1] + actions[0][2:], *actions[1:])
    schedules.append(Schedule(**{**_fields(schedules[0]), "actions": swapped}))
    assert len({schedule.hash for schedule in schedules}) == 5


GOOD = generate("1f1b", 2, 2).to_json()


@pytest.mark.parametrize(
    "value, says",
    [
        ("{", "not JSON"),
        ([], "value is [], not Mapping"),
        ({**GOOD, "version": 2}, "format version 2 is newer than 1"),
        ({key: GOOD[key] for key in GOOD if key != "placement"}, "the fields placement are missing"),
        ({**GOOD, "colour": 1}, "the fields colour are unknown"),
        ({**GOOD, "ranks": True}, "ranks is True"),
        ({**GOOD, "microbatches": 0}, "microbatches is 0"),
        ({**GOOD, "name": 3}, "name is 3"),
        ({**GOOD, "placement": [0, "1"]}, "placement is not a list of ranks"),
        ({**GOOD, "actions": ["F0"]}, "actions is not a list, per rank"),
        ({**GOOD, "actions": [[["F", 0]], []]}, "['F', 0] is not an action"),
        ({**GOOD, "actions": [[["X", 0, 0]], []]}, "['X', 0, 0] is not an action"),
        ({**GOOD, "actions": [[["F", 0, 0.0]], []]}, "['F', 0, 0.0] is not an action"),
        ({**GOOD, "actions": [[["F", 0, 0, "1"]], []]}, "is not an action"),
        ({**GOOD, "actions": [["2F0junk"], []]}, "'2F0junk' is not an action"),
    ],
)
def test_other_shapes_are_refused(value, says):
    with pytest.raises(ScheduleError) as raised:
        Schedule.from_json(value)
    assert says in str(raised.value)


def test_an_action_reads_as_what_it_does():
    shown = [str(action) for action in (Action("F", 1, 2), Action("SEND_B", 1, 2, 0), Action("RECV_F", 1, 2, 0))]
    assert shown == ["F(1, 2)", "SEND_B(1, 2) to rank 0", "RECV_F(1, 2) from rank 0"]
    assert str(Action("REDUCE", 3, -1)) == "REDUCE(3)"


def test_order_of_additions_is_known():
    schedule = generate("1f1b", 2, 3)
    assert schedule.adds_in_order
    backwards = [action for action in schedule.actions[1] if action.kind == "B"]
    other = tuple(backwards[1::-1] + backwards[2:])
    assert not Schedule(**{**_fields(schedule), "actions": (schedule.actions[0], other)}).adds_in_order


def _fields(schedule):
    return {name: getattr(schedule, name) for name in Schedule.__dataclass_fields__}
