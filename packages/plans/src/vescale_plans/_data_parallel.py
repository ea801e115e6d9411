"""Gradient reduction: in buckets, over all pending axes at once, overlapped with backward.

The gradient of a replicated parameter is pending over every axis where it is
replicated: the data axis, but also the tensor axis for a norm weight between
sequence-parallel layers. Its layout says so, so there is one mechanism for both: a
parameter's pending axes choose its bucket, and a bucket is summed by one collective
over those axes flattened into one group.

When autograd has accumulated a parameter's gradient, a hook moves it into its
bucket. A full bucket starts its sum at once, in a fixed order, so that all ranks
start the same collectives; after the backward the rest is started and all are
waited for. Each contribution is thereby reduced exactly once and then ADDED to what
earlier backwards left, which makes several backwards before a step, and a parameter
that is used twice, come out as on one device (design section 3, contract 9).

Behind its gradients a bucket carries one number per parameter, 1 where this rank had
a gradient: the sum tells whether anybody had, so that a parameter that nobody used
keeps `grad = None`, as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import (
    PENDING,
    PendingSum,
    after_backward,
    in_backward,
    local_only,
    set_cause,
    settle,
    settled_layout,
    stamp,
    take_pending_grad,
)

BUCKET_BYTES = 25 << 20
CAUSE = Cause("gradient sync", direction="backward")


class Bucket:
    """Parameters whose gradients are summed by one collective."""

    def __init__(self, parameters: list[DTensor], axes: tuple[int, ...]) -> None:
        self.parameters = parameters
        self.axes = axes
        self.mesh = parameters[0].mesh_layout.mesh
        with local_only():
            self.sizes = [parameter.numel() for parameter in parameters]
            self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.offsets = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.total = sum(self.sizes)
        self.slot = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.flat: Tensor | None = None
        self.filled: set[int] = set()

    def put(self, parameter: DTensor, gradient: Tensor) -> None:
        """Moves one gradient into the buffer."""
        if self.flat is None:
            self.flat = torch.zeros(self.total + len(self.sizes), dtype=self.dtype, device=self.device)
        i = self.slot[id(parameter)]
        place = self.flat[self.offsets[i] : self.offsets[i] + self.sizes[i]]
        with local_only():
            gradient = gradient.reshape(-1)
            place.copy_(gradient) if i not in self.filled else place.add_(gradient)
        self.flat[self.total + i] = 1
        self.filled.add(i)

    @property
    def is_full(self) -> bool:
        return len(self.filled) == len(self.parameters)

    def start(self) -> PendingSum:
        """Starts the sum and leaves the bucket empty."""
        flat = self.flat
        if flat is None:  # no gradient on this rank, and perhaps on others: it takes part all the same
            flat = torch.zeros(self.total + len(self.sizes), dtype=self.dtype, device=self.device)
        self.flat, self.filled = None, set()
        set_cause(CAUSE)
        return PendingSum(flat, self.mesh, self.axes)

    def settle(self, summed: Tensor) -> None:
        """Adds the summed gradients to what earlier backwards left."""
        used = summed[self.total :].tolist()
        for i, parameter in enumerate(self.parameters):
            if not used[i]:
                continue
            with local_only():
                shape = parameter.shape
                gradient = summed[self.offsets[i] : self.offsets[i] + self.sizes[i]].view(shape)
                settled = parameter.__dict__.get("_settled_grad")
                if settled is not None:
                    settled.add_(gradient)
                    continue
            settle(parameter, stamp(gradient, settled_layout(parameter)))


class GradientSync:
    """Reduces the pending gradients of a model's parameters after every backward."""

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buckets = _buckets(model, bucket_bytes)
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._running: list[tuple[Bucket, PendingSum]] = []
        self._started = 0
        self._touched = False
        self.enabled = True
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        if self.buckets:
            after_backward(self.finish)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients stay pending; the next backward outside reduces their sum."""
        saved, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = saved

    def flush(self) -> None:
        """Reduces whatever is still pending: before an optimizer step that follows `paused` backwards only."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                pending = take_pending_grad(parameter)
                if pending is not None:
                    bucket.put(parameter, pending)
                    self._touched = True
        self.finish()

    def _on_gradient(self, parameter: DTensor) -> None:
        if not self.enabled:
            return
        if not self._touched and not in_backward():
            # The loss was a plain tensor: this backward was not started by us, so we ask to be called at its end.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._touched = True
        gradient = take_pending_grad(parameter)
        if gradient is None:
            return
        self._bucket_of[id(parameter)].put(parameter, gradient)
        while self._started < len(self.buckets) and self.buckets[self._started].is_full:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        self._running.append((bucket, bucket.start()))
        self._started += 1

    def finish(self) -> None:
        """Starts what is left, waits for all, and hands out the reduced gradients."""
        if not self._touched:
            return
        with torch.no_grad():
            while self._started < len(self.buckets):
                self._start_next()
            # A parameter used twice may have come again after its bucket had started.
            again = [bucket for bucket in self.buckets if bucket.flat is not None]
            for bucket in again:
                self._running.append((bucket, bucket.start()))
            running, self._running = self._running, []
            self._started, self._touched = 0, False
            set_cause(CAUSE)
            for _, pending in running:
                pending.advance()
            for bucket, pending in running:
                bucket.settle(pending.finish())


def _buckets(model: nn.Module, limit: int) -> list[Bucket]:
    """Parameters in the order in which backward reaches them, grouped by pending axes and dtype."""
    open_buckets: dict[tuple, list[DTensor]] = {}
    filled: dict[tuple, int] = {}
    buckets: list[Bucket] = []
    for parameter in reversed(list(model.parameters())):
        if type(parameter) is not DTensor or not parameter.requires_grad:
            continue
        layout = parameter.mesh_layout
        states = layout.gradient.states
        axes = tuple(a for a, state in enumerate(states) if state is PENDING and layout.mesh.sizes[a] > 1)
        if not axes:
            continue
        with local_only():
            key, size = (axes, parameter.dtype, parameter.device), parameter.nbytes
        if filled.get(key, 0) + size > limit and open_buckets.get(key):
            buckets.append(Bucket(open_buckets.pop(key), axes))
            filled[key] = 0
        open_buckets.setdefault(key, []).append(parameter)
        filled[key] = filled.get(key, 0) + size
    buckets += [Bucket(parameters, key[0]) for key, parameters in open_buckets.items()]
    return buckets
