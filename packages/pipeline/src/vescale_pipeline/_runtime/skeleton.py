"""One stage's run of the user's own forward, the other stages' modules replaced by placeholders.

The forward is run whole and unchanged. A dry run (`_trace/dry_run.py`) has told which events
it will meet; here they are met one by one:

    an event of an earlier stage   answers with its placeholders; nothing is computed
    an event of this stage         is computed: placeholders among its inputs become the
                                   tensors that arrived, or that this stage made before
    an event of a later stage      leaves the forward, by an exception of ours

User code between units sees placeholders on every stage, its own included: so that
the same functions are counted everywhere, and a value has the same key on all ranks.
Inside a unit everything is real, and nothing of this stands in the way: what units of
this stage left in attributes is real while one of them runs.

Where user code computes again in backward (a checkpoint around modules), it still holds
placeholders: the values behind those that it was called with are kept, and come in
their place (`recomputing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_trace.effects import Slot
from vescale_trace.values import copied, map_tensors, tensors_in

from .._errors import PipelineError
from .._trace.captures import tell, untold
from .._trace.event import Event, Record
from .._trace.foreign import REENTRANT
from .._trace.meta_calls import COUNTS, more_counts
from .._trace.placeholder import (
    FACTORIES,
    Placeholder,
    base_of,
    become,
    current,
    local_only,
    make,
    name_of,
    no_handle,
    placeholder,
    stand_in_of,
)


class Leave(Exception):
    """Raised when nothing that the stage owns remains to be called. (An Exception, so that torch calls the modules'
    always-called hooks.)"""


class Station:
    """Stands before a module's call, hooks included, and asks the reader of the moment."""

    __slots__ = ("module", "name", "original")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        before = module.__dict__.get("_call_impl")
        self.original = before.original if isinstance(before, Station) else before
        if self.original is None:
            self.original = type(module)._call_impl.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reader = current.reader
        if reader is not None:
            return reader.enter(self, args, kwargs)
        if current.again is not None:
            args, kwargs = map_tensors((args, kwargs), current.again)
        return self.original(*args, **kwargs)


