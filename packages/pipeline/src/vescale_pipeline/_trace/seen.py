"""Observes a dry run below the functions: random draws, and reads and writes of buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_trace.effects import Slot
from vescale_trace.meter import ON_META
from vescale_trace.values import map_tensors, tensors_in

from .._torch_private import TorchDispatchMode
from .placeholder import Placeholder, memory_of, placeholder


@dataclass(frozen=True)
class Draw:
    """One random operator, replayed on scratch tensors to go past what another stage draws."""

    function: Callable
    args: tuple
    kwargs: dict

    def replay(self) -> None:
        def scratch(tensor: Tensor) -> Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.home)
            return made.fill_(0.5) if made.is_floating_point() else made.zero_()

        args, kwargs = map_tensors((self.args, self.kwargs), scratch)
        self.function(*args, **kwargs)


class Place(NamedTuple):
    """A place in a dry run: so many draws and accesses before it."""

    draws: int
    accesses: int


class Span(NamedTuple):
    began: Place
    ended: Place


class Access(NamedTuple):
    """One of a slot's memory: "r", "w", or "p" where Python reads a value of it."""

    slot: Slot
    kind: str
    stage: int


class Seen(TorchDispatchMode):
    """Notes the operators.

    Arguments:
        memory: plain tensors that stand for what an attribute keeps.
        stage: the stage of the moment.
        device: where the model computes, and draws.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Sequence[tuple[Tensor, Slot]],
        stage: Callable[[], int],
        device: torch.device,
    ) -> None:
        self._device = device
        self.draws: list[Draw] = []
        self.accesses: list[Access] = []
        self._stage = stage
        self._slots: dict[int, list[Slot]] = {}  # by the address of their memory
        self._derived: dict[int, list[Slot]] = {}  # of what was computed from them
        self._alive: list[Any] = []  # memory is told by its address
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        for name, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and type(buffer) is not Placeholder:
                    self._stands_for(buffer, [Slot(module, leaf, f"{name}.{leaf}" if name else leaf, True)])
        for tensor, slot in memory:
            self._stands_for(tensor, [slot])
        super().__init__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def place(self) -> Place:
        return Place(len(self.draws), len(self.accesses))

    def note(self, tensor: Tensor, kind: str) -> None:
        """An access to a plain tensor."""
        memory = memory_of(tensor)
        self.accesses += [Access(slot, kind, self._stage()) for slot in self._slots.get(memory, ())]
        self.accesses += [Access(slot, "r", self._stage()) for slot in self._derived.get(memory, ())]

    def wrote(self, tensor: Tensor) -> bool:
        """True if a plain tensor is a slot's memory."""
        return memory_of(tensor) in self._slots

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if draws and isinstance(generator := kwargs.get("generator"), torch.Generator):
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        out = ON_META.get(function, function)(*args, **kwargs)
        if draws:
            self._note_draw(function, args, kwargs)
        if self._slots:
            self._note_accesses(function, args, kwargs, out)
        return out

    def _note_draw(self, function: Any, args: tuple, kwargs: dict) -> None:
        def kept(tensor: Tensor) -> Placeholder:
            home = self._device if tensor.is_meta else tensor.device
            strides = tensor.stride() if type(tensor) in (Tensor, nn.Parameter, Placeholder) else None
            meta = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
            if strides is not None:
                meta = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
            return placeholder(meta, 0, "", home)

        self.draws.append(Draw(function, *map_tensors((args, kwargs), kept)))

    def _note_accesses(self, function: Any, args: tuple, kwargs: dict, out: Any) -> None:
        read: list[Slot] = []
        for i, schema in enumerate(function._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(schema.name)
            for tensor in tensors_in(value):
                if tensor.is_meta:
                    continue
                memory = memory_of(tensor)
                slots, derived = self._slots.get(memory, []), self._derived.get(memory, [])
                if slots or derived:
                    writes = schema.alias_info is not None and schema.alias_info.is_write
                    kind = "p" if function is torch.ops.aten._local_scalar_dense.default else "r"
                    self.accesses += [Access(slot, "w" if writes else kind, self._stage()) for slot in slots]
                    self.accesses += [Access(slot, kind, self._stage()) for slot in derived]
                    read += slots + derived
        if read:
            for tensor in tensors_in(out):
                if not tensor.is_meta and (memory := memory_of(tensor)) not in self._slots:
                    self._derived[memory] = read
                    self._alive.append(tensor)

    def _stands_for(self, tensor: Tensor, slots: list[Slot]) -> None:
        self._slots[memory_of(tensor)] = slots
        self._alive.append(tensor)
