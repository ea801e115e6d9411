"""Basic indices: integers, slices, None and Ellipsis, in `x[...]`, `x[...] = v`, select, narrow.

    dim taken whole                keeps its sharding
    sharded dim, integer or        partial: the ranks that hold a part give it, the others zeros; no
    short slice                    communication here, and the partial result is smaller than a gather
    whole groups or chunks, or     keep their cut, a view (`part`)
    every k-th index of such
    chunks dealt out, long slice   stay dealt out, few rows move over their boundaries (`shift`)
    sharded dim, any other slice   made whole first
    partial input                  partial
    assignment                     self stays as it is, every rank writes the part it holds

An index with tensors, lists or bools is taken apart in `index_tensor`. A slice is
short when it takes at most 1/n of a dim sharded n ways.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._context.mixing import note_read
from ..._dispatch.copies import mark_copy
from ..._dispatch.signature import Signature, solve
from ..._layouts.layout import Layout, layout_of
from ..registry import Call, Decision, Operand, decomposed, rule
from ..traits import VIEWS, Trait
from .index_items import Item, align, as_index, enters_here, is_basic, owned, parse, pieces
from .index_tensor import read_tensors, write_tensors
from .part import sliced
from .shift import shift_of, shifted

# --- reading --------------------------------------------------------------------------


def read(call: Call, items: list[Item], *, keep: bool) -> Decision | None:
    """The decision for a basic index. keep: the called function itself does on the shards when nothing is cut."""
    x = call.operands[0]
    kept = _of_parts(x.layout, items)
    if kept is not None:
        return kept
    labels: list = list(range(x.ndim))
    output: list = []
    for item in items:
        full = item.is_full(x.shape)
        if item.dim is not None and not full:
            ranks = prod(call.mesh.sizes[axis] for axis in x.layout.axes_of(item.dim))
            short = ranks > 1 and (item.drop or len(item.taken) * ranks <= x.shape[item.dim])
            labels[item.dim] = ("part", item.dim) if short else None
        if not item.drop:
            output.append(item.dim if full else None)
    moving = [item for item in items if item.dim is not None and labels[item.dim] is None and _shift(x.layout, item)]
    if len(moving) == 1 and len(items) == x.ndim and all(i is moving[0] or i.is_full(x.shape) for i in items):
        return _shifting(call, moving[0])
    shape = tuple(len(item.taken) for item in items if not item.drop)
    summed = {label for label in labels if isinstance(label, tuple)}
    decision = solve(call, Signature([tuple(labels)], [tuple(output)], summed, linear=[(0,)], shapes=[shape]))
    source = decision.targets[0] or x.layout
    parted = [item for item in items if item.dim is not None and not item.is_full(x.shape) and source.axes_of(item.dim)]
    if parted or not keep:
        decision.run = _reader(call, source, items, parted)
    return decision


def _of_parts(layout: Layout, items: list[Item]) -> Decision | None:
    """Slices of cut dims that keep a cut: a view of the shards. None if one does not, or nothing cut is sliced."""
    found = sliced(layout, items)
    if found is None:
        return None
    states, local = found
    out = layout_of(layout.mesh, states, [len(item.taken) for item in items if not item.drop])
    if not out.is_exact:
        return None
    index = tuple(
        local[item.dim] if item.dim in local else slice(None) if item.is_full(layout.shape) else as_index(item)
        for item in items
    )
    return Decision(targets=(None,), out=out, run=lambda input, *args, **kwargs: input[index])


def _shift(layout: Layout, item: Item):
    if item.drop or item.taken.step != 1:
        return None
    return shift_of(layout, item.dim, item.taken.start, len(item.taken))


def _shifting(call: Call, item: Item) -> Decision:
    """One slice, which leaves its dim cut."""
    layout, dim = call.operands[0].layout, item.dim
    shift, state = _shift(layout, item)
    states = [state if axis == shift.axis else s for axis, s in enumerate(layout.states)]
    out = layout_of(layout.mesh, states, (*layout.shape[:dim], len(item.taken), *layout.shape[dim + 1 :]))

    def run(input: Tensor, *args, **kwargs) -> Tensor:
        return mark_copy(shifted(shift, input), input, cut_out=True, index=_index(call, args))

    return Decision(targets=(None,), out=out, run=run)


def _index(call: Call, args: tuple) -> Any:
    """Returns the index by which a part can be written; None of what another function took."""
    return args[0] if call.function is Tensor.__getitem__ else None


def _reader(call: Call, source: Layout, items: list[Item], parted: list[Item]):
    region = source.region_at(source.mesh.coordinate)
    cuts = [(item.dim, pieces(region[item.dim], item.taken), len(item.taken)) for item in parted]
    index = tuple(
        (0 if item.drop else slice(None)) if item in parted
        else slice(None) if item.is_full(source.shape)
        else as_index(item)
        for item in items
    )  # fmt: skip

    single = [(item.dim, item.taken.start) for item in parted if item.drop]

    def run(input: Tensor, *args, **kwargs) -> Tensor:
        x = input
        for dim, position in single:
            note_read(source, dim, position)
        for dim, parts, length in cuts:
            x = owned(x, dim, parts, length)
        # on one device a view: what is written to this copy has to reach the base
        return mark_copy(x[index], input, cut_out=True, index=_index(call, args)) if cuts else x[index]

    return run


@rule(Tensor.__getitem__, traits=Trait.VIEW | Trait.LINEAR)
def getitem(call: Call):
    """See the table above; no communication but for a long slice of a sharded dim."""
    index = call.args[1]
    if not is_basic(index):
        return decomposed(read_tensors)
    items = parse(index, call.operands[0].shape)
    return None if items is None else read(call, items, keep=True)


def _one_dim(call: Call, dim: object, entry: object, *, keep: bool = False):
    """The index `entry` of one dim, the others whole."""
    x = call.operands[0]
    if not x.ndim or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        return None
    index = [slice(None)] * x.ndim
    index[dim] = entry
    items = parse(tuple(index), x.shape)
    return None if items is None else read(call, items, keep=keep)


@rule(torch.select, Tensor.select, traits=VIEWS)
def select(call: Call):
    dim, at = call.get(1, "dim"), call.get(2, "index")
    if isinstance(at, Operand):
        return decomposed(lambda x, dim, index: x.select(dim, int(index)))
    return _one_dim(call, dim, at)


@rule(torch.select_copy, traits=Trait.MOVES | Trait.LINEAR)
def select_copy(call: Call):
    return decomposed(lambda x, dim, index: x.select(dim, index).clone())


@rule(torch.narrow, Tensor.narrow, traits=VIEWS)
def narrow(call: Call):
    """A start that is a tensor is read: it must be replicated, or that read communicates."""
    dim, start, length = call.get(1, "dim"), call.get(2, "start"), call.get(3, "length")
    if isinstance(start, Operand):
        return decomposed(lambda x, dim, start, length: x.narrow(dim, int(start), length))
    x = call.operands[0]
    if not x.ndim or not -x.ndim <= dim < x.ndim or length < 0:
        return None
    size = x.shape[dim]
    start = start + size if start < 0 else start
    if not 0 <= start <= size - length:
        return None
    return _one_dim(call, dim, slice(start, start + length))


@rule(torch.narrow_copy, Tensor.narrow_copy, traits=Trait.MOVES | Trait.LINEAR)
def narrow_copy(call: Call):
    return decomposed(lambda x, dim, start, length: x.narrow(dim, start, length).clone())


@rule(torch.slice_copy, traits=Trait.MOVES | Trait.LINEAR)
def slice_copy(call: Call):
    def run(x, dim=0, start=None, end=None, step=1):
        return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].clone()

    return decomposed(run)


# --- writing --------------------------------------------------------------------------


@rule(Tensor.__setitem__)
def setitem(call: Call):
    """Never communicates for the tensor written to; the value is made to fit it."""
    x, index, value = call.args
    if not is_basic(index):
        return decomposed(write_tensors)
    items = parse(index, x.shape)
    return None if items is None else write(call, items, value)


def write(call: Call, items: list[Item], value: object) -> Decision | None:
    """The decision to write `value` (an operand or a number) to a basic index of operand 0, in place."""
    x = call.operands[0]
    labels: list = list(range(x.ndim))
    for item in items:
        if item.dim is not None and not item.is_full(x.shape):
            labels[item.dim] = ("part", item.dim) if x.layout.axes_of(item.dim) else None
    seen = [item for item in items if not item.drop]
    view = [(item.dim if item.is_full(x.shape) else None, len(item.taken)) for item in seen]
    inputs, linear = [tuple(labels)], [(0,)]
    if isinstance(value, Operand):
        aligned = align(value.shape, view)
        if aligned is None:
            return None
        inputs.append(aligned)
        linear = [(0, 1)]
    decision = solve(call, Signature(inputs, [tuple(labels)], linear=linear, shapes=[x.shape]))
    if decision is None:
        return None
    parted = [item for item in items if item.dim is not None and isinstance(labels[item.dim], tuple)]
    drop_value = not isinstance(value, Operand) and not enters_here(x.layout)
    if parted or drop_value:
        decision.run = _writer(x.layout, items, parted, seen, drop_value)
    return decision


def _writer(layout: Layout, items: list[Item], parted: list[Item], seen: list[Item], drop_value: bool):
    region = layout.region_at(layout.mesh.coordinate)
    choices = [pieces(region[item.dim], item.taken) for item in parted]
    index = [slice(None) if item.is_full(layout.shape) else as_index(item) for item in items]
    writes = []
    for chosen in itertools.product(*choices):
        where, narrowed = list(index), []
        for item, piece in zip(parted, chosen):
            where[items.index(item)] = piece.local.start if item.drop else piece.local
            if not item.drop:
                narrowed.append((seen.index(item) - len(seen), piece.position, piece.length))
        writes.append((tuple(where), narrowed))

    def run(x: Tensor, _, value: object) -> None:
        if drop_value:
            value = 0
        if not writes:  # nothing is written here: autograd hears of the write, as on the ranks that hold what is
            x[:0] = value.sum() if isinstance(value, Tensor) else value
        for where, narrowed in writes:
            part = value
            if isinstance(value, Tensor):
                for dim, position, length in narrowed:
                    if -dim <= part.ndim and part.shape[dim] != 1:
                        part = part.narrow(dim, position, length)
            x[where] = part

    return run
