"""The dry run: one forward on placeholders, which tells what every stage will meet.

It runs the user's forward once per signature of its inputs, on every rank alike and
without data, and notes as *events*, in order, what stands above the stages' own
modules: the calls of maximal modules that lie within one stage (units), and the
functions between them. An event knows its stage, its outputs, and the random numbers
it draws. From the uses of each value follows what crosses each cut: several tensors,
skip connections, an encoder's output that every decoder block reads.

A stage boundary is where a module named by a cut is called; what comes before the
next such call belongs to the stage, glue between modules included. A module whose
outputs depend on no parameter and no unit (a rotary table, a mask) is no unit: all
stages run it for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._errors import PipelineError
from .._runtime.generators import device_of
from .containers import copied, map_tensors, tensors_in
from .devices import home_of, on_meta
from .foreign import check_caller, who_calls
from .left import Left, forget_values
from .memory import Kept, Slot, kept_as_it_was, no_draws_of_python
from .placeholder import (
    FACTORIES,
    Placeholder,
    base_of,
    become,
    current,
    local_only,
    make,
    memory_of,
    name_of,
    placeholder,
    read_error,
    stand_in_of,
    version_of,
    weight_placeholder,
)
from .reduction import LABELLED
from .seen import Draw, Place, Seen, Span


@dataclass(frozen=True)
class Event:
    """A unit's call (`module`) or a function between units, with what comes out: placeholders in `template`.

    Arguments:
        after: what user code draws between this event and the next one: on every stage that comes there.
        attributes: what a unit leaves in modules: (slot, template).
        writes: buffers that other stages need, written here: (slot, key of the value).
        fills: the key of the plain tensor that a function fills with values of the stage.
        inside: the autograd Function that called it, by name; None for none.
        again: whether backward computes it again, in a checkpoint of the model's own code.
    """

    stage: int
    name: str
    module: nn.Module | None
    function: Callable | None
    template: Any
    keys: tuple[int, ...]
    draws: tuple[Draw, ...]
    after: tuple[Draw, ...] = ()
    attributes: tuple[tuple[Slot, Any], ...] = ()
    writes: tuple[tuple[Slot, int], ...] = ()
    fills: int | None = None
    inside: str | None = None
    again: bool = False
    span: Span | None = None


@dataclass(frozen=True)
class Record:
    """What a dry run found.

    Arguments:
        events: in order; their stages never decrease.
        result: what the forward returned, placeholders in place of tensors.
        crossing: per cut, the keys of the values that are computed before and used after it, ascending.
        uses: parameter name -> the stages that use it.
        draws_anything: whether anything draws random numbers.
        slots: what a microbatch leaves for the next.
        synced: buffers that several ranks keep: the last stage has them as one device does.
        is_whole: whether every stage must run the user's code to its end, for what that leaves behind.
        written: keys of values that are written in place.
        checkpoints: whether user code computes again in backward.
    """

    events: tuple[Event, ...]
    result: Any
    crossing: tuple[tuple[int, ...], ...]
    uses: dict[str, tuple[int, ...]]
    draws_anything: bool = field(default=False)
    slots: tuple[Slot, ...] = ()
    synced: tuple[Slot, ...] = ()
    is_whole: bool = False
    written: frozenset[int] = frozenset()
    checkpoints: bool = False


def dry_run(
    model: nn.Module,
    cuts: Sequence[str],
    call: Callable[[], Any],
    stations: dict[nn.Module, Any],
    notes: AbstractContextManager | None = None,
    buffers: Mapping[str, tuple[int, ...]] | None = None,
) -> Record:
    """Runs `call()`, which calls `model`, on placeholders; twice, where it leaves anything behind for its next call.

    Arguments:
        cuts: names of the modules that begin stages 1, 2, ...
        stations: per module, what stands before its call and asks the reader (`_skeleton.Station`).
        notes: a context for the run (`_reduction.Notes`).
        buffers: the stages that keep each buffer.

    The generators, the buffers and the attributes are as they were, afterwards. Raises PipelineError
    for a forward that reads a value, for cuts that are called in another order, for a stage without a module, and for
    what one microbatch leaves in a later stage for the next one's earlier stage.
    """
    with kept_as_it_was(model) as kept, stations_in_place(stations):
        recorder = Recorder(model, cuts, kept)
        with no_draws_of_python(), recorder, notes or nullcontext():
            result = recorder.adopt(call(), "the model")
        changed = kept.changed()
        left = Left(changed, recorder, buffers or {})
        if changed or any(access.kind == "w" for access in recorder.seen.accesses):
            made = forget_values(changed)
            between = Kept(model)
            again = Recorder(model, cuts, between, made)
            with again:
                call()
            left.compare(again, between)
        return recorder.record(result, left)


@contextmanager
def stations_in_place(stations: dict[nn.Module, Any]) -> Iterator[None]:
    """Every module's call goes through its station, for the time of the block."""
    kept = {module: module.__dict__.get("_call_impl") for module in stations}
    for module, station in stations.items():
        module.__dict__["_call_impl"] = station
    try:
        yield
    finally:
        for module, before in kept.items():
            if before is None:
                del module.__dict__["_call_impl"]
            else:
                module.__dict__["_call_impl"] = before


