"""Refusals of dispatch: results that would be wrong without a word (design, section 3)."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from .._communication import events
from .._conversions.convert import describe
from .._errors import GradientError, OperatorError, PlainTensorError
from .._tensor.tensor import DTensor, local_only

_WHOLE = "vescale: whole"


def check_history(function: Any, tensor: Tensor, tensors: list[Tensor]) -> None:
    """Raises for a plain tensor with a gradient's history, among the operands `tensors`, if a DTensor or a function of
    ours is in that history. Computed from plain leaves alone it is whole and alike on all ranks, as these are. Nodes
    that were found so are not looked at again."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node in seen or _WHOLE in node.metadata:
            continue
        seen.add(node)
        forward = getattr(type(node), "_forward_cls", None)
        if type(getattr(node, "variable", None)) is DTensor or forward and forward.__module__.startswith("vescale"):
            _raise_lost_layout(function, tensor, tensors)
        nodes += [before for before, _ in node.next_functions if before is not None]
    mark_full(tensor)


def mark_full(tensor: Tensor) -> Tensor:
    """A plain tensor that is known to be whole, and alike on all ranks, whatever it comes from."""
    if tensor.grad_fn is not None:
        tensor.grad_fn.metadata[_WHOLE] = True
    return tensor


def _raise_lost_layout(function: Any, tensor: Tensor, tensors: list[Tensor]) -> NoReturn:
    raise PlainTensorError(
        events.function_name(function),
        f"a plain tensor with autograd history (from {tensor.grad_fn.name()}) is combined with a DTensor: it has "
        "lost its layout",
        [
            describe(f"operand {i}", t, t._layout) if type(t) is DTensor else f"operand {i}  plain {list(t.shape)}"
            for i, t in enumerate(tensors)
        ],
        [
            ("DTensor.from_local(tensor, mesh, placements)", "if it is this rank's part: so is its gradient"),
            ("register_rule(function)", "for a function that returns plain tensors"),
        ],
    )


def raise_number(function: Any, tensor: Tensor) -> NoReturn:
    """Raises for a function in place that would change which kind of object a tensor is."""
    name = events.function_name(function)
    raise OperatorError(
        name,
        "in place it would turn a tensor with several elements, or none, into one with a single element, which "
        "is a different kind of object",
        [describe("tensor", tensor, tensor._layout)],
        [(f"tensor.{name.rstrip('_')}()", "the function that returns a new tensor")],
    )


def check_tracked(function: Any, tensor: DTensor) -> None:
    """A DTensor made under no_grad that has a grad_fn of somebody else's Function: its gradients would be wrong."""
    with local_only():
        node = tensor.grad_fn
    forward = getattr(type(node), "_forward_cls", None)
    if forward is None or forward.__module__.split(".")[0] in ("torch", "vescale_dtensor"):
        return
    raise GradientError(
        events.function_name(function),
        f"an operand comes from the autograd Function {forward.__qualname__}, whose forward ran on DTensors under "
        "no_grad: conversions inside it are unknown to its backward",
        [describe("operand", tensor, tensor._layout)],
        [
            (f"register_function({forward.__name__})", "runs it on whole plain tensors, inputs gathered"),
            (f"register_rule({forward.__name__}.apply)(rule)", "says how it runs on shards"),
        ],
    )