class Run:
    """The reader of one stage's forward of one microbatch.

    Arguments:
        values: key -> the real tensor that arrived for it.
        lift: makes a plain tensor that is filled with other tensors one of their kind.
    """

    __slots__ = (
        "_at", "_began", "_crossing", "_events", "_grad", "_is_whole", "_left", "_lift", "_open", "_replays", "_stage",
        "kept", "values",
    )  # fmt: skip

    def __init__(
        self,
        record: Record,
        stage: int,
        values: dict[int, Tensor],
        lift: Callable[[Tensor, list[Tensor]], Tensor] = lambda tensor, others: tensor,
    ) -> None:
        self._lift = lift
        self._events, self._crossing, self._open = record.events, record.crossing, record.open
        self._stage = stage
        self._at = 0
        self.values = values
        self._replays, self._is_whole = record.draws_anything, record.is_whole
        self._left: dict[Slot, Any] = {}  # what user code sees of what units left
        self._began: dict[Slot, Any] = {}
        self.kept: dict[int, Tensor] | None = {} if record.checkpoints else None

    def __call__(self, forward: Callable[[], Any]) -> Any:
        """The forward's output; None if it was left early. Then the generator is past this microbatch."""
        before, current.reader = current.reader, self
        self._grad = torch.is_grad_enabled()
        try:
            return forward()
        except Leave:
            if self._replays:
                current.reader = None
                for event in self._events[self._at :]:
                    self._replay(event.draws)
                    self._replay(event.after)
            return None
        finally:
            current.reader = before
            if self._left:
                self._restore()

    def reveal(self, output: Any) -> Any:
        """An output with real tensors in place of this stage's placeholders."""
        return map_tensors(output, self._real)

    # --- as a reader ----------------------------------------------------------------

    def enter(self, station: Station, args: tuple, kwargs: dict, told: bool = False) -> Any:
        events, at = self._events, self._at
        if at >= len(events) or (event := events[at]).module is not station.module:
            if station.module not in self._open:
                raise _another_path(events[at] if at < len(events) else None, f"{station.name!r} was called")
            return station.original(*args, **kwargs)  # it spans stages: its own code runs
        if event.captures and not told:
            with untold(station.module):
                out = self.enter(station, args, kwargs, told=True)
            tell(station.module, args, out)
            return out
        if event.stage != self._stage:
            if event.stage < self._stage and event.is_plain:  # most modules
                self._at = at + 1
                return event.template
            return self._elsewhere(event)
        self._at = at + 1
        current.reader = None
        if event.is_plain and not self._left:  # most modules
            try:
                if len(args) == 1 and not kwargs and isinstance(only := args[0], Tensor):
                    out = station.original(self._real(only))
                else:
                    args, kwargs = map_tensors((args, kwargs), self._real)
                    out = station.original(*args, **kwargs)
            finally:
                current.reader = self
            if isinstance(out, Tensor):
                self.values[event.keys[0]] = out
                return event.template
            return self._keep(event, out)
        if self._left:
            self._show(real=True)
        try:
            args, kwargs = map_tensors((args, kwargs), self._real)
            if event.inside is None:
                out = station.original(*args, **kwargs)
            else:
                out = self._computed(event, station.original, args, kwargs)
        finally:
            current.reader = self
        if event.attributes:
            self._take_attributes(event)
        if self._left:
            self._show(real=False)
        if event.writes:
            self._take_writes(event)
        return self._keep(event, out)

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if function in FACTORIES:
            return make(function, args, kwargs)
        if function is Tensor.register_hook and not args[0].is_weight:
            return self._hook(*args, **kwargs)
        event = self._events[self._at] if self._at < len(self._events) else None
        if event is None or event.function is not function and event.function != function:
            return self._unforeseen(function, args, kwargs, event)
        if not _holds_value(args) and not _holds_value(kwargs):
            return self._unforeseen(function, args, kwargs, event)
        if event.stage != self._stage:
            return self._elsewhere(event, args)
        self._at += 1
        current.reader = None
        filled = None
        try:
            if event.fills is not None:
                args, kwargs, filled = self._filling(event, args, kwargs)
            args, kwargs = map_tensors((args, kwargs), self._real)
            out = self._computed(event, function, args, kwargs)
        finally:
            current.reader = self
        if function in COUNTS and out.shape != event.template.shape:
            raise more_counts(len(out), len(event.template))
        if event.writes:
            self._take_writes(event)
        if filled is not None:
            become(filled, _handle(event, filled))
            if tensors_in(event.template) and event.template.key == event.fills:
                return filled
        return self._keep(event, out)

    # --- internal -------------------------------------------------------------------

    def _elsewhere(self, event: Event, args: tuple = ()) -> Any:
        if event.stage > self._stage and not self._is_whole:
            raise Leave
        self._at += 1
        if self._replays:
            self._replay(event.draws)
        for slot, template in event.attributes:
            self._leave(slot, template)
        for slot, key in event.writes:
            if key in self.values:
                with torch.no_grad():
                    slot.get().copy_(self.values[key])
        if event.fills is not None:
            target = base_of(args[0])
            become(target, _handle(event, target))
            if tensors_in(event.template) and event.template.key == event.fills:
                return target
        template = event.template
        return template if type(template) is Placeholder else copied(template)

    def _hook(self, tensor: Placeholder, hook: Callable) -> Any:
        """Hooks the value on the stage that computes it: what arrived has the gradient of its uses from here on
        alone."""
        value = self.values.get(tensor.key)
        arrived = self._crossing[self._stage - 1] if self._stage else ()
        if value is None or tensor.key in arrived or not value.requires_grad:
            return no_handle()
        return value.register_hook(hook)

    def _computed(self, event: Event, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Computes the stage's own event."""
        reentrant = event.inside == REENTRANT and self._grad
        if reentrant and any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):  # else without gradients
            with torch.enable_grad():
                # The reentrant kind adds up the gradients of an input's uses inside first.
                args, kwargs = map_tensors((args, kwargs), lambda t: t.view_as(t) if t.requires_grad else t)
                return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return function(*args, **kwargs)

    def _filling(self, event: Event, args: tuple, kwargs: dict) -> tuple[tuple, dict, Tensor]:
        """The arguments of a function that fills a plain tensor, with a copy of that in its place; and that."""
        target = args[0]  # an in-place function writes to its first argument
        base = base_of(target)
        others = [self._real(tensor) for tensor in tensors_in((args, kwargs))]
        value = self.values[event.fills] = self._lift(base.clone(), others)
        view = value
        if target is not base:
            view = value.as_strided(target.shape, target.stride(), target.storage_offset())
        return *map_tensors((args, kwargs), lambda tensor: view if tensor is target else tensor), base

    def _take_attributes(self, event: Event) -> None:
        """Puts what a unit left in attributes aside."""
        for slot, template in event.attributes:
            made, keys = tensors_in(slot.get()), tensors_in(template)
            if len(made) != len(keys):
                raise _another_path(event, f"{slot.name!r} holds {len(made)} tensors, not {len(keys)}")
            for tensor, placed in zip(made, keys):
                if type(placed) is Placeholder:
                    # What the reentrant kind leaves beside its result has no gradient, on one device either.
                    self.values[placed.key] = tensor.detach() if event.inside == REENTRANT else tensor
            self._leave(slot, template)

    def _take_writes(self, event: Event) -> None:
        for slot, key in event.writes:
            self.values[key] = slot.get().detach().clone()

    def _leave(self, slot: Slot, template: Any) -> None:
        """User code finds a template in a slot."""
        self._began.setdefault(slot, copied(slot.get()) if slot not in self._left else None)
        self._left[slot] = template
        slot.put(copied(template))

    def _show(self, real: bool) -> None:
        """Shows units' attributes to a unit of this stage or to user code."""
        for slot, template in self._left.items():
            slot.put(map_tensors(copied(template), self._real) if real else copied(template))

    def _restore(self) -> None:
        """Keeps the attributes of units whose values this stage knows; restores the rest."""
        for slot, template in self._left.items():
            tensors = [tensor for tensor in tensors_in(template) if type(tensor) is Placeholder]
            if all(tensor.key in self.values for tensor in tensors):
                slot.put(map_tensors(copied(template), lambda tensor: self._real(tensor).detach()))
            else:
                slot.put(self._began[slot])

    def _keep(self, event: Event, out: Any) -> Any:
        """Puts the real outputs aside under their keys; the caller goes on with placeholders."""
        if type(event.template) is Placeholder and isinstance(out, Tensor):
            self.values[event.keys[0]] = out
            return event.template
        made = tensors_in(out)
        if len(made) != len(event.keys):
            raise _another_path(event, f"{event.name!r} returned {len(made)} tensors, not {len(event.keys)}")
        for key, tensor in zip(event.keys, made):
            self.values[key] = tensor
        following = iter(tensors_in(event.template))
        return map_tensors(out, lambda _: next(following))

    def _real(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Placeholder:
            return tensor
        value = self.values.get(tensor.key, tensor)
        if self.kept is not None and value is not tensor:
            self.kept[tensor.key] = value
        return value

    def _replay(self, draws: tuple) -> None:
        with torch.no_grad():
            for draw in draws:
                draw.replay()

    def _unforeseen(self, function: Callable, args: tuple, kwargs: dict, event: Event | None) -> Any:
        """A function that makes no value: a read of metadata, or of a weight that stands elsewhere."""
        given = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is Placeholder]
        if not all(tensor.is_weight for tensor in given):
            raise _another_path(event, f"{name_of(function)} was called on a value of {given[0].origin!r}")
        # What stands for a weight is on meta: so is what is computed of it and of others, which has its shape alone.
        args, kwargs = map_tensors((args, kwargs), stand_in_of)
        with local_only():
            out = function(*args, **kwargs)
        origin, home = given[0].origin, given[0].home
        return map_tensors(out, lambda t: t if type(t) is Placeholder else placeholder(t, -2, origin, home, True))


