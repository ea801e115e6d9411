"""Hooks on gradients that were put on parameters before `parallelize`, which gives their places to shards."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vescale_dtensor.engine import local_only


def carry_hooks(parameter: nn.Parameter, shard: nn.Parameter) -> None:
    """The shard calls the parameter's hooks (`register_hook`, `register_post_accumulate_grad_hook`), in their order,
    with what hooks of the shard's own are given. Handles that the user holds remove them still."""
    with local_only():
        of_gradient, when_accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
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
