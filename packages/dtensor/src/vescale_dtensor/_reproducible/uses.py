r"""Every use of a value for itself: the order in which the contributions to its gradient are added up.

    one device      x --+-- f          gradient of x   (h + g) + f: autograd runs the nodes from the last that was
                        +-- g                          made to the first, and adds what arrives to what is there
                        +-- h

    on a mesh       x --+-- f
                        +-- x' --+-- g                 (h + g) is added to x' first: other bits
                                 +-- h

So while the mode is on a conversion, whose result is the same value, has one node for each use, made with the use:
forward it is made once, and hands out what it gave; backward each contribution goes its own way to the value that one
device has. A value at several places of one call has a node for each place, on one device as well, made from the last
place to the first, so that the contributions arrive in the order of the places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from vescale_trace.values import fill, map_tensors, tensors_in

from .._communication import events
from .._conversions.convert import Convert, convert_tracked
from .._conversions.memo import recall, remember
from .._conversions.steps import Route, route_of
from .._dispatch.dispatch import call_entry
from .._layouts.layout import Layout
from .._rules.registry import Entry
from .._tensor.tensor import DTensor, attach, local_only
from .grid import ReproducibleError


class Origin(NamedTuple):
    """Source of a converted tensor."""

    source: Tensor
    route: Route | None  # None: the same tensor at another place of a call
    versions: tuple[int, int]  # of the source and of the tensor, when it was made


class Again(Function):
    """Reuses the conversion of `source`, `known`, for another use: nothing is sent. Backward as the conversion's.

    `known` comes in a tuple, out of autograd's sight: an edge to its node would have that send zeros, and add them.
    """

    @staticmethod
    def forward(ctx, source: Tensor, known: tuple[Tensor], route: Route | None) -> Tensor:
        ctx.way = (route, events.current_cause())
        return known[0].detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad if ctx.way[0] is None else Convert.backward(ctx, grad)[0], None, None


def converted(tensor: Tensor, source: Layout, target: Layout, own: bool) -> Tensor:
    """A conversion with gradient (`_conversions/convert.py`), with dispatch disabled: its node serves one use."""
    base = _base(tensor)
    known = None if own else recall(base, target)
    if not tensor.__dict__.pop("_is_free", False):
        tensor = once_more(tensor)
    if known is not None:
        return known if _origin(known) is None else _made(tensor, known, route_of(source, target))
    route = route_of(source, target)
    out = attach(convert_tracked(tensor, route, own), target)
    out._origin = Origin(base, route, (base._version, out._version))
    if not own:
        remember(base, target, out)
    return out


def once_more(tensor: Tensor) -> Tensor:
    """The tensor for another use; with dispatch disabled. Itself where it is no conversion's result."""
    origin = _origin(tensor)
    if origin is None:
        return tensor
    return _made(once_more(origin.source), tensor, origin.route)


def _origin(tensor: Tensor) -> Origin | None:
    """Returns the origin; None if there is none, or one of the two was written to since."""
    origin = tensor.__dict__.get("_origin")
    if origin is None or origin.versions != (origin.source._version, tensor._version) or not tensor.requires_grad:
        return None
    return origin


def _made(source: Tensor, known: Tensor, route: Route | None) -> Tensor:
    base = _base(known)
    out = Again.apply(source, (known,), route)
    if type(known) is DTensor:
        out = attach(out, known._layout)
        out._stands_for, out._is_free = base, True
        out._origin = base.__dict__.get("_origin") or Origin(base, None, (base._version, out._version))
    return out


def _base(tensor: Tensor) -> Tensor:
    """Returns the tensor that a node of a use stands for."""
    stands_for = tensor.__dict__.get("_stands_for")
    return tensor if stands_for is None else stands_for


def value_of(tensor: Tensor) -> Tensor:
    """The tensor that has the gradient of all uses, before the conversions; with dispatch disabled.

    A hook of ours on what a module takes or gives belongs there: the node of a conversion hears of its first use only.
    """
    origin = _origin(tensor)
    while origin is not None:
        tensor = origin.source
        origin = _origin(tensor)
    return tensor


