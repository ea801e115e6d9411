"""The base of the errors says what its parts say, and needs nothing but itself."""

import subprocess
import sys

from vescale_trace import VescaleError


def test_the_text_has_operation_rule_operands_and_remedies():
    error = VescaleError("__matmul__", "2 of 3", ["lhs  f32[8]", "rhs  f32[9]"], [("lhs.one()", "no communication")])
    assert str(error) == "matmul: 2 of 3\n  lhs  f32[8]\n  rhs  f32[9]\nfix: lhs.one()  # no communication"
    assert (error.operation, error.operands) == ("matmul", ("lhs  f32[8]", "rhs  f32[9]"))


def test_the_text_has_no_control_characters_whoever_named_what_is_in_it():
    name = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    error = VescaleError(name, f"rule {name}\nof two lines", [name], [(name, name)])
    assert all(line.isprintable() for line in str(error).split("\n")) and len(str(error).split("\n")) == 4
    assert "\\x1b]0;title" in str(error) and error.operation == name


def test_the_package_imports_no_sibling():
    code = "import sys, vescale_trace; print(sorted(n for n in sys.modules if n.startswith('vescale')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        ran.stdout.strip()
        == "['vescale_trace', 'vescale_trace._version', 'vescale_trace.errors', 'vescale_trace.text']"
    )
