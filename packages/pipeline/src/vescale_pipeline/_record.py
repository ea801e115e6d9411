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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ._containers import map_tensors, tensors_in
from ._errors import PipelineError
from ._placeholder import (
    FACTORIES,
    Placeholder,
    current,
    local_only,
    make,
    name_of,
    placeholder,
    read_error,
    weight_placeholder,
)
from ._reduction import LABELLED


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


@dataclass(frozen=True)
class Event:
    """A unit's call (`module`) or a function between units, with what comes out: placeholders in `template`."""

    stage: int
    name: str
    module: nn.Module | None
    function: Callable | None
    template: Any
    keys: tuple[int, ...]
    draws: tuple[Draw, ...]


@dataclass(frozen=True)
class Record:
    """What a dry run found.

    Arguments:
        events: in order; their stages never decrease.
        result: what the forward returned, placeholders in place of tensors.
        crossing: per cut, the keys of the values that are computed before and used after it, ascending.
        uses: parameter name -> the stages that use it.
        draws_anything: whether any event draws random numbers.
    """

    events: tuple[Event, ...]
    result: Any
    crossing: tuple[tuple[int, ...], ...]
    uses: dict[str, tuple[int, ...]]
    draws_anything: bool = field(default=False)


def dry_run(
    model: nn.Module,
    cuts: Sequence[str],
    call: Callable[[], Any],
    stations: dict[nn.Module, Any],
    notes: AbstractContextManager | None = None,
) -> Record:
    """Runs `call()`, which calls `model`, on placeholders.

    Arguments:
        cuts: names of the modules that begin stages 1, 2, ...
        stations: per module, what stands before its call and asks the reader (`_skeleton.Station`).
        notes: a context for the run (`_reduction.Notes`).

    The generator and the buffers are as they were, afterwards. Raises PipelineError
    for a forward that reads a value, for cuts that are called in another order, and for a stage without a module.
    """
    recorder = Recorder(model, cuts)
    with kept_as_it_was(model), stations_in_place(stations), recorder, notes or nullcontext():
        result = recorder.adopt(call(), "the model")
    return recorder.record(result)


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


@contextmanager
def kept_as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers and the generator are afterwards as they were before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer.shape == before.shape and not torch.equal(buffer, before):
                    buffer.copy_(before)


