"""The mode that a model runs in: what was asked for, and, under "auto", whether somebody looks at a call."""

from __future__ import annotations

import os
import sys
from typing import Literal, cast, get_args

from torch.compiler import is_compiling

from vescale_dtensor.engine import is_reproducible

from .._plan.parts import PlanError
from .._torch_private import _len_torch_dispatch_stack, missing_compiler

Mode = Literal["eager", "auto", "static", "compile"]
MODES: tuple[Mode, ...] = get_args(Mode)

DEFAULT: Mode = "eager"
"""What `parallelize` takes where neither its caller nor the environment says anything."""

VARIABLE = "VESCALE_MODE"


def mode_of(given: str | None) -> Mode:
    """The mode that a caller named, else the environment's, else `DEFAULT`. Raises PlanError for one that is none."""
    found = given if given is not None else os.environ.get(VARIABLE) or DEFAULT
    if found not in MODES:
        rule = f"mode is {found!r}" if given is not None else f"{VARIABLE} is {found!r}, in the environment"
        raise PlanError("parallelize", rule, (), [(f"mode={name!r}", "") for name in MODES])
    return cast(Mode, found)


def check_compiler(operation: str, backend: str, device_type: str) -> None:
    """Raises PlanError where the backend generates code that nothing on this machine can compile: found out by itself,
    it would end the training in the middle of a backward."""
    missing = missing_compiler(device_type) if backend == "inductor" else None
    if missing is not None:
        raise PlanError(
            operation,
            f"inductor generates code for {device_type}, and finds no {missing.removeprefix('a ')} here",
            (),
            [
                (
                    f"install {missing}",
                    "g++, or the one that the environment variable CXX names" if "C++" in missing else "",
                ),
                ('mode="static"', "the same on plain local tensors, not compiled"),
            ],
        )


TOOLS = (0, 3, 4)
"""Numbers of `sys.monitoring`: debuggers' (PEP 669), and those that anybody may take. Coverage (1), profilers (2) and
optimizers (5) look at code, not at what it computes with."""

_get_trace = sys.gettrace
_tool_of = sys.monitoring.get_tool if sys.version_info >= (3, 12) else (lambda tool: None)
_NOBODY = [None] * len(TOOLS)


def is_watched() -> bool:
    """Whether what looks at this call must see global tensors: a trace function of this thread, a debugger among
    Python's monitoring tools, a compiler that traces, a dispatch mode, which would see what is recorded tried twice, or
    the reproducible mode, which orders what it sees."""
    return (
        _get_trace() is not None
        or is_compiling()
        or _len_torch_dispatch_stack() > 0
        or is_reproducible()
        or list(map(_tool_of, TOOLS)) != _NOBODY
    )
