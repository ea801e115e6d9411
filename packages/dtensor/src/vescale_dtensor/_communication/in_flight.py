"""Collectives in flight: started at once, waited for later. What gradient sync, ZeRO and experts run on.

A reduction sums over `inner` axes, flattened into one group, and then over `outer` ones:

    chunk      the sum of this rank's n-th of the buffer, n ranks in `inner`, in rank order
    part       the chunks of all ranks that share this one's place on the first inner axis
    whole      all chunks, in the buffer that was given

    ranks (inner = dp 2 x tp 2)   (0, 0)   (0, 1)   (1, 0)   (1, 1)
    chunk                         a        b        c        d
    part                          a b      a b      c d      c d
    whole                         a b c d  ...

On gloo the sum is an all-to-all and a local sum in rank order, whatever is kept of it (of two
ranks the bits are the same in either order, and the whole is one all-reduce in place): so all
ZeRO stages add the same numbers in the same order. Nothing is copied: what is
sent is the caller's buffer, what is received is summed from where it arrived. With `sent`
the numbers travel to their sum in fewer bits, by the same all-to-all on every backend.

On an accelerator what was started on one stream ends on that stream, and whoever asks for it on another comes after:
memory of the first would else be given to somebody new while the collective still reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from weakref import ref

import torch
from torch import Tensor

from .._layouts.mesh import Mesh
from . import pairs
from .collectives import (
    _engine,
    _gather_call,
    _ordered_sum,
    _summable,
    _width,
    _wire,
    all_reduce,
    is_pair,
    start,
)
from .compressed import compress, expand, sent_numel


def _stream_of(tensor: Tensor) -> torch.Stream | None:
    """The stream that is given what is started now; None on the host."""
    return None if tensor.device.type in ("cpu", "meta") else torch.accelerator.current_stream(tensor.device)


@contextlib.contextmanager
def _on(stream: torch.Stream | None, *results: Tensor | None) -> Iterator[None]:
    """Runs the block on this stream; the current one comes after it, and may read `results`."""
    now = None if stream is None else torch.accelerator.current_stream(stream.device)
    if now == stream:
        yield
        return
    with stream:
        yield
    now.wait_event(stream.record_event())
    for result in results:
        if result is not None:
            result.record_stream(now)


class ReductionInFlight:
    """A sum over mesh axes in flight, over one flat buffer whose size the ranks of `inner` divide.

    `advance` waits for the first half and starts the second, where there are two, `finish` waits for that
    and returns the part or the whole, flat. With several in flight, advance all of
    them before finishing the first. The buffer belongs to the reduction: with
    keep="whole" the result is written into it. `sent`: a floating dtype or int8 in which what is
    to be summed travels (see `compressed.py`); sums, and what follows them, keep the buffer's dtype.
    `at_once`: of a whole, one all-reduce of the backend over `inner`, which adds in an order of its own.

    Cost, received per rank, for n inner ranks: (n - 1) / n of the buffer for its sum; the same
    again for the whole, the other chunks for a part; the outer axes all-reduce one chunk. `sent`
    makes the first of these smaller: float32 as int8 to 0.254 of it.
    """

    def __init__(
        self,
        flat: Tensor,
        mesh: Mesh,
        inner: tuple[int, ...],
        outer: tuple[int, ...],
        keep: str,
        sent: torch.dtype | None = None,
        at_once: bool = False,
    ) -> None:
        self._mesh, self._inner, self._outer, self._keep = mesh, inner, outer, keep
        self._group = group = mesh.group(inner)
        self._count = count = mesh.count(inner)
        self._flat, self._stream = flat, _stream_of(flat)
        self._numbers, self._sent = flat.numel() // count, sent
        whole = received = flat.nbytes * (count - 1) // count
        self._native = sent is None and _engine(mesh, inner).reduces
        pair = sent is None and is_pair(mesh, inner)
        in_place = keep == "whole" and not outer and (at_once or (pair and pairs.sums(flat)))
        self._own = None  # of a pair: this rank's chunk, beside which the other's arrives
        if sent is not None:
            self._travels = compress(flat.view(count, -1), sent)
            self._buffer = torch.empty_like(self._travels)
            received = sent_numel(self._numbers, sent) * sent.itemsize * (count - 1)
            call, arguments = group.alltoall_base, (_wire(self._buffer), _wire(self._travels), [], [])
        elif in_place:
            self._buffer = flat
            call, arguments = group.allreduce, ([_summable(flat)],)
        elif pair:
            rows = flat.view(2, -1)
            self._own, self._buffer = rows[group.rank()], flat.new_empty(flat.numel() // 2)
            call, arguments = pairs.swapper(group), (_wire(self._buffer), _wire(rows[1 - group.rank()]))
        elif self._native:
            self._buffer = flat.new_empty(flat.numel() // count)
            call, arguments = group._reduce_scatter_base, (_summable(self._buffer), _summable(flat))
        else:
            self._buffer = torch.empty_like(flat)
            call, arguments = group.alltoall_base, (_wire(self._buffer), _wire(flat), [], [])
        self._kind = "all_reduce" if keep == "whole" else "reduce_scatter"
        self._work = start(self._kind, mesh, inner, received + (whole if keep == "whole" else 0), call, *arguments)
        self._advanced = in_place

    def advance(self) -> None:
        if not self._advanced:
            self._advanced = True
            with _on(self._stream):
                self._advance()

    def _advance(self) -> None:
        mesh = self._mesh
        self._work.wait()
        self._work = self._travels = None  # gloo's would keep what has arrived
        chunk = self._buffer if self._native else self._sum()
        if self._outer:
            chunk = all_reduce(chunk, mesh, self._outer)
        if self._keep == "whole":
            axes, out = self._inner, self._flat
        else:
            axes, self._flat = self._inner[1:], None
            if not axes:
                self._buffer = chunk
                return
            out = chunk.new_empty(chunk.numel() * mesh.count(axes))
        self._chunk, self._buffer = chunk, out  # what travels is kept alive
        self._work = start(self._kind, mesh, axes, 0, _gather_call(mesh, axes), _wire(out), _wire(chunk), count=0)

    def _sum(self) -> Tensor:
        """Sums what has arrived, in rank order."""
        if self._own is not None:
            total, self._own = self._buffer.add_(self._own), None
            return total
        rows = self._buffer.view(self._count, -1)
        return _ordered_sum(rows if self._sent is None else expand(rows, self._numbers, self._flat.dtype))

    def finish(self) -> Tensor:
        """The sum: the whole buffer, or this rank's part of it."""
        self.advance()
        with _on(self._stream, self._buffer):
            if self._work is not None:
                self._work.wait()
                self._work = self._chunk = None
        return self._buffer


