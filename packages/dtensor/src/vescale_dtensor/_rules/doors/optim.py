"""Functions of torch.optim and torch.nn.utils on lists of tensors: `_foreach_*`, `_fused_*`, the gradient scaler's
check.

    foreach     elementwise item by item: item i of all lists takes one layout (in place: self's), items differ
    fused       all lists take the parameters' layouts, partial gradients are reduced
    norm        local sums of powers, one reduction for all items that lie alike

A list whose items do not fit (a nonlinear step in place on a partial tensor) is
walked through with the functions of single tensors, each under its own rule.

torch.nn.utils takes lists for types that it knows only (`_foreach_supported_types`); ours is one: one reduction for all
gradients of a norm, and the same bits however they are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..._conversions.conversion import is_alias
from ..._conversions.convert import convert, convert_plain
from ..._dispatch.signature import Signature, solve
from ..._layouts.layout import Layout, layout_of
from ..._layouts.state import PARTIAL
from ..._tensor.tensor import DTensor, attach, local_only
from ..._torch_private import (
    _amp_foreach_non_finite_check_and_unscale_,
    _foreach_max,
    _foreach_mm,
    _foreach_norm,
    _foreach_powsum,
    _foreach_supported_types,
)
from ..elements.pointwise import broadcast
from ..registry import Call, Decision, Operand, decomposed, handler, rule
from ..traits import Trait

if DTensor not in _foreach_supported_types:
    _foreach_supported_types.append(DTensor)

# Which tensors of an item may be partial together, per function; an entry that names a tensor not given is dropped.
_LINEAR = {
    "neg": [(0,)], "clone": [(0,)], "zero": [(0,)], "copy": [(0, 1)], "add": [(0, 1)], "sub": [(0, 1)],
    "mul": [(0,), (1,)], "div": [(0,)], "lerp": [(0, 1)], "addcmul": [(0, 1), (0, 2)], "addcdiv": [(0, 1)],
}  # fmt: skip
_NOT_ELEMENTWISE = {"norm", "powsum", "max", "mm"}
_FOREACH = [name for name in dir(torch) if name.startswith("_foreach_")]
_FUSED = [getattr(torch, f"_fused_{name}_", None) for name in ("adam", "adamw", "sgd", "adagrad")]


def _base(name: str) -> str:
    return name.removeprefix("_foreach_").removesuffix("_")


@rule(
    [getattr(torch, name) for name in _FOREACH if _base(name) not in _NOT_ELEMENTWISE],
    traits=Trait.LISTS | Trait.ELEMENTWISE,
)
def foreach(call: Call) -> Decision:
    """Every item is an elementwise call of its own, all in one local call."""
    values = [*call.args, *call.kwargs.values()]
    lists = [value for value in values if _has_operands(value)]
    alone = [value for value in values if isinstance(value, Operand)]
    loop = decomposed(looped(call.function))
    if len({len(items) for items in lists}) != 1:
        return loop  # says what torch says
    if any(operand.layout.flat_axis is not None for operand in call.operands):
        return loop
    first_is_list = _has_operands(call.args[0])
    linear = [
        together for together in _LINEAR.get(_base(call.name), ())
        if first_is_list and max(together) < len(lists) and not (len(together) > 1 and alone)
    ]  # fmt: skip
    targets: list[Layout | None] = [None] * len(call.operands)
    wanted: dict[int, set] = {operand.index: set() for operand in alone}
    outs = []
    for items in zip(*lists):
        if not all(isinstance(item, Operand) for item in items):
            return loop
        found = broadcast(list(items))
        if found is None or (call.inplace and items[0].plain):
            return loop
        labels, output, shape = found
        operands = [*items, *alone]
        signature = Signature(
            [*labels, *[(None,) * one.ndim for one in alone]], [output], linear=linear, shapes=[shape]
        )
        solved = solve(Call(call.function, (), {}, operands, call.mesh, call.inplace), signature)
        if solved is None:
            return loop
        outs.append(solved.out)
        for operand, target in zip(operands, solved.targets):
            if operand.index in wanted:
                wanted[operand.index].add(target or operand.layout)
            else:
                targets[operand.index] = target
    for operand in alone:  # one tensor for all items: plain ones are whole as they are, others must be of one mind
        if not operand.plain:
            if len(wanted[operand.index]) > 1:
                return loop
            target = next(iter(wanted[operand.index]))
            targets[operand.index] = None if target is operand.layout else target
    mutated = tuple(item.index for item in lists[0]) if call.inplace else ()
    return Decision(targets=tuple(targets), out=None if call.inplace else tuple(outs), mutated=mutated)


def _has_operands(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, Operand) for item in value)


def looped(function: Callable) -> Callable:
    """`function` as a walk over its items with the function of single tensors, dispatch on."""
    name = function.__name__.removeprefix("_foreach_")
    single = getattr(Tensor, name, None) or getattr(torch, name, None)
    if single is None:  # maximum_ and minimum_ exist for lists only
        fresh = getattr(torch, name.removesuffix("_"))
        single = lambda x, *others: x.copy_(fresh(x, *others))
    weighted = _base(name) in ("addcmul", "addcdiv")

    def walk(*args, **kwargs):
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
        count = len(lists[0])

        def item(value, i: int, indexed: bool):
            return value[i] if indexed or isinstance(value, (list, tuple)) else value

        results = []
        for i in range(count):
            values = [item(a, i, weighted and at == 3 and isinstance(a, Tensor)) for at, a in enumerate(args)]
            named = {key: item(a, i, False) for key, a in kwargs.items()}
            if weighted and len(values) == 4:
                named["value"] = values.pop()
                if isinstance(named["value"], Tensor):
                    named["value"] = named["value"].item()
            results.append(single(*values, **named))
        return args[0] if name.endswith("_") else results

    return walk


@rule(_foreach_max, _foreach_mm, traits=Trait.LISTS)
def foreach_single(call: Call) -> Decision:
    return decomposed(looped(call.function))


@rule(_foreach_powsum, traits=Trait.LISTS)
def foreach_powsum(call: Call) -> Decision:
    def sums(tensors, ord=2, dtype=None):
        return [_power_sum(x, ord, dtype).to((x.abs() if x.is_complex() else x).dtype if dtype is None else dtype)
                for x in tensors]  # fmt: skip

    return decomposed(sums)


@rule(_foreach_norm, traits=Trait.LISTS)
def foreach_norm(call: Call) -> Decision:
    """Per item the sum of |x|^p, partial where x is sharded; one all-reduce for all items of the same states."""
    return decomposed(_norms)


def _norms(tensors, ord=2, dtype=None):
    if not isinstance(ord, (int, float)) or not 0 < ord < math.inf:
        return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in tensors]
    sums = [_power_sum(x, ord, dtype) for x in tensors]
    groups: dict[object, list[int]] = {}
    for i, one in enumerate(sums):
        groups.setdefault((one._layout.base if type(one) is DTensor else None, one.dtype), []).append(i)
    for members in groups.values():
        stacked = torch.stack([sums[i] for i in members])
        for i, one in zip(members, (stacked.sqrt() if ord == 2 else stacked.pow(1 / ord)).unbind()):
            kept = tensors[i].dtype if dtype is None else dtype
            sums[i] = one.to(kept) if one.dtype is torch.float64 else one
    return sums


def _power_sum(x: Tensor, ord: float, dtype: torch.dtype | None) -> Tensor:
    """The sum of |x|^ord, partial where x is cut.

    Squares are summed in float64, so that the norm of the same values is the same number, to the bit of a
    float32, however they are cut.
    """
    x = x if dtype is None else x.to(dtype)
    if type(x) is DTensor and x._layout.is_partial:  # reduced once, not once per use
        x = convert(x, x._layout.reduced)
    squares = ord == 2 and x.is_floating_point() and not (torch.is_grad_enabled() and x.requires_grad)
    if not squares and (type(x) is not DTensor or x._layout.flat_axis is None):
        return _powers(x, ord).sum()
    with local_only():
        total = _sum_of_squares(x.detach()) if squares else _powers(x, ord).sum()
    if type(x) is not DTensor:
        return total
    layout = x._layout.base
    total.__class__ = Tensor
    return attach(total, layout_of(layout.mesh, [PARTIAL if s.kind in "SF" else s for s in layout.states], ()))


def _powers(x: Tensor, ord: float) -> Tensor:
    return (x.abs() if ord == 1 else (x * x.conj()).real if x.is_complex() and ord == 2
            else x * x if ord == 2 else x.abs().pow(ord))  # fmt: skip


# Elements that are float64 at a time: what fits the cache. (`vector_norm(dtype=float64)` makes all of them at once.)
_AT_A_TIME = {"cpu": 1 << 16}
_AT_A_TIME_BESIDE = 1 << 22


def _sum_of_squares(local: Tensor) -> Tensor:
    flat = local.reshape(-1)
    total = flat.new_zeros((), dtype=torch.float64)
    for part in flat.split(_AT_A_TIME.get(flat.device.type, _AT_A_TIME_BESIDE)):
        wide = part.double()
        total += torch.dot(wide, wide)
        del wide  # before the next is made
    return total


# --- fused optimizers -----------------------------------------------------------------


@rule(_FUSED, traits=Trait.LISTS | Trait.ELEMENTWISE)
def fused(call: Call) -> Decision:
    """Parameters keep their layouts; states lie as they do; gradients are converted to them (partial: reduced).

    `grad_scale` makes the function write gradients too: then converted ones are copied back.
    """
    parameters = call.args[0]
    targets: list[Layout | None] = [None] * len(call.operands)
    scales = call.kwargs.get("grad_scale") is not None
    written: list[int] = []
    lists = [value for value in call.args if isinstance(value, (list, tuple))]
    for at, items in enumerate(lists):
        for parameter, operand in zip(parameters, items):
            lead = parameter.layout
            if parameter.plain or lead.is_partial:
                return decomposed(_aligned(call.function))
            writes = at != 1 or scales
            if operand.shape == parameter.shape and operand.layout is not lead:
                if not is_alias(operand.layout, lead):
                    if writes:
                        return decomposed(_aligned(call.function))
                    targets[operand.index] = lead
            elif operand.shape != parameter.shape and not operand.layout.is_replicated:
                targets[operand.index] = operand.layout.invariant
            if writes and not operand.plain:
                written.append(operand.index)
    for operand in call.kwargs.values():
        if isinstance(operand, Operand) and not operand.layout.is_replicated:
            targets[operand.index] = operand.layout.invariant
    return Decision(targets=tuple(targets), run=_bumping(call.function), mutated=tuple(written))


def _bumping(function: Callable) -> Callable:
    """torch's fused functions leave the version counters alone, by which remembered conversions are known stale."""

    def run(*args, **kwargs):
        function(*args, **kwargs)
        for items in args[:1] + args[2:]:
            if items and isinstance(items, (list, tuple)):
                increment_version(items)

    return run


