"""Gradients at the boundary: what a user assigns, or sees in a hook.

The gradient of a DTensor of layout L has the layout `L.gradient` (design section 3,
contract 2). Whatever comes in is converted to it; whatever goes out has it attached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .._conversions.conversion import is_alias
from .._conversions.convert import alias, convert, convert_plain, describe
from .._errors import GradientError
from .._layouts.layout import Layout
from .._layouts.state import INVARIANT, REPLICATE
from .tensor import (
    DTensor,
    attach,
    drop_gradients,
    local_only,
    plain_grad,
    set_plain_data,
    set_plain_grad,
    set_reduced_grad,
)


def grad_of(tensor: DTensor) -> DTensor | None:
    """`tensor.grad`: a DTensor, partial on the axes where this is a replicated parameter, until it was reduced."""
    _end_pass(tensor)
    with local_only():
        partial = plain_grad(tensor)
    reduced = tensor.__dict__.get("_reduced_grad")
    if partial is None:
        found = reduced
    else:
        found = partial if type(partial) is DTensor else _grad_with_layout(tensor, partial)
        if reduced is not None:
            del tensor.__dict__["_reduced_grad"]
            found = fold(found, reduced)
    if found is not None:
        found._gradient_of = id(tensor)
    return found


def _end_pass(tensor: DTensor) -> None:
    """Turns the gradients that a backward that raised has left into one, before anybody looks or writes."""
    owner = tensor.__dict__.get("_owner")
    if owner is not None:
        owner.end_pass()


def held_gradients(tensors: Sequence[DTensor]) -> list[tuple[Tensor | None, Layout | None]]:
    """Returns each `tensor.grad` for whoever wants this rank's part alone, and its layout: what autograd has left is
    plain, and stays so."""
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
    _end_pass(tensor)
    reduced, given = None, value
    if value is not None:
        if type(value) is Tensor and not value.requires_grad:
            value = value.detach()  # a part of it is no view, which would hold what was given
        owner = tensor.__dict__.get("_owner")
        reduced = value if is_reduced_gradient(tensor, value) else None if owner is None else owner.reduced(value)
        value = as_gradient_of(tensor, value, "grad") if reduced is None else None
    set_reduced_grad(tensor, reduced)
    held = value if reduced is None else reduced
    with local_only():
        set_plain_grad(tensor, value)
        before = tensor.__dict__.pop("_refusal", None)
        if before is not None:
            before.remove()
    if given is None or _is_same(held, given):
        return
    if type(given) is DTensor:
        if given.__dict__.get("_gradient_of", id(tensor)) != id(tensor):
            set_grad(tensor, None)
            _refuse_to_share(held, given)
    elif tensor.requires_grad and tensor.is_leaf:
        _refuse_to_add(tensor, given, held)


def _is_same(held: DTensor, given: Tensor) -> bool:
    """True if writes to one are writes to the other, on all ranks alike."""
    layout = held._layout.base
    if type(given) is DTensor:
        return is_alias(given._layout.base, layout)
    whole = all(
        state is INVARIANT or state is REPLICATE or n == 1 for state, n in zip(layout.states, layout.mesh.sizes)
    )
    with local_only():
        return whole and held.data_ptr() == given.data_ptr()


def _refuse_to_share(held: DTensor, given: DTensor) -> None:
    raise GradientError(
        "grad",
        "the gradient of another tensor is given, which lies otherwise: on one device both would be one tensor, and "
        "what is written to one of them would be written to the other",
        [describe("given", given, given._layout), describe("here", held, held._layout)],
        [("tensor.grad = other.grad.clone()", "a gradient of its own")],
    )


def _refuse_to_add(tensor: DTensor, given: Tensor, held: DTensor) -> None:
    """Refuses to add a backward's gradient into memory that was given, as one device does. Where a gradient is a part
    or a copy of it, it does not: if somebody still holds that memory then, and the gradient is the same one, all ranks
    raise."""
    theirs, own = [ref(one) for one in (given, given._base) if one is not None], ref(held)
    owner = tensor.__dict__.get("_owner")
    if owner is not None and owner.hooks is not None and tensor._post_accumulate_grad_hooks is None:
        return  # frozen until now: whoever sums its gradients comes first

    def added(parameter: Tensor) -> None:
        parameter.__dict__.pop("_refusal").remove()
        with local_only():
            now = parameter.__dict__.get("_reduced_grad", plain_grad(parameter))
        if now is None or now is not own() or all(one() is None for one in theirs):
            return
        raise GradientError(
            "backward",
            "it would add to a gradient that was given as a plain tensor, which somebody still holds: on one device it "
            "would add into that tensor's memory, and here the gradient is another",
            [describe("gradient", now, now._layout)],
            [
                ("parameter.grad = value.clone()", "nobody else looks at what is added"),
                ("parameter.grad.full_tensor()", "after the backward: the whole gradient, plain"),
            ],
        )

    tensor._refusal = tensor.register_post_accumulate_grad_hook(added)


def move_grad(tensor: DTensor, held: DTensor) -> None:
    """Keeps `held` as the gradient of a tensor that was given another layout: as a reduced one, for what autograd
    accumulates from now on is laid out otherwise, and may be of another dtype."""
    moved = convert(held, reduced_grad_layout(tensor), "grad")
    drop_gradients([tensor])
    set_reduced_grad(tensor, moved)


def leave_graphs(tensor: DTensor) -> None:
    """Parts a leaf from the graphs that were made of it, for it is to lie otherwise: autograd measures the gradients of
    a leaf by one shape for as long as somebody holds such a graph, a loss perhaps. What one of them brings later is
    refused, unless the leaf lies as it did."""
    before = tensor._layout.base.gradient
    with local_only():
        if not tensor.requires_grad:
            return
        with torch.enable_grad():
            node = tensor.view_as(tensor).grad_fn.next_functions[0][0]
        node.register_prehook(lambda _: _check_lies(tensor, before))
        # torch makes a leaf's node anew for another dtype, and for no other shape
        set_plain_data(tensor, tensor.new_empty(0, dtype=torch.half if tensor.dtype is not torch.half else torch.float))


def _check_lies(tensor: DTensor, layout: Layout) -> None:
    now = layout_of_gradient(tensor)
    if now is not layout:
        raise GradientError(
            "backward",
            "it runs through a graph that was made before the tensor was given data that lie otherwise",
            [f"gradient, as computed  {layout!r}", f"gradient of the tensor now  {now!r}"],
            [
                ("loss.backward() before tensor.data = value", ""),
                ("tensor.data = value.redistribute(tensor.placements)", "the tensor lies as it did"),
            ],
        )


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
    """True if `value` is a gradient of `tensor` that was reduced already: I where it would be partial."""
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
    """Returns the layout that a backward computes for `tensor`."""
    owner = tensor.__dict__.get("_owner")  # of a parameter that computes under another layout than it rests in
    return tensor._layout.gradient if owner is None else owner.full_layout.gradient


def register_hook(function: Any, args: tuple, kwargs: dict) -> Any:
    """`Tensor.register_hook`: the hook sees, and may return, a DTensor in the gradient's layout."""
    tensor, hook = args
    layout = layout_of_gradient(tensor)
    with local_only():
        is_leaf = tensor.is_leaf

    def wrapped(gradient: Tensor) -> Tensor | None:
        lies = layout_of_gradient(tensor) if is_leaf else layout  # a leaf may be given data that lie otherwise
        if is_leaf and tuple(gradient.shape) != lies.local_shape:
            _check_lies(tensor, layout)
        seen = attach(alias(gradient), lies)
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
