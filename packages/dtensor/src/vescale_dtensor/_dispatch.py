"""Dispatch: what happens when a function is called on DTensors. The hot path.

    look up the function's entry
    key = layouts of the tensors, values of the static arguments
    decision = entry.cache[key]            (a miss asks the rule, once)
    convert what does not fit              (differentiable, remembered)
    run the function on the local tensors, dispatch disabled
    stamp the result with its layout

Budget: at most 1.25x an empty `__torch_function__` that only calls the function
(design section 4). Of the 3 us that such a pass-through takes on a slow CPU core,
nearly all is torch's; so what is added here is two dictionary look-ups, one small
loop over the arguments, one class assignment and one attribute. The common case
(positional tensors and numbers, nothing to convert) is written out first; all else
takes `_general`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from . import _events, _fallback
from ._convert import alias, convert_operand, describe
from ._errors import GradientError, InternalError, MeshError, PlainTensorError, VescaleError, ViewError
from ._layout import Layout, layout_of
from ._rules.registry import CACHE_LIMIT, TABLE, Call, Decision, Entry, Operand
from ._signature import Signature, solve
from ._state import INVARIANT
from ._tensor import DTensor, local_only, stamp

_ATOMS = frozenset(
    {int, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_BOOL = {True: "true", False: "false"}  # True == 1 as a key, and x[True] is not x[1]


def dispatch(cls: type, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """`DTensor.__torch_function__`."""
    entry = TABLE.get(function)
    if entry is not None and not kwargs:
        key: list = []
        for argument in args:
            kind = type(argument)
            if kind is DTensor:
                key.append(argument._layout)
            elif kind in _ATOMS:
                key.append(argument)
            else:
                break
        else:
            decision = entry.cache.get(tuple(key))
            if decision is not None and decision.ready:
                with local_only():
                    out = decision.run(*args)
                layout = decision.out
                if type(out) is Tensor:
                    out.__class__ = DTensor
                    out._layout = layout if is_grad_enabled() else layout.untracked
                    return out
                return _finish(out, layout, args, decision)
    return _general(entry, function, args, kwargs or {})


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`function` through its rule, for functions that do not come to `__torch_function__` by themselves."""
    return _general(TABLE.get(function), function, args, kwargs)


def _general(entry: Entry | None, function: Any, args: tuple, kwargs: dict) -> Any:
    if entry is None:
        entry = TABLE[function] = Entry(function)
    if entry.handler is not None:
        return entry.handler(function, args, kwargs)
    tensors: list[Tensor] = []
    try:
        key: Any = (_keyed(args, tensors, entry.exact), tuple((k, _keyed(v, tensors, entry.exact)) for k, v in kwargs.items()))
        if not kwargs:
            key = key[0]
        decision = entry.cache.get(key)
    except TypeError:  # an argument that cannot be a key: decided anew each time
        key = decision = None
        tensors = []
        _collect(args, tensors)
        _collect(kwargs, tensors)
    if decision is None:
        decision = _decide(entry, function, args, kwargs, tensors)
        if key is not None:
            if len(entry.cache) >= CACHE_LIMIT:
                entry.cache.clear()
            entry.cache[key] = decision
    return _apply(decision, entry, function, args, kwargs, tensors)


def _keyed(value: Any, tensors: list[Tensor], exact: bool) -> Any:
    """The hashable stand-in of an argument; collects tensors on the way."""
    kind = type(value)
    if kind is DTensor:
        tensors.append(value)
        return value._layout
    if kind in _ATOMS:
        return value
    if kind is float:
        return (float, value) if exact else float
    if kind is bool:
        return _BOOL[value]
    if kind is tuple:
        return tuple([_keyed(item, tensors, exact) for item in value])
    if kind is list:  # x[[0, 1]] is not x[0, 1]
        return (list, *[_keyed(item, tensors, exact) for item in value])
    if kind is slice:
        return (
            slice,
            _keyed(value.start, tensors, exact),
            _keyed(value.stop, tensors, exact),
            _keyed(value.step, tensors, exact),
        )
    if isinstance(value, Tensor):
        tensors.append(value)
        return (Tensor, value.shape, value.requires_grad)
    if kind is dict:
        return tuple([(name, _keyed(item, tensors, exact)) for name, item in value.items()])
    return (kind, value)  # numpy.True_ == 1: the type is part of it


