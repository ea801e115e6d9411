"""Dispatch: what happens when a function is called on DTensors. The hot path.

    look up the function's entry
    key = layouts of the tensors, values of the static arguments
    decision = entry.cache[key]            (a miss asks the rule, once)
    convert what does not fit              (differentiable, remembered)
    run the function on the local tensors, dispatch disabled
    attach the result with its layout

Budget: at most 1.25x an empty `__torch_function__` that only calls the function
(design section 4). Of the 3 us that such a pass-through takes on a slow CPU core,
nearly all is torch's; so what is added here is two dictionary look-ups, one small
loop over the arguments, one class assignment and one attribute. The common case
(nothing to convert, nothing written in place) is written out first; all else takes
`_decided`.
"""

from __future__ import annotations

from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor, is_grad_enabled, strided

from vescale_trace.values import collect, fill, map_tensors

from .._communication import events
from .._conversions.conversion import is_alias
from .._conversions.convert import alias, convert_operand, describe, read, refuse_foreign
from .._errors import InternalError, MeshError, VescaleError
from .._layouts.layout import Layout, layout_of
from .._layouts.state import INVARIANT, PARTIAL
from .._rules.doors.communication import refuse_operator
from .._rules.registry import CACHE_LIMIT, TABLE, Call, Decision, Entry, Operand
from .._rules.traits import Trait
from .._tensor.loans import borrow
from .._tensor.tensor import DTensor, attach, below_autograd, local_only, watch_autograd
from .._torch_private import OpOverload, without_dispatch_modes
from .._torch_private import _disabled_torch_function_impl as _run_local
from .._torch_private import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from . import fallback, forms
from .arguments import ATOMS, key_of, keyed
from .contracts import check_history, check_tracked, raise_number
from .copies import as_on_one_device, check_writable, is_there, mark_copy, write_through
from .flat_rules import decide_flat
from .functorch import check_not_wrapped
from .number import takes_number, with_numbers
from .order import in_order
from .signature import Signature, solve
from .sums import alike, as_zeros, shared

# Functions whose result may be an operand, or in its memory: one that stays partial must then be the very one.
_HANDS_ON = Trait.VIEW | Trait.METADATA | Trait.MOVES
_LENDS = frozenset({Tensor.to, Tensor.type_as})

# The table that is looked into: the one of rules, or an overlay of it.
_table: Any = TABLE


def look_into(table: Any) -> Any:
    """Makes `table`, an overlay of the one of rules, decide functions from now on. Returns the one before."""
    global _table
    before, _table = _table, table
    return before


