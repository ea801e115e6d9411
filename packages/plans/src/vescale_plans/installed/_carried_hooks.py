"""Hooks on gradients that were put on parameters before `parallelize`, which gives their places to shards."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vescale_dtensor.engine import local_only

Hooks = tuple[dict[int, Callable] | None, dict[int, Callable] | None]
"""Hooks of a gradient that is computed, and that was accumulated, by the numbers of their handles."""


def take_hooks(parameter: nn.Parameter) -> Hooks:
    """The hooks that users put on the parameter, which has none any more."""
    with local_only():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    return hooks


def carry_hooks(hooks: Hooks, shard: nn.Parameter) -> None:
    """The shard calls the hooks (`register_hook`, `register_post_accumulate_grad_hook`) that the parameter had, in
    their order, with what hooks of the shard's own are given. Handles that the user holds remove them still."""
    of_gradient, when_accumulated = hooks
    if of_gradient:
        shard.register_hook(_each(of_gradient))
    if when_accumulated:
        shard.register_post_accumulate_grad_hook(_all(when_accumulated))


def _each(hooks: dict[int, Callable]) -> Callable[[Tensor], Tensor | None]:
    def called(gradient: Tensor) -> Tensor | None:
        given = gradient
        for hook in tuple(hooks.values()):
            answer = hook(gradient)
            gradient = gradient if answer is None else answer
        return None if gradient is given else gradient

    return called


def _all(hooks: dict[int, Callable]) -> Callable[[Tensor], None]:
    def called(parameter: Tensor) -> None:
        for hook in tuple(hooks.values()):
            hook(parameter)

    return called
