"""Sums over ranks that calls share: what a call reads is taken so that it needs no sum of its own.

partial     an operand that would stay a sum of parts is taken as the sum that an open scope remembers
alike (I)   an operand beside which another is made alike for nothing (a whole weight, R) is taken as R where an open
            scope remembers it so: its gradient is added up over ranks as it is, and all that comes of this call is part
            of that sum (a router and the gate of a shared expert, beside that expert)
parts       of what a module with cut weights takes apart (a latent key and its rotary part, the step, B and C of a
            state-space layer, rows that are dealt out to experts) the whole is R, and not each part by itself
zeros       a tensor of zeros that nobody has written, to which parts of a sum are added at some indices, is a sum of
            parts from there on: what experts give is added up over ranks once, and not expert by expert. What adds
            to all of it (`add_`, `lerp_`) gives none another layout: an optimizer's states lie as their parameters do

An axis of one rank has no sums to share: there it would only add up gradients in another order than one device does.
None of it depends on values, or on whether gradients are recorded, but the second: under `no_grad` nothing that is
alike is remembered as R. So it is not done where a first pass without gradients has a second one with (a reentrant
checkpoint, within a backward), nor, as for partial operands, while hooks pack what is saved: the second pass of a
checkpoint finds nothing remembered of what enters it. The reproducible mode has an order of its own for sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, is_grad_enabled

from .._conversions import convert as conversions
from .._conversions.memo import already_summed, cut_here, recall, version
from .._conversions.steps import route_of
from .._layouts.layout import Layout
from .._layouts.state import INVARIANT, PARTIAL, REPLICATE
from .._rules.registry import Call, Decision, Operand
from .._tensor.tensor import DTensor, attach, local_only
from .._torch_private import _current_graph_task_id, _storage_Use_Count
from .._torch_private import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from .signature import Signature, solve

BY_INDEX = {Tensor.index_add_, Tensor.index_put_, Tensor.scatter_add_}
"""Functions that add to some indices of their first operand."""


def alike(decision: Decision, operands: Sequence[Operand]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Operands that might be R where they stay I, each with those axes."""
    if decision.parts:
        axes = tuple(a for a in _summed_over(operands[0].layout) if operands[0].states[a] is INVARIANT)
        return ((0, axes),) if axes and not operands[0].plain else ()
    masked = {
        axis
        for operand, target in zip(operands, decision.targets)
        if target is not None and not operand.plain
        for axis in _summed_over(operand.layout)
        if operand.states[axis] is REPLICATE and target.states[axis] is INVARIANT
    }
    found = []
    for operand in operands:
        axes = tuple(axis for axis in sorted(masked) if operand.states[axis] is INVARIANT)
        if axes and not operand.plain:
            found.append((operand.index, axes))
    return tuple(found)


def as_zeros(call: Call, rule: Callable, decision: Decision) -> Layout | None:
    """The layout in which the first operand, were it nothing but zeros, takes parts of sums as they are; None if
    none of the others is to be added up for it, and for what does not add by index."""
    if call.function not in BY_INDEX:
        return None
    own, targets = call.operands[0], decision.targets
    reduced = [
        axis
        for operand, target in zip(call.operands[1:], targets[1:])
        if target is not None
        for axis, state in enumerate(operand.states)
        if state is PARTIAL and target.states[axis] is own.states[axis] and own.states[axis].is_replicated
    ]
    if not reduced or call.args[:1] != (own,):
        return None
    layout = own.layout.with_states([PARTIAL if a in reduced else state for a, state in enumerate(own.states)])
    zeros = Operand(layout, False, own.index)
    given = Call(
        call.function, (zeros, *call.args[1:]), call.kwargs, [zeros, *call.operands[1:]], call.mesh, True
    )
    found = rule(given)
    found = solve(given, found) if isinstance(found, Signature) else found
    fits = found is not None and found.decomposition is None and not (found.targets and found.targets[0])
    return layout if fits else None


