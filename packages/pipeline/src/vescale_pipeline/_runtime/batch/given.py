"""Protects a call's arguments from the forward: each of its runs has copies of the tensors it writes to.

A dry run finds which tensors these are, by their versions. When the call has ended, the caller's own take what the last
stage's runs have left (`call_exchange.share_written`), as on one device. A list, dict or dataclass that a forward
changes is refused: its caller would see one microbatch's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import PLAIN, copied, fill, parts, tensors_in

from ..._errors import PipelineError
from ..._trace.placeholder import Placeholder, version_of

Part = tuple[tuple, dict[str, Any]]
_LEAVES = PLAIN | {Tensor}


def on_copies(part: Part, which: Collection[int] | None = None) -> Part:
    """Arguments in fresh containers, the tensors in these places copied; all tensors, where none are named."""
    tensors = tensors_in(part)
    with torch.no_grad():
        fresh = [t.clone() if which is None or at in which else t for at, t in enumerate(tensors)]
    return fill(copied(part), fresh)


class Watched:
    """Copies of a dry run's arguments, and what it does to them."""

    def __init__(self, part: Part) -> None:
        self._part, self.copy = part, on_copies(part)
        self._tensors = tensors_in(self.copy)
        self._versions = [-1 if tensor.is_inference() else version_of(tensor) for tensor in self._tensors]

    def written(self) -> set[int]:
        """The places of the tensors that were written to. Raises PipelineError for what cannot be given back."""
        found = set()
        for at, (tensor, version) in enumerate(zip(self._tensors, self._versions)):
            if type(tensor) is Placeholder:
                raise PipelineError(
                    "pipeline",
                    "the forward writes what a module computes to a tensor that it was given, in place: only ranks of "
                    "that module's stage would have the values",
                    [f"tensor  {at} of the call, {list(tensor.shape)}"],
                    [("x = x.clone()", "in the forward, before the write: a copy of the tensor")],
                )
            if version >= 0 and version_of(tensor) != version:
                found.add(at)
        own = {id(copy): tensor for copy, tensor in zip(self._tensors, tensors_in(self._part))}
        args, kwargs = self._part
        for name, before, now in (
            *((f"argument {at}", *pair) for at, pair in enumerate(zip(args, self.copy[0]))),
            *((f"the argument {name!r}", kwargs[name], value) for name, value in self.copy[1].items()),
        ):
            changed = _changed(before, now, own)
            if changed is not None:
                raise PipelineError(
                    "pipeline",
                    f"the forward changes a {changed} that it was given, in {name}: each microbatch has its own, and "
                    "the caller would not see it",
                    (),
                    [
                        ("batch = dict(batch)", "in the forward, before the change; a list: list(batch)"),
                        ("labels = batch['labels']", "what is read stays where it is"),
                    ],
                )
        return found


class Runs:
    """A forward's runs on parts of a batch.

    Arguments:
        written: the places of the tensors that it writes to.
    """

    def __init__(self, forward: Callable[[Part], Any], written: Collection[int]) -> None:
        self._forward, self._written = forward, written
        self._last: dict[int, list[Tensor]] = {}  # by the id of a part: what its last stage's run has left

    def of_stage(self, part: Part) -> Any:
        """A microbatch's, of a stage; what the latest has left is kept."""
        if not self._written:
            args, kwargs = part
            holds_none = _LEAVES.issuperset(map(type, (*args, *kwargs.values())))  # containers that it may change
            return self._forward(part if holds_none else copied(part))
        copy = on_copies(part, self._written)
        self._last[id(part)] = self.places(copy)
        return self._forward(copy)

    def alone(self, part: Part) -> Any:
        """Runs on placeholders: nothing of what it leaves is kept."""
        return self._forward(on_copies(part, self._written))

    def places(self, part: Part) -> list[Tensor]:
        return [tensor for at, tensor in enumerate(tensors_in(part)) if at in self._written]

    def left(self, part: Part) -> list[Tensor]:
        return self._last[id(part)]


def check_views(whole: Part, part: Part, written: Collection[int], local: Callable[[Tensor], Tensor]) -> None:
    """Raises PipelineError where a microbatch's rows of what the forward writes to are no views of the batch's."""
    pairs = list(zip(tensors_in(whole), tensors_in(part)))
    for at in sorted(written):
        batch, rows = map(local, pairs[at])
        if batch.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            raise PipelineError(
                "pipeline",
                "the forward writes in place to a tensor that it was given, of which the microbatches have copies",
                [f"tensor  {at} of the call, {list(pairs[at][0].shape)}"],
                [("x = x.clone()", "in the forward, before the write: a copy of the tensor")],
            )


def _changed(before: Any, now: Any, own: dict[int, Tensor]) -> str | None:
    """The kind of a container that holds something else than before; None if all hold the same."""
    if isinstance(before, Tensor):
        return None
    entries, current = parts(before), parts(now)
    if entries is None or current is None:
        return None
    if list(entries) != list(current):
        return type(before).__name__
    for key, value in entries.items():
        other = current[key]
        same = own.get(id(other), other) is value or (parts(value) is not None and type(other) is type(value))
        if not same:
            return type(before).__name__
        if (inner := _changed(value, other, own)) is not None:
            return inner
    return None
