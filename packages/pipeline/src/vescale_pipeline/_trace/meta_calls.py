"""A call as a dry run makes it, on meta tensors.

devices   those that it names are meta, and what comes is at home where the call says
counts    as many as the call asks for at least: torch has no shape for them
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import PipelineError

_KINDS = frozenset(("cpu", "cuda", "xpu"))
_LIKE = frozenset((Tensor.to, Tensor.type_as))
"""Methods that take the device of a tensor that they are given."""
COUNTS = frozenset((torch.bincount, Tensor.bincount))
"""Functions whose result has as many elements as the values say, of which a dry run knows the least."""


def on_meta(function: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The call on meta tensors."""
    moved = _moved_to(function)
    if moved is not None:
        return Tensor.to, (args[0], "meta"), {}
    if function in COUNTS:
        return partial(_counts, function), args, kwargs
    args = tuple("meta" if _names(function, value) else value for value in args)
    return function, args, {name: "meta" if _is_given(name, value) else value for name, value in kwargs.items()}


def _counts(function: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """torch has no shape for counts: the largest value decides. Where code says how many it wants at least, values
    (experts, labels) are taken to be below that; a stage that finds one that is not raises."""
    if weights is not None or not minlength:
        return function(input, weights, minlength)
    return input.new_empty(minlength, dtype=torch.int64)


def more_counts(found: int, expected: int) -> PipelineError:
    """The error of a stage that counts a value which is not below `minlength`."""
    return PipelineError(
        "pipeline",
        f"bincount met the value {found - 1}, and minlength={expected} promises values below {expected}: between "
        "modules a forward's shapes are known before its values",
        (),
        [("torch.bincount(values, minlength=n)", "n above every value")],
    )


def home_of(function: Any, args: tuple, kwargs: dict) -> torch.device | None:
    """The device that a call names for its result, if it names one."""
    moved = _moved_to(function)
    if moved is not None:
        return placed(torch.device(moved, *(index for index in args[1:2] if isinstance(index, int))))
    named = [value for value in args if _names(function, value)]
    named += [value for name, value in kwargs.items() if _is_given(name, value)]
    if named:
        return placed(torch.device(named[0]))
    like = (*args[1:2], kwargs.get("other")) if function in _LIKE else ()
    return next((tensor.device for tensor in like if isinstance(tensor, Tensor)), None)


def placed(device: torch.device) -> torch.device:
    """The device with the index that tensors there have: of an accelerator without one, this rank's."""
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _moved_to(function: Any) -> str | None:
    """The type of device that a method is named after: `x.cpu()`."""
    name = getattr(function, "__name__", "")
    return name if name in _KINDS and getattr(Tensor, name, None) is function else None


def _is_given(name: str, value: Any) -> bool:
    return value is not None and (name == "device" or isinstance(value, torch.device))


def _names(function: Any, value: Any) -> bool:
    """True if a positional argument is a device: also "cuda:1", as no other string is, and `x.to(1)`."""
    if isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError:
            return False
        return True
    return isinstance(value, torch.device) or function is Tensor.to and type(value) is int
