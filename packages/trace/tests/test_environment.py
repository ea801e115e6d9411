"""Variables are numbers, or errors that name them."""

import pytest

from vescale_trace import VescaleError
from vescale_trace.environment import count, seconds

WRONG = ["", "5m", "-1", "nan", "inf", "1e999", "abc", "0x10", "\u0661", "\x1b[2J", "9" * 500, "1 2"]


@pytest.mark.parametrize("value", [*WRONG, "1.5", "2147483648"], ids=ascii)
def test_what_is_no_count_is_an_error_that_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("VESCALE_X", value)
    with pytest.raises(VescaleError, match=r"^VESCALE_X: .* in the environment, is no whole number") as caught:
        count("VESCALE_X", 1)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


@pytest.mark.parametrize("value", [one for one in WRONG if one != "\u0661"] + ["0"], ids=ascii)
def test_what_is_no_time_is_an_error_that_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("VESCALE_X", value)
    with pytest.raises(VescaleError, match=r"^VESCALE_X: .* in the environment, is no positive number of seconds"):
        seconds("VESCALE_X", 1.0)


def test_numbers_are_read(monkeypatch):
    assert (count("VESCALE_X", 3), seconds("VESCALE_X", 2.5), seconds("VESCALE_X", None)) == (3, 2.5, None)
    monkeypatch.setenv("VESCALE_X", " 12 ")
    assert (count("VESCALE_X", 3), seconds("VESCALE_X", 2.5)) == (12, 12.0)
