"""Flat buffers: parameters and gradients that lie one behind the other, so that collectives take them as they are.

A buffer holds parameters whose gradients are pending over the same mesh axes. It has up
to three pieces of memory, each cut by one packing, so that everything is a view:

    full       what the model computes with, whole over the data axis, in the compute dtype
    master     what the optimizer updates: this rank's part of it from ZeRO-1 on, else all of it
    gradients  flat like `full`, in the reduction's dtype; autograd adds into its views

                      at rest         in its module's forward and backward
    ZeRO 0            full = master
    ZeRO 1, 2         full, whose own part is master; gathered in place after each step
    ZeRO 3            master          full, gathered from all masters, then let go
    with precision    master          full, cast from master (and gathered), let go under ZeRO 3

Offloaded, a master that is memory of its own lies on the host, pinned, and with it the parameter at rest; of one that
is part of full the optimizer updates a pinned copy.

A parameter is ONE object all the time: its data and its layout are pointed at the piece
that counts (`expose`). So hooks, ties, names and references of users hold.

The gradient of a parameter that nobody used must stay None, as on one device, and on all
ranks alike, though a rank that did not use it cannot know of the others. What it sends
for it is -0.0: the sum is -0.0 only where nobody sent anything else, for what is added
into a buffer of zeros is never -0.0. From ZeRO-2 on a rank may hold nothing of the
parameter to look at; then ranks tell each other, a byte per parameter (`Usage`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import (
    INVARIANT,
    PENDING,
    Mesh,
    PendingGather,
    PendingReduction,
    convert,
    flat,
    forget,
    local_only,
    set_cause,
    settle,
    stamp,
)

from ._in_flight import SYNC, InFlight, Usage
from ._packing import pack, whole_rows
from ._promise import fulfil

GATHER = Cause("parameter gather")
# Parameters begin where a fresh tensor would: kernels may round by the alignment of their operands.
_ALIGN_BYTES = 64

_set_data = Tensor.data.__set__
_get_grad = Tensor.grad.__get__
_set_grad = Tensor.grad.__set__


@dataclass(frozen=True)
class Sharing:
    """How the buffers of a model are shared.

    zero: the stage. lead: the mesh axis over which ZeRO shards (the innermost data axis); None without one.
    compute, reduce, sent: see `Precision`, None for the parameters' own.
    offload: masters, and so optimizer states, on the host.
    """

    mesh: Mesh
    zero: int = 0
    lead: int | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    sent: torch.dtype | None = None
    offload: bool = False


class Slot:
    """One parameter's place in a buffer."""

    __slots__ = (
        "parameter", "name", "start", "numel", "shape", "full_layout", "master_layout", "reduced_layout",
        "gradient_layout", "full", "master", "optimized", "gradient", "arriving",
        "is_copied",
    )  # fmt: skip

    parameter: DTensor
    full_layout: Layout  # while the model computes with it
    master_layout: Layout  # as the optimizer updates it
    reduced_layout: Layout  # of the whole reduced gradient
    gradient_layout: Layout  # of the reduced gradient that an optimizer step consumes
    full: Tensor
    master: Tensor
    optimized: nn.Parameter | None  # the master as a plain parameter, which elementwise optimizers take
    gradient: Tensor | None
    arriving: Tensor | None  # on the host, where the gradients of an offloaded parameter arrive
    is_copied: bool  # whether `optimized` is a copy of the master, on the host


