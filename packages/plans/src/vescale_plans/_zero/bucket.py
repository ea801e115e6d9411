"""Buffers: flat parameters with the gradients that lie behind one another like them.

A bucket holds parameters whose gradients are partial over the same mesh axes. Its gradients are memory of their own,
flat like `full` (`parameters.py`), in the reduction's dtype; autograd adds into its views.

The gradient of a parameter that nobody used must stay None, as on one device, and on all
ranks alike, though a rank that did not use it cannot know of the others. What it sends
for it is -0.0: the sum is -0.0 only where nobody sent anything else, for what is added
into a bucket is added to zero, which never makes -0.0. From ZeRO-2 on a rank may hold nothing of the
parameter to look at; then ranks tell each other, a byte per parameter (`running_reductions.Usage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import ReductionInFlight, attach, convert, local_only, set_cause, set_reduced_grad

from .parameters import FlatParameters, another_dtype
from .sharded_parameter import ShardedParameter, Sharing
from .streams import Streams

SYNC = Cause("gradient sync", direction="backward")

_get_grad = Tensor.grad.__get__
_set_grad = Tensor.grad.__set__


class Bucket(FlatParameters):
    """Parameters of one block whose gradients are partial over the same axes, and these."""

    def __init__(
        self, parameters: Sequence[tuple[str, DTensor]], axes: tuple[int, ...], sharing: Sharing, rows: Sequence[int]
    ) -> None:
        super().__init__(parameters, axes, sharing, rows)
        for param in self.params:
            param.open_gradients, param.end_pass = self._open_at_rest, self._end_pass
        self.runs_hooks = False  # while users' hooks run
        self.handed_out: list[ShardedParameter] = []  # whose reduced gradients came, and hooks have not run yet
        self.flat: Tensor | None = None
        self._streams: Streams | None = None  # that have written to it
        self.filled: set[int] = set()  # who has a gradient partial
        self.came: set[int] = set()  # whom autograd has reached in the backward that runs
        self.started = False  # whether the backward that runs has asked for its sum
        self.parallel: Any = None  # whose it is: a parameter that somebody keeps keeps all that its gradient needs

    @property
    def reduces(self) -> bool:
        return self.differentiable and bool(self.axes)

    def open_gradients(self) -> None:
        """A parameter's first gradient is written into a flat bucket from here on, and autograd adds to it there; what
        is partial there already stays."""
        if not self.reduces:
            return
        fresh = self.flat is None
        if fresh:
            self.flat = torch.empty(self.packing.total, dtype=self.reduce, device=self.device)
            self._streams = Streams(self.flat)
            for low, high in self._gaps:
                self.flat[low:high].zero_()
        with local_only():
            for i, param in enumerate(self.params):
                if fresh:
                    view = self.flat[param.start : param.start + param.numel].view(size=param.shape)
                    param.gradient = attach(view, param.full_layout.gradient)
                now = _get_grad(param.parameter)
                if now is param.gradient:
                    continue
                if now is not None:
                    self._put(i, param, now)
                else:
                    self.filled.discard(i)  # zero_grad since then

    def _end_pass(self) -> None:
        if self.parallel is not None:
            self.parallel.end_pass()

    def _open_at_rest(self) -> None:
        """`open_gradients`, in a backward that comes to parameters at rest."""
        at_rest = any(param.parameter._layout.base is not param.full_layout for param in self.params)
        if at_rest:
            self.expose(True)  # a gradient has the shape of its tensor when it is set
        self.open_gradients()
        if at_rest:
            self.expose(False)

    def arrived(self, i: int) -> None:
        """Autograd has added to a parameter's gradient."""
        param = self.params[i]
        if self.flat is None:
            self.open_gradients()
        self._streams.join()
        with local_only():
            now = _get_grad(param.parameter)
            if now is param.gradient:
                self.filled.add(i)
            elif now is not None:  # a Function may hand out none, as a pipeline does for what it did not use
                self._put(i, param, now)
            param.part()
        self.came.add(i)

    def _put(self, i: int, param: ShardedParameter, gradient: Tensor) -> None:
        """A gradient that is not in the bucket's memory: what the bucket has of the parameter counts no longer. With
        dispatch off."""
        if param.is_away and param.parameter.dtype is not self.dtype and self.compute is self.dtype:
            raise another_dtype([f"{param.name}  {param.parameter.dtype}, in a bucket of {self.dtype}"])
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if gradient.layout is torch.strided and gradient.shape == param.shape:
            torch.add(gradient, 0, out=param.gradient)  # a copy in which no zero is negative
        else:
            param.gradient.zero_().add_(gradient)
        _set_grad(param.parameter, param.gradient)
        self.filled.add(i)

    def has_partial(self) -> bool:
        """True if any parameter has a gradient that was not reduced."""
        with local_only():
            return any(_get_grad(param.parameter) is not None for param in self.params)

    def leave(self) -> None:
        """After a backward; what it has not asked the sum of stays partial."""
        self.came, self.started = set(), False

    @property
    def is_full(self) -> bool:
        return len(self.came) == len(self.params) or self.is_elsewhere

    def start(self) -> tuple[ReductionInFlight | None, list[int]]:
        """Starts the sum over ranks, and leaves nothing partial. Ranks without a gradient take part all the same.

        Returns the reduction, None if other ranks hold the bucket, and the parameters that this rank did not use.
        """
        missing = []
        if self.flat is not None:
            flat = self._streams.take()
        else:
            flat = torch.zeros(self.packing.total, dtype=self.reduce, device=self.device)
        with local_only():
            for i, param in enumerate(self.params):
                now = _get_grad(param.parameter)
                if now is not None and self.flat is not None:
                    if now is not param.gradient:  # a backward in the user's code put it there, and no node has said so
                        self._put(i, param, now)
                    _set_grad(param.parameter, None)
                if i not in self.filled or now is None:
                    missing.append(i)
                    piece = flat[param.start : param.start + param.numel]
                    (torch.view_as_real(piece) if piece.is_complex() else piece).fill_(-0.0)
                param.gradient = None
        self.flat, self._streams, self.filled, self.came = None, None, set(), set()
        if self.is_elsewhere:
            return None, missing  # all it could sum with have none of it either
        set_cause(SYNC)
        sharing = self.sharing
        at_once = sharing.sums == "all_reduce"
        axes = (self.outer + self.inner, ()) if at_once else (self.inner, self.outer)
        sent = sharing.precision.sent if sharing.precision else None
        return ReductionInFlight(flat, sharing.mesh, *axes, self.keep, sent, at_once), missing

    @property
    def is_hooked(self) -> bool:
        return any(param.hooks for param in self.params)

    def run_hooks(self) -> None:
        """Calls users' hooks of the parameters whose gradients have been handed out. They see parameters at rest, so
        that what they write stays, and gradients and optimizer states are this rank's parts.

        Cost: below ZeRO-3 an all-gather of the bucket, as after a step.
        """
        told = [param for param in dict.fromkeys(self.handed_out) if param.hooks and param.parameter.grad is not None]
        self.handed_out.clear()
        if not told:
            return
        if self.separate:
            self.reshard()
        elif self.shards:
            self.wait()
            self.expose(False)
        self.runs_hooks = True
        try:
            for param in told:
                for hook in tuple(param.hooks.values()):
                    hook(param.parameter)
        finally:
            self.runs_hooks = False
            self.updated()
            if self.shards and not self.separate:
                self.wait()
                self.expose(True)

    def used_elsewhere(self, used: Sequence[bool]) -> None:
        """Parameters that other ranks hold get a gradient, of no elements, where they have one there."""
        for param, there in zip(self.params, used):
            if there:
                self.handed_out.append(param)
            if there and param.parameter.grad is None:
                layout = param.gradient_layout if self.keep == "part" else param.full_layout.gradient.reduced
                set_reduced_grad(param.parameter, attach(param.shard.detach().new_empty(layout.local_shape), layout))

    def hand_out(self, summed: Tensor, missing: list[int], is_used: Callable[[ShardedParameter], bool] | None) -> None:
        """Adds the reduced gradients to what earlier backwards left.

        Arguments:
            missing: what this rank did not use.
            is_used: whether any rank did; None looks at what was summed.
        """
        part = self.keep == "part"
        rank = self.sharing.mesh.coordinate[self.lead] if part else 0
        pieces = []
        for i, param in enumerate(self.params):
            if part:
                low, high = self.packing.held(i, param.numel, rank)
                at = param.start + low - rank * self.packing.part if high > low else 0
                pieces.append(summed[at : at + high - low])
            else:
                pieces.append(summed[param.start : param.start + param.numel].view(size=param.shape))
        if is_used is not None:
            absent = {i for i in missing if not is_used(self.params[i])}
        else:
            absent = _negative_zeros(pieces, missing)
        for i, (param, piece) in enumerate(zip(self.params, pieces)):
            if i in absent:
                continue
            self.handed_out.append(param)
            layout = param.gradient_layout if part else param.reduced_layout
            piece = attach(piece if piece.dtype is self.dtype else piece.to(self.dtype), layout)
            before = param.parameter.__dict__.get("_reduced_grad")
            if before is None:
                set_reduced_grad(param.parameter, piece)
                continue
            if before.mesh_layout is not layout:  # a user's own
                piece = convert(piece, before.mesh_layout, SYNC)
            with local_only():
                before.add_(piece)


def _negative_zeros(pieces: Sequence[Tensor], which: Sequence[int]) -> set[int]:
    """Returns those of these pieces that are -0.0 throughout. The host waits once, if there are any.

    In a dry run, which has no values, all: what this rank did not use nobody did."""
    if not which or pieces[which[0]].is_meta:
        return set(which)
    flat = [torch.view_as_real(pieces[i]) if pieces[i].is_complex() else pieces[i] for i in which]
    told = torch.stack([((piece == 0) & piece.signbit()).all() for piece in flat]).tolist()
    return {i for i, is_negative in zip(which, told) if is_negative}
