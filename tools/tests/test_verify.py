"""A check's exit status, figures and time limit become its verdict."""

import sys

import pytest

from verify import CHECKS, Check, run_check


def verdict(program, timeout_s=60.0):
    return run_check(Check(2, 6, "a check", (sys.executable, "-c", program), timeout_s))


def test_the_last_line_holds_the_figures():
    found = verdict("print('text'); print('{\"ratio\": 1.2}')")
    assert found.holds and found.figures == {"ratio": 1.2}
    assert found.as_json()["point"] == "2.6" and "tail" not in found.as_json()


@pytest.mark.parametrize("program", ["", "print('12 passed in 3 s')"])
def test_a_last_line_of_words_holds_none(program):
    assert verdict(program).figures is None


def test_a_check_that_fails_shows_its_end():
    found = verdict("print('why'); raise SystemExit(3)")
    assert not found.holds and found.status == 3
    assert found.as_json()["tail"] == ["why"]


def test_a_check_that_runs_out_of_time_does_not_hold():
    found = verdict("import time; time.sleep(60)", timeout_s=2)
    assert not found.holds and found.status is None


def test_what_is_recorded_names_no_path_of_this_machine():
    recorded = [run_check(Check(2, 6, "a check", (sys.executable, "-c", ""))).as_json()["command"]]
    assert recorded == [f"{sys.executable.rsplit('/', 1)[-1]} -c "]


def test_the_titles_differ():
    assert len({(check.key, check.title) for check in CHECKS}) == len(CHECKS)
