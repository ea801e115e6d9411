"""Flat parameters: memory in which parameters lie one behind the other, so that one collective takes them as they are.

It is up to two pieces, cut by one packing, so that everything is a view:

    full       what the model computes with, whole over the data axis, in the compute dtype
    master     what the optimizer updates: this rank's part of it from ZeRO-1 on, else all of it

                      at rest         in its module's forward and backward
    ZeRO 0            full = master
    ZeRO 1, 2         full, whose own part is master; gathered in place after each step, waited for when first read
    ZeRO 3            master          full, gathered from all masters, then let go
    with precision    master          full, cast from master (and gathered), let go under ZeRO 3

Offloaded, a master that is memory of its own lies on the host, pinned, and with it the parameter at rest; of one that
is part of full the optimizer updates a pinned copy.

A parameter is ONE object all the time: its data and its layout are pointed at the piece
that counts (`expose`). So hooks, ties, names and references of users hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm, prod
from operator import attrgetter
from weakref import ref

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import Held, Lender, PendingGather, flat, local_only, set_cause

from .._plan.parts import PlanError
from .._plan.promise import fulfil
from .._torch_private import _has_compatible_shallow_copy_type, _storage_Use_Count, version_of
from .packing import pack
from .slot import Sharing, Slot, block_of, holders, largest_shard

GATHER = Cause("parameter gather")
# Parameters begin where a fresh tensor would: kernels may round by the alignment of their operands.
_ALIGN_BYTES = 64

_is_away, _is_lent, _owner_of = attrgetter("is_away"), attrgetter("is_lent"), attrgetter("_owner")
_requires_grad_of = Tensor.requires_grad.__get__


class FlatParameters:
    """Parameters of one block whose gradients are pending over the same axes."""

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
        self._take_dtype(dtype)
        # Frozen parameters are cut like those that are trained, for they may be thawed.
        self.shards = self.lead is not None and sharing.zero >= 1
        self.lets_go = self.shards and sharing.zero >= 3
        self.separate = self.lets_go or self.compute is not dtype
        self.offloads = sharing.offload and _is_beside_host(self.device)
        self.hosted = self.offloads and self.separate and _may_lie_on_host(self.device)
        self.keep = "part" if self.shards and sharing.zero >= 2 else "whole"
        self.holders = holders(first.mesh_layout)
        largest = [largest_shard(parameter.mesh_layout) for _, parameter in parameters]
        self.packing = pack(
            largest,
            mesh.sizes[begin] if self.inner else 1,
            blocks=[block_of(p.mesh_layout, n) if n else 1 for (_, p), n in zip(parameters, rows)],
            align=lcm(max(1, _ALIGN_BYTES // dtype.itemsize), mesh.count(self.inner[1:]) if self.inner[1:] else 1),
        )
        self.slots = [self._slot(i, *named) for i, named in enumerate(parameters)]
        self._parameters = [slot.parameter for slot in self.slots]
        # torch exchanges no tensor that somebody refers to weakly. Of parameters that change their shape between steps
        # it would exchange some on one rank alone: those whose graph nodes are of another shape than they.
        self._refuse_exchange = [ref(one) for one in self._parameters] if self.lets_go else []
        made = [fulfil(slot.parameter, slot.master_layout) for slot in self.slots]
        self._move_in([slot.take_back(False) if one is None else one for slot, one in zip(self.slots, made)])
        self._pending: PendingGather | None = None
        self._is_shared = False  # as it was when a gather began
        self._is_left = False  # who first reads a parameter waits
        for slot in self.slots:
            slot.parameter._owner, slot.wait = slot, self.wait
        self._is_whole = False  # whether a block computes with them
        self._versions: list[int] = []

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
        slot.is_copied = slot.is_away = slot.is_lent = False
        slot.is_separate, slot.met = self.separate, None
        slot.hooks = OrderedDict() if self.axes else None
        if self.shards:
            cut = flat(layout.ndim, self.packing.units(i, largest_shard(layout)))
            slot.master_layout = layout.with_states((*layout.states[:lead], cut, *layout.states[lead + 1 :]))
        slot.choose_shown()
        slot.reduced_layout, slot.gradient_layout = layout.gradient.reduced, slot.master_layout.gradient.reduced
        return slot

    def _take_dtype(self, dtype: torch.dtype) -> None:
        sharing = self.sharing
        changes = dtype.is_floating_point and sharing.compute not in (None, dtype)
        self.dtype, self.compute = dtype, sharing.compute if changes else dtype
        self.reduce = sharing.reduce if changes and sharing.reduce is not None else dtype

    def _move_in(self, values: Sequence[tuple[Tensor, bool]]) -> None:
        """Allocates, and points the parameters, with their values, at the new memory. `values`: per slot, local, and
        whether it is this rank's part of the master alone."""
        packing, device, dtype = self.packing, self.device, self.dtype
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
        self.lender = Lender(partial(_shows, ref(self), whole.untyped_storage()._cdata))
        self._sink = whole.data  # written through an alias of its own: a gather is no change that autograd must see
        for i, (slot, (value, is_part)) in enumerate(zip(self.slots, values, strict=True)):
            slot.full = whole[slot.start : slot.start + slot.numel].view(slot.shape)
            slot.lender = self.lender
            if self.shards:
                low, high = packing.held(i, slot.numel, rank)
                at = slot.start + low - part[0] if high > low else 0
                slot.master = self.master[at : at + high - low]
            else:
                low, high = 0, slot.numel
                slot.master = self.master[slot.start : slot.start + slot.numel].view(slot.shape)
            slot.held = (low, high) if high > low else (0, 0)
            with torch.no_grad(), local_only():
                if not self.separate:
                    slot.full.copy_(value.view(slot.shape))
                else:
                    slot.master.view(-1).copy_(value.reshape(-1) if is_part else value.reshape(-1)[low:high])
            if self.differentiable:
                self._make_trainable(slot)
        self._gaps = packing.gaps([slot.numel for slot in self.slots])
        if self.lets_go:
            whole.untyped_storage().resize_(0)
        with local_only():
            for slot in self.slots:
                slot.show(not self.separate)
        self.ready = not self.separate
        self._holders = self._count_holders()

    def _make_trainable(self, slot: Slot) -> None:
        """What an optimizer is given of the slot."""
        optimized, dtype, device = slot.master, self.dtype, self.device
        if self.offloads:
            slot.arriving = on_host(slot.master.shape, dtype, device)
            slot.is_copied = not self.hosted
            if slot.is_copied:
                optimized = on_host(slot.master.shape, dtype, device).copy_(slot.master)
        slot.optimized = nn.Parameter(optimized)
        if self.reduce is not self.compute or self.compute is not dtype:
            with local_only():
                slot.parameter.grad_dtype = self.reduce

    @property
    def is_thawed(self) -> bool:
        """Whether the buffer was made of frozen parameters, and one of them is to be trained by now."""
        return not self.differentiable and any(map(_requires_grad_of, self._parameters))

    def thaw(self) -> None:
        """From here on its gradients are reduced, and optimizers step over it."""
        self.differentiable = True
        with torch.inference_mode(False):
            for slot in self.slots:
                before = self._count_holders()
                self._make_trainable(slot)
                self._holders += self._count_holders() - before

    @property
    def is_intact(self) -> bool:
        """Whether no parameter was pointed at other memory, by `.data`, or exchanged (`torch.utils.swap_tensors`)."""
        try:
            return not any(map(_is_away, self.slots)) and list(map(_owner_of, self._parameters)) == self.slots
        except AttributeError:
            return False

    def take_in(self) -> list[int]:
        """Parameters that have got other memory lie in the buffer again, with its values and dtype. Returns those that
        were exchanged, which have lost their hooks.

        The buffer moves: what is over its old memory keeps its values. Raises PlanError where only some have another
        dtype now, on all ranks alike.
        """
        self.wait()
        lost = [slot.is_lost for slot in self.slots]
        with local_only():
            dtypes = {s.name: s.parameter.dtype if away else self.dtype for s, away in zip(self.slots, lost)}
            devices = {s.name: s.parameter.device for s, away in zip(self.slots, lost) if away}
        dtype = next(iter(dtypes.values()))
        needs_copy = dtype.is_floating_point and self.sharing.compute not in (None, dtype) and not self.separate
        elsewhere = not self.hosted and any(one != self.device for one in devices.values())
        if len({*dtypes.values()}) > 1 or needs_copy or elsewhere:
            raise PlanError(
                "parallelize",
                "parameters were given another dtype or device than the flat buffer, which they share, can have",
                [f"{name}  {dtype}  {devices.get(name, self.device)}" for name, dtype in dtypes.items()],
                [("model.to(dtype) before parallelize", ""), ("Precision(compute=...)", "computes in another dtype")],
            )
        exchanged = [i for i, slot in enumerate(self.slots) if slot.parameter.__dict__.get("_owner") is not slot]
        kept = [(slot.master, True) if self.separate else (slot.full, False) for slot in self.slots]
        values = [s.take_back(self.separate) if away else one for s, away, one in zip(self.slots, lost, kept)]
        self._take_dtype(dtype)
        with torch.inference_mode(False):  # an evaluation may be what meets them first, and training follows
            self._move_in(values)
        return exchanged

    # --- parameters ---------------------------------------------------------------------

    def expose(self, whole: bool) -> None:
        """Points the parameters at `full` or at `master`, but for those that somebody has pointed elsewhere."""
        with local_only():
            for slot in self.slots:
                if not slot.is_lost:
                    slot.show(whole)

    def fetch(self) -> None:
        """Starts to make `full` what the masters say; pairs with `wait`."""
        if self.ready and not self.lets_go and self._is_written:
            self.ready = False
        if self.ready or self._pending is not None:
            return
        if self.lets_go:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        # From the host the copy is waited for: it must not be overtaken by what a user writes to a parameter at rest.
        part = self.master.to(self.device) if self.hosted else self.master
        part = part if self.compute is self.dtype else part.to(self.compute)
        self._note_versions()
        if not self.shards or self.is_elsewhere:
            self._sink.copy_(part)
            self.ready = True
            return
        set_cause(GATHER)
        self._pending = PendingGather(self._sink, part, self.sharing.mesh, (self.lead,))

    def _note_versions(self) -> None:
        with local_only():
            self._versions = list(map(version_of, self._parameters))
        for slot in self.slots:
            slot.is_lent = False

    @property
    def _is_written(self) -> bool:
        """Whether somebody else than an optimizer of ours may have written to a parameter since `full` was made, or was
        first computed with."""
        if not self.separate:
            return False
        with local_only():
            return list(map(version_of, self._parameters)) != self._versions or any(map(_is_lent, self.slots))

    def begin_whole(self) -> None:
        """The parameters are `full` from here on, as they are at rest by now: what was written to them since it was
        gathered ahead is in it. What is written to them from here on is taken by `end_whole`."""
        self.wait()
        if self._is_written:
            self.ready = False
            self.fetch()
            self.wait()
        self._note_versions()
        self._is_whole = True
        self.expose(True)

    def end_whole(self) -> None:
        """They are the masters again, to which goes what a block wrote to them while it ran (an embedding with a
        `max_norm`, weights that a forward clips, sets in its first call, or puts on a sphere)."""
        self.wait()
        if self._is_whole:
            self._is_whole = False
            if self._is_written:
                self._take_writes()
                self._note_versions()
        self.expose(False)

    def _take_writes(self) -> None:
        """Of every rank its part, since all have written the same. In another dtype, of what is another value now."""
        self.lender.end(Held.COPY)
        with torch.no_grad(), local_only():
            for slot, before in zip(self.slots, self._versions, strict=True):
                if version_of(slot.parameter) == before and not slot.is_lent:
                    continue
                low, high = slot.held
                master = slot.master.view(-1)
                value = slot.full.view(-1)[low:high].to(master.device)
                if self.compute is not self.dtype:
                    value = torch.where(value == master.to(self.compute), master, value.to(self.dtype))
                master.copy_(value)

    @property
    def is_gathered(self) -> bool:
        """Whether `full` is what the masters said, or is to be."""
        return self.ready or self._pending is not None

    def wait(self) -> None:
        """`full` is there, and the parameters are it."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending, self.ready = None, True
        if self._is_left:
            self._is_left = False
            for slot in self.slots:
                slot.parameter._layout = slot.shown[True]

    def leave_under_way(self) -> None:
        """What `updated` has started is waited for by whoever first asks how one of the parameters lies: nothing reads
        one without that. Where somebody else is over their memory, whom nobody would ask, it is waited for now."""
        if self._pending is None:
            return
        if self._is_shared:
            self.wait()
            return
        self._pending.leave(self)
        for slot in self.slots:
            del slot.parameter._layout
        self._is_left = True

    def _count_holders(self) -> int:
        """Tensors over the parameters' memory."""
        return _storage_Use_Count(self.full.untyped_storage()._cdata)

    def let_go(self) -> None:
        """The masters are the parameters; memory of `full` goes under ZeRO-3."""
        self.end_whole()
        if self.lets_go and self.ready:
            self.lender.end(Held.COMES_AND_GOES)
            self.full.untyped_storage().resize_(0)
            self.ready = False

    def updated(self) -> None:
        """The masters have changed: starts to gather `full` in place where it is not a copy; pairs with `wait`, or
        `leave_under_way`."""
        self.wait()
        self.lender.end(Held.COPY)
        if self.separate:
            self.let_go()
            self.lender.end(Held.COMES_AND_GOES)
            self.ready = False
        elif self.shards and self.differentiable and not self.is_elsewhere:
            self._is_shared = not self.is_intact or self._count_holders() != self._holders
            set_cause(GATHER)
            self._pending = PendingGather(self._sink, self.master.data, self.sharing.mesh, (self.lead,))


def _shows(of: ref[FlatParameters], place: int) -> bool:
    """Whether the whole parameters lie in the storage at `place`, now."""
    parameters = of()
    if parameters is None or parameters.full.untyped_storage()._cdata != place:
        return False
    parameters.wait()
    return parameters.ready


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
    return device.type == "meta" or _has_compatible_shallow_copy_type(there, torch.empty(0))
