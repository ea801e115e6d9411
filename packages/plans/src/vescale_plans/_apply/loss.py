"""A loss outside of the model's forward: with it, a call of the model gives the loss, under every plan alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from .._calls.chain import add_step

LossFn = Callable[..., Any]


class LossBoundary:
    """A step of the root by which `model(...)` returns `loss_fn(output, ...)`, called with the arguments of the call.

    Keyword arguments that the forward does not take (targets) go to `loss_fn` alone.
    """

    def __init__(self, root: nn.Module, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        parameters = inspect.signature(root.forward).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._taken = None if takes_all else {p.name for p in parameters}
        self._for_the_loss: dict[str, Any] = {}
        add_step(root, "loss", self._enter, self._leave)

    def _enter(self, root: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self._taken is None:
            return args, kwargs
        self._for_the_loss = {name: value for name, value in kwargs.items() if name not in self._taken}
        return args, {name: value for name, value in kwargs.items() if name in self._taken}

    def _leave(self, root: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        rest, self._for_the_loss = self._for_the_loss, {}
        return self._loss_fn(output, *args, **kwargs, **rest)
