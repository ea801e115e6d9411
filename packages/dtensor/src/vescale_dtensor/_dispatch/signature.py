"""Signatures: an operator's dims by name, and the solver that turns one into a decision.

    matmul          b m k, b k n -> b m n     k summed
    softmax         b t v        -> b t v     v whole
    add             b t,   t     -> b t       additive

A label names one extent. A dim of size 1 that broadcasts, or one that the operator
must see whole and gives no name, has the label None. Each mesh axis is decided on
its own; the choices are

    I         all operands I
    R         all operands R
    P         the operands of one entry of `linear` partial, the addends too, the rest R
    S(label)  operands that have the label sharded on it, the rest R (addends P if it is summed)

where only cuts that some operand has already are tried. The choice with the least
communication in the forward wins, then in the backward, then with the fewest
conversions: sharded work stays sharded, and nothing moves that need not.
(Labels as in an einsum; per-axis states as in design section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from .._conversions.conversion import axis_cost
from .._layouts.layout import Layout, layout_of
from .._layouts.region import cut_sizes, divides
from .._layouts.state import INVARIANT, PARTIAL, REPLICATE, State, sharded
from .._rules.registry import Call, Decision, Operand

Label = Hashable
EVEN = sharded(0)
Labels = tuple[Label | None, ...]


@dataclass
class Signature:
    """Describes one operator call by naming its dims.

    Arguments:
        inputs: the label of each dim of each tensor operand, in the order of the call.
        outputs: the label of each dim of each output.
        summed: labels that the operator sums over; if one is sharded, the output is partial.
        linear: alternatives, each a set of operands that may be partial together.
        addends: operands that are added once (a bias): partial if the output is.
        whole: labels that must not be sharded.
        shapes: the shapes of the outputs; by default the extent of each label, and 1 for None.
        single: whether the function returns a bare tensor.
        local: from the solved output layouts, the function to run on local tensors.
        extra: further valid choices for an axis, as (input states, output states).
        whole_gradient: whether the operator's backward is not linear in the gradient, which must not be partial: no
            output is R.
    """

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    summed: frozenset | set | tuple = ()
    linear: Sequence[tuple[int, ...]] = ()
    addends: tuple[int, ...] = ()
    whole: frozenset | set | tuple = ()
    shapes: Sequence[tuple[int, ...]] | None = None
    single: bool = True
    local: Callable[[tuple[Layout, ...]], Callable] | None = None
    extra: Callable[[int], Iterable[tuple[tuple[State, ...], tuple[State, ...]]]] | None = None
    whole_gradient: bool = False


def solve(call: Call, signature: Signature) -> Decision | None:
    """The decision for a call, or None when no choice fits (an in-place operand that would have to move)."""
    operands = call.operands
    fixed = 0 if call.inplace else None
    columns = []
    for axis in range(call.mesh.ndim):
        best = _best(signature, operands, call.mesh, axis, fixed, columns)
        if best is None:
            return None
        columns.append(best)
    targets = []
    for i, operand in enumerate(operands):
        states = tuple(column[0][i] for column in columns)
        target = layout_of(call.mesh, states, operand.shape)
        targets.append(None if target is operand.layout else target)
    shapes = signature.shapes or [_shape(labels, signature, operands) for labels in signature.outputs]
    outs = tuple(
        layout_of(call.mesh, tuple(column[1][o] for column in columns), shapes[o])
        for o in range(len(signature.outputs))
    )
    run = signature.local(outs) if signature.local is not None else None
    return Decision(targets=tuple(targets), out=outs[0] if signature.single else outs, run=run)


def _best(signature: Signature, operands: list[Operand], mesh, axis: int, fixed: int | None, columns: list):
    """The cheapest (input states, output states) of one axis."""
    count = mesh.sizes[axis]
    numels = [unsharded_numel(operand.layout, axis) for operand in operands]
    best, best_cost = None, None
    for order, (inputs, outputs) in enumerate(_choices(signature, operands, axis, fixed)):
        if fixed is not None and (inputs[fixed] is not operands[fixed].states[axis] or outputs[0] is not inputs[fixed]):
            continue
        if not _divides(inputs, operands, columns, mesh.sizes):
            continue
        forward = backward = moves = 0.0
        for operand, target, numel in zip(operands, inputs, numels):
            state = operand.states[axis]
            if state is target:
                continue
            there, back = axis_cost(state, target, count, numel)
            forward += there
            if not operand.plain:
                backward += back
                moves += 1
        cost = (forward, backward, moves, order)
        if best_cost is None or cost < best_cost:
            best, best_cost = (inputs, outputs), cost
    return best


def _divides(inputs, operands: list[Operand], columns: list, sizes: tuple[int, ...]) -> bool:
    """True if grouped and ragged cuts divide what the axes before leave of their dim, on every rank."""
    for i, (state, operand) in enumerate(zip(inputs, operands)):
        if state.kind != "S" or (state.groups == 1 and state.units is None):
            continue
        left = {operand.shape[state.dim]}
        for before, (states, _) in enumerate(columns):
            outer = states[i]
            if outer.kind == "S" and outer.dim == state.dim:
                left = {size for whole in left for size in cut_sizes(outer, whole, sizes[before])}
        if not all(divides(state, size) for size in left):
            return False
    return True


def _choices(signature: Signature, operands: list[Operand], axis: int, fixed: int | None):
    """All (input states, output states) that are right for one axis, the plainest first. `fixed`: an operand that is
    written in place.

    Where the features of a linear are cut (row parallel) they are a summed label that is cut: the output is PARTIAL,
    and so is the bias, an addend, which the conversion keeps on the axis's first rank (`_conversions/steps.py`:
    `_keep_on_first`). In the same way `x.sum()` of a sharded x is PARTIAL, and moves nothing until it is needed.
    """
    n, outputs = len(operands), signature.outputs
    yield (INVARIANT,) * n, (INVARIANT,) * len(outputs)
    if not signature.whole_gradient or operands[0].layout.mesh.sizes[axis] == 1:
        yield (REPLICATE,) * n, (REPLICATE,) * len(outputs)
    states = [operand.states[axis] for operand in operands]
    if PARTIAL in states:
        summands = max(operand.layout.numel for operand, state in zip(operands, states) if state is PARTIAL)
        stays = fixed is not None and states[fixed] is PARTIAL
        for together in signature.linear:
            if not stays and any(states[i].kind == "S" and operands[i].layout.numel > summands for i in together):
                continue  # free, but for `x - x.mean()` the sum of all of x is due then, of parts that cancel
            partial = {*together, *signature.addends}
            yield tuple(PARTIAL if i in partial else REPLICATE for i in range(n)), (PARTIAL,) * len(outputs)
    for label, cut in _cuts(signature, operands, axis):
        summed = label in signature.summed
        if not summed and any(label not in labels for labels in outputs):
            continue
        yield (
            tuple(
                cut.at(labels.index(label)) if label in labels
                else PARTIAL if summed and i in signature.addends
                else REPLICATE
                for i, labels in enumerate(signature.inputs)
            ),
            tuple(cut.at(labels.index(label)) if label in labels else PARTIAL for labels in outputs),
        )  # fmt: skip
    if signature.extra is not None:
        yield from signature.extra(axis)


def _cuts(signature: Signature, operands: list[Operand], axis: int) -> list[tuple[Label, State]]:
    """Labels that some operand has sharded on this axis, with how; and the same cut on its other labels."""
    found: list[tuple[Label, State]] = []
    for operand, labels in zip(operands, signature.inputs):
        state = operand.states[axis]
        if state.kind != "S":
            continue
        own = labels[state.dim]
        if own is not None and own not in signature.whole and (own, state.at(0)) not in found:
            found.append((own, state.at(0)))
        for label in labels:
            if label is None or label is own or label in signature.whole:
                continue
            if (label, EVEN) not in found:
                found.append((label, EVEN))
    return found


def unsharded_numel(layout: Layout, axis: int) -> float:
    """Elements of a shard, were `axis` not to cut it: what `axis_cost` counts in."""
    sizes = layout.mesh.sizes
    return layout.numel / prod(sizes[a] for a, s in enumerate(layout.states) if s.kind == "S" and a != axis)


def _shape(labels: Labels, signature: Signature, operands: list[Operand]) -> tuple[int, ...]:
    extents = {
        label: operand.shape[dim]
        for operand, names in zip(operands, signature.inputs)
        for dim, label in enumerate(names)
        if label is not None
    }
    return tuple(1 if label is None else extents[label] for label in labels)
