"""Functions on tensors of which an axis holds parts of the flattened shard (state F).

elementwise      all operands take the first flat one's layout (a replica is sliced: free), the result has it
metadata         local
in order         other dims over the same elements: a view of the part, where no other axis cuts
lists            item by item, each under its own rule
anything else    the flat operand is gathered over its axis, and the function decided anew
in place         as above on the flat shard; what is not elementwise runs whole, and the result is cut again

Which of these a function is, its traits say (`_rules/traits.py`). Flat shards are
parameters, gradients and optimizer states at rest: what computes with them sees them
gathered, block by block. So few functions stay on them, and the others are right, not
fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import map_tensors

from .._conversions.convert import convert_operand
from .._layouts.layout import layout_of
from .._layouts.state import flat
from .._rules.registry import Call, Decision, Entry, Operand, decomposed
from .._rules.traits import Trait
from .._tensor.tensor import DTensor
from .copies import copied_side, mark_copy
from .fallback import gathered, share
from .signature import Signature


def decide_flat(entry: Entry, call: Call) -> Decision:
    """The decision for a call of which some operand is flat."""
    traits = entry.traits
    if entry.rule is not None and (_stays(traits, call) or Trait.LISTS in traits):
        decision = entry.rule(call)
        if isinstance(decision, Signature):
            decision = on_flat(call, decision)
        if decision is not None and (decision.decomposition is not None or _stays(traits, call)):
            return decision
    if Trait.ORDERED in traits and (decision := _reshaped(call)) is not None:
        return decision
    if call.inplace and call.operands[0].layout.flat_axis is not None:
        return decomposed(gathered(call.function, lacks="form on flat shards"))
    return decomposed(_opened(call.function))


def _stays(traits: Trait, call: Call) -> bool:
    """True if the local function of flat shards is the flat shard of the function."""
    if Trait.DRAWS in traits:
        return False
    named = any(isinstance(value, Operand) for value in call.kwargs.values())  # alpha=, a number by itself
    return Trait.METADATA in traits or Trait.ELEMENTWISE in traits and (Trait.LISTS in traits or not named)


def _reshaped(call: Call) -> Decision | None:
    """Other dims over the same elements in the same order: the part of them that a rank has is the same memory. None
    where another axis cuts dims, or the elements are read as those of another dtype."""
    layout = call.operands[0].layout
    axis, arguments = layout.flat_axis, (*call.args, *call.kwargs.values())
    if axis is None or call.inplace or any(isinstance(one, torch.dtype) for one in arguments):
        return None

    sizes = {one.index: torch.empty(one.shape, device="meta") for one in call.operands}

    def sized(one: Any) -> Any:
        return sizes[one.index] if isinstance(one, Operand) else one

    try:
        made = call.function(*map(sized, call.args), **{name: sized(one) for name, one in call.kwargs.items()})
    except RuntimeError:
        return None  # which the function says of whole tensors
    if made is sizes[call.operands[0].index]:  # `flatten` of one dim
        return Decision(out=layout, run=_itself)
    after = tuple(made.shape)
    if after == layout.shape:
        return Decision(out=layout, run=_alias)
    if any(
        size > 1 and one.is_sharded
        for at, (one, size) in enumerate(zip(layout.states, layout.mesh.sizes))
        if at != axis
    ):
        return None
    states = [flat(len(after), one.units) if at == axis else one for at, one in enumerate(layout.states)]
    return Decision(out=layout_of(layout.mesh, states, after), run=_alias)


def _alias(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor.view_as(tensor)


def _itself(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def on_flat(call: Call, signature: Signature) -> Decision | None:
    """Decides on flat shards; None if the function looks at dims, or a partial operand would have to be reduced in
    place."""
    cut = [operand for operand in call.operands if operand.layout.flat_axis is not None]
    lead = cut[0].layout
    outputs = set(signature.outputs)
    full = [operand for operand, labels in zip(call.operands, signature.inputs) if labels in outputs]
    scalars = [operand for operand in call.operands if not operand.ndim]
    if (
        len(outputs) != 1 or None in next(iter(outputs)) or signature.summed or signature.whole or signature.local
        or any(operand not in full and operand not in scalars for operand in call.operands)
        or any(operand.shape != lead.shape for operand in full)
        or (call.inplace and call.operands[0] is not cut[0])
    ):  # fmt: skip
        return None
    linear = any(
        all(call.operands[i].layout is lead for i in together) and len(together) == len(full)
        for together in signature.linear
    )
    if lead.is_partial and not linear:
        if call.inplace:
            return None
        lead = lead.reduced
    targets = []
    for operand in call.operands:
        target = lead if operand in full else operand.layout.invariant
        targets.append(None if operand.layout is target or (operand in scalars and operand.plain) else target)
    outs = (lead,) * len(signature.outputs)
    return Decision(targets=tuple(targets), out=outs[0] if signature.single else outs)


def _opened(function: Callable) -> Callable:
    """`function` with its flat operands gathered over their axes. What would share an operand's memory on one device,
    and shares what was gathered, is marked as a copy."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given: list[tuple[DTensor, DTensor]] = []

        def opened(tensor: Tensor) -> Tensor:
            if type(tensor) is not DTensor or tensor._layout.flat_axis is None:
                return tensor
            layout = tensor._layout.base
            whole = convert_operand(tensor, layout, layout.opened, function)
            if "_of" in tensor.__dict__:  # read in place of a parameter: so is this
                whole.__dict__["_of"] = tensor.__dict__["_of"]
            given.append((tensor, whole))
            return whole

        index = args[1] if function is Tensor.__getitem__ else None

        def marked(out: Tensor) -> Tensor:
            for source, whole in given:
                if type(out) is DTensor and (share(out, whole) or copied_side(out) == "copy"):
                    out = mark_copy(out, source, index=index)
            return out

        return map_tensors(function(*map_tensors(args, opened), **map_tensors(kwargs, opened)), marked)

    return run
