"""Side effects of a forward on the model: attributes that it sets, lists that it appends to, buffers. Objects of users
that modules hold, such as one that collects losses for several blocks, are part of the model in this.

A dry run must leave none of it (`kept_as_it_was`). A run of one stage sees it as that
stage's own: a rank with several stages runs them in turns, each over the microbatches in
order (`Memories`).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_trace.effects import host_generators_kept, python_states
from vescale_trace.values import PLAIN, copied, map_tensors, same, tensors_in

from .._errors import PipelineError
from .._runtime.random_order import device_of, set_states, states
from .captures import as_many_as_before
from .placeholder import Placeholder, local_only, version_of

_MACHINERY = frozenset(
    (
        *nn.Module().__dict__,
        *("_call_impl", "__deepcopy__", "parameters", "_vescale", "_is_hf_initialized"),
    )
) - {"training"}
_CONTAINERS = (list, dict, set)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "transformers", "tokenizers"}
"""Packages whose objects keep nothing of a forward."""
_ABSENT = object()
_NOTHING = nullcontext()


class Slot(NamedTuple):
    """An attribute or a buffer of a module, or an attribute of an object that modules hold."""

    owner: Any
    leaf: str
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self.owner is other.owner and self.leaf == other.leaf

    def __hash__(self) -> int:
        return hash((id(self.owner), self.leaf))  # an object of a user's may have no hash

    @property
    def is_buffer(self) -> bool:
        return isinstance(self.owner, nn.Module) and self.leaf in self.owner._buffers

    def get(self) -> Any:
        return self._holder().get(self.leaf, _ABSENT)

    def put(self, value: Any) -> None:
        """Lists and dicts are filled anew, in place: others may hold them, too."""
        holder = self._holder()
        now = holder.get(self.leaf, _ABSENT)
        if value is _ABSENT:
            holder.pop(self.leaf, None)
        elif type(now) is type(value) and isinstance(now, _CONTAINERS):
            if now is not value:
                _refill(now, value)
        else:
            holder[self.leaf] = value

    def _holder(self) -> dict:
        return self.owner._buffers if self.is_buffer else self.owner.__dict__


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)


def _contents(value: Any) -> Any:
    """Fresh containers around the same objects."""
    if type(value) in (list, tuple):
        return type(value)(_contents(item) for item in value)
    if type(value) is dict:
        return {key: _contents(item) for key, item in value.items()}
    return set(value) if type(value) is set else value


class Kept:
    """The attributes and buffers of all modules, and of the objects that they hold, as they were."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        self._objects_of = {id(module): list(_objects_in(prefix, module)) for prefix, module in modules}
        self._owners = self._with_objects(modules)
        self._before: dict[tuple[int, str], Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        for _, owner in self._owners:
            for leaf, value in _attributes(owner):
                self._before[id(owner), leaf] = _contents(value)
                if type(value) in _CONTAINERS:
                    self._containers.append((value, _contents(value)))
        self._objects = {(id(owner), leaf): value for _, owner in self._owners for leaf, value in _attributes(owner)}

    def _with_objects(self, modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
        """The modules and what they hold, each object under its first name."""
        owners: dict[int, tuple[str, Any]] = {}
        for prefix, module in modules:
            owners[id(module)] = prefix, module
            for name, held in self._objects_of.get(id(module), ()):
                owners.setdefault(id(held), (name, held))
        return list(owners.values())

    def changed(self, within: nn.Module | None = None) -> list[Slot]:
        """Returns the attributes that changed."""
        found = []
        for prefix, owner in self._owners if within is None else self._with_objects(within.named_modules()):
            now = dict(_attributes(owner))
            for leaf, value in now.items():
                if not same(value, self._before.get((id(owner), leaf), _ABSENT)):
                    found.append(Slot(owner, leaf, f"{prefix}.{leaf}" if prefix else leaf))
        return found

    def numbers(self, within: nn.Module) -> dict[Slot, Any]:
        """Numbers, flags and texts, as they are now."""
        return {
            Slot(owner, leaf, f"{prefix}.{leaf}" if prefix else leaf): value
            for prefix, owner in self._with_objects(within.named_modules())
            for leaf, value in _attributes(owner)
            if type(value) in PLAIN
        }

    def containers_changed(self) -> list[Slot]:
        """Returns the changed lists, dicts and sets of any module."""
        ids = {id(container) for container, before in self._containers if not same(container, before)}
        return [slot for slot in self.changed() if id(slot.get()) in ids] if ids else []

    def restore(self) -> None:
        for container, before in self._containers:
            if not same(container, before):
                _refill(container, before)
        for _, owner in self._owners:
            for leaf, value in list(_attributes(owner)):
                before = self._objects.get((id(owner), leaf), _ABSENT)
                holder = owner._buffers if Slot(owner, leaf, leaf).is_buffer else owner.__dict__
                if before is _ABSENT:
                    del holder[leaf]
                elif value is not before:
                    holder[leaf] = before


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    for leaf, value in owner.__dict__.items():
        is_weight = type(value) is _WEIGHT or type(value) is Placeholder and value.is_weight
        if leaf not in _MACHINERY and not is_weight and not isinstance(value, nn.Module):
            yield leaf, value
    if isinstance(owner, nn.Module):
        yield from owner._buffers.items()


def _objects_in(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The objects of users that a module's attributes lead to, with a name each; not through other modules."""
    waiting, met = [(name, module)], {id(module)}
    while waiting:
        prefix, owner = waiting.pop()
        for leaf, value in list(_attributes(owner)):
            inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
            for held in inside:
                if _is_object(held) and id(held) not in met:
                    met.add(id(held))
                    found = f"{prefix}.{leaf}" if prefix else leaf, held
                    yield found
                    waiting.append(found)


def _is_object(value: Any) -> bool:
    kind = type(value)
    if kind in (SimpleNamespace, Namespace):
        return True
    root = kind.__module__.partition(".")[0]
    if root in _LIBRARIES or root.startswith("vescale") or isinstance(value, (nn.Module, Tensor, type, Enum)):
        return False
    return type(getattr(value, "__dict__", None)) is dict


_WEIGHT = nn.Parameter


@contextmanager
def kept_as_it_was(model: nn.Module) -> Iterator[Kept]:
    """Buffers, attributes and the generators are afterwards as they were before."""
    real = [buffer for buffer in model.buffers() if type(buffer) is not Placeholder]
    buffers = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in real]
    kept = Kept(model)
    device = device_of(model)
    state = states(device)
    try:
        with host_generators_kept(), as_many_as_before(list(model.modules())):
            yield kept
    finally:
        set_states(device, state)
        kept.restore()
        with torch.no_grad(), local_only():
            for buffer, before, version in buffers:
                if buffer.shape == before.shape and _is_written(buffer, before, version):
                    buffer.copy_(before)


def _is_written(buffer: Tensor, before: Tensor, version: int) -> bool:
    """True if the version, or the values, changed: kernels of batch normalization count no write. With dispatch off."""
    return buffer._version != version or (not buffer.is_meta and not torch.equal(buffer, before))


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

    def of_stage(self, stage: int, values: dict[int, Tensor]) -> AbstractContextManager[None]:
        """A run of one microbatch. Placeholders that it leaves become the values behind them, or what was before."""
        return self._of_stage(stage, values) if self._slots else _NOTHING

    @contextmanager
    def _of_stage(self, stage: int, values: dict[int, Tensor]) -> Iterator[None]:
        before = self._of[stage]
        for slot, value in zip(self._slots, before):
            slot.put(_snapshot(value))
        yield
        self._of[stage] = [self._reduced(slot.get(), old, values) for slot, old in zip(self._slots, before)]

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
                if isinstance(found, _CONTAINERS):
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
