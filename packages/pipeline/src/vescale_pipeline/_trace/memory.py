"""Side effects of a forward on the model: attributes that it sets, lists that it appends to, buffers. Objects of users
that modules hold, such as one that collects losses for several blocks, are part of the model in this.

A dry run must leave none of it (`kept_as_it_was`). A run of one stage sees it as that
stage's own: a rank with several stages runs them in turns, each over the microbatches in
order (`Memories`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vescale_trace.effects import Kept, Slot, host_generators_kept, python_states
from vescale_trace.values import copied, map_tensors, same, tensors_in

from .._errors import PipelineError
from .._runtime.random_order import device_of, set_states, states
from .placeholder import Placeholder

_OURS = frozenset(("_call_impl", "__deepcopy__", "parameters", "_vescale", "_is_hf_initialized"))
"""Attributes of modules that this library and transformers write."""


def kept(model: nn.Module) -> Kept:
    """Returns what the model and all that it holds are now."""
    return Kept(model, _OURS)


@contextmanager
def kept_as_it_was(model: nn.Module) -> Iterator[Kept]:
    """All that the model holds, and the generators, are afterwards as they were before."""
    before, device = kept(model), device_of(model)
    state = states(device)
    try:
        with host_generators_kept():
            yield before
    finally:
        set_states(device, state)
        before.restore()


@contextmanager
def no_draws_of_python() -> Iterator[None]:
    """Raises PipelineError if the block draws from Python's or numpy's generators: stages that leave a forward early,
    or do not run a module, would not draw what one device does."""
    before = python_states()
    yield
    now = python_states()
    moved = next((name for name, state in now.items() if before.get(name, state) != state), None)
    if moved is not None:
        raise PipelineError(
            "pipeline",
            f"the forward draws from the generator of {moved}: a stage runs its own modules only, and cannot know what "
            "the others draw there",
            (),
            [("torch.rand(()) in its place", "torch's draws are the same on all stages")],
        )


class Memories:
    """State that a forward leaves for the next microbatch, stage by stage.

    A run of one microbatch gets tensors of its own: backwards to come hold those of earlier ones.

    Arguments:
        whole: a value as a plain tensor: a plain buffer stays one, whatever is assigned to it.
    """

    def __init__(self, slots: tuple[Slot, ...], stages: Collection[int], whole: Callable[[Tensor], Tensor]) -> None:
        self._slots, self._whole = slots, whole
        self._objects = [slot.get() for slot in slots]
        self._first = [_snapshot(value) for value in self._objects]
        self._of = {stage: list(self._first) for stage in stages}

    def of_stage(self, stage: int, values: dict[int, Tensor], run: Callable, *given: Any) -> Any:
        """Runs one microbatch. Placeholders that it leaves become the values behind them, or what was before."""
        if not self._slots:
            return run(*given)
        before = self._of[stage]
        for slot, value in zip(self._slots, before):
            slot.put(_snapshot(value))
        result = run(*given)
        self._of[stage] = [self._reduced(slot.get(), old, values) for slot, old in zip(self._slots, before)]
        return result

    def _reduced(self, value: Any, before: Any, values: dict[int, Tensor]) -> Any:
        tensors = tensors_in(value)
        if any(type(tensor) is Placeholder and tensor.key not in values for tensor in tensors):
            return before
        real = map_tensors(value, lambda t: values[t.key] if type(t) is Placeholder else t)
        if type(before) is Tensor and isinstance(real, Tensor) and type(real) is not Tensor:
            real = self._whole(real.detach())
        return _snapshot(real)

    def end(self) -> None:
        """After the last microbatch: what any stage here has changed, the last one's in doubt."""
        for i, (slot, found) in enumerate(zip(self._slots, self._objects)):
            value = self._first[i]
            for stage in sorted(self._of):
                if not _equal(self._of[stage][i], self._first[i]):
                    value = self._of[stage][i]
            if isinstance(found, Tensor) and isinstance(value, Tensor) and _alike(found, value):
                slot.put(found)  # the buffer stays the object that it is
                with torch.no_grad():
                    found.copy_(value)
            else:
                if isinstance(found, (list, dict, set)):
                    slot.put(found)
                slot.put(copied(value))


def _snapshot(value: Any) -> Any:
    """Tensors by value, containers anew."""
    return map_tensors(copied(value), lambda t: t if type(t) is Placeholder else t.detach().clone())


def _alike(one: Tensor, other: Tensor) -> bool:
    return type(one) is type(other) and one.shape == other.shape and one.dtype == other.dtype


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _alike(one, other) and bool((one == other).all())
    return same(one, other)
