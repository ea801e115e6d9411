"""Activations that lie in the host's memory from forward to backward.

What autograd saves goes there a storage at a time: views of one share the way, and what several operators saved goes
once. Copies run beside the computation, on a stream of their own. The device's memory is given back when the next
call of an offloading module ends: by then the copy is due, so that the peak does not depend on how fast it was. Of
the calls that wait for their backward, the one that is asked for anything has all of it brought back, and the one
before it too, which is asked next. What is smaller than a page stays, and parameters do; so does everything where the
host's memory is the device's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from vescale_dtensor import DTensor, GradientError, Layout
from vescale_dtensor.engine import attach, local_only

from .._zero.parameters import on_host

LEAST = 4096
"""Bytes of a storage that is worth its way."""


class Placed(NamedTuple):
    """Saved in place of a tensor whose storage went to the host."""

    of: Moved
    stay: Stay
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        self.stay.asked()
        return self.of.full().as_strided(self.shape, self.stride, self.offset)


class Moved:
    """A storage on the host."""

    def __init__(self, root: Tensor, flat: Tensor, kept: Tensor, stay: Stay) -> None:
        self._stay, self._flat, self._host, self._device = stay, flat, kept, flat.device
        self._root, self._version = weakref.ref(root), flat._version
        self._made_on = None if stay.lane is None else torch.accelerator.current_stream()
        self.saved = self._asked = 0
        self.is_through = False  # all who saved it have asked once
        self._is_back = self._is_written = False
        self._arrived: torch.Event | None = None
        self._begun_on: torch.Stream | None = None

    def holds(self, root: Tensor) -> bool:
        """True if it is what a tensor over `root` has now. Another tensor over the same storage may count its writes
        apart."""
        return self._root() is root and root._version == self._version

    def leave(self) -> None:
        """The device's memory is given back."""
        if self._flat is not None and not self._is_back:
            self._is_written = self._flat._version != self._version
            if self._made_on is not None and self._made_on != torch.accelerator.current_stream():
                self._flat.record_stream(self._stay.lane)  # the one that waits for the copy is not the memory's own
        self._flat = None

    def begin(self, lane: torch.Stream | None) -> None:
        """Begins to bring it back, unless it is there."""
        if self._flat is not None:
            return
        self._is_back = True
        self._flat = flat = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
        if lane is not None:
            self._begun_on = torch.accelerator.current_stream()  # of the call behind it, perhaps
            lane.wait_event(self._begun_on.record_event())
        with _along(lane):
            flat.copy_(self._host, non_blocking=True)
            if lane is not None:
                flat.record_stream(lane)
                self._arrived = lane.record_event()

    def full(self) -> Tensor:
        """Back on the device; kept there until all who saved it have asked. Call with dispatch disabled."""
        self._stay.wait_for_copies()
        self._check()
        self.begin(self._stay.lane)
        if self._arrived is not None:
            now = torch.accelerator.current_stream()
            now.wait_event(self._arrived)
            if now != self._begun_on:
                self._flat.record_stream(now)
        flat = self._flat
        self._asked += 1
        if self._asked >= self.saved:
            self._flat, self._arrived, self._asked, self.is_through = None, None, 0, True
        return flat

    def _check(self) -> None:
        if self._flat is not None and not self._is_back and self._flat._version != self._version:
            self._is_written = True
        if self._is_written:
            raise GradientError(
                "backward",
                "a tensor that backward needs was written in place after it was used",
                [f"its storage  {self._host.numel()} {self._host.dtype}, on its way to the host"],
                [("x = x + y", "in place of x += y")],
            )


class Stay:
    """Storages that one call of a module moved to the host."""

    def __init__(self, lane: torch.Stream | None, before: Stay | None) -> None:
        self.lane = lane
        self._moved: list[weakref.ref[Moved]] = []
        self._before = weakref.ref(before) if before is not None else None
        self._left: torch.Event | None = None

    def add(self, moved: Moved) -> None:
        self._moved.append(weakref.ref(moved))

    def sent(self) -> None:
        """The call is over, and all of its copies are asked for."""
        self._left = self.lane.record_event() if self.lane is not None else None

    def leave(self) -> None:
        """Frees the memory for computations from here on."""
        self.wait_for_copies()
        for moved in self._alive():
            moved.leave()

    def wait_for_copies(self) -> None:
        """Makes computations from here on wait until all of it is on the host."""
        if self._left is not None:
            torch.accelerator.current_stream().wait_event(self._left)
            self._left = None

    def asked(self) -> None:
        """Brings back what backward asks for, and the call before."""
        self.begin()
        before = self._before() if self._before is not None else None
        if before is not None:
            before.begin()

    def begin(self) -> None:
        for moved in self._alive():
            if not moved.is_through:
                moved.begin(self.lane)

    def _alive(self) -> Iterator[Moved]:
        return (moved for ref in self._moved if (moved := ref()) is not None)


