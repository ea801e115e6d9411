"""Effects of a step on the host. A graph repeats what the device was given, and nothing else: a count in Python would
stand still, and a random number of the host's would be the same for ever."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_rng import current_stream
from vescale_rng.state import draws, fingerprints, generators_of, moved
from vescale_trace.effects import Kept, python_states
from vescale_trace.values import named, same

from .._torch_private import version_of
from .held import Optimizer
from .reads import Reads, names_of, root_of

_WAITS = "called a synchronizing"  # as torch says it of every device


class Host:
    """Everything that a step may change on the host, as it is now: what modules and optimizers hold, what the step's
    own names stand for, and generators.

    Names that the step's functions call may change beside it, in modules of their own, are not looked at.
    """

    def __init__(self, step: Callable, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._step, self._optimizers = step, optimizers
        self._kept, self._reads = Kept(root_of(step, models), copies=False), Reads(step, models, optimizers)
        self._generators = {slot.name: one for slot, one in self._kept.held() if isinstance(one, torch.Generator)}
        self._was = self._now()

    def changed(self) -> str:
        """Returns what is otherwise by now, "" for nothing."""
        now = self._now()
        for name, before in self._was.items():
            if not same(before, now.get(name)):
                return name
        if now.keys() != self._was.keys():
            return next(iter(now.keys() ^ self._was.keys()))
        slots = self._kept.changed()
        return slots[0].name if slots else self._reads.changed().partition(" ")[0]

    def iterator(self) -> str:
        """Returns the name of an iterator that the step takes from, "" for none."""
        return next((name for name, one in names_of(self._step).items() if isinstance(one, Iterator)), "")

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {"the host's generator": torch.get_rng_state().numpy().tobytes()}
        found |= {f"the generator of {name}": state for name, state in python_states().items()}
        found |= {f"the generator {name}": one.get_state().numpy().tobytes() for name, one in self._generators.items()}
        for name, value in names_of(self._step).items():
            found[name] = value
            if not isinstance(value, (nn.Module, Optimizer, type)) and hasattr(value, "state_dict"):
                found |= {place: _of_host(leaf) for place, leaf in named(value.state_dict(), name)}
        for optimizer in self._optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups:
                mine = {key: value for key, value in group.items() if key != "params"}
                found |= {place: _of_host(leaf) for place, leaf in named(mine, f"{kind}.param_groups")}
            for number, state in enumerate(optimizer.state.values()):
                found |= {place: _of_host(leaf) for place, leaf in named(state, f"{kind}.state[{number}]")}
        return found


def _of_host(leaf: Any) -> Any:
    """Returns how often a tensor on the host was written; of one on the device nothing: the graph writes it."""
    if isinstance(leaf, Tensor):
        return (id(leaf), version_of(leaf)) if leaf.is_cpu else None
    return leaf


class Draws:
    """Draws of a device from now on."""

    def __init__(self, device_type: str) -> None:
        self._generator = generators_of(device_type)[1]
        self._was = self._now()

    def _now(self) -> tuple[int, int, int, int]:
        offset = self._generator.get_offset() if self._generator.device.type == "cuda" else 0
        return fingerprints([self._generator])[0], draws(), moved(), offset

    def refused(self, is_recomputed: bool) -> str:
        """Returns why a graph would draw other numbers, "" if it would not: a run moves the generator by what torch's
        own kernels draw, or by what sharded tensors do, and a checkpoint cannot set it back."""
        states, counts, own, offsets = zip(self._was, self._now())
        if is_recomputed and states[0] != states[1]:
            return "it draws in what is computed again in its backward, which a graph cannot draw again"
        if counts[0] == counts[1]:
            return ""
        if current_stream() == "philox":
            return 'it draws from the "philox" stream, whose numbers begin on the host'
        if offsets[1] - offsets[0] != own[1] - own[0]:
            return "it draws for plain tensors beside sharded ones, in an order that a graph does not keep"
        return ""


class Waits:
    """Waits of the host for the device within a block. `where`: the line that asked for the first, "" for none; torch
    says nothing of `synchronize`."""

    where = ""


@contextlib.contextmanager
def waits_of_host(device_type: str) -> Iterator[Waits]:
    """A block in which torch says where the host waits. Other warnings are passed on."""
    module, found = torch.get_device_module(device_type), Waits()
    if not hasattr(module, "set_sync_debug_mode"):
        yield found
        return
    before = module.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            module.set_sync_debug_mode(before)
    for one in said:
        if _WAITS not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        else:
            found.where = found.where or f"{one.filename}:{one.lineno}"
