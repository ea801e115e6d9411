"""The page of evidence is what the newest results say, and of each kind of results there is one file."""

import json

import pytest

import evidence


def test_the_page_is_what_results_say():
    assert (evidence.TOP / evidence.PAGE).read_text() == evidence.page(), "python tools/evidence.py writes it"


@pytest.fixture
def folder(tmp_path):
    for name, record in {
        "2026-01-01-speed": {"ratio": 2.0, "only": [{"before": 1.5}]},
        "2026-01-02-speed": {"ratio": 3.0},
        "2026-01-02-speed-night": {"ratio": 0.256},
        "2026-01-03-other": {"ratio": 9.0},
        "2026-01-02": {"parts": {"a": {"holds": True}, "b": {"holds": False}}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    return tmp_path


def test_a_figure_is_of_the_newest_file_that_has_it(folder):
    assert evidence.figure(folder, "speed", "ratio", ".0%") == ("26%", "2026-01-02-speed-night.json")
    assert evidence.figure(folder, "speed", "only > 0 > before", "") == ("1.5", "2026-01-01-speed.json")
    assert evidence.figure(folder, "day", "parts", "") == ("1 of 2", "2026-01-02.json")
    with pytest.raises(LookupError, match="'speed' has 'ratio > x'"):
        evidence.figure(folder, "speed", "ratio > x", "")


def test_there_is_one_file_of_each_kind():
    names = [path.stem[11:] for path in (evidence.TOP / "results").glob("????-??-??*.json") if "T" not in path.stem]
    assert len(names) == len(set(names))
