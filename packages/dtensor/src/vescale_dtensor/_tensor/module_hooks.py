"""Modules' backward hooks see global gradients.

`register_full_backward_hook` and its like put an identity, an autograd Function of torch's, before and behind a
module's forward, and hooks on its node. `Function.apply` does not come to `__torch_function__`, and a node's hooks are
handed plain shards. So where one of the tensors is a DTensor the identity is another one, whose node knows the layouts:
its hooks are given each gradient in the state that follows from its tensor's, and what they return is converted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._conversions.convert import alias, convert
from .._layouts.layout import Layout
from .._torch_private import BackwardHookFunction as TorchsFunction
from .gradient import converted_gradient
from .tensor import DTensor, attach

Gradients = Sequence[Tensor | None]
_plain_apply = TorchsFunction.apply


# torch looks for the node by its name, which is the Function's.
class BackwardHookFunction(torch.autograd.Function):
    """torch's identity, on shards."""

    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_non_differentiable(*[arg for arg in args if not arg.requires_grad])
        return args

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


_on_shards = BackwardHookFunction.apply
_Node = BackwardHookFunction._backward_cls
_register = _Node.register_hook


def _register_global(node: Any, hook: Callable) -> Any:
    """The node's `register_hook`, whose hook is given, and may give, global gradients."""
    layouts = node.layouts

    def wrapped(inputs: Gradients, outputs: Gradients) -> Gradients | None:
        answer = hook(_attached(inputs, layouts), _attached(outputs, layouts))
        if answer is None:
            return None
        return tuple(_local(gradient, layout) for gradient, layout in zip(answer, layouts))

    return _register(node, wrapped)


def _local(gradient: Tensor | None, layout: Layout | None) -> Tensor | None:
    if gradient is None or layout is None:
        return gradient
    return alias(converted_gradient(gradient, layout, "backward hook"))


_Node.register_hook = _register_global


def _attached(gradients: Gradients, layouts: Sequence[Layout | None]) -> Gradients:
    return tuple(
        gradient if gradient is None or layout is None else attach(alias(gradient), layout.gradient)
        for gradient, layout in zip(gradients, layouts)
    )


def _apply(*tensors: Tensor) -> tuple[Tensor, ...]:
    if not any(type(tensor) is DTensor for tensor in tensors):
        return _plain_apply(*tensors)
    # A number that not every rank holds is another object than its shard, and its node another one.
    given = [
        convert(one, one._layout.base.invariant, "backward hook")
        if type(one) is DTensor and one._layout.is_number else one for one in tensors
    ]  # fmt: skip
    layouts = [one._layout if type(one) is DTensor else None for one in given]
    outs = _on_shards(*[alias(one) if type(one) is DTensor else one for one in given])
    node = next(out.grad_fn for out in outs if out.grad_fn is not None)
    node.layouts = [None if layout is None else layout.base for layout in layouts]
    return tuple(out if layout is None else attach(out, layout) for out, layout in zip(outs, layouts))


def see_globally() -> None:
    """Makes torch's modules use it from now on; once for the process."""
    TorchsFunction.apply = staticmethod(_apply)
