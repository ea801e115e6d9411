"""The conversion of a tensor that the host reads: to the whole value, in messages of its own (`reads.py`)."""

from __future__ import annotations

from torch import is_grad_enabled

from .._communication import events
from .._communication.reads import compare_reads, over, reading_mesh
from .._tensor.tensor import DTensor, attach, local_only
from .._torch_private import _are_functorch_transforms_active
from .convert import convert, read
from .memo import recall, remember
from .steps import route_of


def convert_to_read(tensor: DTensor, cause: object) -> DTensor:
    """`tensor`, whole on every rank. What autograd or functorch is to know of, and what a pass that is recorded does,
    goes the way of every conversion.

    Raises CommunicationError where other ranks do not read it, too.
    """
    source = tensor._layout.base
    target, apart = source.invariant, reading_mesh(source.mesh)
    is_followed = events.watch is not None or _are_functorch_transforms_active()
    if apart is None or is_followed or (is_grad_enabled() and tensor.requires_grad):
        return convert(tensor, target, cause)
    if tensor._layout is not source:
        tensor = read(tensor)
    with local_only():
        known = recall(tensor, target)
        if known is not None:
            return known
        events.set_cause(cause, tensor, source, target)
        compare_reads(apart, source, tensor)
        out = attach(route_of(over(apart, source), over(apart, target))(tensor).detach(), target)
        remember(tensor, target, out)
        return out
