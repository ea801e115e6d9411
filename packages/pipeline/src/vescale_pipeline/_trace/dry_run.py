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
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._errors import PipelineError
from .event import Event, Record, keys_of
from .foreign import check_caller
from .left import Left, forget_values, placeholders_in
from .memory import kept, kept_as_it_was, no_draws_of_python
from .placeholder import Placeholder
from .record import Recorder
from .rows.notes import Notes


def dry_run(
    model: nn.Module,
    cuts: Sequence[str],
    call: Callable[[], Any],
    stations: dict[nn.Module, Any],
    notes: Notes | None = None,
    buffers: Mapping[str, tuple[int, ...]] | None = None,
    compute: torch.dtype | None = None,
) -> Record:
    """Runs `call()`, which calls `model`, on placeholders; twice, where it leaves anything behind for its next call.

    Arguments:
        cuts: names of the modules that begin stages 1, 2, ...
        stations: per module, what stands before its call and asks the reader (`skeleton.Station`).
        notes: what is to note the run's functions.
        buffers: the stages that keep each buffer.
        compute: the floating dtype that forwards see parameters in, where that is not theirs.

    The generators, the buffers and the attributes are as they were, afterwards. Raises PipelineError
    for a forward that reads a value, for cuts that are called in another order, for a stage without a module, and for
    what one microbatch leaves in a later stage for the next one's earlier stage.
    """
    with kept_as_it_was(model) as before, stations_in_place(stations):
        recorder = Recorder(model, cuts, before, compute=compute, notes=notes)
        with no_draws_of_python(), recorder, notes or nullcontext():
            try:
                given = call()
                computed, result = placeholders_in(given), recorder.adopt(given, "the model")
            except (IndexError, KeyError, AttributeError, TypeError) as error:
                if recorder.unheard:
                    raise _without_hooks(error, recorder.unheard) from error
                raise
        changed = before.changed()
        left = Left(changed, recorder, buffers or {})
        if changed or any(access.kind == "w" for access in recorder.seen.accesses):
            made = forget_values(changed)
            between = kept(model)
            again = Recorder(model, cuts, between, made, compute)
            with again:
                call()
            left.compare(again, between)
        return _record(recorder, result, computed, left)


def _without_hooks(error: Exception, unheard: list[str]) -> PipelineError:
    """Builds the error for code that fails without hooks that may have left what it reads."""
    return PipelineError(
        "pipeline",
        f"the forward raised {type(error).__name__}: {error}; hooks of {len(unheard)} modules, such as {unheard[0]!r},"
        " are called only on the stage that computes the module: what they leave behind is missing on the others",
        (),
        [
            ("return the value from the module's forward", "stages send each other what modules return"),
            ("output_hidden_states=False, a layer's own output in its place", "where a library collects by hooks"),
            ("generate_plan(model, pin={'pp': 1}, ...)", "tensor and data parallelism call every hook"),
        ],
    )


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


def _record(recorder: Recorder, result: Any, computed: list[Placeholder], left: Left) -> Record:
    """Builds the record, once the forward has returned."""
    cuts, draws = recorder.cuts, recorder.seen.draws
    if recorder.stage < len(cuts):
        raise PipelineError(
            "pipeline",
            f"the cut {cuts[recorder.stage]!r} was never reached: the model does not call this module",
            [f"cuts  {', '.join(cuts)}"],
            [("name a module whose forward runs", "a list of modules has none")],
        )
    events = recorder.events
    for event in events:
        check_caller(event)
    events = left.decide(events, len(cuts))
    starts = [event.span.began.draws for event in events[1:]] + [len(draws)]
    events = tuple(
        replace(event, after=tuple(draws[event.span.ended.draws : start])) for event, start in zip(events, starts)
    )
    stages = len(cuts) + 1
    made = {key: event.stage for event in reversed(events) for key in keys_of(event)}
    _check_ways(recorder, events, made, computed)
    crossing = []
    for cut in range(1, stages):
        keys = [key for key, uses in recorder.used.items() if key in made and made[key] < cut and max(uses) >= cut]
        crossing.append(tuple(sorted(keys)))
    _check_views(recorder, crossing)
    out = {tensor.key for tensor in computed} & made.keys()
    returned = {key: max((made[key], *recorder.used.get(key, ()))) for key in sorted(out)}
    uses = {name: tuple(sorted(stages)) for name, stages in recorder.weight_uses.items()}
    return Record(
        events,
        result,
        tuple(crossing),
        uses,
        bool(draws),
        left.slots,
        left.synced,
        left.is_whole,
        frozenset(recorder.written),
        bool(recorder.checkpoints),
        frozenset(recorder.open),
        {key: stage for key, stage in returned.items() if stage < stages - 1},
    )


def _check_ways(
    recorder: Recorder, events: Sequence[Event], made: Mapping[int, int], computed: list[Placeholder]
) -> None:
    """A value comes out of a unit as a result or through the model's state. By any other way (a global list, a closure)
    it is on the unit's own stage alone, where other units may take it and nothing between units can.
    """
    taken = [(event.name, event.stage if event.module is not None else None, event.takes) for event in events]
    returned = tuple(tensor.key for tensor in computed)
    for name, stage, keys in (*taken, ("the forward's result", None, returned)):
        for key in keys:
            if key not in made and recorder.born[key] != stage:
                raise PipelineError(
                    "pipeline",
                    f"{name} takes a value that {recorder.origins[key]!r} computes, and that left this module neither "
                    "as its result nor in the model: other stages do not get it",
                    [f"computed  in stage {recorder.born[key]}"],
                    [
                        ("return the value from the module's forward", "stages send each other what modules return"),
                        ("self.extra = value", "or a list or object that an attribute of a module holds"),
                    ],
                )


def _check_views(recorder: Recorder, crossing: list[tuple[int, ...]]) -> None:
    """Two views of one memory are two values once they have crossed a cut: a write to one would miss the other."""
    for key, stage in recorder.written.items():
        memory = recorder.memory_of.get(key)
        for cut, keys in enumerate(crossing, 1):
            others = [other for other in keys if other != key and recorder.memory_of.get(other) == memory]
            if cut <= stage and key in keys and others:
                raise PipelineError(
                    "pipeline",
                    f"stage {stage} writes in place to a value that crosses the cut before stage {cut}, and "
                    "another view of the same memory crosses it too, as a separate value",
                    (),
                    [("x = x + y", "in place of x += y"), ("x.clone()", "before one of the two is written")],
                )
