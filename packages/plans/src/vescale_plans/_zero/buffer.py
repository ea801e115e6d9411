"""Buffers: flat parameters with the gradients that lie behind one another like them.

A buffer holds parameters whose gradients are pending over the same mesh axes. Its gradients are memory of their own,
flat like `full` (`parameters.py`), in the reduction's dtype; autograd adds into its views.

The gradient of a parameter that nobody used must stay None, as on one device, and on all
ranks alike, though a rank that did not use it cannot know of the others. What it sends
for it is -0.0: the sum is -0.0 only where nobody sent anything else, for what is added
into a buffer is added to zero, which never makes -0.0. From ZeRO-2 on a rank may hold nothing of the
parameter to look at; then ranks tell each other, a byte per parameter (`in_flight.Usage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import PendingReduction, convert, local_only, set_cause, settle, stamp

from .parameters import FlatParameters
from .slot import Sharing, Slot
from .streams import Streams

SYNC = Cause("gradient sync", direction="backward")

_get_grad = Tensor.grad.__get__
_set_grad = Tensor.grad.__set__


class Buffer(FlatParameters):
    """Parameters of one block whose gradients are pending over the same axes, and these."""

    def __init__(
        self, parameters: Sequence[tuple[str, DTensor]], axes: tuple[int, ...], sharing: Sharing, rows: Sequence[int]
    ) -> None:
        super().__init__(parameters, axes, sharing, rows)
        for slot in self.slots:
            slot.open_gradients = self._open_at_rest
        self.tells = False  # while users' hooks run
        self.settled: list[Slot] = []  # whose reduced gradients came, and hooks have not run yet
        self.flat: Tensor | None = None
        self._streams: Streams | None = None  # that have written to it
        self.filled: set[int] = set()  # who has a gradient pending
        self.came: set[int] = set()  # whom autograd has reached in the backward that runs
        self.parallel: Any = None  # whose it is: a parameter that somebody keeps keeps all that its gradient needs

    @property
    def reduces(self) -> bool:
        return self.differentiable and bool(self.axes)

    def open_gradients(self) -> None:
        """A parameter's first gradient is written into a flat buffer from here on, and autograd adds to it there; what
        is pending there already stays."""
        if not self.reduces:
            return
        fresh = self.flat is None
        if fresh:
            self.flat = torch.empty(self.packing.total, dtype=self.reduce, device=self.device)
            self._streams = Streams(self.flat)
            for low, high in self._gaps:
                self.flat[low:high].zero_()
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
                else:
                    self.filled.discard(i)  # zero_grad since then

    def _open_at_rest(self) -> None:
        """`open_gradients`, in a backward that comes to parameters at rest."""
        at_rest = any(slot.parameter._layout.base is not slot.full_layout for slot in self.slots)
        if at_rest:
            self.expose(True)  # a gradient has the shape of its tensor when it is set
        self.open_gradients()
        if at_rest:
            self.expose(False)

    def arrived(self, i: int) -> None:
        """Autograd has added to a parameter's gradient."""
        slot = self.slots[i]
        if self.flat is None:
            self.open_gradients()
        self._streams.join()
        with local_only():
            now = _get_grad(slot.parameter)
            if now is slot.gradient:
                self.filled.add(i)
            elif now is not None:  # a Function may hand out none, as a pipeline does for what it did not use
                self._put(i, slot, now)
            slot.part()
        self.came.add(i)

    def _put(self, i: int, slot: Slot, gradient: Tensor) -> None:
        """A gradient that is not in the buffer's memory: what the buffer has of the parameter counts no longer. With
        dispatch off."""
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if gradient.layout is torch.strided and gradient.shape == slot.shape:
            torch.add(gradient, 0, out=slot.gradient)  # a copy in which no zero is negative
        else:
            slot.gradient.zero_().add_(gradient)
        _set_grad(slot.parameter, slot.gradient)
        self.filled.add(i)

    def has_pending(self) -> bool:
        """Whether any parameter has a gradient that was not reduced."""
        with local_only():
            return any(_get_grad(slot.parameter) is not None for slot in self.slots)

    def leave_pending(self) -> None:
        """After a backward whose gradients stay pending."""
        self.came = set()

    @property
    def is_full(self) -> bool:
        return len(self.came) == len(self.slots) or self.is_elsewhere

    def start(self) -> tuple[PendingReduction | None, list[int]]:
        """Starts the sum over ranks, and leaves nothing pending. Ranks without a gradient take part all the same.

        Returns the reduction, None where other ranks hold the buffer, and the parameters that this rank did not use.
        """
        missing = []
        if self.flat is not None:
            flat = self._streams.take()
        else:
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
        self.flat, self._streams, self.filled, self.came = None, None, set(), set()
        if self.is_elsewhere:
            return None, missing  # all it could sum with have none of it either
        set_cause(SYNC)
        sharing = self.sharing
        at_once = sharing.sums == "all_reduce"
        axes = (self.outer + self.inner, ()) if at_once else (self.inner, self.outer)
        return PendingReduction(flat, sharing.mesh, *axes, self.keep, sharing.sent, at_once), missing

    @property
    def is_hooked(self) -> bool:
        return any(slot.hooks for slot in self.slots)

    def tell(self) -> None:
        """Calls users' hooks of the parameters whose gradients have been handed out. They see parameters at rest, so
        that what they write stays, and gradients and optimizer states are this rank's parts.

        Cost: below ZeRO-3 an all-gather of the buffer, as after a step.
        """
        told = [slot for slot in dict.fromkeys(self.settled) if slot.hooks and slot.parameter.grad is not None]
        self.settled.clear()
        if not told:
            return
        if self.separate:
            self.let_go()
        elif self.shards:
            self.wait()
            self.expose(False)
        self.tells = True
        try:
            for slot in told:
                for hook in tuple(slot.hooks.values()):
                    hook(slot.parameter)
        finally:
            self.tells = False
        self.updated()
        if self.shards and not self.separate:
            self.wait()
            self.expose(True)

    def used_elsewhere(self, used: Sequence[bool]) -> None:
        """Parameters that other ranks hold get a gradient, of no elements, where they have one there."""
        for slot, there in zip(self.slots, used):
            if there:
                self.settled.append(slot)
            if there and slot.parameter.grad is None:
                layout = slot.gradient_layout if self.keep == "part" else slot.full_layout.gradient.reduced
                settle(slot.parameter, stamp(slot.master.detach().new_empty(layout.local_shape), layout))

    def settle(self, summed: Tensor, missing: list[int], is_used: Callable[[Slot], bool] | None) -> None:
        """Adds the reduced gradients to what earlier backwards left.

        Arguments:
            missing: what this rank did not use.
            is_used: whether any rank did; None looks at what was summed.
        """
        part = self.keep == "part"
        rank = self.sharing.mesh.coordinate[self.lead] if part else 0
        pieces = []
        for i, slot in enumerate(self.slots):
            if part:
                low, high = self.packing.held(i, slot.numel, rank)
                at = slot.start + low - rank * self.packing.part if high > low else 0
                pieces.append(summed[at : at + high - low])
            else:
                pieces.append(summed[slot.start : slot.start + slot.numel].view(size=slot.shape))
        if is_used is not None:
            absent = {i for i in missing if not is_used(self.slots[i])}
        else:
            absent = _negative_zeros(pieces, missing)
        for i, (slot, piece) in enumerate(zip(self.slots, pieces)):
            if i in absent:
                continue
            self.settled.append(slot)
            layout = slot.gradient_layout if part else slot.reduced_layout
            piece = stamp(piece if piece.dtype is self.dtype else piece.to(self.dtype), layout)
            before = slot.parameter.__dict__.get("_settled_grad")
            if before is None:
                settle(slot.parameter, piece)
                continue
            if before.mesh_layout is not layout:  # a user's own
                piece = convert(piece, before.mesh_layout, SYNC)
            with local_only():
                before.add_(piece)


def _fill_negative_zero(piece: Tensor) -> None:
    (torch.view_as_real(piece) if piece.is_complex() else piece).fill_(-0.0)


def _negative_zeros(pieces: Sequence[Tensor], which: Sequence[int]) -> set[int]:
    """Of these pieces those that are -0.0 throughout. The host waits once, if there are any."""
    if not which:
        return set()
    flat = [torch.view_as_real(pieces[i]) if pieces[i].is_complex() else pieces[i] for i in which]
    told = torch.stack([((piece == 0) & piece.signbit()).all() for piece in flat]).tolist()
    return {i for i, is_negative in zip(which, told) if is_negative}