class GatherInFlight:
    """An all-gather in flight: the ranks' equal parts, in rank order, into `out`, of which `part` may be a slice."""

    def __init__(self, out: Tensor, part: Tensor, mesh: Mesh, axes: tuple[int, ...]) -> None:
        self._kept, self._stream = (out, part), _stream_of(out)
        call, received = _gather_call(mesh, axes), out.nbytes - part.nbytes
        self._work = start("all_gather", mesh, axes, received, call, _wire(out), _wire(part))

    def wait(self) -> None:
        if self._work is not None:
            with _on(self._stream, self._kept[0]):
                self._work.wait()
            self._work = self._kept = None
            left_to_readers.pop(self, None)

    def leave(self, reader: object) -> None:
        """`reader` waits for it when its output is first read, which need not be ever. Of readers that are gone the
        memory stays until another one is left: what arrives must have where to."""
        for gather, of in tuple(left_to_readers.items()):
            if of() is None:
                gather.wait()
        left_to_readers[self] = ref(reader)


left_to_readers: dict[GatherInFlight, ref] = {}


class RowsInFlight:
    """An all-to-all of rows in flight: the next `sends[r]` of `rows` go to rank r of the axis."""

    def __init__(self, rows: Tensor, sends: list[int], receives: list[int], mesh: Mesh, axis: int) -> None:
        rows, self._stream = rows.contiguous(), _stream_of(rows)
        self._out = out = rows.new_empty((sum(receives), *rows.shape[1:]))
        width = _width(out) * prod(rows.shape[1:])
        received = (out.shape[0] - receives[mesh.coordinate[axis]]) * prod(rows.shape[1:]) * out.element_size()
        splits_in, splits_out = [count * width for count in sends], [count * width for count in receives]
        self._kept = sent, taken = _wire(rows).view(-1), _wire(out).view(-1)
        call = mesh.group((axis,)).alltoall_base
        self._work = start("all_to_all", mesh, (axis,), received, call, taken, sent, splits_out, splits_in)

    def wait(self) -> Tensor:
        """The `receives[r]` rows of each rank r, in rank order."""
        if self._work is not None:
            with _on(self._stream, self._out):
                self._work.wait()
            self._work = self._kept = None
        return self._out
