"""The result of a call: the loss, connected to the parameters, so that `loss.backward()` releases the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import tensors_in

from .._errors import PipelineError
from .._torch_private import DisableTorchFunctionSubclass as local_only
from .._torch_private import _foreach_mul


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a forward returned: what is called so, or else its only number (0-dim, floating)."""
    if isinstance(output, Tensor):
        return output if _is_number(output) else None
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named if _is_number(named) else None
    numbers = [tensor for tensor in tensors_in(output) if _is_number(tensor)]
    return numbers[0] if len(numbers) == 1 else None


Weight = float | Tensor
Weights = list[float] | list[Tensor]
"""Weights of the microbatches; on a device, numbers in double precision that the host does not know."""


def weighted(losses: Sequence[Tensor], weights: Weights) -> Tensor:
    """The batch's loss, of the microbatches'; one that has no weight is left out: it may be 0 / 0."""
    if weights and isinstance(weights[0], Tensor):
        precise = torch.promote_types(losses[0].dtype, torch.float32)  # as the product with a Python number
        parts = [
            (loss * weight.to(precise)).to(loss.dtype).masked_fill(weight == 0, 0)
            for loss, weight in zip(losses, weights)
        ]
        return sum(parts[1:], parts[0])
    kept = [(loss, weight) for loss, weight in zip(losses, weights) if weight]
    if not kept:
        return torch.zeros_like(losses[0])
    total, *others = _foreach_mul(*map(list, zip(*kept)))
    for part in others:
        total = total + part
    return total


def no_loss(output: Any) -> PipelineError:
    """The error for a training call whose forward returns no loss."""
    shapes = [f"{list(tensor.shape)}" for tensor in tensors_in(output)]
    return PipelineError(
        "pipeline",
        f"the forward returns {', '.join(shapes) or 'no tensor'}, and no loss: a number, or what it names `loss`",
        (),
        [
            ("parallelize(plan, model, optimizer_fn, loss_fn=f)", "model(x, target=y) is f(output, x, target=y)"),
            ("model(input_ids=x, labels=y)", "a model that computes its loss when it is given labels"),
            ("with torch.no_grad(): model(x)", "evaluation returns whole outputs"),
        ],
    )


def _is_number(tensor: Tensor) -> bool:
    with local_only():  # placeholders are asked several times in a call
        return tensor.ndim == 0 and tensor.is_floating_point()


class Gradients:
    """The gradients of one call, until the user's backward takes them.

    They were computed for a loss scaled by `scale`, a guess of what the backward will
    scale it by: the last call's. So a loss scaler's factor was in the backward, where
    half precision needs it. Where the guess is right nothing is multiplied on the CPU; a
    device's factor is not known to the host, and multiplying by 1 changes nothing.
    `releases` is told that they are taken; it raises if the pipeline is known to have failed since the call.
    """

    def __init__(self, sums: list[Tensor | None], scale: Weight, releases: Callable[[], None]) -> None:
        self._sums: list[Tensor | None] | None = sums
        self._scale, self._releases = scale, releases
        self.used = scale

    def take(self, incoming: Tensor) -> list[Tensor | None]:
        sums, self._sums = self._sums, None
        if sums is None:
            raise PipelineError(
                "backward",
                "the gradients of this call were released by an earlier backward",
                (),
                [("loss = model(batch)", "once per backward; retain_graph has no meaning here")],
            )
        self._releases()
        if incoming.is_meta:  # a dry run, whose backward scales as the one before
            return sums
        if incoming.device.type == "cpu":
            scale = incoming.item()
            if scale and isfinite(scale):
                self.used = scale
            if scale == self._scale:
                return sums
        else:
            scale = incoming.double()
            guess = torch.full_like(scale, self._scale) if isinstance(self._scale, float) else self._scale
            self.used = scale.where(scale.isfinite() & (scale != 0), guess)
        factor = scale / self._scale
        for i, gradient in enumerate(sums):
            if gradient is not None:  # not in place: of a single microbatch two may share memory
                sums[i] = gradient * factor
        return sums


class Release(torch.autograd.Function):
    """A loss whose backward hands out gradients that are computed already: hooks, scalers and data-parallel
    reductions see one ordinary backward."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, loss: Tensor, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple:
        return (None, None, None, *ctx.gradients.take(incoming))


def released(
    gradients: list[Tensor | None], scale: Weight, loss: Tensor, parameters: list[Tensor], releases: Callable[[], None]
) -> tuple[Tensor, Gradients]:
    """`loss`, connected to the parameters."""
    held = Gradients(gradients, scale, releases)
    return Release.apply(held, loss, torch.zeros((), requires_grad=True), *parameters), held
