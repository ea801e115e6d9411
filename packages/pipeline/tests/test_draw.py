"""Timelines of simulated and recorded schedules, as pictures and as traces."""

import json
import sys
from xml.etree import ElementTree

import pytest

from vescale_pipeline import Action, Costs, ScheduleError, chrome_trace, draw, generate, simulate
from vescale_pipeline.schedules import GENERATORS

RECORDED = [
    (0, Action("F", 0, 0), 100.0, 101.0),
    (0, ("SEND_F", 0, 0, 1), 101.0, 101.5),
    (1, ("RECV_F", 1, 0, 0), 101.0, 101.5),
    (1, ("F", 1, 0), 101.5, 102.0),
    (1, ("B", 1, 0), 102.0, 103.0),
]


@pytest.mark.parametrize("kind", GENERATORS)
def test_every_kind_is_drawn(kind, tmp_path):
    pytest.importorskip("matplotlib")
    schedule = generate(kind, 3, 5)
    text = draw(schedule, tmp_path / "timeline.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    # Texts are drawn as outlines, each after a comment that says it: microbatch 4 on each of its computations.
    computed = [action for actions in schedule.actions for action in actions if action.kind in "FBIW"]
    assert text.count("<!-- 4 -->") >= sum(action.microbatch == 4 for action in computed)
    assert f"<!-- {kind}: 3 ranks, 5 microbatches" in text


def test_a_picture_is_as_wide_as_its_page_and_its_legend_is_whole(tmp_path):
    pytest.importorskip("matplotlib")
    text = draw(generate("zbv", 2, 4), tmp_path / "timeline.svg").read_text()
    root = ElementTree.fromstring(text)
    assert "viewBox" in root.attrib and not {"width", "height"} & set(root.attrib)
    assert all(f"<!-- {label} -->" in text for label in ("chunk 0", "chunk 1", "F forward", "I input gradient"))
    assert "fill: #ffffff" in text  # digits on a dark ground


def test_recorded_events_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw(RECORDED, tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert draw([], tmp_path / "nothing.png", title="nothing").stat().st_size > 0


def test_a_picture_is_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    one, two = (draw(generate("zbv", 2, 4), tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two


def test_a_trace_has_every_event_in_its_lane(tmp_path):
    simulated = simulate(generate("zb-h1", 3, 4), Costs(transfer=0.5))
    trace = json.loads(draw(simulated, tmp_path / "trace.json").read_text())
    spans = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert len(spans) == len(simulated.events)
    for row, event in zip(spans, simulated.events):
        assert (row["pid"], row["name"], row["ts"]) == (event.rank, str(event.action), event.start * 1e6)
        assert row["dur"] == pytest.approx((event.end - event.start) * 1e6)
        assert row["tid"] == (event.action.peer is not None)
    names = [row["args"]["name"] for row in trace["traceEvents"] if row["ph"] == "M"]
    assert names == [name for rank in range(3) for name in (f"rank {rank}", "compute", "transfers")]


def test_recorded_time_begins_with_the_first_event(tmp_path):
    spans = [
        row for row in json.loads(draw(RECORDED, tmp_path / "t.json").read_text())["traceEvents"] if row["ph"] == "X"
    ]
    assert [row["ts"] for row in spans] == [0, 1e6, 1e6, 1.5e6, 2e6]
    assert chrome_trace([])["traceEvents"] == []


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ScheduleError, match=r"ends in none of \.png, \.svg, \.json"):
        draw(generate("gpipe", 2, 2), tmp_path / "timeline.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ScheduleError, match="a picture needs matplotlib, which is not installed"):
        draw(generate("gpipe", 2, 2), tmp_path / "timeline.png")
