"""Who calls a function in a dry run: an autograd Function of somebody else, or a checkpoint.

Between modules user code sees placeholders, which no autograd Function is recorded for:
its backward would be left out without a word. torch's own reentrant checkpoint is one
of them, and is run as the other kind instead.
"""

from __future__ import annotations

import inspect
import sys

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from .._errors import PipelineError
from .event import Event

REENTRANT = CheckpointFunction.__name__
_APPLY = torch.autograd.Function.apply.__func__.__code__
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def who_calls() -> tuple[str | None, bool]:
    """The innermost autograd Function that this dry run is in, by name, and whether it is in a checkpoint."""
    frame, function, checkpointed = sys._getframe(1), None, False
    while frame is not None and frame.f_code.co_name != "dry_run":
        if frame.f_code is _APPLY and function is None:
            function = frame.f_locals["cls"].__name__
        checkpointed = checkpointed or frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return function, checkpointed


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
