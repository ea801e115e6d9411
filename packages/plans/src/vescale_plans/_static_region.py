"""A region: a module that runs, with all that it calls, on plain local tensors, and the guard that it runs under."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import convert_at_once, convert_erased, erase, restore, stamp

from . import _passes
from ._boundary import replaceable
from ._containers import map_first, map_tensors
from ._static_frame import Border, Frame, Step, parameter_place, tensors_of
from ._static_guard import FORWARD_HOOKS


class StaleRegion(BaseException):
    """A region came to a module that the recorded pass did not call. Its call is made again, eagerly."""


@dataclass
class Nested:
    """A module inside a region: what its border converts, and, for one that draws by region, its layouts."""

    border: Border
    drawn: tuple[Layout | None, ...] | None = None
    first: int | str | None = None  # the argument that a plan's border converts, where that is a tensor itself


class Eager:
    """A module that was found to be eager under a key."""

    def __init__(self, module: nn.Module) -> None:
        training = module.training
        self.holds = lambda: module.training is training


class Region:
    """How one module runs under one key. Made from its frame, when that and all frames below are static."""

    def __init__(self, frame: Frame, nested: dict[Any, Nested], borders: dict[Any, Step], unseen: set[Any]) -> None:
        self.site = frame.site
        self.border = frame.border
        self.nested = nested  # every module that the recorded pass called
        self.unseen = unseen
        self._borders = borders
        self._outputs = tuple(frame.outputs)
        self._stamps = any(layout is not None for layout in frame.outputs)
        module = frame.module
        self._weights = [tensor for tensor in module.parameters() if type(tensor) is DTensor]
        self._others = [tensor for tensor in module.buffers() if type(tensor) is DTensor]
        self._random = any(each.drawn is not None for each in nested.values()) and bool(unseen)
        self._made: list[Tensor] = []
        self._stands = [] if frame.shares else list(self._straightened())
        self.holds = frame.guard

    def run(self, args: tuple, kwargs: dict, erased: list[DTensor]) -> Any:
        """The module's forward on plain tensors; `erased` are its inputs, plain already. Communicates as in eager."""
        made: list[Tensor] = []
        outer, self._made = self._made, made
        before, _passes.running = _passes.running, self
        forward, border = self.site.forward, self.border
        state = torch.get_rng_state() if self._random else None
        erased += erase(self._others)
        for tensor in self._weights:
            tensor.__class__ = nn.Parameter
        for held, _, straight in self._stands:
            held.update(straight)
        try:
            if border.before or border.after:
                out = self._across(border, self.site, args, kwargs)
            else:
                out = forward(*args, **kwargs)
        except StaleRegion:
            if state is not None:
                torch.set_rng_state(state)
            raise
        finally:
            _passes.running = before
            self._made = outer
            for held, usual, straight in self._stands:
                held.update(usual)
                for hooks in FORWARD_HOOKS:
                    if straight[hooks]:  # registered while the region ran
                        usual[hooks].update(straight[hooks])
                        straight[hooks].clear()
                if usual["forward"] is None:
                    del held["forward"]
            for tensor in self._weights:
                tensor.__class__ = DTensor
            restore(erased)
            restore(made)
        if self._stamps:
            self._stamp(out)
        return out

    def _straightened(self) -> Iterator[tuple[dict, dict, dict]]:
        """Of each module inside whose hooks are a plan's borders and scopes: its attributes, as they are and for the
        time that the region runs, when its forward converts by itself and it has no hooks.

        Only where no conversion is shared: then scopes, which are hooks too, have nothing to remember.
        """
        for site, nested in self.nested.items():
            held = site.module.__dict__
            before = replaceable(held["_forward_pre_hooks"].values())
            after = replaceable(held["_forward_hooks"].values())
            if before is None or after is None or not (before or after):
                continue
            steps = [[self._borders[c] for c in found if c in self._borders] for found in (before, after)]
            inner = self._entering(site) if nested.border or nested.drawn else site.forward
            forward = _across_once(inner, nested.first, *steps)
            straight = {"_forward_pre_hooks": OrderedDict(), "_forward_hooks": OrderedDict(), "forward": forward}
            yield held, {name: held.get(name) for name in straight}, straight

    def _entering(self, site: Any) -> Callable:
        return lambda *args, **kwargs: self.enter(site, args, kwargs)

    def _stamp(self, out: Any) -> None:
        layouts = self._outputs
        if type(out) is Tensor:
            if layouts[0] is not None:
                stamp(out, layouts[0])
            return
        for tensor, layout in zip(tensors_of(out), layouts, strict=True):
            if layout is not None and type(tensor) is not DTensor:
                stamp(tensor, layout)

    def enter(self, site: Any, args: tuple, kwargs: dict) -> Any:
        """A module inside: called on plain tensors."""
        nested = self.nested.get(site)
        if nested is None:
            raise StaleRegion(site.name)
        if nested.drawn is not None:
            return self._draw(nested, site, args, kwargs)
        if nested.border:
            return self._across(nested.border, site, args, kwargs)
        return site.forward(*args, **kwargs)

    def _across(self, border: Border, site: Any, args: tuple, kwargs: dict) -> Any:
        swapped = []
        try:
            if border.before:
                inputs = None
                for step in border.before:
                    if isinstance(step.at, str):
                        owner, name = parameter_place(site.module, step.at)
                        swapped.append((owner, name, owner[name]))
                        owner[name] = convert_erased(owner[name], step.route, step.cause, self._made)
                        continue
                    if inputs is None:
                        inputs = tensors_of((args, kwargs))
                    old = inputs[step.at]
                    new = convert_erased(old, step.route, step.cause, self._made)
                    inputs = [new if tensor is old else tensor for tensor in inputs]
                if inputs is not None:
                    args, kwargs = _filled((args, kwargs), inputs)
            out = site.forward(*args, **kwargs)
        finally:
            for owner, name, parameter in reversed(swapped):
                owner[name] = parameter
        if border.after:
            outputs = tensors_of(out)
            for step in border.after:
                outputs[step.at] = convert_erased(outputs[step.at], step.route, step.cause, self._made)
            out = _filled(out, outputs)
        return out

    def _draw(self, nested: Nested, site: Any, args: tuple, kwargs: dict) -> Any:
        """A leaf that draws: its input is a DTensor for the time of the call, so that it draws its region."""
        inputs = tensors_of((args, kwargs))
        for tensor, layout in zip(inputs, nested.drawn, strict=True):
            if layout is not None:
                stamp(tensor, layout)
        own = [tensor for tensor in site.module.parameters() if "_layout" in tensor.__dict__]
        restore(own)
        _passes.running = None
        try:
            out = site.forward(*args, **kwargs)
        finally:
            _passes.running = self
            erase((*own, *inputs))
        erase(tensors_of(out))
        return out

    def at_border(self, converter: Any, tensor: Tensor) -> Tensor:
        """A plan's border inside the region."""
        step = self._borders.get(converter)
        if step is None:
            return tensor
        return convert_erased(tensor, step.route, converter, self._made)


def _across_once(inner: Callable, first: int | str | None, before: list[Step], after: list[Step]) -> Callable:
    """`inner` with the conversions of a plan's border around it."""
    if not before and not after:
        return inner
    if first == 0 and len(before) == len(after) == 1:
        route, cause, back, back_cause = before[0].route, before[0].cause, after[0].route, after[0].cause

        def straight(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = inner(convert_at_once(x, route, cause), *args, **kwargs)
            if type(out) is Tensor:
                return convert_at_once(out, back, back_cause)
            return map_first(out, lambda tensor: convert_at_once(tensor, back, back_cause))

        return straight

    def around(*args: Any, **kwargs: Any) -> Any:
        for step in before:
            if isinstance(first, str):
                kwargs[first] = convert_at_once(kwargs[first], step.route, step.cause)
            else:
                args, kwargs = map_first((args, kwargs), lambda t, s=step: convert_at_once(t, s.route, s.cause))
        out = inner(*args, **kwargs)
        for step in after:
            out = map_first(out, lambda t, s=step: convert_at_once(t, s.route, s.cause))
        return out

    return around


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with its tensors, in order, replaced."""
    queue = iter(tensors)
    return map_tensors(value, lambda _: next(queue))