def _collect(value: Any, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, tensors)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), tensors)


def substitute(value: Any, replace: Any) -> Any:
    """`value` with `replace(tensor)` in place of every tensor, containers rebuilt, in the order of `_collect`."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (tuple, list)):
        items = [substitute(item, replace) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {name: substitute(item, replace) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*[substitute(item, replace) for item in (value.start, value.stop, value.step)])
    return value


# --- deciding (once per function and layouts) --------------------------------------


def _decide(entry: Entry, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Decision:
    mesh = _common_mesh(function, tensors)
    operands = []
    for index, tensor in enumerate(tensors):
        if type(tensor) is DTensor:
            operands.append(Operand(tensor._layout.base, False, index))
        else:
            shape = tuple(tensor.shape)
            plain = not tensor.requires_grad
            operands.append(Operand(layout_of(mesh, (INVARIANT,) * mesh.ndim, shape), plain, index))
    queue = iter(operands)
    abstract_args = substitute(args, lambda _: next(queue))
    abstract_kwargs = substitute(kwargs, lambda _: next(queue))
    inplace = entry.inplace or abstract_kwargs.get("inplace") is True
    decision = None
    if entry.rule is not None and "out" not in kwargs and not (inplace and operands[0].plain):
        answer = entry.rule(Call(function, abstract_args, abstract_kwargs, operands, mesh, inplace))
        decision = solve(Call(function, abstract_args, abstract_kwargs, operands, mesh, inplace), answer) if isinstance(
            answer, Signature
        ) else answer
    if decision is None:
        decision = Decision(composite=_fallback.gathered(function))
        return decision
    decision.untracked = tuple(i for i, t in enumerate(tensors) if type(t) is DTensor and t._layout.is_untracked)
    if inplace:
        decision.mutated = (0,)
    decision.plain = any(type(t) is not DTensor for t in tensors)
    if not any(decision.targets):
        decision.targets = ()
    if decision.run is None:
        decision.run = function
    moved = bool(decision.targets) and entry.view
    decision.ready = not (
        decision.targets or decision.composite or decision.untracked or decision.plain or decision.mutated or moved
    ) and not isinstance(decision.out, (tuple, list))
    return decision


def _common_mesh(function: Any, tensors: list[Tensor]):
    meshes = {}
    for tensor in tensors:
        if type(tensor) is DTensor:
            meshes.setdefault(tensor._layout.mesh, tensor)
    if len(meshes) == 1:
        return next(iter(meshes))
    if not meshes:
        raise InternalError("dispatch without a DTensor", function=_events.function_name(function))
    raise MeshError(
        _events.function_name(function),
        f"operands lie on {len(meshes)} different meshes",
        [describe(f"operand {i}", tensor, tensor._layout) for i, tensor in enumerate(meshes.values())],
        [
            ("use one DeviceMesh object for all tensors of a computation", "no communication"),
            ("distribute_tensor(other.full_tensor(), mesh, placements)", "an all-gather over the other mesh"),
        ],
    )


# --- applying -----------------------------------------------------------------------


def _apply(decision: Decision, entry: Entry, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
    if decision.plain or decision.composite is not None:
        for tensor in tensors:
            if type(tensor) is not DTensor and tensor.grad_fn is not None:
                _raise_lost_layout(function, tensor, tensors)
    for index in decision.untracked:
        _check_tracked(function, tensors[index])
    if decision.composite is not None:
        return decision.composite(*args, **kwargs)
    for index in decision.mutated:
        _check_writable(function, tensors[index])
    converted: list[Tensor] = tensors
    if decision.targets:
        converted = list(tensors)
        for index, target in enumerate(decision.targets):
            if target is not None:
                tensor = tensors[index]
                source = tensor._layout.base if type(tensor) is DTensor else target.invariant
                converted[index] = convert_operand(tensor, source, target, function)
        queue = iter(converted)
        args = substitute(args, lambda _: next(queue))
        kwargs = substitute(kwargs, lambda _: next(queue))
    try:
        with local_only():
            out = decision.run(*args, **kwargs)
    except VescaleError:
        raise
    except Exception as error:
        for index, tensor in enumerate(tensors):
            if type(tensor) is DTensor:
                error.add_note(describe(f"operand {index}", tensor, tensor._layout))
        raise
    out = _finish(out, decision.out, converted, decision, tensors)
    if entry.view and decision.targets:
        _guard_copied_view(out, tensors[0])
    return out


def _finish(out: Any, layout: Any, inputs: Any, decision: Decision, originals: Any = ()) -> Any:
    """Stamps what a local function returned. Never restamps an object that the function was given."""
    if layout is None:
        return out
    kind = type(out)
    if isinstance(layout, Layout):
        if kind is Tensor:
            if decision.plain and (_among(out, inputs) or _among(out, originals)):
                out = alias(out)
            return stamp(out, layout if is_grad_enabled() else layout.untracked)
        if kind is DTensor:
            if out._layout.base is layout:
                return out
            return stamp(alias(out), layout if is_grad_enabled() else layout.untracked)
        if isinstance(out, Tensor):
            return stamp(alias(out), layout)
        return out
    if isinstance(out, Tensor) or len(out) != len(layout):
        raise InternalError("a rule stated other outputs than the function has", stated=layout, found=type(out))
    items = [_finish(item, one, inputs, decision, originals) for item, one in zip(out, layout)]
    if kind is list or kind is tuple:
        return kind(items)
    return out if all(a is b for a, b in zip(out, items)) else kind(items)


def _among(tensor: Tensor, tensors: Any) -> bool:
    return any(tensor is other for other in tensors)


# --- contracts ------------------------------------------------------------------------


def _raise_lost_layout(function: Any, tensor: Tensor, tensors: list[Tensor]) -> None:
    raise PlainTensorError(
        _events.function_name(function),
        f"a plain tensor computed with gradient (from {tensor.grad_fn.name()}) meets a DTensor: it lost its layout",
        [
            describe(f"operand {i}", t, t._layout) if type(t) is DTensor else f"operand {i}  plain {list(t.shape)}"
            for i, t in enumerate(tensors)
        ],
        [
            ("DTensor.from_local(tensor, mesh, placements)", "says what the plain tensor is; no communication"),
            ("register_rule(function)", "for a function that hands back plain tensors"),
        ],
    )


def _check_tracked(function: Any, tensor: DTensor) -> None:
    """A DTensor made under no_grad that has a grad_fn of somebody else's Function: its gradients would be wrong."""
    with local_only():
        node = tensor.grad_fn
    forward = getattr(type(node), "_forward_cls", None)
    if forward is None or forward.__module__.split(".")[0] in ("torch", "vescale_dtensor"):
        return
    raise GradientError(
        _events.function_name(function),
        f"an operand comes from the autograd Function {forward.__qualname__}, whose forward ran on DTensors under "
        "no_grad: conversions inside it left no trace for its backward",
        [describe("operand", tensor, tensor._layout)],
        [
            (f"register_function({forward.__name__})", "runs it on whole plain tensors, inputs gathered"),
            (f"register_rule({forward.__name__}.apply)(rule)", "says how it runs on shards"),
        ],
    )


def _guard_copied_view(out: Any, base: Tensor) -> None:
    for one in out if isinstance(out, (tuple, list)) else (out,):
        if type(one) is DTensor:
            one._copied_from = True
    if type(base) is DTensor:
        base._copied_to = True


def _check_writable(function: Any, tensor: Tensor) -> None:
    """A view that had to be redistributed is a copy: a write to it, or to its base, would not reach the other."""
    known = tensor.__dict__ if type(tensor) is DTensor else {}
    if "_copied_from" in known:
        raise ViewError(
            _events.function_name(function),
            "in-place write to a view that had to be redistributed, so that it is a copy and not a view",
            [describe("view", tensor, tensor._layout)],
            [("write to the base tensor itself, or build the value with torch.where / torch.cat", "")],
        )


DTensor.__torch_function__ = classmethod(dispatch)