class Host:
    """Tracks one model's storages on the host, and the order of its calls.

    `made` is told of every tensor there.
    """

    def __init__(self) -> None:
        self.made: Callable[[Tensor], None] | None = None
        self._known: dict[tuple[int, torch.dtype], tuple[StorageWeakRef, weakref.ref[Moved]]] = {}
        self._lane: torch.Stream | None = None
        self._last: Stay | None = None  # its memory on the device is not given back yet
        self._open: list[tuple[Stay, nn.Module]] = []

    def enter(self, module: nn.Module) -> None:
        """A call of an offloading module begins."""
        self._open.append((Stay(self._lane, self._open[-1][0] if self._open else self._last), module))

    def leave(self) -> None:
        """The innermost is over; the memory of the one before it is given back."""
        stay, _ = self._open.pop()
        stay.sent()
        if self._last is not None:
            self._last.leave()
        self._last = stay
        self._known = {key: held for key, held in self._known.items() if not held[0].expired()}

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def place(self, tensor: Tensor) -> Placed | None:
        """Moves a local tensor; returns what to save in its place, None if it stays. Call with dispatch disabled."""
        if tensor.device.type == "cpu" or type(tensor) not in _KINDS or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST or tensor.is_conj() or tensor.is_neg():
            return None
        key = storage._cdata, tensor.dtype
        known = self._known.get(key)  # the weak reference keeps the address taken
        moved = known[1]() if known is not None else None
        root = tensor if tensor._base is None else tensor._base
        if moved is None or not moved.holds(root):
            if self._is_weight(tensor, storage._cdata):
                return None
            moved = self._move(root, tensor.detach().as_subclass(Tensor))
            self._known[key] = StorageWeakRef(storage), weakref.ref(moved)
        moved.saved += 1
        return Placed(moved, self._open[-1][0], tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _is_weight(self, tensor: Tensor, address: int) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        return any(each.untyped_storage()._cdata == address for each in self._open[-1][1].parameters())

    def _move(self, root: Tensor, tensor: Tensor) -> Moved:
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        stay, _ = self._open[-1]
        if self._lane is None and flat.device.type != "meta":
            self._lane = torch.Stream(device=flat.device)
        stay.lane = lane = self._lane
        kept = on_host(flat.shape, flat.dtype, flat.device)
        if self.made is not None:
            self.made(kept)
        if lane is not None:
            lane.wait_event(torch.accelerator.current_stream().record_event())
        with _along(lane):
            kept.copy_(flat, non_blocking=True)
        moved = Moved(root, flat, kept, stay)
        stay.add(moved)
        return moved


_KINDS = (Tensor, DTensor, nn.Parameter)


class Parked:
    """The arguments of a checkpoint, from its call to the one in backward. torch would keep them through the hooks of
    what offloads, which give a plain tensor back."""

    def __init__(self, host: Host, args: tuple) -> None:
        with local_only(), torch.no_grad():
            self._held = [_parked(host, one) for one in args]

    def arguments(self) -> tuple:
        """Returns the original arguments; those that were on the host are leaves."""
        with local_only(), torch.no_grad():
            return tuple(one.tensor() if isinstance(one, Argument) else one for one in self._held)


class Argument(NamedTuple):
    """One that is on the host."""

    placed: Placed
    layout: Layout | None
    requires_grad: bool

    def tensor(self) -> Tensor:
        tensor = self.placed.tensor()
        return (tensor if self.layout is None else attach(tensor, self.layout)).requires_grad_(self.requires_grad)


def _parked(host: Host, one: Any) -> Any:
    placed = host.place(one) if isinstance(one, Tensor) else None
    return one if placed is None else Argument(placed, getattr(one, "_layout", None), one.requires_grad)


def _along(lane: torch.Stream | None) -> contextlib.AbstractContextManager:
    return lane if lane is not None else contextlib.nullcontext()
