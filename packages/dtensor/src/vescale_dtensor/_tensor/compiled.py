"""Tells torch.compile's tracer that a function which is given a DTensor runs as it is written.

A tracer would trace dispatch itself. It asks every tensor of another class how it is taken apart; a DTensor answers
with the error by which torch leaves a function, and all that it calls, to Python. Nothing of torch is changed, and a
function that is given plain tensors first is compiled as ever.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from .._torch_private import TracingContext, compiler_user_errors, skipped_frame

_told = set()
_TEXT = (
    "torch.compile: {name} is given a DTensor, and runs as it is written, with what it calls: a compiler does not see "
    "shards. parallelize(plan, model, optimizer_fn, mode='compile') compiles what of a model is local."
)


class LeftToPython:
    """`__tensor_flatten__`, which a DTensor does not have; a tracer that asks for it is sent away."""

    def __get__(self, tensor: Any, owner: type | None = None) -> None:
        if TracingContext.try_get() is not None:
            raise _sent_away()
        raise AttributeError("__tensor_flatten__")


def _sent_away() -> Exception:
    """The error by which a tracer skips a function and what it calls; under fullgraph=True it is raised to the user."""
    stack = TracingContext.extract_stack()
    name = stack[0].name if stack else "a function"  # what is left is all of it, not only what met the DTensor
    text = _TEXT.format(name=name)
    if name not in _told:
        _told.add(name)
        warnings.warn(text, stacklevel=2)
    error = _left_to_python()(text)
    error.frame_exec_strategy = skipped_frame()
    return error


@functools.cache
def _left_to_python() -> Callable[[str], Any]:
    """The error's class, once torch's tracer is imported."""
    UserError, UserErrorType = compiler_user_errors()

    class LeftToPythonError(UserError):
        # A tracer clears the flag where it has traced into a call, and would compile what is around it.
        skip_frame = property(lambda self: True, lambda self, value: None)

    return functools.partial(LeftToPythonError, UserErrorType.INVALID_INPUT)