def dispatch(cls: type, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """`DTensor.__torch_function__`. A subclass with `before_dtensor` (a placeholder, without values) goes first: no
    decision is ever kept under its key."""
    entry = _table[function]
    if entry.handler is not None:
        if len(types) > 1 and any(getattr(kind, "before_dtensor", False) for kind in types):
            return NotImplemented
        return entry.handler(function, args, kwargs or {})
    if kwargs:
        key: Any = key_of(args, kwargs, entry.exact)
    elif (count := len(args)) == 2:  # `key_of`, written out for what most calls have
        first, second = args
        if type(first) is DTensor:
            first = first._layout
        elif type(first) not in ATOMS:
            first = keyed(first, entry.exact)
        if type(second) is DTensor:
            second = second._layout
        elif type(second) not in ATOMS:
            second = keyed(second, entry.exact)
        key = (first, second)
    elif count == 3:  # F.linear(x, weight, bias), x.transpose(1, 2)
        first, second, third = args
        if type(first) is DTensor:
            first = first._layout
        elif type(first) not in ATOMS:
            first = keyed(first, entry.exact)
        if type(second) is DTensor:
            second = second._layout
        elif type(second) not in ATOMS:
            second = keyed(second, entry.exact)
        if type(third) is DTensor:
            third = third._layout
        elif type(third) not in ATOMS:
            third = keyed(third, entry.exact)
        key = (first, second, third)
    elif count == 1 and type(args[0]) is DTensor:
        key = (args[0]._layout,)
    else:
        key = key_of(args, None, entry.exact)
    try:
        decision = entry.cache.get(key)
    except TypeError:  # an argument that cannot be a key: decided anew each time
        key = decision = None
    if decision is not None and decision.ready:
        if _saved_tensors_hooks(True) is None:
            out = _run_local(decision.run, types, args, kwargs) if kwargs else _run_local(decision.run, types, args)
        else:
            args, kwargs = map_tensors(args, _as_saved), map_tensors(kwargs or {}, _as_saved)
            out = apart(_run_local(decision.run, types, args, kwargs))
        if type(out) is Tensor:
            layout = decision.out if is_grad_enabled() else decision.out.untracked
            if decision.guarded:
                for one in args:
                    if one is out:  # a plain operand
                        return _finish(out, decision.out, args, decision)
                if layout.is_number:
                    return attach(out, layout)
            out.__class__ = DTensor
            out._layout = layout
            return out
        return _finish(out, decision.out, args, decision)
    return _decided(entry, function, args, kwargs or {}, key, decision)


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`function` through its rule, for functions that do not come to `__torch_function__` by themselves."""
    return dispatch(DTensor, function, (), args, kwargs)


def ordinary_call(table: Any, function: Any, args: tuple, kwargs: dict) -> Any:
    """`function` as `table` decides it."""
    return call_entry(table[function], function, args, kwargs)


def call_entry(entry: Entry, function: Any, args: tuple, kwargs: dict) -> Any:
    """`function` as `entry` decides it."""
    if entry.handler is not None:
        return entry.handler(function, args, kwargs)
    try:
        key: Any = key_of(args, kwargs, entry.exact)
        decision = entry.cache.get(key)
    except TypeError:
        key = decision = None
    return _decided(entry, function, args, kwargs, key, decision)


def _decided(entry: Entry, function: Any, args: tuple, kwargs: dict, key: Any, decision: Decision | None) -> Any:
    """Everything that the hot path leaves: a decision to be made, or one that is more than a plain local call."""
    tensors: list[Tensor] = []
    collect(args, tensors)
    collect(kwargs, tensors)
    if decision is None and any(getattr(type(tensor), "before_dtensor", False) for tensor in tensors):
        return NotImplemented
    if isinstance(function, OpOverload) and below_autograd():
        watch_autograd()
        with local_only():
            return function(*args, **kwargs)
    if decision is None:
        with without_dispatch_modes():  # what a rule asks of meta tensors is no part of the program
            decision = _decide(entry, function, args, kwargs, tensors)
        if key is not None:
            if len(entry.cache) >= CACHE_LIMIT:
                entry.cache.clear()
            entry.cache[key] = decision
    return _apply(decision, entry, function, args, kwargs, tensors)


def local_form(function: Any) -> Any:
    """Returns what runs on the shards: the function itself, or what it names.

    A `torch.library` op of somebody else's is called on plain tensors: what its autograd formula saves comes back to it
    with dispatch on, beside gradients that are plain.
    """
    if isinstance(function, OpOverload) and function.namespace not in ("aten", "prims", "prim"):
        return lambda *args, **kwargs: function(*map_tensors(args, _as_plain), **map_tensors(kwargs, _as_plain))
    return getattr(function, "_local", function)


def _as_plain(tensor: Tensor) -> Tensor:
    return alias(tensor) if type(tensor) is DTensor else tensor


# --- deciding (once per function and layouts) --------------------------------------


def _decide(entry: Entry, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Decision:
    check_not_wrapped(function, tensors)
    refuse_foreign(function, tensors)
    if isinstance(function, OpOverload):
        refuse_operator(function, tensors)
    if takes_number(function, args, kwargs):
        return Decision(decomposition=with_numbers(function))
    mesh = _common_mesh(function, tensors)
    operands = []
    for index, tensor in enumerate(tensors):
        if type(tensor) is DTensor:
            operands.append(Operand(tensor._layout.base, False, index, tensor._layout.products))
        else:
            shape = tuple(tensor.shape)
            plain = not tensor.requires_grad
            operands.append(Operand(layout_of(mesh, (INVARIANT,) * mesh.ndim, shape), plain, index))
    abstract_args, abstract_kwargs = fill((args, kwargs), operands)
    inplace = entry.inplace or abstract_kwargs.get("inplace") is True
    decision = None
    if any(type(tensor) is not DTensor and tensor.layout is not strided for tensor in tensors):
        pass  # what is sparse has no parts: the function runs whole
    elif entry.rule is not None and kwargs.get("out") is not None:
        decision = forms.out_form(function)
    elif entry.rule is not None and inplace and type(args[0] if args else None) is Tensor:
        decision = forms.plain_in_place(function)
    elif entry.rule is not None and not (inplace and operands[0].plain):
        asked = Call(function, abstract_args, abstract_kwargs, operands, mesh, inplace)
        is_flat = any(operand.layout.flat_axis is not None for operand in operands)
        decision = decide_flat(entry, asked) if is_flat else entry.rule(asked)
        if isinstance(decision, Signature):
            signature = decision
            decision = solve(asked, signature)
            if decision is None and inplace:
                decision = forms.partial_in_place(asked, signature)
        if inplace and decision is not None and any(decision.targets):
            decision.zeros = as_zeros(asked, entry.rule, decision)
    if decision is None:
        decision = Decision(decomposition=fallback.gathered(function))
    decision.untracked = tuple(i for i, t in enumerate(tensors) if type(t) is DTensor and t._layout.is_untracked)
    decision.watched = Trait.VIEW in entry.traits and any(type(t) is DTensor and t._layout.is_watched for t in tensors)
    if decision.decomposition is not None:
        return decision
    if inplace:
        decision.mutated = decision.mutated or (0,)
        if isinstance(decision.out, Layout) and decision.out.is_number and not operands[0].layout.is_number:
            raise_number(function, tensors[0])
    decision.plain = any(type(t) is not DTensor for t in tensors)
    if len(operands) > 1 and function not in _LENDS and not entry.traits & _HANDS_ON:
        moved = {i for i, target in enumerate(decision.targets) if target is not None}
        stay = set(range(len(operands))) - moved - set(decision.mutated)
        decision.partial = tuple(sorted(i for i in stay if PARTIAL in operands[i].states))
    if not inplace and (decision.parts or any(decision.targets)):
        decision.alike = alike(decision, operands)
    # A plain tensor without gradient holds the same values whether it is called I or R.
    decision.targets = tuple(
        None if target is None or (operand.plain and is_alias(operand.layout, target)) else target
        for operand, target in zip(operands, decision.targets)
    )
    if not any(decision.targets):
        decision.targets = ()
    if decision.run is None:
        decision.run = local_form(function)
    if operands:
        base = (decision.targets[0] if decision.targets else None) or operands[0].layout
        decision.run = as_on_one_device(function, decision.run, base)
        if not inplace and isinstance(decision.out, Layout):
            targets = decision.targets or [None] * len(operands)
            given = [target or operand.layout for target, operand in zip(targets, operands)]
            places = [at for at, one in enumerate(args) if isinstance(one, Tensor)]
            direct = places if len(places) == len(tensors) else None
            alone = len(args) == len(tensors) and not kwargs
            decision.run = in_order(function, decision.run, given, decision.out, direct, alone)
    plain = [t for t in tensors if type(t) is not DTensor]
    seen = all(_among(t, args) and not t.requires_grad for t in plain)  # `dispatch` checks them by `args` alone
    decision.copies = bool(decision.targets) and _must_copy(entry, operands[0], decision)
    more = decision.targets or decision.untracked or decision.mutated or decision.watched
    more = more or decision.partial or decision.alike
    decision.ready = seen and not (more or isinstance(function, OpOverload))
    decision.guarded = decision.plain or isinstance(decision.out, Layout) and decision.out.is_number
    return decision


def _common_mesh(function: Any, tensors: list[Tensor]):
    meshes = {}
    for tensor in tensors:
        if type(tensor) is DTensor:
            meshes.setdefault(tensor._layout.mesh, tensor)
    if len(meshes) == 1:
        return next(iter(meshes))
    if not meshes:
        raise InternalError("dispatch without a DTensor", function=events.function_name(function))
    raise MeshError(
        events.function_name(function),
        f"operands lie on {len(meshes)} different meshes",
        [describe(f"operand {i}", tensor, tensor._layout) for i, tensor in enumerate(meshes.values())],
        [
            ("use one DeviceMesh object for all tensors of a computation", "no communication"),
            ("distribute_tensor(other.full_tensor(), mesh, placements)", "an all-gather over the other mesh"),
        ],
    )


# --- applying -----------------------------------------------------------------------


def _apply(decision: Decision, entry: Entry, function: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
    if function is Tensor.__setitem__ and is_there(*args):
        return None
    if decision.plain or decision.decomposition is not None:
        for tensor in tensors:
            if type(tensor) is not DTensor and tensor.grad_fn is not None:
                check_history(function, tensor, tensors)
    if decision.untracked and is_grad_enabled():
        for index in decision.untracked:
            check_tracked(function, tensors[index])
        if Trait.METADATA not in entry.traits:
            given = [one if i == 0 and entry.inplace else read(one) for i, one in enumerate(tensors)]
            if any(one is not tensor for one, tensor in zip(given, tensors)):
                if function is Tensor.view_as and tensors[0] is tensors[1]:
                    return given[0]  # an alias, whose node is next to the parameter's own, for which torch looks
                return call_entry(entry, function, *fill((args, kwargs), given))
    if decision.decomposition is not None:
        out = decision.decomposition(*args, **kwargs)
        if decision.watched:
            borrow(out, tensors)
        return out
    if decision.partial or decision.alike or decision.zeros is not None:
        given = shared(decision, function, tensors)
        if given is not tensors:
            return call_entry(entry, function, *fill((args, kwargs), given))
    for index in decision.mutated:
        check_writable(function, tensors[index], through=True)
    taken = args[1] if function is Tensor.__getitem__ else None
    converted: list[Tensor] = tensors
    hooked = _saved_tensors_hooks(True) is not None
    if decision.targets or hooked:
        converted = list(tensors)
        for index, target in enumerate(decision.targets):
            if target is not None:
                tensor = tensors[index]
                source = tensor._layout.base if type(tensor) is DTensor else target.invariant
                converted[index] = convert_operand(tensor, source, target, function, decision.explanation)
        if hooked:
            written = decision.mutated
            with local_only():
                for index in written:
                    _ = tensors[index].grad_fn  # a view's is brought up to date by being asked for, not by a write
            converted = [t if index in written else _as_saved(t) for index, t in enumerate(converted)]
        queue = iter(converted)  # `fill`, written out
        args = map_tensors(args, lambda _: next(queue))
        kwargs = map_tensors(kwargs, lambda _: next(queue))
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
    if hooked:
        out = apart(out)
    if decision.copies:
        out = _marked_copies(out, tensors[0], taken)
    out = _finish(out, decision.out, converted, decision, tensors)
    for index in decision.mutated:
        write_through(tensors[index])
    if decision.watched:
        borrow(out, tensors)
    return out


def _finish(out: Any, layout: Any, inputs: Any, decision: Decision, originals: Any = ()) -> Any:
    """Attaches layouts to what a local function returned; never anew to an object that the function was given."""
    if layout is None:
        return out
    kind = type(out)
    if isinstance(layout, Layout):
        if kind is Tensor:
            if decision.plain and (_among(out, inputs) or _among(out, originals)):
                out = alias(out)
            return attach(out, layout if is_grad_enabled() else layout.untracked)
        if kind is DTensor:
            if out._layout.base is layout:
                # A copy in place of a view is in order, where one device's view need not be, and be copied here.
                return out if decision.mutated or "_taken" not in out.__dict__ else attach(alias(out), out._layout)
            if decision.mutated and out is inputs[0]:  # squeeze_, transpose_: self has another layout now
                out._layout = layout.untracked if out._layout.is_untracked else layout
                return out
            return attach(alias(out), layout if is_grad_enabled() else layout.untracked)
        if isinstance(out, Tensor):
            return attach(alias(out), layout)
        return out
    if isinstance(out, Tensor) or len(out) != len(layout):
        raise InternalError("a rule stated other outputs than the function has", stated=layout, found=type(out))
    items = [_finish(item, one, inputs, decision, originals) for item, one in zip(out, layout)]
    if kind is list or kind is tuple:
        return kind(items)
    return out if all(a is b for a, b in zip(out, items)) else kind(items)


def _among(tensor: Tensor, tensors: Any) -> bool:
    return any(map(is_, tensors, repeat(tensor)))


def _as_saved(tensor: Tensor) -> Tensor:
    """Under saved-tensor hooks (a checkpoint, offloading) an operand without gradient goes as its plain shard.

    Autograd hands a hook the very object that an operator saves. A hook that keeps a
    DTensor would read the global shape later, where at saving it saw the shard's.
    It goes as a view, for what is written with gradient into a slice of it is to reach it.
    """
    if type(tensor) is not DTensor:
        return tensor
    with local_only():
        return tensor if tensor.requires_grad else tensor.as_subclass(Tensor)


def apart(out: Any) -> Any:
    """Results without gradient as other objects: under saved-tensor hooks autograd has handed a hook the very result
    (indices of a maximum), which must stay plain there while the caller's becomes a DTensor."""
    if type(out) is Tensor:
        if out.requires_grad:
            return out
        other = out.as_subclass(Tensor) if out._is_view() else out.detach()
        if out.__dict__:  # what its rule noted of it
            other.__dict__.update(out.__dict__)
        return other
    if isinstance(out, (tuple, list)) and not hasattr(out, "_fields"):
        return type(out)([apart(one) for one in out])
    return out


def _must_copy(entry: Entry, base: Operand, decision: Decision) -> bool:
    """True if a view's base moves first, so that the view is a copy."""
    target = decision.targets[0]
    return Trait.VIEW in entry.traits and target is not None and not is_alias(base.layout, target)


def _marked_copies(out: Any, base: Tensor, index: Any) -> Any:
    if type(out) in (tuple, list):
        return type(out)([_marked_copies(one, base, None) for one in out])
    return mark_copy(out, base, index=index) if isinstance(out, Tensor) else out


DTensor.__torch_function__ = classmethod(dispatch)
