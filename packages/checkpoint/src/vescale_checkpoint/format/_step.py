"""The number of a step: which are any, how a directory is called after one."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

import torch

from .._errors import MismatchError
from ._text import shown

if TYPE_CHECKING:
    Step = int | None
else:
    Step = Any  # as users give it, any integer: `step_number` says what is none
MOST_STEP = 10**18 - 1
_NAME = re.compile(r"step-(\d{8,18})", re.ASCII)
_REPLACED = re.compile(r"step-(\d{8,18})\.old-[0-9a-f]+", re.ASCII)
_LEFT = re.compile(r"step-(\d{8,18})\.(tmp|old|gone)-[0-9a-f]+", re.ASCII)


def folder_of(step: int) -> str:
    """The name of a committed step's directory."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a directory of this name holds; None for all other names."""
    return _number(_NAME.fullmatch(name))


def step_replaced(name: str) -> int | None:
    """The step whose former directory, on its way to be replaced, has this name."""
    return _number(_REPLACED.fullmatch(name))


def step_left(name: str) -> tuple[int, str] | None:
    """The step, and "tmp", "old" or "gone", of a directory that a killed save may have left."""
    match = _LEFT.fullmatch(name)
    step = _number(match)
    return None if step is None else (step, match[2])


def _number(match: re.Match[str] | None) -> int | None:
    """Parses names that this module gives: `step-000000009` is not one."""
    if match is None or (len(match[1]) > 8 and match[1][0] == "0"):
        return None
    return int(match[1])


def step_number(operation: str, value: Any, what: str = "step") -> int:
    """The int that a user's step is: an int, one of numpy, or a tensor of one integer.

    Raises MismatchError for anything else, and beyond 0 .. 10**18 - 1: a step is found by the number of its save.
    """
    is_bool = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    try:
        number = None if is_bool else operator.index(value)
    except Exception:  # whatever `__index__` of a tensor raises
        number = None
    if number is None or not 0 <= number <= MOST_STEP:
        found = shown(value) if number is None or number.bit_length() > 128 else str(number)
        raise MismatchError(
            operation, f"{what} is {found}: a step is an integer from 0 to 10**18 - 1",
            (), [("step=int(...)", "its number; True, 3.0 and \"5\" are none")],
        )  # fmt: skip
    return number