def parted(tensor: Tensor, function: Any) -> Tensor:
    """`tensor`, of which parts are about to be taken: R where the module has weights that are cut."""
    cut = cut_here()
    if not cut or type(tensor) is not DTensor or conversions.each_use is not None:
        return tensor
    source = tensor._layout.base
    axes = tuple(axis for axis in _summed_over(source) if axis in cut and source.states[axis] is INVARIANT)
    with local_only():
        if not axes or not tensor.is_floating_point():
            return tensor
    return _read(tensor, _as_r(source, axes), function)


def shared(decision: Decision, function: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The operands as this call is to read them; `tensors` where that is as they are. Not while an operand may be
    written, but the first, of zeros, which is given its other layout."""
    if decision.zeros is not None:
        if not _is_zeros(tensors[0]):
            return tensors
        _make_partial(tensors[0], decision.zeros)
        return list(tensors)
    if decision.parts:
        given = parted(tensors[0], function)
        return tensors if given is tensors[0] else [given, *tensors[1:]]
    if decision.partial and _saved_tensors_hooks(True) is None:
        found = _summed(decision, function, tensors)
        if found is not tensors:
            return found
    return _alike(decision, function, tensors) if decision.alike else tensors


def _summed(decision: Decision, function: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The operands, with the sum in place of each that would stay partial although somebody had it added up before."""
    found = tensors
    for index in decision.partial:
        tensor = tensors[index]
        source = tensor._layout.base
        with local_only():
            target = already_summed(tensor, source)
        if target is not None:
            found = list(tensors) if found is tensors else found
            found[index] = conversions.convert_operand(tensor, source, target, function)
    return found


def _alike(decision: Decision, function: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The operands, with all that are alike as R, if each is remembered so, in a pass that is sure to be the only one
    with gradients, or has none (integers)."""
    if conversions.each_use is not None or any(type(tensors[index]) is not DTensor for index, _ in decision.alike):
        return tensors
    targets = {}
    with local_only():
        for index, axes in decision.alike:
            tensor = tensors[index]
            targets[index] = target = _as_r(tensor._layout.base, axes)
            has_gradients = tensor.is_floating_point() or tensor.is_complex()
            if has_gradients and (recall(tensor, target) is None or not _is_only_pass()):
                return tensors
    found = list(tensors)
    for index, target in targets.items():
        found[index] = _read(tensors[index], target, function)
    return found


def _read(tensor: Tensor, target: Layout, function: Any) -> Tensor:
    """`tensor` as R. Without gradients, too, where there is nothing to convert: layouts do not depend on those."""
    with local_only():
        if not (is_grad_enabled() and tensor.requires_grad):
            return attach(tensor.detach(), target)
    return conversions.convert_operand(tensor, tensor._layout.base, target, function)


def _is_only_pass() -> bool:
    """True if no other pass of this code records gradients: neither of a checkpoint's two is such a one."""
    return is_grad_enabled() and _saved_tensors_hooks(True) is None and _current_graph_task_id() == -1


def _summed_over(layout: Layout) -> list[int]:
    """The axes over which there is anything to add up."""
    return [axis for axis, size in enumerate(layout.mesh.sizes) if size > 1]


def _as_r(layout: Layout, axes: tuple[int, ...]) -> Layout:
    return layout.with_states([REPLICATE if axis in axes else state for axis, state in enumerate(layout.states)])


def _make_partial(tensor: Tensor, layout: Layout) -> None:
    """`tensor` in another layout, in its own memory; right whatever was written there unseen (`.data`, arrays)."""
    with local_only():
        moved = route_of(tensor._layout.base, layout)(tensor)
        if moved is not tensor:
            tensor.copy_(moved)
    tensor._layout = layout if is_grad_enabled() else layout.untracked


def _is_zeros(tensor: Tensor) -> bool:
    """True if it was made of zeros, is as it was made, and is nobody else's memory."""
    if not tensor.__dict__.get("_zeros") or tensor.requires_grad:
        return False
    with local_only():
        return version(tensor) == 0 and _storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
