"""A public function says of its arguments what does not fit, from its signature alone."""

import inspect
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from vescale_trace import VescaleError
from vescale_trace.arguments import fits, torch_call, typed_call, typed_methods


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


class Place:
    """A path of another library."""

    def __fspath__(self):
        return "a"


class Floats:
    """A number of numpy's kind: it has a dtype, and is no bool of Python's."""

    dtype = bool


@pytest.mark.parametrize(
    ("hint", "fitting", "others"),
    [
        (int, [3, True, -1], ["3", 3.0, None, 2**63, float("nan"), torch.ones(())]),
        (float, [3, 0.5, float("inf")], ["3", None, 1j]),
        (complex, [3, 0.5, 1j], ["3", None]),
        (bool, [True, 1, Floats()], ["yes", None, [], torch.ones(2)]),
        (str | os.PathLike[str], ["a", pathlib.Path("a")], [b"a", 3, None]),
        (str | pathlib.Path, ["a", pathlib.Path("a"), Place()], [b"a", 3, None]),
        (Sequence[int], [[], [1], (1, 2), torch.Size([2])], ["12", b"12", 3, ["1"], None, {}, nn.Linear(1, 1)]),
        (Iterable[int], [[1], iter("a"), {1}], ["12", 3, [None]]),
        (Mapping[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "1"}, [], "a", None]),
        (tuple[int, ...], [(), (1, 2)], [[1], ("1",), "1"]),
        (tuple[int, str], [(1, "a")], [(1,), ("a", 1), (1, "a", 2)]),
        (Callable[[int], str], [str, lambda one: one, nn.ReLU()], ["str", None, 3]),
        (Literal["torch", "philox"] | None, ["torch", None], ["x", 3, []]),
        (nn.Module, [nn.Linear(1, 1)], [nn.Linear, 3, None]),
        (type[nn.Module], [nn.Linear], [nn.Linear(1, 1), 3]),
        (Any, [3, None, "x"], []),
        (object, [3, None, "x"], []),
        (list[list[int]], [[[1], []]], [[[1], 1], [1]]),
    ],
    ids=lambda one: re.sub(" at 0x[0-9a-f]+", "", str(one)),
)
def test_a_value_fits_a_type_or_does_not(hint, fitting, others):
    assert all(fits(one, hint) for one in fitting)
    assert not [one for one in others if fits(one, hint)]


@typed_call
def told(path: "str | os.PathLike[str]", *rest: "int", model: "nn.Module | None" = None, unknown: "Nowhere" = 1) -> str:  # noqa: F821
    """Documented.

    Arguments:
        path: where it is. More of it.
        model, unknown: the whole
            model, in two lines.
    """
    return f"{path} {rest}"


def test_a_value_of_another_type_is_a_typed_error_that_says_what_the_parameter_is():
    assert told(pathlib.Path("a"), 1, 2, model=nn.Linear(1, 1), unknown="x") == "a (1, 2)"
    with pytest.raises(VescaleError) as error:
        told("a", model=[object(), 1])
    assert error.value.rule == "model is [an object, 1], not nn.Module | None"
    assert error.value.operands[1] == "model  the whole model, in two lines."
    with pytest.raises(VescaleError, match="rest is '2', not int"):
        told("a", 1, "2")
    with pytest.raises(VescaleError, match="path is 3, not") as error:
        told(3)
    assert error.value.operands[1] == "path  where it is"


def test_a_function_is_to_others_as_it_was_written():
    assert inspect.signature(told).parameters["path"].annotation == "str | os.PathLike[str]"
    assert told.__doc__.startswith("Documented.") and told.__name__ == "told"
    assert typed_call(typed_call(told))("a") == "a ()"


class Kind:
    def __init__(self, size: int) -> None:
        self.size = size

    def method(self, other: "Kind") -> int:
        return self.size + other.size

    @classmethod
    def made(cls, size: int) -> "Kind":
        return cls(size)

    def _private(self, other: "Kind") -> "Kind":
        return other


typed_methods(Kind, VescaleError)


def test_methods_of_a_class():
    assert Kind(1).method(Kind.made(2)) == 3 and Kind(1)._private(3) == 3

    class Below(Kind):
        def method(self, other: Any) -> int:
            return 0

    assert Below.made(1).method(3) == 0 and type(Below.made(1)) is Below
    for call, operation in (
        (lambda: Kind("1"), "Kind"),
        (lambda: Kind(1).method(3), "Kind.method"),
        (lambda: Kind.made(None), "Kind.made"),
    ):
        with pytest.raises(VescaleError) as error:
            call()
        assert error.value.operation == operation


def test_what_torch_refuses():
    zeros = torch_call(lambda *size, **options: torch.zeros(*size, **options))
    assert zeros(2, dtype=torch.int64).tolist() == [0, 0]
    for args, options in (((-1,), {}), (("x",), {}), ((2,), {"surplus": 1}), ((2,), {"device": "x"})):
        with pytest.raises(VescaleError):
            zeros(*args, **options)
