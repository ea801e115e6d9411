"""The types of the public modules, and of users' code that is right and wrong."""

from pathlib import Path

import pytest

from checks.check_types import TOP, findings, public_modules

TYPED = Path(__file__).absolute().parent / "typed"


def test_public_modules():
    assert findings(public_modules(TOP)) == []


@pytest.mark.parametrize("name", ["good", "bad"])
def test_users_code(name):
    assert findings([TYPED / f"{name}.py"]) == []


def test_a_mistake_that_is_not_found_is_told(tmp_path):
    (tmp_path / "one.py").write_text("number: int = 3  # error: assignment\n")
    (finding,) = findings([tmp_path / "one.py"])
    assert "mypy finds nothing" in finding


def test_a_mistake_that_nobody_expected_is_told(tmp_path):
    (tmp_path / "one.py").write_text("number: int = 'three'\n")
    (finding,) = findings([tmp_path / "one.py"])
    assert "Incompatible types in assignment" in finding
