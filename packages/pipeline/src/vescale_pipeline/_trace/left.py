"""State that one microbatch leaves in the model for the next: which stage writes it, and which stages need it.

Buffers that stages write, and attributes that keep values, are a memory from one
microbatch to the next. Stages run different microbatches at a time, so that a memory
can reach later stages, by travelling with the values of its microbatch, but never
an earlier one.

    written by no stage alone (a counter)   every stage runs the code to its end
    written and read by one stage           nothing to do
    read by later stages                    travels to them
    kept by several ranks                   travels to the last stage, which tells all at the end of a call
    anything else                           PipelineError, before anything runs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_trace.effects import Kept, Slot
from vescale_trace.values import PLAIN, map_tensors, tensors_in

from .._errors import PipelineError
from .event import Event
from .placeholder import Placeholder, local_only
from .record import Recorder


def placeholders_in(value: Any) -> list[Placeholder]:
    return [tensor for tensor in tensors_in(value) if type(tensor) is Placeholder and not tensor.is_weight]


def forget_values(changed: list[Slot]) -> list[tuple[Tensor, Slot]]:
    """Puts plain tensors in place of the placeholders that a dry run left: what the next microbatch will find."""
    made = []
    for slot in changed:
        value = slot.get()
        if placeholders_in(value):

            def plain(tensor: Tensor, slot: Slot = slot) -> Tensor:
                if type(tensor) is not Placeholder:
                    return tensor
                with local_only():
                    like = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.home)
                made.append((like, slot))
                return like

            slot.put(map_tensors(value, plain))
    return made


def _accesses_of(event: Event) -> range:
    return range(event.span.began.accesses, event.span.ended.accesses)


def _without_counts(event: Event, again: Event) -> Event:
    """Numbers that a unit sets are what every stage finds, if a forward begins them anew; one that goes on from call to
    call, of which a dry run knows one value alone, stays on the unit's stage."""
    second = dict(again.attributes)
    kept = tuple(
        (slot, value) for slot, value in event.attributes if type(value) not in PLAIN or second.get(slot) == value
    )
    return event if kept == event.attributes else replace(event, attributes=kept)


def _written_again(slot: Slot) -> PipelineError:
    return PipelineError(
        "pipeline",
        f"the buffer {slot.name!r} is written inside a checkpoint: its backward would write it again, when other "
        "microbatches have written it since",
        (),
        [("write it outside of what is checkpointed", ""), ("no checkpoint around this module", "")],
    )


class Left:
    """See the module.

    Arguments:
        changed: what a first pass left.
        first: its recorder.
        buffers: the stages that keep each buffer.
    """

    def __init__(self, changed: list[Slot], first: Recorder, buffers: Mapping[str, tuple[int, ...]]) -> None:
        self._first, self._buffers = first, buffers
        self._final = {slot: placeholders_in(slot.get()) for slot in changed}
        self._again: Recorder | None = None
        self.slots: tuple[Slot, ...] = ()
        self.synced: tuple[Slot, ...] = ()
        self.is_whole = False

    def compare(self, again: Recorder, kept: Kept) -> None:
        """The second pass, and what it began with. Raises PipelineError where it took another way than the first."""
        self._again = again
        ways = [[(event.stage, event.name) for event in recorder.events] for recorder in (self._first, again)]
        names = [slot.name for slot in self._final]
        if ways[0] != ways[1]:
            raise PipelineError(
                "pipeline",
                "a second call of the forward with the same inputs calls different modules or functions than the "
                "first: "
                "what it left behind decides",
                [f"left behind  {', '.join(sorted(names))}"],
                [("let nothing but the shapes of its inputs decide which modules a forward calls", "")],
            )
        changed = kept.changed()
        self.slots = tuple(dict.fromkeys([*changed, *(slot for slot, left in self._final.items() if left)]))
        self.is_whole = any(not placeholders_in(slot.get()) for slot in changed)

    def decide(self, events: list[Event], last: int) -> list[Event]:
        """The events, with what travels. Raises PipelineError for what would have to travel back in time."""
        if self._again is not None:
            events = [_without_counts(*pair) for pair in zip(events, self._again.events)]
        writers, readers, alone, python = (defaultdict(set) for _ in range(4))
        for recorder in (self._first, self._again):
            if recorder is None:
                continue
            inside = {i for event in recorder.events for i in _accesses_of(event)}
            again = {i for event in recorder.events if event.again for i in _accesses_of(event)}
            for i, (slot, kind, stage) in enumerate(recorder.seen.accesses):
                if kind == "w" and i in again:
                    raise _written_again(slot)
                if kind == "w":
                    (writers if i in inside else alone)[slot].add(stage)
                elif i in inside:
                    readers[slot].add(stage)
                elif kind == "p":
                    python[slot].add(stage)
        for slot, left in self._final.items():
            writers[slot] |= {self._first.born[tensor.key] for tensor in left}
            writers[slot] |= {self._first.written[tensor.key] for tensor in left if tensor.key in self._first.written}
        tracked = [*self.slots, *alone]
        self.is_whole |= any(not writers[slot] for slot in alone)
        travelling: dict[Slot, set[int]] = {}
        for slot in [slot for slot, stages in writers.items() if stages]:
            reach = self._reach(slot, writers[slot], readers[slot], python[slot], last)
            if reach or slot.is_buffer and readers[slot] and slot not in self._final:
                tracked.append(slot)  # a microbatch's backward holds the buffer that the next one writes
            if reach:
                travelling[slot] = reach
                for tensor in self._final.get(slot, ()):
                    self._first.used.setdefault(tensor.key, set()).update(reach)
        self.slots = tuple(dict.fromkeys(tracked))
        return [self._with_writes(event, travelling) for event in events]

    def _reach(self, slot: Slot, writers: set[int], readers: set[int], python: set[int], last: int) -> set[int]:
        """The later stages that need what stages leave in a slot."""
        kind = "buffer" if slot.is_buffer else "attribute"
        operands = [f"written  in stage {', '.join(map(str, sorted(writers)))}"]
        remedies = [("a cut elsewhere", f"with all that uses {slot.name!r} in one stage")]
        if not (slot.is_buffer or readers or python):
            return set()  # the next microbatch begins it anew
        if len(writers) > 1:
            raise PipelineError(
                "pipeline",
                f"the {kind} {slot.name!r} is written in stages {' and '.join(map(str, sorted(writers)))}: for the "
                "next microbatch the earlier stage would need what the later one is yet to compute",
                operands,
                remedies,
            )
        (writer,) = writers
        early = sorted(stage for stage in readers if stage < writer)
        if early or python:
            what = f"read in stage {early[0]}" if early else "read by Python, between modules, on every stage"
            raise PipelineError(
                "pipeline",
                f"the {kind} {slot.name!r} is written in stage {writer}, and {what}, which would need it before the "
                "next microbatch",
                operands,
                remedies,
            )
        reach = {stage for stage in readers if stage > writer}
        if slot.is_buffer and self._buffers.get(slot.name, (writer,)) != (writer,):
            self.synced += (slot,)
            reach.add(last)
        return reach

    def _with_writes(self, event: Event, travelling: dict[Slot, set[int]]) -> Event:
        accesses = self._first.seen.accesses[event.span.began.accesses : event.span.ended.accesses]
        written = dict.fromkeys(access.slot for access in accesses if access.kind == "w" and access.slot in travelling)
        if not written:
            return event
        return replace(event, writes=tuple((at, self._first.new_key(event.stage, {*travelling[at]})) for at in written))
