"""Sends, receives and reduces are put where they belong."""

import pytest

from vescale_pipeline import Action, ScheduleError, add_communication, generate


def _text(schedule):
    return [
        " ".join(f"{a.kind}{a.stage}{a.microbatch if a.microbatch >= 0 else ''}" for a in of) for of in schedule.actions
    ]


def test_one_f_one_b_with_its_transfers():
    assert _text(generate("1f1b", 2, 2)) == [
        "F00 SEND_F00 F01 SEND_F01 RECV_B00 B00 RECV_B01 B01 REDUCE0",
        "RECV_F10 RECV_F11 F10 B10 SEND_B10 F11 B11 SEND_B11 REDUCE1",
    ]


@pytest.mark.parametrize("kind, virtual", [("gpipe", 1), ("1f1b", 1), ("looped-bfs", 3)])
def test_every_list_is_a_part_of_one_order_of_transfers(kind, virtual):
    """Taking the transfer that is first on both its ranks, until none is left: so nothing needs a buffer."""
    schedule = generate(kind, 4, 5, virtual)
    left = [[a for a in actions if a.peer is not None] for actions in schedule.actions]
    ends = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
    while any(left):
        rank = next(
            rank
            for rank, actions in enumerate(left)
            if actions and (a := actions[0]).kind in ends and left[a.peer]
            if left[a.peer][0] == (ends[a.kind][0], a.stage + ends[a.kind][1], a.microbatch, rank)
        )
        left[left[rank].pop(0).peer].pop(0)


def test_stages_on_one_rank_hand_over_without_transfer():
    schedule = generate("looped-bfs", 1, 2, 3)
    assert {a.kind for a in schedule.actions[0]} == {"F", "B", "REDUCE"}
    assert [a.stage for a in schedule.actions[0] if a.kind == "REDUCE"] == [2, 1, 0]


def _orders(*texts):
    return [[Action(word[0], int(word[1]), int(word[2])) for word in text.split()] for text in texts]


@pytest.mark.parametrize(
    "orders, says",
    [
        (_orders("F00 B00 F01 B01", "F10 F11 B10 B11"), "wait for each other"),
        (_orders("F00 B00 F10", "F11"), "rank 0 has F(1, 0)"),
        (_orders("F02", ""), "rank 0 has F(0, 2)"),
        ([[Action("SEND_F", 0, 0, 1)], []], "rank 0 has SEND_F(0, 0) to rank 1"),
    ],
)
def test_orders_that_cannot_be_are_refused(orders, says):
    with pytest.raises(ScheduleError, match="add_communication") as raised:
        add_communication("mine", (0, 1), 2, orders)
    assert says in str(raised.value)


def test_a_placement_outside_the_ranks_is_refused():
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 2 of 2"):
        add_communication("mine", (0, 2), 1, [[], []])
