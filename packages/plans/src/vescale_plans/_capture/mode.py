"""The mode that a model runs in, and whether somebody looks at a call."""

from __future__ import annotations

import os
import sys
from typing import Literal, cast, get_args

from torch.compiler import is_compiling
from torch.utils import checkpoint

from vescale_dtensor.engine import is_reproducible, is_strict

from .._plan.parts import PlanError
from .._torch_private import (
    _are_functorch_transforms_active,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _top_saved_tensors_default_hooks,
    compiler_is_asked_otherwise,
    has_global_hooks,
    missing_compiler,
)

Mode = Literal["eager", "compile"]
MODES: tuple[Mode, ...] = get_args(Mode)

DEFAULT: Mode = "eager"
"""The mode that `parallelize` takes if neither its caller nor the environment says anything."""

VARIABLE = "VESCALE_MODE"


def mode_of(given: str | None) -> Mode:
    """Returns the mode that a caller named, else the environment's, else `DEFAULT`. Raises PlanError for another."""
    found = given if given is not None else os.environ.get(VARIABLE) or DEFAULT
    if found not in MODES:
        rule = f"mode is {found!r}" if given is not None else f"{VARIABLE} is {found!r}, in the environment"
        raise PlanError("parallelize", rule, (), [(f"mode={name!r}", "") for name in MODES])
    return cast(Mode, found)


def check_compiler(device_type: str) -> None:
    """Raises PlanError if inductor finds nothing on this machine that compiles the code it generates, which would
    otherwise end the training in the middle of a backward."""
    missing = missing_compiler(device_type)
    if missing is not None:
        which = "g++, or the one that the environment variable CXX names" if "C++" in missing else ""
        raise PlanError(
            "parallelize",
            f"inductor generates code for {device_type}, and finds no {missing.removeprefix('a ')} here",
            (),
            [(f"install {missing}", which), ('mode="eager"', "the same results, not compiled")],
        )


TOOLS = (0, 3, 4)
"""Numbers of `sys.monitoring`: debuggers' (PEP 669), and those that anybody may take. Coverage (1), profilers (2) and
optimizers (5) look at code, not at the values that it computes with."""

_get_trace = sys.gettrace
_tool_of = sys.monitoring.get_tool if sys.version_info >= (3, 12) else (lambda tool: None)
_CHECKPOINT = checkpoint.__name__
_NOBODY = [None] * len(TOOLS)


def watcher(is_checkpointed: bool = False) -> str:
    """Returns what makes the call that begins eager, "" for nothing: somebody must see its tensors or its functions one
    by one, or orders them. `is_checkpointed`: the plan has what is called computed again in its backward."""
    if _get_trace() is not None or list(map(_tool_of, TOOLS)) != _NOBODY:
        return "a debugger watches it"
    if _len_torch_dispatch_stack() or _len_torch_function_stack() or _are_functorch_transforms_active():
        return "a mode or a transform of torch sees its functions"
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is not None and not (is_checkpointed and hooks[0].__module__ == _CHECKPOINT):
        return "hooks take what is saved for its backward"
    if has_global_hooks():
        return "hooks of all modules see its calls"
    if is_reproducible() or is_strict():
        return "the reproducible or the strict mode decides each function"
    if is_compiling() or compiler_is_asked_otherwise():
        return "torch.compiler is set otherwise"
    return ""
