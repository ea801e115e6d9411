"""One stage's run of the user's own forward, the other stages' modules replaced by placeholders.

The forward is run whole and unchanged. A dry run (`_record`) has told which events
it will meet; here they are met one by one:

    an event of an earlier stage   answers with its placeholders; nothing is computed
    an event of this stage         is computed: placeholders among its inputs become the
                                   tensors that arrived, or that this stage made before
    an event of a later stage      leaves the forward, by an exception of ours

User code between units sees placeholders on every stage, its own included: so that
the same functions are counted everywhere, and a value has the same key on all ranks.
Inside a unit everything is real, and nothing of this stands in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._containers import copied, map_tensors, tensors_in
from ._errors import PipelineError
from ._placeholder import FACTORIES, Placeholder, current, local_only, make, name_of, placeholder
from ._record import Event, Record


class Leave(Exception):
    """Nothing that the stage owns remains to be called. (An Exception, so that torch calls the modules' always-called
    hooks.)"""


class Station:
    """Stands before a module's call, hooks included, and asks the reader of the moment."""

    __slots__ = ("module", "name", "original")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.original = type(module)._call_impl.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reader = current.reader
        return self.original(*args, **kwargs) if reader is None else reader.enter(self, args, kwargs)


class Run:
    """The reader of one stage's forward of one microbatch.

    Arguments:
        values: key -> the real tensor that arrived for it.
    """

    __slots__ = ("_events", "_stage", "_at", "values", "_replays", "_before")

    def __init__(self, record: Record, stage: int, values: dict[int, Tensor]) -> None:
        self._events = record.events
        self._stage = stage
        self._at = 0
        self.values = values
        self._replays = record.draws_anything

    def __call__(self, forward: Callable[[], Any]) -> Any:
        """The forward's output; None where it was left early. Then the generator is past this microbatch."""
        before, current.reader = current.reader, self
        try:
            return forward()
        except Leave:
            if self._replays:
                current.reader = None
                for event in self._events[self._at :]:
                    self._replay(event)
            return None
        finally:
            current.reader = before

    def reveal(self, output: Any) -> Any:
        """An output with real tensors in place of this stage's placeholders."""
        return map_tensors(output, self._real)

    # --- as a reader ----------------------------------------------------------------

    def enter(self, station: Station, args: tuple, kwargs: dict) -> Any:
        events, at = self._events, self._at
        if at >= len(events) or (event := events[at]).module is not station.module:
            return station.original(*args, **kwargs)  # it spans stages: its own code runs
        if event.stage != self._stage:
            return self._elsewhere(event)
        self._at = at + 1
        current.reader = None
        try:
            if len(args) == 1 and not kwargs and type(only := args[0]) is Placeholder:
                out = station.original(self.values.get(only.key, only))
            else:
                args, kwargs = map_tensors((args, kwargs), self._real)
                out = station.original(*args, **kwargs)
        finally:
            current.reader = self
        template = event.template
        if type(template) is Placeholder and isinstance(out, Tensor):
            self.values[event.keys[0]] = out
            return template
        return self._keep(event, out)

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if function in FACTORIES:
            return make(function, args, kwargs)
        event = self._events[self._at] if self._at < len(self._events) else None
        if event is None or event.function is not function and event.function != function:
            return self._unforeseen(function, args, kwargs, event)
        if not _holds_value(args) and not _holds_value(kwargs):
            return self._unforeseen(function, args, kwargs, event)
        if event.stage != self._stage:
            return self._elsewhere(event)
        self._at += 1
        current.reader = None
        try:
            args, kwargs = map_tensors((args, kwargs), self._real)
            out = function(*args, **kwargs)
        finally:
            current.reader = self
        return self._keep(event, out)

    # --- internal -------------------------------------------------------------------

    def _elsewhere(self, event: Event) -> Any:
        if event.stage > self._stage:
            raise Leave
        self._at += 1
        if self._replays:
            self._replay(event)
        template = event.template
        return template if type(template) is Placeholder else copied(template)

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
        return self.values.get(tensor.key, tensor)

    def _replay(self, event: Event) -> None:
        with torch.no_grad():
            for draw in event.draws:
                draw.replay()

    def _unforeseen(self, function: Callable, args: tuple, kwargs: dict, event: Event | None) -> Any:
        """A function that makes no value: a read of metadata, or of a weight that stands elsewhere."""
        given = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is Placeholder]
        if not all(tensor.is_weight for tensor in given):
            raise _another_path(event, f"{name_of(function)} was called on a value of {given[0].origin!r}")
        with local_only():
            out = function(*args, **kwargs)
        origin, home = given[0].origin, given[0].home
        return map_tensors(out, lambda t: t if type(t) is Placeholder else placeholder(t, -2, origin, home, True))


def _holds_value(given: tuple | dict) -> bool:
    """Whether any of the arguments is the placeholder of a value, not only of weights."""
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
        f"the forward took another way than in its dry run: {what} where {expected} was expected",
        (),
        [("let nothing but the shapes of its inputs decide which modules a forward calls", "")],
    )
