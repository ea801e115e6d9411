"""The tape: what was done to tensors that do not exist yet, and which of it a value depends on. Pure bookkeeping.

A `Slot` stands for one tensor object: its sizes and strides, as a tensor on meta, and
the entry that made it. Slots that alias share a `Memory`, which knows who wrote to it.
An `Entry` is one ATen call. The value of a slot at a time is made by the entry that
made the slot, by the writes to its memory before that time, back to the last that
overwrote it all, and by what those read, in turn. So what was overwritten before
anybody read it is never computed: the first of the two initialisations that a
HuggingFace model gives every weight, say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, device

from .._cpu.stream import Taken
from .._torch_private import tree_map_only

NEVER = 0  # before the first entry
ALWAYS = 1 << 62
_numbers = itertools.count(1)


@dataclass(eq=False)
class Memory:
    """State that aliases share."""

    writes: list[Entry] = field(default_factory=list)
    read_at: int = NEVER


@dataclass(eq=False)
class Slot:
    """One tensor: its metadata, where it lies, who made it."""

    meta: Tensor
    device: device
    memory: Memory
    entry: Entry

    @property
    def is_all_of_its_memory(self) -> bool:
        """True if a write to it overwrites all of its memory."""
        return self.meta.is_contiguous() and self.meta.nbytes == self.meta.untyped_storage().nbytes()


@dataclass(eq=False)
class Entry:
    """`function(*args, **kwargs)`, with slots for tensors.

    taken: the numbers, where it draws random ones into its first argument.
    constant: the value, where it stands for a tensor that was there already; without a function.
    reads: the slots it depends on, with the time as of which their values count; NEVER where only the place does.
    made: positions in its flat output, and the slots that these became.
    """

    function: Callable | None
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    taken: Taken | None = None
    constant: Tensor | None = None
    reads: tuple[tuple[Slot, int], ...] = ()
    made: tuple[tuple[int, Slot], ...] = ()
    number: int = field(default_factory=lambda: next(_numbers))
    overwrites: bool = False

    def write_to(self, slot: Slot) -> None:
        """Notes that this entry writes to `slot`; older writes that nobody read are forgotten."""
        memory = slot.memory
        if self.overwrites and memory.writes and memory.read_at < memory.writes[0].number:
            memory.writes.clear()
        memory.writes.append(self)

    def call(self, values: dict[Slot, Tensor]) -> Any:
        """Runs it, on the values of its slots."""
        if self.constant is not None:
            return self.constant.clone()
        args, kwargs = tree_map_only(Slot, values.__getitem__, (self.args, self.kwargs))
        if self.taken is not None:
            return self.taken.place(args[0])
        return self.function(*args, **kwargs)


def history(slot: Slot) -> list[Entry]:
    """The entries that make the present value of `slot`, in the order of time."""
    found: dict[int, Entry] = {}
    seen: set[tuple[Slot, int]] = set()
    waiting = [(slot, ALWAYS)]
    while waiting:
        one, before = waiting.pop()
        if (one, before) in seen:
            continue
        seen.add((one, before))
        entries = [one.entry]
        for write in reversed(one.memory.writes):
            if write.number < before:
                entries.append(write)
                if write.overwrites:
                    break
        for entry in entries:
            if entry.number not in found:
                found[entry.number] = entry
                waiting += entry.reads
    return [found[number] for number in sorted(found)]