def apart(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with a node for every tensor that has a gradient."""
    tensors = tensors_in((args, kwargs))
    if not is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return args, kwargs
    made = [_made(t, t, None) if t.requires_grad else t for t in reversed(tensors)]
    return fill((args, kwargs), reversed(made))


def places(tensors: list[Tensor], skip: Tensor | None = None) -> dict[int, list[Tensor]] | None:
    """Nodes for the places of one call, by the id of the tensor that stands there, in the order of its places; None
    where no tensor needs one. With dispatch disabled."""
    roots = [value_of(t) if t is not skip and t.requires_grad else None for t in tensors]
    many = len(tensors) > 1
    found: dict[int, list[Tensor]] = {}
    for i in reversed(range(len(tensors))):
        root, tensor = roots[i], tensors[i]
        if root is None:
            continue
        if root is not tensor:
            made = once_more(tensor)
        elif many and sum(other is root for other in roots) > 1:
            made = _made(tensor, tensor, None)
        else:
            continue
        found.setdefault(id(tensor), []).insert(0, made)
    return found or None


def handler_of(entry: Entry) -> Callable:
    """A handler that calls `entry` with a node for every use of a converted tensor."""

    def run(function: Any, args: tuple, kwargs: dict) -> Any:
        tensors = tensors_in((args, kwargs))
        if not tensors or not is_grad_enabled():
            return call_entry(entry, function, args, kwargs)
        writes = entry.inplace or kwargs.get("inplace") is True
        with local_only():
            if writes:
                _check_written(function, tensors[0])
            found = places(tensors, tensors[0] if writes else None)
        if found is None:
            return call_entry(entry, function, args, kwargs)
        args, kwargs, back = replaced(args, kwargs, found)
        try:
            return map_tensors(call_entry(entry, function, args, kwargs), lambda out: back.get(id(out), out))
        finally:
            for made in found.values():
                for node in made:  # which autograd may save
                    node.__dict__.pop("_origin", None)
                    node._stands_for = None

    return run


def replaced(args: tuple, kwargs: dict, found: dict[int, list[Tensor]]) -> tuple[tuple, dict, dict[int, Tensor]]:
    """The arguments with the nodes in place, and what to give back where a node is what comes out."""
    queues = {key: iter(made) for key, made in found.items()}
    back: dict[int, Tensor] = {}

    def other(tensor: Tensor) -> Tensor:
        queue = queues.get(id(tensor))
        if queue is None:
            return tensor
        made = next(queue)
        back[id(made)] = tensor
        return made

    return map_tensors(args, other), map_tensors(kwargs, other), back


def _check_written(function: Any, tensor: Tensor) -> None:
    """Refuses writes to a view of one use, which is no view of the value."""
    if tensor._is_view() and tensor._base is not None and "_stands_for" in tensor._base.__dict__:
        raise ReproducibleError(
            events.function_name(function),
            "a view of a tensor that a plan converted at a module's boundary is written to with gradients",
            [repr(getattr(tensor, "_layout", tensor.shape))],
            [("x = x.clone()", "before the view is taken"), ("x[...] = value", "writes without a view")],
        )


# --- what asks for the gradient of a converted tensor: of the value, that is ----------------


def _of_value(entry: Entry) -> Callable:
    """`register_hook`: the hook sees the gradient of all uses, as on one device."""

    def run(function: Any, args: tuple, kwargs: dict) -> Any:
        with local_only():
            root = value_of(args[0])
        if type(root) is DTensor:
            return entry.handler(function, (root, *args[1:]), kwargs)
        return function(root, *args[1:], **kwargs)

    return run


def _of_inputs(entry: Entry) -> Callable:
    """`torch.autograd.grad`, likewise."""

    def run(function: Any, args: tuple, kwargs: dict) -> Any:
        with local_only():
            if "inputs" in kwargs:
                kwargs = {**kwargs, "inputs": map_tensors(kwargs["inputs"], value_of)}
            elif len(args) > 1:
                args = (args[0], map_tensors(args[1], value_of), *args[2:])
        return entry.handler(function, args, kwargs)

    return run


def _retained(entry: Entry) -> Callable:
    """`retain_grad`: the gradient would be that of no use."""

    def run(function: Any, args: tuple, kwargs: dict) -> Any:
        with local_only():
            converted = value_of(args[0]) is not args[0]
        if converted:
            raise ReproducibleError(
                "retain_grad",
                "the tensor was converted at a module's boundary, and the gradient is that of the value before it",
                [repr(args[0]._layout)],
                [("x.register_hook(...)", "sees the value's gradient"), ("x = x.clone()", "a value of its own")],
            )
        return call_entry(entry, function, args, kwargs)

    return run


ASKING: dict[Callable, Callable[[Entry], Callable]] = {
    Tensor.register_hook: _of_value,
    Tensor.retain_grad: _retained,
    torch.autograd.grad: _of_inputs,
}
