"""Modules that mix positions in a way for which a cut sequence has no rule: an error that names them.

Attention, products, choices of rows and what treats positions one by one have rules. A scan, a sort, a convolution, a
shift of positions, and a function that has no rule at all would need the sequence whole on every rank: the result
would be right, and what context parallelism is for would be lost without a word. So it is an error while the model of
a plan with a context axis runs, and for activations alone: of places, masks and labels (two dims) little is moved.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_trace.stack import frames
from vescale_trace.values import tensors_in

from .._communication.events import function_name
from .._conversions import convert
from .._errors import OperatorError
from .._layouts.layout import Layout
from .._layouts.mesh import Mesh
from .._rules.registry import TABLE

ONE_BY_ONE = 8
"""Number of positions of one activation that may be read one by one: more of them are a scan."""
_NAMES = """
cumsum cumprod logcumsumexp cummax cummin diff sort argsort msort kthvalue mode median nanmedian quantile nanquantile
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d pad constant_pad_nd roll flip fliplr flipud
rot90 unfold fold unbind avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d max_pool1d max_pool2d
interpolate upsample grid_sample pixel_shuffle pixel_unshuffle
""".split()
"""Functions with a rule that needs the dim whole along which they work; of a running sum not where each rank's part is
in one piece."""
MIXING = frozenset(
    function
    for name in _NAMES
    for owner in (torch, Tensor, F)
    if callable(function := getattr(owner, name, None))
) | frozenset(function for function in vars(torch.fft).values() if callable(function))  # fmt: skip
_MEETING = frozenset({"_grouped_mm", "grouped_mm", "flex_attention", "scaled_dot_product_attention"})
"""Functions without a rule that meet positions as attention and products do."""


class Running(NamedTuple):
    """A model that runs: its mesh, the axis that cuts its sequences, its root, and which positions of activations of
    a layout were read one by one."""

    mesh: Mesh
    axis: int
    root: nn.Module
    read: dict[Layout, set[int]]


_running: list[Running] = []  # the innermost last


def enter(mesh: Mesh, axis: int, root: nn.Module) -> None:
    """The model's forward begins: from now on what mixes positions that `axis` cuts raises. Pairs with `leave`."""
    _running.append(Running(mesh, axis, root, {}))
    convert.about_to_move = _check


def leave(root: nn.Module) -> None:
    """The model's forward has ended, maybe before it was told that it began."""
    if _running and _running[-1].root is root:
        _running.pop()
    if not _running:
        convert.about_to_move = None


def note_read(layout: Layout, dim: int, position: int) -> None:
    """One position of a cut dim is read: many of them, one after the other, are a scan."""
    if not _running or not _is_cut(layout, dim) or convert.each_use is not None:
        return
    now = _running[-1]
    read = now.read.setdefault(layout, set())
    read.add(position)
    if len(read) > ONE_BY_ONE and _innermost(now.root)[0]:
        rule = f"reads more than {ONE_BY_ONE} positions one by one of a sequence that {{axis}} shards"
        _raise("getitem", rule, layout)


def _check(source: Layout, target: Layout, function: object) -> None:
    axis = _running[-1].axis
    state = source.states[axis] if source.mesh is _running[-1].mesh else None
    if state is None or state.kind != "S" or target.states[axis] is state or not _is_cut(source, state.dim):
        return
    if source.shape[state.dim] == source.mesh.sizes[axis]:  # what each rank hands on, of a running sum
        return
    if convert.each_use is not None:  # the reproducible mode runs much on whole tensors, and says so
        return
    name = function_name(function)
    if function in MIXING:
        _raise(name, "mixes positions of a sequence that {axis} shards, and needs the whole sequence", source)
    entry = TABLE.get(function) if callable(function) else None
    if entry is not None and entry.rule is None and entry.handler is None and name not in _MEETING:
        rule = "calls a function without a rule, for which a sequence that {axis} shards would be gathered"
        _raise(name, rule, source)


def _is_cut(layout: Layout, dim: int) -> bool:
    """True if the dim is an activation's sequence: places, labels and masks of the model's own have two dims."""
    now = _running[-1]
    return layout.mesh is now.mesh and layout.ndim > 2 and layout.axes_of(dim) == (now.axis,)


def _raise(operation: str, rule: str, layout: Layout) -> None:
    now = _running[-1]
    axis, (name, forward) = now.mesh.names[now.axis], _innermost(now.root)
    where = f"module {name!r} ({type(now.root.get_submodule(name)).__name__})" if name else "the model's own forward"
    remedies = [
        (
            f"Plan(..., boundaries={{{name!r}: Boundary({_gathered(forward, axis)})}})",
            "the module sees whole sequences: all-gathers its inputs",
        )
    ] if name else []  # fmt: skip
    remedies += [
        ("Plan(..., context_axis=None)", "sequences stay whole on every rank"),
        (f"register_rule({operation})", "if it does not mix positions, or communicates by itself"),
    ]
    states = ", ".join(map(repr, layout.states))
    operands = [f"operand  {list(layout.shape)}  {states}  on {layout.mesh}"]
    raise OperatorError(operation, f"{where} {rule.format(axis=repr(axis))}", operands, remedies)


def _innermost(root: nn.Module) -> tuple[str, FrameType | None]:
    """The module of which the forward runs, the user's own, else torch's, and that forward; "" for the root."""
    names = {id(module): name for name, module in root.named_modules()}
    found, forward = "", None
    for frame in frames():
        module = frame.f_locals.get("self") if frame.f_code.co_argcount else None
        name = names.get(id(module), "") if isinstance(module, nn.Module) else ""
        is_forward = frame.f_code.co_name == "forward"
        if name and not type(module).__module__.startswith("torch.nn") and is_forward:
            return name, frame
        if name and not found:
            found, forward = name, frame if is_forward else None
    return found, forward


def _gathered(forward: FrameType | None, axis: str) -> str:
    """The arguments of a Boundary that gathers all that a forward is given of cut sequences: a mask of places that
    stays cut would cut what it meets again."""
    whole = f"{{{axis!r}: Replicate()}}"
    given = _given(forward) if forward is not None else {}
    if len(given) < 2:
        return f"input={whole}"
    named = ", ".join(f"{name!r}: {whole}" for name, tensors in given.items() if any(map(_is_cut_by_axis, tensors)))
    return f"arguments={{{named}}}" if named else f"input={whole}"


def _given(forward: FrameType) -> dict[str, list[Tensor]]:
    """The tensors among a forward's arguments, by the argument's name."""
    code, held = forward.f_code, forward.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    values: dict[str, Any] = {name: held.get(name) for name in code.co_varnames[1:count]}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        values |= held.get(code.co_varnames[count + bool(code.co_flags & inspect.CO_VARARGS)], {})
    return {name: found for name, value in values.items() if (found := tensors_in(value))}


def _is_cut_by_axis(tensor: Tensor) -> bool:
    now, layout = _running[-1], getattr(tensor, "mesh_layout", None)
    return layout is not None and layout.mesh is now.mesh and layout.states[now.axis].is_sharded