class Recorder:
    """The reader of a dry run."""

    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        self._cuts = list(cuts)
        self._begins = {name: index + 1 for index, name in enumerate(cuts)}
        self._weights: dict[int, Placeholder] = {}
        for name, parameter in model.named_parameters():
            self._weights[id(parameter)] = weight_placeholder(parameter, name)
        self._stage = 0
        self._frames: list[list[Event]] = [[]]
        self._path: list[str] = [""]
        self._draws: list[Draw] = []
        self._keys = 0
        self._born: dict[int, int] = {}
        self._used: dict[int, set[int]] = {}
        self._weight_uses: dict[str, set[int]] = {}
        self._modes = (_Weights(self), _Draws(self))

    def __enter__(self) -> Recorder:
        self._before, current.reader = current.reader, self
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        current.reader = self._before

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
        stage, drawn = self._stage, len(self._draws)
        self._frames.append([])
        self._path.append(name)
        out = station.module.forward(*args, **kwargs)  # without hooks: they may look at values
        self._path.pop()
        inner = self._frames.pop()
        outputs = tensors_in(out)
        counted = any(event.function in LABELLED for event in inner)
        if name and not counted and self._stage == stage and any(type(tensor) is Placeholder for tensor in outputs):
            out = self.adopt(out, name)
            self._frames[-1].append(self._event(station.module, None, out, name, drawn))
        else:
            self._frames[-1].extend(inner)
        return out

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A function on placeholders: its shapes, computed on meta."""
        if function in FACTORIES:
            return make(function, args, kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is Placeholder]
        for tensor in given:
            self._note_use(tensor)
        drawn = len(self._draws)
        is_weight = all(tensor.is_weight for tensor in given)
        home = _home(args, kwargs) or given[0].home
        result = self._on_meta(function, args, kwargs)
        origin = self._path[-1] if self._path[-1] and not is_weight else given[0].origin
        found = False

        def wrap(tensor: Tensor) -> Tensor:
            nonlocal found
            found = True
            return tensor if type(tensor) is Placeholder else self._new(tensor, origin, home, is_weight)

        result = map_tensors(result, wrap)
        if found and not is_weight:
            self._frames[-1].append(self._event(None, function, result, name_of(function), drawn))
        return result

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
        self._born[self._keys] = self._stage
        return placeholder(meta, self._keys, origin, home, is_weight)

    def _event(self, module: nn.Module | None, function: Callable | None, out: Any, name: str, drawn: int) -> Event:
        keys = tuple(tensor.key for tensor in tensors_in(out) if type(tensor) is Placeholder)
        return Event(self._stage, name, module, function, out, keys, tuple(self._draws[drawn:]))

    def _on_meta(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        args, kwargs = map_tensors((_without_device(args), _without_device(kwargs)), _meta)
        try:
            with local_only():
                return function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                raise read_error(function, args, self._path[-1] or "the model") from error
            raise

    def _note_use(self, tensor: Placeholder) -> None:
        if tensor.is_weight:
            if tensor.key == -1:
                self._weight_uses.setdefault(tensor.origin, set()).add(self._stage)
        elif self._born[tensor.key] != self._stage:
            self._used.setdefault(tensor.key, set()).add(self._stage)

    def _wrong_order(self, name: str, expected: str) -> None:
        raise PipelineError(
            "pipeline",
            f"the cut {name!r} was reached before the cut {expected!r}",
            [f"cuts  {', '.join(self._cuts)}"],
            [("order the cuts as the model calls their modules", "")],
        )

    def record(self, result: Any) -> Record:
        """What was found, once the forward has returned."""
        if self._stage < len(self._cuts):
            raise PipelineError(
                "pipeline",
                f"the cut {self._cuts[self._stage]!r} was never reached: the model does not call this module",
                [f"cuts  {', '.join(self._cuts)}"],
                [("name a module whose forward runs", "a list of modules has none")],
            )
        events = tuple(self._frames[0])
        stages = len(self._cuts) + 1
        made = {key: event.stage for event in reversed(events) for key in event.keys}
        crossing = []
        for cut in range(1, stages):
            keys = [key for key, uses in self._used.items() if key in made and made[key] < cut and max(uses) >= cut]
            crossing.append(tuple(sorted(keys)))
        uses = {name: tuple(sorted(stages)) for name, stages in self._weight_uses.items()}
        return Record(events, result, tuple(crossing), uses, any(event.draws for event in events))


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


class _Draws(TorchDispatchMode):
    """Notes the random operators."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        super().__init__()

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = _STAND_INS.get(function, function)(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags:
            recorder = self._recorder

            def kept(tensor: Tensor) -> Placeholder:
                home = torch.device("cpu") if tensor.is_meta else tensor.device
                return placeholder(_meta(tensor, fresh=True), 0, "", home)

            args, kwargs = map_tensors((args, kwargs), kept)
            recorder._draws.append(Draw(function, args, kwargs))
        return out


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype=None):
    """torch's own takes bfloat16 alone on meta, whatever the kernels take."""
    if left.is_meta and left.ndim == 2 and right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2], dtype=out_dtype)
    return torch.ops.aten._grouped_mm.default(left, right, offs, bias, out_dtype)


_STAND_INS = {torch.ops.aten._grouped_mm.default: _grouped_mm} if hasattr(torch.ops.aten, "_grouped_mm") else {}


def _meta(tensor: Tensor, fresh: bool = False) -> Tensor:
    """A meta tensor like it; of a distributed one, like the whole."""
    if tensor.device.type == "meta" and not fresh or type(tensor) is Placeholder and not fresh:
        return tensor
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _without_device(given: Any) -> Any:
    """Arguments with devices replaced by meta."""
    if isinstance(given, dict):
        return {
            name: "meta" if value is not None and (name == "device" or isinstance(value, torch.device)) else value
            for name, value in given.items()
        }
    return tuple(torch.device("meta") if _is_device(value) else value for value in given)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda")


def _home(args: tuple, kwargs: dict) -> torch.device | None:
    named = [value for value in (*args, kwargs.get("device")) if value is not None and _is_device(value)]
    return torch.device(named[0]) if named else None
