"""The reader of a dry run: it notes an event for what stands above the stages' own modules.

A module's call that lies within one stage is one event, a unit; so is a function between two of them. Shapes are
computed on meta, of placeholders, and no weight's value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_trace.effects import Kept, Slot
from vescale_trace.values import PLAIN, copied, map_tensors, tensors_in

from .._errors import PipelineError
from .._runtime.random_order import device_of
from .captures import captures, is_capture, tell
from .event import Event
from .foreign import who_calls
from .meta_calls import home_of, on_meta
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
    no_handle,
    placeholder,
    read_error,
    stand_in_of,
    version_of,
    weight_placeholder,
)
from .rows.notes import Notes
from .rows.scattered import SCATTERS, is_seen
from .rows.tags import LABELLED
from .seen import Place, Seen, Span


class Recorder:
    """The reader of a dry run.

    Arguments:
        kept: the model as it was.
        memory: plain tensors that stand for what an earlier pass left behind -> its slots.
        compute: the floating dtype that forwards see parameters in, where that is not theirs.
        notes: what notes the functions that are called.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[str],
        kept: Kept,
        memory: Sequence[tuple[Tensor, Slot]] = (),
        compute: torch.dtype | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._notes = notes
        self.cuts = list(cuts)
        self._begins = {name: index + 1 for index, name in enumerate(cuts)}
        self._weights: dict[int, Placeholder] = {}
        for name, parameter in model.named_parameters():
            self._weights[id(parameter)] = weight_placeholder(parameter, name, compute=compute)
        for held in (value for module in model.modules() for value in module.__dict__.values()):
            if type(held) is Placeholder and held.is_weight and id(held) not in self._weights:  # of another stage
                self._weights[id(held)] = weight_placeholder(held, held.origin, compute=compute)
        self.stage = 0
        self._frames: list[list[Event]] = [[]]
        self._opens = [False]  # of each frame: whether it is no unit, for something inside
        self._path: list[str] = [""]
        self._keys = 0
        self.born: dict[int, int] = {}
        self.origins: dict[int, str] = {}  # key of a value -> the module that computes it
        self.used: dict[int, set[int]] = {}
        self.weight_uses: dict[str, set[int]] = {}
        self.open: set[nn.Module] = set()  # called, and no units
        self.unheard: list[str] = []  # modules whose hooks, a user's, were not called
        self._kept = kept
        self._left: dict[Slot, list[int]] = {}
        self.written: dict[int, int] = {}  # key of a value -> the stage that writes it in place
        self.checkpoints: dict[FrameType, int] = {}  # calls of checkpoints, each with the stage it begins in
        self.memory_of: dict[int, int] = {}
        self.seen = Seen(model, memory, lambda: self.stage, device_of(model))
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

        Not those of a module that takes a mean over labels, or values by a mask of the batch's: labels and masks are
        looked at where the function is met. And not those of a module in which a library collects what another returns
        (the logits of a router): it is handed on.
        """
        name = station.name
        begins = self._begins.get(name, 0)
        if begins > self.stage:
            if begins > self.stage + 1:
                self._wrong_order(name, self.cuts[self.stage])
            self.stage = begins
        stage, began, known = self.stage, self.seen.place(), self._keys
        numbers = self._numbers(station.module) if name else {}
        self._frames.append([])
        self._opens.append(False)
        self._path.append(name)
        if any(map(_is_users, station.module._forward_hooks.values())):
            self.unheard.append(name)
        out = station.module.forward(*args, **kwargs)  # without other hooks: they may look at values
        self._path.pop()
        inner, opens = self._frames.pop(), self._opens.pop()
        outputs = tensors_in(out)
        if name and not opens and self.stage == stage and any(type(tensor) is Placeholder for tensor in outputs):
            out = self.adopt(out, name)
            event = self._event(station.module, None, copied(out), name, began)  # the caller may write to its own
            attributes, captured = self._attributes(station.module, name), bool(captures(station.module))
            now = self._numbers(station.module)
            attributes += tuple((slot, now[slot]) for slot in now if slot in numbers and now[slot] != numbers[slot])
            takes = {key for one in inner for key in one.takes if key <= known}
            self._frames[-1].append(
                replace(event, attributes=attributes, captures=captured, takes=tuple(sorted(takes)))
            )
        else:
            self._frames[-1].extend(inner)
            self.open.add(station.module)
        self._opens[-1] |= tell(station.module, args, out) or opens
        return out

    def _numbers(self, unit: nn.Module) -> dict[Slot, Any]:
        """Returns the numbers, flags and texts that a unit holds now."""
        return {slot: value for slot, value in self._kept.held(unit) if type(value) in PLAIN}

    def _attributes(self, unit: nn.Module, name: str) -> tuple[tuple[Slot, Any], ...]:
        """Returns a unit's new attributes in its modules, their objects, lists and dicts, as placeholders."""
        found = []
        for slot in (*self._kept.changed(unit), *self._kept.refilled()):
            value = slot.get()
            ids = [id(tensor) for tensor in tensors_in(value)]
            if ids and self._left.get(slot) != ids:
                template = self.adopt(value, name)
                slot.put(template)
                self._left[slot] = [id(tensor) for tensor in tensors_in(template)]
                if any(type(tensor) is Placeholder for tensor in tensors_in(template)):
                    found.append((slot, copied(template)))
        return tuple(found)

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A function on placeholders: its shapes, computed on meta."""
        if function in FACTORIES:
            return make(function, args, kwargs)
        if function in (Tensor.register_hook, Tensor.retain_grad) and not args[0].is_weight:
            return self._hook(function, args[0])
        self._opens[-1] |= function in LABELLED or function in SCATTERS and is_seen(args, kwargs)
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
            takes = tuple(tensor.key for tensor in given if not tensor.is_weight)
            self._frames[-1].append(replace(event, fills=None if fills is None else fills.key, takes=takes))
        return result

    def _hook(self, function: Callable, tensor: Placeholder) -> Any:
        """A hook on a value's gradient is registered where the value is computed; there is none to retain."""
        born = self.born.get(tensor.key, self.stage)
        if function is Tensor.retain_grad:
            raise PipelineError(
                "pipeline",
                f"retain_grad was called on a value of {tensor.origin!r}: the backward of a microbatch has run when "
                "the model returns, and its values are gone",
                (),
                [("x.register_hook(f)", "f sees each microbatch's gradient")],
            )
        if born != self.stage:
            raise PipelineError(
                "pipeline",
                f"a hook is registered in stage {self.stage} on the gradient of a value of {tensor.origin!r}, which is "
                f"of stage {born}: it would see a part of the gradient",
                (),
                [("x.register_hook(f)", f"before {self.cuts[born]!r} is called")],
            )
        return no_handle()

    def _fill(self, written: list[tuple[Tensor, Tensor]], origin: str, home: torch.device) -> Placeholder | None:
        """Notes values that are written in place; a plain tensor that is filled with values becomes a placeholder."""
        filled = None
        for tensor, _ in written:
            if type(tensor) is Placeholder:
                if not tensor.is_weight:
                    self.written[tensor.key] = self.stage
            elif not self.seen.wrote(tensor):
                base = base_of(tensor)
                with local_only():
                    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
                made = self._new(like, origin, home, False)
                become(base, made)
                filled = base
        return filled

    def adopt(self, value: Any, origin: str) -> Any:
        """Adopts a unit's output: real tensors and placeholders of weights become placeholders of values."""

        def adopted(tensor: Tensor) -> Tensor:
            if type(tensor) is Placeholder and not tensor.is_weight:
                return tensor
            lent = type(tensor) is Placeholder  # it stands in the module for a weight, and is to go on doing so
            made = self._new(_meta(tensor, fresh=lent), origin, tensor.device, False)
            if self._notes is not None:
                self._notes.is_as(made, tensor)
            return made

        return map_tensors(value, adopted)

    # --- internal -------------------------------------------------------------------

    def _new(self, meta: Tensor, origin: str, home: torch.device, is_weight: bool) -> Placeholder:
        self._keys += 1
        self.born[self._keys], self.origins[self._keys] = self.stage, origin
        self.memory_of[self._keys] = memory_of(meta)
        return placeholder(meta, self._keys, origin, home, is_weight)

    def _event(self, module: nn.Module | None, function: Callable | None, out: Any, name: str, began: Place) -> Event:
        keys = tuple(tensor.key for tensor in tensors_in(out) if type(tensor) is Placeholder)
        ended = self.seen.place()
        inside, checkpoint = who_calls()
        again = checkpoint is not None
        if again and (first := self.checkpoints.setdefault(checkpoint, self.stage)) != self.stage:
            raise PipelineError(
                "pipeline",
                f"a checkpoint begins in stage {first} and goes on in stage {self.stage}: each of them would"
                " recompute a part of the other",
                [f"cut  {self.cuts[self.stage - 1]}", f"met  {name}"],
                [
                    ("checkpoint what lies before the cut and what lies behind it apart", ""),
                    ('Plan(checkpointing={"blocks.*": True})', "modules that lie within one stage"),
                ],
            )
        draws = tuple(self.seen.draws[began.draws : ended.draws])
        span = Span(began, ended)
        return Event(self.stage, name, module, function, out, keys, draws, inside=inside, again=again, span=span)

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
                name = self._path[-1]
                is_cut = not name or any(cut.startswith(f"{name}.") for cut in self.cuts)
                raise read_error(function, args, name or "the model", is_cut) from error
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
                self.weight_uses.setdefault(tensor.origin, set()).add(self.stage)
        elif self.born.setdefault(tensor.key, self.stage) != self.stage:
            self.used.setdefault(tensor.key, set()).add(self.stage)

    def _wrong_order(self, name: str, expected: str) -> None:
        raise PipelineError(
            "pipeline",
            f"the cut {name!r} was reached before the cut {expected!r}",
            [f"cuts  {', '.join(self.cuts)}"],
            [("order the cuts as the model calls their modules", "")],
        )

    def new_key(self, stage: int, uses: set[int]) -> int:
        """Returns a key for a value that is no output of an event."""
        self._keys += 1
        self.born[self._keys], self.used[self._keys] = stage, uses
        return self._keys


def seen(value: Any) -> Any:
    """Returns a dry run's stub of a parameter. Anything else, and all outside of a dry run, is itself."""
    reader = current.reader
    return reader._weights.get(id(value), value) if isinstance(reader, Recorder) else value


def _is_users(hook: Callable) -> bool:
    own = (getattr(hook, "__module__", None) or type(hook).__module__).startswith("vescale")
    return not own and not is_capture(hook)


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
