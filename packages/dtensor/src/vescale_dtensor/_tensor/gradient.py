"""Gradients at the boundary: what a user assigns, or sees in a hook.

The gradient of a DTensor of layout L has the layout `L.gradient` (design section 3,
contract 2). Whatever comes in is converted to it; whatever goes out has it attached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._conversions.convert import alias, convert, convert_plain, describe
from .._errors import GradientError
from .._layouts.layout import Layout
from .tensor import DTensor, attach, drop_gradients, local_only, plain_grad, set_plain_grad, set_reduced_grad


def grad_of(tensor: DTensor) -> DTensor | None:
    """`tensor.grad`: a DTensor, partial on the axes where this is a replicated parameter, until it was reduced."""
    _settle(tensor)
    with local_only():
        partial = plain_grad(tensor)
    reduced = tensor.__dict__.get("_reduced_grad")
    if partial is None:
        return reduced
    if type(partial) is not DTensor:
        partial = _grad_with_layout(tensor, partial)
    if reduced is None:
        return partial
    del tensor.__dict__["_reduced_grad"]
    return fold(partial, reduced)


def _settle(tensor: DTensor) -> None:
    """What a backward that raised has left of its gradients is one, before anybody looks or writes."""
    owner = tensor.__dict__.get("_owner")
    if owner is not None:
        owner.settle()


def held_gradients(tensors: Sequence[DTensor]) -> list[tuple[Tensor | None, Layout | None]]:
    """Of each `tensor.grad` for whoever wants this rank's part alone, and its layout: what autograd has left is plain,
    and stays so."""
    with local_only():
        partials = [plain_grad(tensor) for tensor in tensors]
    return [
        (partial, tensor._layout.base.gradient)
        if type(partial) is Tensor and "_reduced_grad" not in tensor.__dict__
        else _with_reduced(tensor, partial)
        for tensor, partial in zip(tensors, partials)
    ]


def _with_reduced(tensor: DTensor, partial: Tensor | None) -> tuple[Tensor | None, Layout | None]:
    gradient = tensor.__dict__.get("_reduced_grad") if partial is None else grad_of(tensor)
    return gradient, None if gradient is None else gradient._layout.base


def _grad_with_layout(tensor: DTensor, partial: Tensor) -> DTensor:
    attached = attach(partial, tensor._layout.base.gradient)
    if attached is not partial:
        with local_only():
            set_plain_grad(tensor, attached)
    return attached


def set_grad(tensor: DTensor, value: Tensor | None) -> None:
    """`tensor.grad = value`: converted to the gradient's layout, as partial or as reduced as it comes."""
    _settle(tensor)
    reduced = None
    if value is not None:
        owner = tensor.__dict__.get("_owner")
        reduced = value if is_reduced_gradient(tensor, value) else None if owner is None else owner.reduced(value)
        value = as_gradient_of(tensor, value, "grad") if reduced is None else None
    set_reduced_grad(tensor, reduced)
    with local_only():
        set_plain_grad(tensor, value)


def move_grad(tensor: DTensor, held: DTensor) -> None:
    """Keeps `held` as the gradient of a tensor that was given another layout: as a reduced one, for what autograd
    accumulates from now on is laid out otherwise, and may be of another dtype."""
    moved = convert(held, reduced_grad_layout(tensor), "grad")
    drop_gradients([tensor])
    set_reduced_grad(tensor, moved)


def as_gradient_of(tensor: DTensor, value: Tensor, operation: str) -> DTensor:
    """`value` in the gradient layout of `tensor`; a plain value counts as the whole gradient, alike on all ranks.

    Raises GradientError when the global shapes differ.
    """
    return converted_gradient(value, tensor._layout.base, operation)


def converted_gradient(value: Tensor, layout: Layout, operation: str) -> DTensor:
    """`value` as the gradient of a tensor of `layout`; see `as_gradient_of`."""
    if tuple(value.shape) != layout.shape:
        raise GradientError(
            operation,
            f"a gradient of shape {list(value.shape)} for a tensor of shape {list(layout.shape)}",
            [describe("tensor", value, layout)],
            [("give a gradient of the tensor's global shape", "")],
        )
    if type(value) is DTensor:
        return convert(value, layout.gradient, operation)
    return convert_plain(value, layout.mesh, layout.gradient, operation)


def is_reduced_gradient(tensor: DTensor, value: Tensor) -> bool:
    """Whether `value` is a gradient of `tensor` that was reduced already: I where it would be partial."""
    if type(value) is not DTensor or value._layout.base is tensor._layout.base.gradient:
        return False
    return value._layout.base is reduced_grad_layout(tensor)


def reduced_grad_layout(tensor: DTensor) -> Layout:
    """The layout of `tensor`'s gradient after its reduction over the partial axes."""
    return tensor._layout.base.gradient.reduced


def fold(partial: DTensor, reduced: DTensor) -> DTensor:
    """Adds the reduced gradient into the partial one, in place: read between two backwards under `no_sync`."""
    with torch.no_grad():
        added = convert(reduced, partial._layout.base, "grad")
        with local_only():
            partial.add_(added)
    return partial


def layout_of_gradient(tensor: DTensor) -> Layout:
    """What a backward computes for `tensor`."""
    owner = tensor.__dict__.get("_owner")  # of a parameter that computes under another layout than it rests in
    return tensor._layout.gradient if owner is None else owner.full_layout.gradient


def register_hook(function: Any, args: tuple, kwargs: dict) -> Any:
    """`Tensor.register_hook`: the hook sees, and may return, a DTensor in the gradient's layout."""
    tensor, hook = args
    layout = layout_of_gradient(tensor)

    def wrapped(gradient: Tensor) -> Tensor | None:
        seen = attach(alias(gradient), layout)
        answer = hook(seen)
        if answer is None:
            return None
        return alias(as_gradient_of(tensor, answer, "register_hook"))

    with local_only():
        return function(tensor, wrapped)


def accumulate_hook(function: Any, args: tuple, kwargs: dict) -> Any:
    """`Tensor.register_post_accumulate_grad_hook`: the hook gets the tensor itself, once its gradient is reduced."""
    tensor, hook = args
    owner = tensor.__dict__.get("_owner")
    if owner is not None and owner.hooks is not None:
        return owner.register(hook)
    with local_only():
        return function(tensor, hook)
