"""Turns the advice in errors of checkpoints, written for calls of `save` and `load`, into words for a shell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from vescale_checkpoint import CheckpointError

_CALL = re.compile(r"\w+\(.*\)")
_STEP = re.compile(r"load\(\.\.\., step=(\d+)\)")
_KEY = re.compile(r"key='(.*)'")
_WORDS = {
    "load an earlier step": ("vescale checkpoint verify PATH", "says all that is wrong with a step"),
    "save another step": ("another directory", "that has no such step"),
}


@contextmanager
def as_commands() -> Iterator[None]:
    """Within, errors of checkpoints advise commands, options and paths. Also a decorator."""
    try:
        yield
    except CheckpointError as error:
        remedies = [said for remedy in error.remedies if (said := _said(error, *remedy)) is not None]
        raise type(error)(error.operation, error.rule, error.operands, remedies) from error


def _said(error: CheckpointError, code: str, cost: str) -> tuple[str, str] | None:
    """A remedy in words for a shell; None for one that only a program can follow."""
    if code in _WORDS:
        return _WORDS[code]
    if found := _KEY.fullmatch(code):
        return f"--key {found[1]}", cost
    if found := _STEP.fullmatch(code):
        paths = [operand.removeprefix("path  ") for operand in error.operands if operand.startswith("path  ")]
        return f"the path {os.path.dirname(paths[0])}/step-{int(found[1]):08d}", cost
    return None if _CALL.fullmatch(code) else (code, cost)
