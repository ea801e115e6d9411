"""The base of the errors says what its parts say, and needs nothing but itself."""

import subprocess
import sys

import pytest

from vescale_trace import VescaleError
from vescale_trace.errors import typed_call


def test_the_text_has_operation_rule_operands_and_remedies():
    error = VescaleError("__matmul__", "2 of 3", ["lhs  f32[8]", "rhs  f32[9]"], [("lhs.one()", "no communication")])
    assert str(error) == "matmul: 2 of 3\n  lhs  f32[8]\n  rhs  f32[9]\nfix: lhs.one()  # no communication"
    assert (error.operation, error.operands) == ("matmul", ("lhs  f32[8]", "rhs  f32[9]"))


def test_the_text_has_no_control_characters_whoever_named_what_is_in_it():
    name = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    error = VescaleError(name, f"rule {name}\nof two lines", [name], [(name, name)])
    assert all(line.isprintable() for line in str(error).split("\n")) and len(str(error).split("\n")) == 4
    assert "\\x1b]0;title" in str(error) and error.operation == name


@typed_call
def given(path, state=None, *, step=0):
    """Documented."""
    return path + step


@pytest.mark.parametrize(
    ("args", "named", "rule"),
    [
        ((1,), {"lr": 0.1}, "unexpected keyword argument 'lr'"),
        ((), {}, "missing 1 required positional argument: 'path'"),
        ((1, 2, 3), {}, "takes from 1 to 2 positional arguments but 3"),
        ((1,), {"path": 2}, "multiple values for argument 'path'"),
    ],
)
def test_arguments_that_do_not_fit_are_a_typed_error(args, named, rule):
    with pytest.raises(VescaleError, match=rule) as error:
        given(*args, **named)
    assert error.value.operation == "given" and error.value.operands == ("takes  path, state, step",)


def test_what_the_code_of_a_function_raises_is_left_alone():
    assert given(1, step=2) == 3 and given.__doc__ == "Documented."
    with pytest.raises(TypeError, match="concatenate"):
        given("a")
    with pytest.raises(TypeError, match="'int' object is not callable"):
        typed_call(lambda one: one())(3)


def test_the_package_imports_no_sibling():
    code = "import sys, vescale_trace; print(sorted(n for n in sys.modules if n.startswith('vescale')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        ran.stdout.strip()
        == "['vescale_trace', 'vescale_trace._version', 'vescale_trace.errors', 'vescale_trace.text']"
    )
