"""Flat parameters: memory in which parameters lie one behind the other, so that one collective takes them as they are.

It is up to two pieces, cut by one packing, so that everything is a view:

    full       what the model computes with, whole over the data axis, in the compute dtype
    shard      what the optimizer updates: this rank's part of it from ZeRO-1 on, else all of it

                      at rest         in its module's forward and backward
    ZeRO 0            full = shard
    ZeRO 1, 2         full, whose own part is shard; gathered in place after each step, waited for when first read
    ZeRO 3            shard           full, gathered from all shards, then freed
    with precision    shard           full, cast from shard (and gathered), freed under ZeRO 3

Offloaded, a shard that is memory of its own lies on the host, pinned, and with it the parameter at rest; of one that
is part of full the optimizer updates a pinned copy.

A parameter is ONE object all the time: its data and its layout are pointed at the piece
that counts (`expose`). So hooks, ties, names and references of users hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from operator import attrgetter
from weakref import ref

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import GatherInFlight, Held, Lender, flat, local_only, set_cause

from .._plan.parts import PlanError
from .._plan.promise import fulfil
from .._torch_private import _has_compatible_shallow_copy_type, owners_of, version_of
from .packing import pack
from .sharded_parameter import ShardedParameter, Sharing, block_of, holders, largest_shard

GATHER = Cause("parameter gather")
# Parameters begin where a fresh tensor would: kernels may round by the alignment of their operands.
_ALIGN_BYTES = 64

_is_away, _is_lent, _owner_of = attrgetter("is_away"), attrgetter("is_lent"), attrgetter("_owner")
_requires_grad_of = Tensor.requires_grad.__get__


class FlatParameters:
    """Parameters of one block whose gradients are partial over the same axes."""

    def __init__(
        self, parameters: Sequence[tuple[str, DTensor]], axes: tuple[int, ...], sharing: Sharing, rows: Sequence[int]
    ) -> None:
        """`rows`: per parameter, rows of dim 0 that no boundary may split; 0 for none."""
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
        self.reshards = self.shards and sharing.zero >= 3
        self.separate = self.reshards or self.compute is not dtype
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
        self.params = [self._param(i, *named) for i, named in enumerate(parameters)]
        self._parameters = [param.parameter for param in self.params]
        # torch exchanges no tensor that somebody refers to weakly. Of parameters that change their shape between steps
        # it would exchange some on one rank alone: those whose graph nodes are of another shape than they.
        self._refuse_exchange = [ref(one) for one in self._parameters] if self.reshards else []
        made = [fulfil(one.parameter, one.shard_layout if self.separate else one.full_layout) for one in self.params]
        self._move_in([param.take_back(False) if one is None else one for param, one in zip(self.params, made)])
        self.gathering: GatherInFlight | None = None
        self._is_shared = False  # as it was when a gather began
        self._is_left = False  # who first reads a parameter waits
        for param in self.params:
            param.parameter._owner = param
        self._is_unsharded = False  # whether a block computes with them
        self._versions: list[int] = []

    # --- making -------------------------------------------------------------------------

    @property
    def is_elsewhere(self) -> bool:
        """True if other ranks hold all of it: no rank that this one would sum or gather with has any of it."""
        return bool(self.params) and not any(param.numel for param in self.params)

    def _param(self, i: int, name: str, parameter: DTensor) -> ShardedParameter:
        layout, lead, hooks = parameter.mesh_layout, self.lead, OrderedDict() if self.axes else None
        part = layout
        if self.shards:
            cut = flat(layout.ndim, self.packing.units(i, largest_shard(layout)))
            part = layout.with_states((*layout.states[:lead], cut, *layout.states[lead + 1 :]))
        start = self.packing.starts[i]
        param = ShardedParameter(parameter, name, start, layout, part, self.separate, hooks, self.wait)
        param.choose_shown(self.sharing.precision and self.sharing.precision.products)
        return param

    def _take_dtype(self, dtype: torch.dtype) -> None:
        precision = self.sharing.precision
        changes = precision is not None and dtype.is_floating_point and precision.compute is not dtype
        self.dtype = dtype
        self.compute, self.reduce = (precision.compute, precision.reduce) if changes else (dtype, dtype)

    def _move_in(self, values: Sequence[tuple[Tensor | None, bool]]) -> None:
        """Allocates, and points the parameters, with their values, at the new memory. `values`: per parameter, local,
        and whether it is this rank's part of the full-precision shard alone; None where they come later, or are any."""
        packing, device, dtype = self.packing, self.device, self.dtype
        if self.is_elsewhere:
            self.packing = packing = replace(packing, part=0)
        rank = self.sharing.mesh.coordinate[self.lead] if self.shards else 0
        part = (rank * packing.part, (rank + 1) * packing.part) if self.shards else (0, packing.total)
        # Memory is not touched before values come: that of what is resharded is given back below.
        full = torch.empty(packing.total, dtype=self.compute, device=device)
        if self.separate:
            size = (part[1] - part[0],)
            self.shard = on_host(size, dtype, device) if self.hosted else torch.empty(size, dtype=dtype, device=device)
        else:
            self.shard = full[part[0] : part[1]]
        self.full, self._gaps = full, packing.gaps([param.numel for param in self.params])
        held, begin = (self.shard, part[0]) if self.separate else (full, 0)
        for low, high in self._gaps:
            held[max(low - begin, 0) : max(high - begin, 0)].zero_()
        self.lender = Lender(partial(_shows, ref(self), full.untyped_storage()._cdata))
        self._sink = full.data  # written through an alias of its own: a gather is no change that autograd must see
        for i, (param, (value, is_part)) in enumerate(zip(self.params, values, strict=True)):
            param.full = full[param.start : param.start + param.numel].view(param.shape)
            param.lender = self.lender
            if self.shards:
                low, high = packing.held(i, param.numel, rank)
                at = param.start + low - part[0] if high > low else 0
                param.shard = self.shard[at : at + high - low]
            else:
                low, high = 0, param.numel
                param.shard = self.shard[param.start : param.start + param.numel].view(param.shape)
            param.held = (low, high) if high > low else (0, 0)
            with torch.no_grad(), local_only():
                if value is None:
                    pass
                elif not self.separate:
                    param.full.copy_(value.view(param.shape))
                else:
                    param.shard.view(-1).copy_(value.reshape(-1) if is_part else value.reshape(-1)[low:high])
            if self.differentiable:
                self._make_trainable(param)
        if self.reshards:
            full.untyped_storage().resize_(0)
        with local_only():
            for param in self.params:
                param.show(not self.separate)
        self.ready = not self.separate
        self._holders = self._count_holders()

    def _make_trainable(self, param: ShardedParameter) -> None:
        """Makes the optimizer's parameter."""
        optimized, dtype, device = param.shard, self.dtype, self.device
        if self.offloads:
            param.arriving = on_host(param.shard.shape, dtype, device)
            param.is_copied = not self.hosted
            if param.is_copied:
                optimized = on_host(param.shard.shape, dtype, device).copy_(param.shard)
        param.optimized = nn.Parameter(optimized)
        if self.reduce is not self.compute or self.compute is not dtype:
            with local_only():
                param.parameter.grad_dtype = self.reduce

    @property
    def is_thawed(self) -> bool:
        """True if the bucket was made of frozen parameters, and one of them is to be trained by now."""
        return not self.differentiable and any(map(_requires_grad_of, self._parameters))

    def thaw(self) -> None:
        """Reduces its gradients from here on, and lets optimizers step over it."""
        self.differentiable = True
        with torch.inference_mode(False):
            for param in self.params:
                before = self._count_holders()
                self._make_trainable(param)
                self._holders += self._count_holders() - before

    @property
    def is_intact(self) -> bool:
        """True if no parameter was pointed at other memory, by `.data`, or exchanged (`torch.utils.swap_tensors`)."""
        try:
            return not any(map(_is_away, self.params)) and list(map(_owner_of, self._parameters)) == self.params
        except AttributeError:
            return False

    def take_in(self) -> list[int]:
        """Parameters that have got other memory lie in the bucket again, with its values and dtype. Returns those that
        were exchanged, which have lost their hooks.

        The bucket moves: what is over its old memory keeps its values. Raises PlanError where only some have another
        dtype now, on all ranks alike.
        """
        self.wait()
        lost = [param.is_lost for param in self.params]
        with local_only():
            dtypes = {s.name: s.parameter.dtype if away else self.dtype for s, away in zip(self.params, lost)}
            devices = {s.name: s.parameter.device for s, away in zip(self.params, lost) if away}
        dtype = next(iter(dtypes.values()))
        computes_in = self.sharing.precision.compute if self.sharing.precision else dtype
        needs_copy = dtype.is_floating_point and computes_in is not dtype and not self.separate
        elsewhere = not self.hosted and any(one != self.device for one in devices.values())
        if len({*dtypes.values()}) > 1 or needs_copy or elsewhere:
            raise another_dtype([f"{name}  {one}  {devices.get(name, self.device)}" for name, one in dtypes.items()])
        exchanged = [i for i, param in enumerate(self.params) if param.parameter.__dict__.get("_owner") is not param]
        kept = [(param.shard, True) if self.separate else (param.full, False) for param in self.params]
        values = [s.take_back(self.separate) if away else one for s, away, one in zip(self.params, lost, kept)]
        self._take_dtype(dtype)
        with torch.inference_mode(False):  # an evaluation may be what meets them first, and training follows
            self._move_in(values)
        return exchanged

    # --- parameters ---------------------------------------------------------------------

    def expose(self, unsharded: bool) -> None:
        """Points the parameters at `full` or at `shard`, but for those that somebody has pointed elsewhere."""
        with local_only():
            for param in self.params:
                if not param.is_lost:
                    param.show(unsharded)

    def start_unshard(self) -> None:
        """Starts to make `full` what the full-precision shards say; pairs with `wait`."""
        if self.ready and not self.reshards and self._is_written:
            self.ready = False
        if self.ready or self.gathering is not None:
            return
        if self.reshards:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        # From the host the copy is waited for: it must not be overtaken by what a user writes to a parameter at rest.
        part = self.shard.to(self.device) if self.hosted else self.shard
        part = part if self.compute is self.dtype else part.to(self.compute)
        self._note_versions()
        if not self.shards or self.is_elsewhere:
            self._sink.copy_(part)
            self.ready = True
            return
        set_cause(GATHER)
        self.gathering = GatherInFlight(self._sink, part, self.sharing.mesh, (self.lead,))

    def _note_versions(self) -> None:
        with local_only():
            self._versions = list(map(version_of, self._parameters))
        for param in self.params:
            param.is_lent = False

    @property
    def _is_written(self) -> bool:
        """True if anybody but an optimizer of ours may have written to a parameter since `full` was made, or was first
        computed with."""
        if not self.separate:
            return False
        with local_only():
            return list(map(version_of, self._parameters)) != self._versions or any(map(_is_lent, self.params))

    def begin_unsharded(self) -> None:
        """The parameters are `full` from here on, as they are at rest by now: what was written to them since it was
        gathered ahead is in it. What is written to them from here on is taken by `end_unsharded`."""
        self.wait()
        if self._is_written:
            self.ready = False
            self.start_unshard()
            self.wait()
        self._note_versions()
        self._is_unsharded = True
        self.expose(True)

    def end_unsharded(self) -> None:
        """They are the full-precision shards again, to which goes what a block wrote to them while it ran (an embedding
        with a `max_norm`, weights that a forward clips, sets in its first call, or puts on a sphere)."""
        self.wait()
        if not self._is_unsharded:
            return
        self._is_unsharded = False
        if self._is_written:
            self._take_writes()
            self._note_versions()
        self.expose(False)

    def _take_writes(self) -> None:
        """Takes this rank's part of writes to the full parameters, since all have written the same. In another dtype,
        of what is another value now."""
        self.lender.end(Held.COPY)
        with torch.no_grad(), local_only():
            for param, before in zip(self.params, self._versions, strict=True):
                if version_of(param.parameter) == before and not param.is_lent:
                    continue
                low, high = param.held
                shard = param.shard.view(-1)
                value = param.full.view(-1)[low:high].to(shard.device)
                if self.compute is not self.dtype:
                    value = torch.where(value == shard.to(self.compute), shard, value.to(self.dtype))
                shard.copy_(value)

    def wait(self) -> None:
        """`full` is there, and the parameters are it."""
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering, self.ready = None, True
        if self._is_left:
            self._is_left = False
            for param in self.params:
                param.parameter._layout = param.shown[True]

    def leave_under_way(self) -> None:
        """Leaves the gather of `updated` to be waited for by whoever first asks for a parameter's layout: nothing reads
        one without that. Where somebody else is over their memory, whom nobody would ask, it is waited for now."""
        if self.gathering is None:
            return
        if self._is_shared:
            self.wait()
            return
        self.gathering.leave(self)
        for param in self.params:
            del param.parameter._layout
        self._is_left = True

    def _count_holders(self) -> int:
        """Tensors over the parameters' memory."""
        return owners_of(self.full)

    def reshard(self) -> None:
        """The full-precision shards are the parameters; memory of `full` goes under ZeRO-3."""
        self.end_unsharded()
        if self.reshards and self.ready:
            self.lender.end(Held.COMES_AND_GOES)
            self.full.untyped_storage().resize_(0)
            self.ready = False

    def updated(self) -> None:
        """The full-precision shards have changed: starts to gather `full` in place where it is not a copy; pairs with
        `wait`, or `leave_under_way`."""
        self.wait()
        self.lender.end(Held.COPY)
        if self.separate:
            self.reshard()
            self.lender.end(Held.COMES_AND_GOES)
            self.ready = False
        elif self.shards and self.differentiable and not self.is_elsewhere:
            self._is_shared = not self.is_intact or self._count_holders() != self._holders
            set_cause(GATHER)
            self.gathering = GatherInFlight(self._sink, self.shard.data, self.sharing.mesh, (self.lead,))


def _shows(of: ref[FlatParameters], place: int) -> bool:
    """True if the full parameters lie in the storage at `place`, now."""
    parameters = of()
    if parameters is None or parameters.full.untyped_storage()._cdata != place:
        return False
    parameters.wait()
    return parameters.ready


def another_dtype(parameters: Sequence[str]) -> PlanError:
    """Builds the error for parameters that cannot lie in a bucket any longer."""
    return PlanError(
        "parallelize",
        "parameters were given another dtype or device than the flat bucket, which they share, can have",
        parameters,
        [
            ("module.to(dtype) before parallelize", "of what a forward casts, too: each dtype has buckets of its own"),
            ("Precision(compute=...)", "computes in another dtype"),
        ],
    )


def on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that copies to and from `device` are fast with; of a dry run's (meta), without values."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def _is_beside_host(device: torch.device) -> bool:
    """True if the host's memory is another than the device's."""
    return device.type != "cpu"


def _may_lie_on_host(device: torch.device) -> bool:
    """True if a parameter may be pointed at memory of the device and of the host in turn, as torch has it for CUDA."""
    there = torch.empty(0, device=device)
    return device.type == "meta" or _has_compatible_shallow_copy_type(there, torch.empty(0))