def settled(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor of `layout`, reduced."""
    gradient = layout.gradient
    return gradient.with_states(INVARIANT if state is PENDING else state for state in gradient.states)


class Buffer:
    """Parameters of one block whose gradients are pending over the same axes, flat."""

    def __init__(
        self, parameters: Sequence[tuple[str, DTensor]], axes: tuple[int, ...], sharing: Sharing, rows: Sequence[int]
    ) -> None:
        """`rows`: per parameter, rows of dim 0 that no border may split; 0 for none."""
        mesh, first = sharing.mesh, parameters[0][1]
        self.sharing, self.axes = sharing, axes
        with local_only():
            dtype, self.device = first.dtype, first.device
        self.lead = sharing.lead if sharing.lead in axes else None
        begin = self.lead if self.lead is not None else min(axes, default=0)
        self.inner = tuple(axis for axis in axes if axis >= begin)
        self.outer = tuple(axis for axis in axes if axis < begin)
        self.differentiable = first.requires_grad
        changes = first.dtype.is_floating_point and sharing.compute not in (None, dtype)
        self.dtype, self.compute = dtype, sharing.compute if changes else dtype
        self.reduce = sharing.reduce if changes and sharing.reduce is not None else dtype
        # Frozen parameters have nothing to share below ZeRO-3.
        self.shards = self.lead is not None and sharing.zero >= (1 if self.differentiable else 3)
        self.lets_go = self.shards and sharing.zero >= 3
        self.separate = self.lets_go or self.compute is not dtype
        self.offloads = sharing.offload and _is_beside_host(self.device)
        self.hosted = self.offloads and self.separate and _may_lie_on_host(self.device)
        self.keep = "part" if self.shards and sharing.zero >= 2 else "whole"
        self.holders = holders(first.mesh_layout)
        largest = [_largest_shard(parameter.mesh_layout) for _, parameter in parameters]
        self.packing = pack(
            largest,
            mesh.sizes[begin] if self.inner else 1,
            blocks=[_block(p.mesh_layout, n) if n else 1 for (_, p), n in zip(parameters, rows)],
            align=lcm(max(1, _ALIGN_BYTES // dtype.itemsize), mesh.count(self.inner[1:]) if self.inner[1:] else 1),
        )
        self.slots = [self._slot(i, *named) for i, named in enumerate(parameters)]
        self._move_in(dtype)
        self.ready = not self.separate
        self._pending: PendingGather | None = None
        self.flat: Tensor | None = None
        self.filled: set[int] = set()

    # --- making -------------------------------------------------------------------------

    @property
    def is_elsewhere(self) -> bool:
        """Whether other ranks hold all of it: no rank that this one would sum or gather with has any of it."""
        return bool(self.slots) and not any(slot.numel for slot in self.slots)

    def _slot(self, i: int, name: str, parameter: DTensor) -> Slot:
        slot, layout, lead = Slot(), parameter.mesh_layout, self.lead
        slot.parameter, slot.name, slot.start = parameter, name, self.packing.starts[i]
        slot.full_layout = slot.master_layout = layout
        slot.numel, slot.shape = prod(layout.local_shape), layout.local_shape
        slot.gradient = slot.optimized = slot.arriving = None
        slot.is_copied = False
        if self.shards:
            cut = flat(layout.ndim, self.packing.units(i, _largest_shard(layout)))
            slot.master_layout = layout.with_states((*layout.states[:lead], cut, *layout.states[lead + 1 :]))
        slot.reduced_layout, slot.gradient_layout = settled(layout), settled(slot.master_layout)
        return slot

    def _move_in(self, dtype: torch.dtype) -> None:
        """Allocates, and points the parameters, with their values, at the new memory."""
        packing, device = self.packing, self.device
        if self.is_elsewhere:
            self.packing = packing = replace(packing, part=0)
        rank = self.sharing.mesh.coordinate[self.lead] if self.shards else 0
        part = (rank * packing.part, (rank + 1) * packing.part) if self.shards else (0, packing.total)
        # What is let go is not touched here: it takes no memory.
        whole = (torch.empty if self.lets_go else torch.zeros)(packing.total, dtype=self.compute, device=device)
        if self.separate:
            numel = part[1] - part[0]
            self.master = (
                on_host((numel,), dtype, device).zero_()
                if self.hosted
                else torch.zeros(numel, dtype=dtype, device=device)
            )
        else:
            self.master = whole[part[0] : part[1]]
        self.full = whole
        self._sink = whole.data  # written through an alias of its own: a gather is no change that autograd must see
        for i, slot in enumerate(self.slots):
            slot.full = whole[slot.start : slot.start + slot.numel].view(slot.shape)
            if self.shards:
                low, high = packing.held(i, slot.numel, rank)
                at = slot.start + low - part[0] if high > low else 0
                slot.master = self.master[at : at + high - low]
            else:
                low, high = 0, slot.numel
                slot.master = self.master[slot.start : slot.start + slot.numel].view(slot.shape)
            with torch.no_grad(), local_only():
                made = fulfil(slot.parameter, slot.master_layout)
                values = slot.parameter.detach() if made is None else made
                if made is not None:
                    (slot.master if self.separate else slot.full).view(-1).copy_(values.reshape(-1))
                elif self.separate:
                    slot.master.view(-1).copy_(values.reshape(-1)[low:high])
                else:
                    slot.full.copy_(values)
            if self.differentiable:
                optimized = slot.master
                if self.offloads:
                    slot.arriving = on_host(slot.master.shape, dtype, device)
                    slot.is_copied = not self.hosted
                    if slot.is_copied:
                        optimized = on_host(slot.master.shape, dtype, device).copy_(slot.master)
                slot.optimized = nn.Parameter(optimized)
                if self.reduce is not self.compute or self.compute is not dtype:
                    with local_only():
                        slot.parameter.grad_dtype = self.reduce
        if self.lets_go:
            whole.untyped_storage().resize_(0)
        self.expose(not self.separate)

    # --- parameters ---------------------------------------------------------------------

    def expose(self, whole: bool) -> None:
        """Points the parameters at `full` or at `master`."""
        with local_only():
            for slot in self.slots:
                parameter = slot.parameter
                forget(parameter)
                _set_data(parameter, slot.full if whole else slot.master)
                parameter._layout = slot.full_layout if whole else slot.master_layout

    def fetch(self) -> None:
        """Starts to make `full` what the masters say; pairs with `wait`."""
        if self.ready or self._pending is not None:
            return
        if self.lets_go:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        # From the host the copy is waited for: it must not be overtaken by what a user writes to a parameter at rest.
        part = self.master.to(self.device) if self.hosted else self.master
        part = part if self.compute is self.dtype else part.to(self.compute)
        if not self.shards or self.is_elsewhere:
            self._sink.copy_(part)
            self.ready = True
            return
        set_cause(GATHER)
        self._pending = PendingGather(self._sink, part, self.sharing.mesh, (self.lead,))

    def wait(self) -> None:
        """`full` is there, and the parameters are it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending, self.ready = None, True

    def let_go(self) -> None:
        """The masters are the parameters; memory of `full` goes under ZeRO-3."""
        self.wait()
        self.expose(False)
        if self.lets_go and self.ready:
            self.full.untyped_storage().resize_(0)
            self.ready = False

    def updated(self) -> None:
        """The masters have changed: starts to gather `full` in place where it is not a copy; pairs with `wait`."""
        if self.separate:
            self.let_go()
            self.ready = False
        elif self.shards and not self.is_elsewhere:
            set_cause(GATHER)
            self._pending = PendingGather(self._sink, self.master.data, self.sharing.mesh, (self.lead,))

    # --- gradients ----------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        return self.differentiable and bool(self.axes)

    def open_gradients(self) -> None:
        """Autograd adds into views of a flat buffer from here on; what is pending there already stays."""
        if not self.reduces:
            return
        fresh = self.flat is None
        if fresh:
            self.flat = torch.zeros(self.packing.total, dtype=self.reduce, device=self.device)
        with local_only():
            for i, slot in enumerate(self.slots):
                if fresh:
                    view = self.flat[slot.start : slot.start + slot.numel].view(size=slot.shape)
                    slot.gradient = stamp(view, slot.full_layout.gradient)
                now = _get_grad(slot.parameter)
                if now is slot.gradient:
                    continue
                if now is not None:
                    self._put(i, slot, now)
                elif i in self.filled:  # zero_grad since then
                    slot.gradient.zero_()
                    self.filled.discard(i)
                _set_grad(slot.parameter, slot.gradient)

    def arrived(self, i: int) -> None:
        """Autograd has added to a parameter's gradient."""
        slot = self.slots[i]
        if self.flat is None:
            self.open_gradients()
        with local_only():
            now = _get_grad(slot.parameter)
            if now is not slot.gradient:
                self._put(i, slot, now)
                _set_grad(slot.parameter, slot.gradient)
        self.filled.add(i)

    def _put(self, i: int, slot: Slot, gradient: Tensor) -> None:
        """A gradient that autograd did not add into the buffer; with dispatch off."""
        slot.gradient.add_(gradient.detach() if gradient.requires_grad else gradient)
        self.filled.add(i)

    def has_pending(self) -> bool:
        """Whether any parameter has a gradient that was not reduced."""
        with local_only():
            return any(_get_grad(slot.parameter) is not None for slot in self.slots)

    def leave_pending(self) -> None:
        """After a backward whose gradients stay pending: who got none has none."""
        with local_only():
            for i, slot in enumerate(self.slots):
                if i not in self.filled and slot.gradient is not None and _get_grad(slot.parameter) is slot.gradient:
                    _set_grad(slot.parameter, None)

    @property
    def is_full(self) -> bool:
        return len(self.filled) == len(self.slots) or self.is_elsewhere

    def start(self) -> InFlight:
        """Starts the sum over ranks, and leaves nothing pending. Ranks without a gradient take part all the same."""
        flat, missing = self.flat, []
        if flat is None:
            flat = torch.zeros(self.packing.total, dtype=self.reduce, device=self.device)
        with local_only():
            for i, slot in enumerate(self.slots):
                now = _get_grad(slot.parameter)
                if now is not None and self.flat is not None:
                    _set_grad(slot.parameter, None)
                if i not in self.filled or now is None:
                    missing.append(i)
                    _fill_negative_zero(flat[slot.start : slot.start + slot.numel])
                slot.gradient = None
        self.flat, self.filled = None, set()
        if self.is_elsewhere:
            return InFlight(self, None, missing)  # all it could sum with have none of it either
        set_cause(SYNC)
        sharing = self.sharing
        pending = PendingReduction(flat, sharing.mesh, self.inner, self.outer, self.keep, sharing.sent)
        return InFlight(self, pending, missing)

    def used_elsewhere(self, used: Sequence[bool]) -> None:
        """Parameters that other ranks hold get a gradient, of no elements, where they have one there."""
        for slot, there in zip(self.slots, used):
            if there and slot.parameter.grad is None:
                layout = slot.gradient_layout if self.keep == "part" else settled(slot.full_layout)
                settle(slot.parameter, stamp(slot.master.detach().new_empty(layout.local_shape), layout))

    def settle(self, summed: Tensor, missing: list[int], usage: Usage | None) -> None:
        """Adds the reduced gradients to what earlier backwards left. `missing`: what this rank did not use."""
        part = self.keep == "part"
        rank = self.sharing.mesh.coordinate[self.lead] if part else 0
        for i, slot in enumerate(self.slots):
            if part:
                low, high = self.packing.held(i, slot.numel, rank)
                at = slot.start + low - rank * self.packing.part if high > low else 0
                piece, layout = summed[at : at + high - low], slot.gradient_layout
            else:
                piece = summed[slot.start : slot.start + slot.numel].view(size=slot.shape)
                layout = slot.reduced_layout
            if i in missing and not (usage.anywhere(slot) if usage is not None else not _is_negative_zero(piece)):
                continue
            piece = stamp(piece if piece.dtype is self.dtype else piece.to(self.dtype), layout)
            before = slot.parameter.__dict__.get("_settled_grad")
            if before is None:
                settle(slot.parameter, piece)
                continue
            if before.mesh_layout is not layout:  # a user's own
                piece = convert(piece, before.mesh_layout, SYNC)
            with local_only():
                before.add_(piece)


def on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that copies to and from `device` are fast with; of a dry run's (meta), without values."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def _is_beside_host(device: torch.device) -> bool:
    """Whether the host's memory is another than the device's."""
    return device.type != "cpu"


def _may_lie_on_host(device: torch.device) -> bool:
    """Whether a parameter may be pointed at memory of the device and of the host in turn, as torch has it for CUDA."""
    there = torch.empty(0, device=device)
    return device.type == "meta" or torch._has_compatible_shallow_copy_type(there, torch.empty(0))


def holders(layout: Layout) -> tuple[tuple[int, int], ...]:
    """(axis, rank) of the axes of which one rank alone holds anything: an expert's, say."""
    found = []
    for axis, state in enumerate(layout.states):
        if state.is_sharded and layout.mesh.sizes[axis] > 1:
            before, after = (0,) * axis, (0,) * (layout.mesh.ndim - axis - 1)
            ranks = range(layout.mesh.sizes[axis])
            full = [rank for rank in ranks if prod(layout.shape_at((*before, rank, *after)))]
            found += [(axis, rank) for rank in full if len(full) == 1]
    return tuple(found)


def _largest_shard(layout: Layout) -> int:
    """Elements of the largest shard over all coordinates: what the buffer reserves on every rank alike."""
    cutting = [range(size) if state.is_sharded else (0,) for size, state in zip(layout.mesh.sizes, layout.states)]
    return max(prod(layout.shape_at(coordinate)) for coordinate in itertools.product(*cutting))


def _block(layout: Layout, rows: int) -> int:
    """Elements of `rows` rows of the local shard."""
    return whole_rows(layout.local_shape, rows) if layout.ndim else 1


def _fill_negative_zero(piece: Tensor) -> None:
    (torch.view_as_real(piece) if piece.is_complex() else piece).fill_(-0.0)


def _is_negative_zero(piece: Tensor) -> bool:
    piece = torch.view_as_real(piece) if piece.is_complex() else piece
    return bool(((piece == 0) & piece.signbit()).all())