class Recorder:
    """The reader of a dry run.

    Arguments:
        kept: the model as it was.
        memory: plain tensors that stand for what an earlier pass left behind -> its slots.
    """

    def __init__(
        self, model: nn.Module, cuts: Sequence[str], kept: Kept, memory: Sequence[tuple[Tensor, Slot]] = ()
    ) -> None:
        self._cuts = list(cuts)
        self._begins = {name: index + 1 for index, name in enumerate(cuts)}
        self._weights: dict[int, Placeholder] = {}
        for name, parameter in model.named_parameters():
            self._weights[id(parameter)] = weight_placeholder(parameter, name)
        self._stage = 0
        self._frames: list[list[Event]] = [[]]
        self._path: list[str] = [""]
        self._keys = 0
        self.born: dict[int, int] = {}
        self.used: dict[int, set[int]] = {}
        self._weight_uses: dict[str, set[int]] = {}
        self._kept = kept
        self._left: dict[tuple[int, str], Any] = {}
        self.written: dict[int, int] = {}  # key of a value -> the stage that writes it in place
        self._checkpoints = False
        self._memory_of: dict[int, int] = {}
        self.seen = Seen(model, memory, lambda: self._stage, device_of(model))
        self._modes = (_Weights(self), self.seen)

    def __enter__(self) -> Recorder:
        self._before, current.reader = current.reader, self
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        current.reader = self._before

    @property
    def events(self) -> list[Event]:
        return self._frames[0]

    # --- as a reader ----------------------------------------------------------------

    def enter(self, station: Any, args: tuple, kwargs: dict) -> Any:
        """A module's call: its events become one, if it lies within one stage and computes something.

        Not those of a module that takes a mean over labels: the labels are counted where the function is met.
        """
        name = station.name
        begins = self._begins.get(name, 0)
        if begins > self._stage:
            if begins > self._stage + 1:
                self._wrong_order(name, self._cuts[self._stage])
            self._stage = begins
        stage, began = self._stage, self.seen.place()
        self._frames.append([])
        self._path.append(name)
        out = station.module.forward(*args, **kwargs)  # without hooks: they may look at values
        self._path.pop()
        inner = self._frames.pop()
        outputs = tensors_in(out)
        counted = any(event.function in LABELLED for event in inner)
        if name and not counted and self._stage == stage and any(type(tensor) is Placeholder for tensor in outputs):
            out = self.adopt(out, name)
            event = self._event(station.module, None, out, name, began)
            self._frames[-1].append(replace(event, attributes=self._attributes(station.module, name)))
        else:
            self._frames[-1].extend(inner)
        return out

    def _attributes(self, unit: nn.Module, name: str) -> tuple[tuple[Slot, Any], ...]:
        """What a unit left in its modules, or in a list or dict of any module, as placeholders."""
        found = []
        for slot in (*self._kept.changed(unit), *self._kept.containers_changed()):
            place, value = (id(slot.module), slot.leaf), slot.get()
            ids = [id(tensor) for tensor in tensors_in(value)]
            if ids and self._left.get(place) != ids:
                template = self.adopt(value, name)
                slot.put(template)
                self._left[place] = [id(tensor) for tensor in tensors_in(template)]
                if any(type(tensor) is Placeholder for tensor in tensors_in(template)):
                    found.append((slot, copied(template)))
        return tuple(found)

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A function on placeholders: its shapes, computed on meta."""
        if function in FACTORIES:
            return make(function, args, kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is Placeholder]
        for tensor in given:
            self._note_use(tensor)
        began = self.seen.place()
        is_weight = all(tensor.is_weight for tensor in given)
        named = home_of(function, args, kwargs)
        home = named or given[0].home
        result, written = self._on_meta(function, args, kwargs)
        origin = self._path[-1] if self._path[-1] and not is_weight else given[0].origin
        found = False

        def wrap(tensor: Tensor) -> Tensor:
            nonlocal found
            found = True
            if type(tensor) is not Placeholder:
                return self._new(tensor, origin, home, is_weight)
            if named is None or tensor.home == home:
                return tensor
            return self._new(_meta(tensor, fresh=True), origin, home, is_weight)  # all of meta is one device

        fills = self._fill(written, origin, home) if not is_weight else None
        if fills is not None and isinstance(result, Tensor) and id(result) in (id(meta) for _, meta in written):
            result = fills
        result = map_tensors(result, wrap)
        writes = any(type(tensor) is Placeholder and not tensor.is_weight for tensor, _ in written)
        if (found or fills is not None or writes) and not is_weight:
            event = self._event(None, function, result, name_of(function), began)
            self._frames[-1].append(replace(event, fills=None if fills is None else fills.key))
        return result

    def _fill(self, written: list[tuple[Tensor, Tensor]], origin: str, home: torch.device) -> Placeholder | None:
        """Notes values that are written in place; a plain tensor that is filled with values becomes a placeholder."""
        filled = None
        for tensor, _ in written:
            if type(tensor) is Placeholder:
                if not tensor.is_weight:
                    self.written[tensor.key] = self._stage
            elif not self.seen.wrote(tensor):
                base = base_of(tensor)
                with local_only():
                    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
                made = self._new(like, origin, home, False)
                become(base, made)
                filled = base
        return filled

    def adopt(self, value: Any, origin: str) -> Any:
        """What leaves a unit: real tensors and placeholders of weights become placeholders of values."""

        def adopted(tensor: Tensor) -> Tensor:
            if type(tensor) is Placeholder and not tensor.is_weight:
                return tensor
            return self._new(_meta(tensor), origin, tensor.device, False)

        return map_tensors(value, adopted)

    # --- internal -------------------------------------------------------------------

    def _new(self, meta: Tensor, origin: str, home: torch.device, is_weight: bool) -> Placeholder:
        self._keys += 1
        self.born[self._keys] = self._stage
        self._memory_of[self._keys] = memory_of(meta)
        return placeholder(meta, self._keys, origin, home, is_weight)

    def _event(self, module: nn.Module | None, function: Callable | None, out: Any, name: str, began: Place) -> Event:
        keys = tuple(tensor.key for tensor in tensors_in(out) if type(tensor) is Placeholder)
        ended = self.seen.place()
        inside, again = who_calls()
        self._checkpoints |= again
        draws = tuple(self.seen.draws[began.draws : ended.draws])
        span = Span(began, ended)
        return Event(self._stage, name, module, function, out, keys, draws, inside=inside, again=again, span=span)

    def _on_meta(self, function: Callable, args: tuple, kwargs: dict) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
        """The result, and the tensors that were written in place, each with its stand-in."""
        pairs: dict[int, tuple[Tensor, Tensor, int]] = {}

        def stand_in(tensor: Tensor) -> Tensor:
            if id(tensor) not in pairs:
                meta = _meta(tensor)
                pairs[id(tensor)] = tensor, meta, version_of(meta)
            return pairs[id(tensor)][1]

        call, args, kwargs = on_meta(function, args, kwargs)
        args, kwargs = map_tensors((args, kwargs), stand_in)
        try:
            with local_only():
                out = call(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                raise read_error(function, args, self._path[-1] or "the model") from error
            raise
        written = []
        for tensor, meta, version in pairs.values():
            changed = version_of(meta) != version
            if changed:
                written.append((tensor, meta))
            if type(tensor) is not Placeholder:
                self.seen.note(tensor, "w" if changed else "r")
        return out, written

    def _note_use(self, tensor: Placeholder) -> None:
        if tensor.is_weight:
            if tensor.key == -1:
                self._weight_uses.setdefault(tensor.origin, set()).add(self._stage)
        elif self.born.setdefault(tensor.key, self._stage) != self._stage:
            self.used.setdefault(tensor.key, set()).add(self._stage)

    def _wrong_order(self, name: str, expected: str) -> None:
        raise PipelineError(
            "pipeline",
            f"the cut {name!r} was reached before the cut {expected!r}",
            [f"cuts  {', '.join(self._cuts)}"],
            [("order the cuts as the model calls their modules", "")],
        )

    def record(self, result: Any, left: Left) -> Record:
        """What was found, once the forward has returned."""
        if self._stage < len(self._cuts):
            raise PipelineError(
                "pipeline",
                f"the cut {self._cuts[self._stage]!r} was never reached: the model does not call this module",
                [f"cuts  {', '.join(self._cuts)}"],
                [("name a module whose forward runs", "a list of modules has none")],
            )
        events = self.events
        for event in events:
            check_caller(event)
        events = left.decide(events, len(self._cuts))
        starts = [event.span.began.draws for event in events[1:]] + [len(self.seen.draws)]
        events = tuple(
            replace(event, after=tuple(self.seen.draws[event.span.ended.draws : start]))
            for event, start in zip(events, starts)
        )
        stages = len(self._cuts) + 1
        made = {key: event.stage for event in reversed(events) for key in _keys_of(event)}
        crossing = []
        for cut in range(1, stages):
            keys = [key for key, uses in self.used.items() if key in made and made[key] < cut and max(uses) >= cut]
            crossing.append(tuple(sorted(keys)))
        self._check_views(crossing)
        uses = {name: tuple(sorted(stages)) for name, stages in self._weight_uses.items()}
        return Record(
            events,
            result,
            tuple(crossing),
            uses,
            bool(self.seen.draws),
            left.slots,
            left.synced,
            left.is_whole,
            frozenset(self.written),
            self._checkpoints,
        )

    def new_key(self, stage: int, uses: set[int]) -> int:
        """For a value that is no output of an event."""
        self._keys += 1
        self.born[self._keys], self.used[self._keys] = stage, uses
        return self._keys

    def _check_views(self, crossing: list[tuple[int, ...]]) -> None:
        """Two views of one memory are two values once they have crossed a cut: a write to one would miss the other."""
        for key, stage in self.written.items():
            memory = self._memory_of.get(key)
            for cut, keys in enumerate(crossing, 1):
                others = [other for other in keys if other != key and self._memory_of.get(other) == memory]
                if cut <= stage and key in keys and others:
                    raise PipelineError(
                        "pipeline",
                        f"stage {stage} writes in place to a value that crosses the cut before stage {cut}, and "
                        "another view of the same memory crosses it, too: they are two values there",
                        (),
                        [("x = x + y", "in place of x += y"), ("x.clone()", "before one of the two is written")],
                    )


def _keys_of(event: Event) -> Iterator[int]:
    yield from event.keys
    if event.fills is not None:
        yield event.fills
    for _, template in event.attributes:
        yield from (tensor.key for tensor in tensors_in(template) if type(tensor) is Placeholder)
    yield from (key for _, key in event.writes)


class _Weights(TorchFunctionMode):
    """Puts placeholders in place of the model's parameters: nothing is computed with their values."""

    def __init__(self, recorder: Recorder) -> None:
        self._weights = recorder._weights
        super().__init__()

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(function, "__name__", "") == "__set__":  # a hook's own handling of a parameter, such as `.data = `
            return function(*args, **(kwargs or {}))
        args, kwargs = map_tensors((args, kwargs or {}), lambda tensor: self._weights.get(id(tensor), tensor))
        return function(*args, **kwargs)


def _meta(tensor: Tensor, fresh: bool = False) -> Tensor:
    """A meta tensor like it; of a distributed one, like the whole."""
    if tensor.device.type == "meta" and not fresh or type(tensor) is Placeholder and not fresh:
        return stand_in_of(tensor)
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
