"""Buffers that a checkpointed module writes: its recomputation finds them as the first pass did, and leaves them as it
found them in backward. A running average that the forward reads and updates is updated once, and what was computed with
it is computed again with the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vescale_dtensor import GradientError
from vescale_dtensor.engine import local_only

from .._torch_private import _NormBase


class Buffers:
    """Buffers of a module and of those inside. All are copied in the first call of each mode; then those that were
    written in one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: dict[bool, set[tuple[int, str]]] = {}  # by mode

    def now(self) -> Found:
        known = self._written.get(self._module.training)
        written = self._written.setdefault(self._module.training, set())
        held = []
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copied = known is None or (id(module), name) in known
                    held.append(Held(module, name, buffer, _version(buffer), _copy(buffer) if copied else None))
        return Found(held, written, list(self._module.named_parameters()))


class Held(NamedTuple):
    """A buffer as a call finds it."""

    owner: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    @property
    def is_written(self) -> bool:
        if _version(self.buffer) != self.version:
            return True
        owner = self.owner  # batch statistics are written without the version being told
        return isinstance(owner, _NormBase) and owner.training and owner.track_running_stats


class Found:
    """The buffers that a call has found, and, once it is through, those of them that it changed; and the parameters
    that it may have written to, of which there are no copies."""

    def __init__(self, held: list[Held], written: set[tuple[int, str]], parameters: list[tuple[str, Tensor]]) -> None:
        self._held, self._written = held, written
        with local_only():
            self._parameters = [(name, one, _version(one)) for name, one in parameters]

    def check_written(self) -> None:
        """Raises GradientError for a buffer that is written and was not copied."""
        with local_only():
            self._parameters = [each for each in self._parameters if _version(each[1]) != each[2] or _is_lent(each[1])]
        changed = []
        for one in self._held:
            if one.is_written:
                self._written.add((id(one.owner), one.name))
                if one.copy is None:
                    raise GradientError(
                        "checkpointing",
                        f"buffer {one.name} of a {type(one.owner).__name__} is written, but was not in the first "
                        "call of the checkpointed module: backward would have to read its old value again",
                        (),
                        [
                            ("model(batch)", "once more: from now on it is kept"),
                            ("Plan(checkpointing=...)", "without a pattern that matches the module"),
                        ],
                    )
                changed.append(one)
            elif one.owner._buffers.get(one.name) is not one.buffer:
                changed.append(one._replace(copy=None))
        self._held = changed

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts back, for a while, what the call found. Raises GradientError for a parameter that is written once more,
        and is another then: what comes after the write was recomputed with other weights than the call's."""
        before = [(name, one, _copy(one)) for name, one, _ in self._parameters]
        now = [(one, one.owner._buffers.get(one.name), _copy(one.buffer)) for one in self._held]
        try:
            for one, _, _ in now:
                one.owner._buffers[one.name] = one.buffer
                if one.copy is not None:
                    _fill(one.buffer, one.copy)
            yield
        finally:
            for one, buffer, value in now:
                _fill(one.buffer, value)
                one.owner._buffers[one.name] = buffer
            _check_unchanged(before)


def _check_unchanged(before: list[tuple[str, Tensor, Tensor]]) -> None:
    with local_only(), torch.no_grad():
        changed = [name for name, one, copy in before if not torch.equal(one.nan_to_num(), copy.nan_to_num())]
        for _, one, copy in before if changed else ():
            one.data.copy_(copy)
    if changed:
        raise GradientError(
            "checkpointing",
            f"the parameter {changed[0]!r} is written in the forward of a checkpointed module, which runs once more in "
            "backward: it would be written twice",
            (),
            [
                ("Plan(checkpointing=...)", "without a pattern that matches the module"),
                ("write before the model is called", "outside of what is recomputed"),
            ],
        )


def _is_lent(parameter: Tensor) -> bool:
    """True if somebody was given its memory, whose writes its version does not tell."""
    return getattr(parameter.__dict__.get("_owner"), "is_lent", False)


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _copy(buffer: Tensor) -> Tensor:
    with local_only(), torch.no_grad():
        return buffer.detach().clone()


def _fill(buffer: Tensor, value: Tensor) -> None:
    """Without telling the version: who keeps the buffer for backward is to find there what it kept."""
    with local_only(), torch.no_grad():
        buffer.data.copy_(value)
