"""The Python body of a torch function, without its check for `__torch_function__`.

Functions of torch.nn.functional that are written in Python hand over to
`__torch_function__` first and have their formula below. `body_of` gives the
formula alone: a copy of the function whose globals say that nothing overrides
torch, so that run on DTensors each call inside it is dispatched by itself.
torch's own function is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType


def _never(*_) -> bool:
    return False


_CHECKS = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)


@lru_cache(maxsize=None)
def body_of(function: FunctionType) -> Callable:
    """`function` below its override check."""
    copy = FunctionType(
        function.__code__, {**function.__globals__, **_CHECKS}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
