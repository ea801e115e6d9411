"""Finds who calls a function in a dry run: an autograd Function of somebody else, or a checkpoint.

Between modules user code sees placeholders, which no autograd Function is recorded for:
its backward would be left out without a word. torch's own reentrant checkpoint is one
of them, and is run as the other kind instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FrameType
from weakref import WeakKeyDictionary

import torch.utils.checkpoint
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from vescale_trace.stack import frames

from .._errors import PipelineError
from .event import Event

REENTRANT = CheckpointFunction.__name__
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def who_calls() -> tuple[str | None, FrameType | None]:
    """The innermost autograd Function that this dry run is in, by name, and the call of the outermost checkpoint."""
    function = checkpointed = None
    for frame in frames():
        if frame.f_code.co_name == "dry_run":
            break
        function = function or _function_of(frame.f_code)
        if frame.f_code is _CHECKPOINT:
            checkpointed = frame
    return function, checkpointed


def _function_of(code: CodeType) -> str | None:
    """The autograd Function whose forward this is, by name. `apply` leaves no frame: from torch 2.15 on it is C."""
    if code not in _functions:
        _functions[code] = None
        for one in _subclasses(Function):
            forward = inspect.unwrap(one.forward)
            if hasattr(forward, "__code__"):
                _functions[forward.__code__] = one.__name__
    return _functions[code]


def _subclasses(one: type) -> Iterator[type]:
    for derived in one.__subclasses__():
        yield from _subclasses(derived)
        yield derived


_functions: WeakKeyDictionary[CodeType, str | None] = WeakKeyDictionary()


def check_caller(event: Event) -> None:
    """Raises PipelineError for an event between modules that an autograd Function called."""
    if event.inside not in (None, REENTRANT):
        raise PipelineError(
            "pipeline",
            f"the autograd Function {event.inside} is applied between modules (it calls {event.name!r}): every stage "
            "runs this code on placeholders, and its backward would be left out",
            (),
            [("call it inside a module that lies within one stage", "there it runs as it is")],
        )
