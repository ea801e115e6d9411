"""Copies that a step hands to a forward in place of a call's arguments: the caller sees what the forward writes there.

Of tensors, where they were converted; of the containers that hold them, where they were copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only
from vescale_trace.values import parts, refill

from .._torch_private import DisableTorchFunction, version_of


class _Container(NamedTuple):
    own: Any  # the caller's
    copy: Any
    held: dict[Any, Any]  # what the copy held before the forward


class _Written(NamedTuple):
    own: Tensor  # the caller's
    copy: Tensor
    version: int  # of the copy before the forward
    kind: type  # of the copy then: in a pipeline it may become what stands for another stage's result


class Copies:
    """Ends a call. Each container and each tensor is written to only where its copy was.

    Cost: an all-gather, over the axes that cut it, of a plain tensor that was written to; of a DTensor a conversion
    back. None if nothing was written.
    """

    __slots__ = ("_containers", "_tensors", "_owns")
    name = "copies"

    def __init__(self) -> None:
        self._containers: list[_Container] = []
        self._tensors: list[_Written] = []
        self._owns: dict[int, tuple[Any, Any]] = {}  # by the id of what stands for it, which is kept beside it

    def note(self, own: Any, copy: Any) -> None:
        if own is copy:
            return
        self._owns[id(copy)] = copy, own
        if isinstance(own, Tensor):
            if isinstance(copy, Tensor) and not copy.is_inference():  # whose writes nobody counts
                with DisableTorchFunction():
                    self._tensors.append(_Written(own, copy, version_of(copy), type(copy)))
            return
        entries, copied = _entries(own), _entries(copy)
        if not isinstance(own, (tuple, slice)) and entries:
            self._containers.append(_Container(own, copy, copied))
        for key in entries.keys() & copied.keys():
            self.note(entries[key], copied[key])

    def give_back(self) -> None:
        """Writes back, at the end of a call."""
        with DisableTorchFunction():  # a pipeline's dry run must not see it
            changed = [(own, copy) for own, copy, version, kind in self._tensors
                       if type(copy) is not kind or version_of(copy) != version]  # fmt: skip
        for own, copy in changed:
            _write(own, copy)
        self._change_containers()

    def after(self, *call: Any) -> None:
        """Writes back after a call that has raised: it may have raised on this rank alone, so that nothing may be
        sent."""
        self._change_containers()

    def _change_containers(self) -> None:
        for own, copy, held in self._containers:
            now = _entries(copy)
            if list(now) != list(held) or any(held[key] is not value for key, value in now.items()):
                refill(own, {key: self._own(value) for key, value in now.items()})

    def _own(self, value: Any) -> Any:
        return self._owns.get(id(value), (value, value))[1]


def _entries(value: Any) -> dict[Any, Any]:
    """Returns the entries of a container that `map_tensors` looks into."""
    return dict(parts(value) or {})


def _write(own: Tensor, copy: Tensor) -> None:
    with local_only():
        shares = type(copy) in (DTensor, Tensor) and _memory(own) == _memory(copy)
    if type(copy) is DTensor and type(own) is not DTensor:
        copy = copy.full_tensor()
    if shares:  # autograd has heard of the write, and what it keeps for the backward is of after it
        own.data.copy_(copy.detach())
        return
    with torch.set_grad_enabled(torch.is_grad_enabled() and (own.requires_grad or copy.requires_grad)):
        own.copy_(copy)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copies_of(given: tuple[tuple, dict[str, Any]], handed: tuple[tuple, dict[str, Any]]) -> Copies | None:
    """Pairs the arguments of a call with those that a step made of them; None if it made nothing new."""
    copies = None
    for own, copy in (*zip(given[0], handed[0]), *zip(given[1].values(), map(handed[1].get, given[1]))):
        if own is not copy:
            copies = copies or Copies()
            copies.note(own, copy)
    return copies