def _handle(event: Event, filled: Tensor) -> Placeholder:
    """Returns the handle that the filled tensor becomes."""
    return placeholder(torch.empty(0, device="meta"), event.fills, event.name, filled.device)


def recomputing(kept: dict[int, Tensor] | None, backward: Callable, *given: Any) -> Any:
    """Runs a backward. User code that computes again in it finds `kept` behind its placeholders."""
    if not kept:
        return backward(*given)

    def value(tensor: Tensor) -> Tensor:
        return kept.get(tensor.key, tensor) if type(tensor) is Placeholder else tensor

    before, current.again = current.again, value
    try:
        return backward(*given)
    finally:
        current.again = before


def _holds_value(given: tuple | dict) -> bool:
    """True if any of the arguments is the placeholder of a value, not only of weights."""
    for value in given.values() if type(given) is dict else given:
        if type(value) is Placeholder:
            if not value.is_weight:
                return True
        elif any(type(tensor) is Placeholder and not tensor.is_weight for tensor in tensors_in(value)):
            return True
    return False


def _another_path(event: Event | None, what: str) -> PipelineError:
    expected = "the end of the forward" if event is None else f"{event.name!r}"
    return PipelineError(
        "pipeline",
        f"the forward took a different path than in its dry run: {what} where {expected} was expected",
        (),
        [("let nothing but the shapes of its inputs decide which modules a forward calls", "")],
    )