def _aligned(function: Callable) -> Callable:
    """`function` on copies under the parameters' layouts, which are copied back."""

    def run(*args, **kwargs):
        copies: list[tuple[Tensor, Tensor]] = []
        leads = [_lead(parameter) for parameter in args[0]]

        def fit(tensor: Tensor, lead: Layout | None) -> Tensor:
            if lead is None or tuple(tensor.shape) != lead.shape:
                return tensor
            if type(tensor) is DTensor:
                source = tensor._layout.base
                if source is lead or is_alias(source, lead):
                    return tensor
                fresh = convert(tensor, lead, function)
            else:
                if lead.is_replicated:
                    return tensor
                fresh = convert_plain(tensor, lead.mesh, lead, function)
            copies.append((tensor, fresh))
            return fresh

        fitted = [
            [fit(tensor, lead) for tensor, lead in zip(items, leads)] if isinstance(items, (list, tuple)) else items
            for items in args
        ]
        function(*fitted, **kwargs)
        for tensor, fresh in copies:
            tensor.copy_(fresh)

    return run


def _lead(parameter: Tensor) -> Layout | None:
    return parameter._layout.reduced if type(parameter) is DTensor else None


# --- the gradient scaler --------------------------------------------------------------


@handler(_amp_foreach_non_finite_check_and_unscale_)
def check_and_unscale(function, args, kwargs):
    """Gradients are scaled where they lie; what any rank found is known to all (one all-reduce of one number).

    A partial gradient is checked as it is and again reduced, because a finite sum can overflow.
    """
    gradients, found, inverse = args
    layouts = [g._layout.base for g in gradients if type(g) is DTensor]
    seen = found.detach().clone()
    for gradient in gradients:
        if type(gradient) is DTensor and gradient._layout.is_partial:
            whole = convert(gradient, gradient._layout.base.invariant, function)
            seen = torch.maximum(seen, (~torch.isfinite(whole).all()).to(seen.dtype).to_local())
    with local_only():
        function(list(gradients), seen, inverse)
        mesh = layouts[0].mesh
        local = attach(seen.detach().clone(), layout_of(mesh, (PARTIAL,) * mesh.ndim, tuple(seen.shape)))
    total = convert(local, local._layout.base.invariant, function).to_local()
    found.copy_((total > 0).to(found.dtype))
