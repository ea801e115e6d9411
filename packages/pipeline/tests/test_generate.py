"""Generated schedules: what each rank computes, and what is refused."""

import pytest

from vescale_pipeline import ScheduleError, generate
from vescale_pipeline.schedules import GENERATORS


def _computed(schedule):
    return [" ".join(f"{a.kind}{a.stage}{a.microbatch}" for a in of if a.kind in "FBIW") for of in schedule.actions]


def test_gpipe():
    assert _computed(generate("gpipe", 2, 2)) == ["F00 F01 B00 B01", "F10 F11 B10 B11"]


def test_one_f_one_b():
    assert _computed(generate("1f1b", 3, 4)) == [
        "F00 F01 F02 B00 F03 B01 B02 B03",
        "F10 F11 B10 F12 B11 F13 B12 B13",
        "F20 B20 F21 B21 F22 B22 F23 B23",
    ]
    assert _computed(generate("1f1b", 3, 1)) == ["F00 B00", "F10 B10", "F20 B20"]


def test_looped_bfs():
    assert _computed(generate("looped_bfs", 2, 2, 2)) == [
        "F00 F01 F20 F21 B20 B21 B00 B01",
        "F10 F11 F30 F31 B30 B31 B10 B11",
    ]


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_kind_computes_everything_once_and_adds_in_order(kind):
    for ranks, microbatches in [(1, 1), (1, 3), (2, 1), (2, 8), (3, 7), (4, 3), (4, 8), (4, 9), (5, 13), (8, 3)]:
        for virtual in {GENERATORS[kind].virtual or 1, GENERATORS[kind].virtual or 3}:
            schedule = generate(kind, ranks, microbatches, virtual)
            computed = [a for actions in schedule.actions for a in actions if a.kind in "FBIW"]
            assert len(set(computed)) == len(computed)
            forwards = {(a.stage, a.microbatch) for a in computed if a.kind == "F"}
            backwards = {(a.stage, a.microbatch) for a in computed if a.kind in "BW"}
            assert len(forwards) == schedule.stages * microbatches == ranks * virtual * microbatches
            assert forwards == backwards
            assert schedule.adds_in_order


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("2f2b", 2, 2), "there is no schedule '2f2b'"),
        (("1f1b", 0, 2), "ranks is 0"),
        (("1f1b", 2, 1.5), "microbatches is 1.5"),
        (("1f1b", 2, 2, 2), "1f1b has 1 stages per rank, not 2"),
    ],
)
def test_what_cannot_be_generated_is_refused(arguments, says):
    with pytest.raises(ScheduleError) as raised:
        generate(*arguments)
    assert says in str(raised.value)
