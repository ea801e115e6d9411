"""A loss outside of the model's forward: with it, a call of the model gives the loss, under every plan alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from .._calls.chain import add_step
from ..plan import PlanError

LossFn = Callable[..., Any]


class LossBoundary:
    """A step of the root by which `model(...)` returns `loss_fn(output, ...)`, called with the arguments of the call.

    Keyword arguments that the forward does not take (targets) go to `loss_fn` alone.
    """

    def __init__(self, root: nn.Module, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        parameters = list(inspect.signature(root.forward).parameters.values())
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
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
        given = (output, *args), {**kwargs, **rest}
        try:
            return self._loss_fn(*given[0], **given[1])
        except TypeError as error:
            why = _refusal(self._loss_fn, *given)
            if why is None:
                raise
            names = [*self._positional[: len(args)], *given[1]]
            shown = ", ".join(["output", *names[: len(args)], *(f"{name}={name}" for name in given[1])])
            raise PlanError(
                "loss_fn",
                f"it is called with the output and all arguments of the model's call, f({shown}), which it does not "
                f"take: {why}",
                (),
                [(f"loss_fn=lambda {', '.join(['output', *names])}: f(...)", "hands on what f takes")],
            ) from error


def _refusal(function: LossFn, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Says why a function does not take these arguments; None if it takes them, or does not say what it takes."""
    try:
        inspect.signature(function.forward if isinstance(function, nn.Module) else function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        return None
    return None
