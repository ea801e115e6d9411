"""A region: a module that runs, with all that it calls, on plain local tensors, and the guard that it runs under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import convert_erased, erase, restore, stamp

from . import _passes
from ._containers import map_tensors
from ._static_frame import Border, Frame, Step, parameter_place, tensors_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class StaleRegion(BaseException):
    """A region came to a module that the recorded pass did not call. Its call is made again, eagerly."""


@dataclass
class Nested:
    """A module inside a region: what its border converts, and, for one that draws by region, its layouts."""

    border: Border
    drawn: tuple[Layout | None, ...] | None = None


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
        self.holds = _guard(module)

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
            for tensor in self._weights:
                tensor.__class__ = DTensor
            restore(erased)
            restore(made)
        if self._stamps:
            self._stamp(out)
        return out

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


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with its tensors, in order, replaced."""
    queue = iter(tensors)
    return map_tensors(value, lambda _: next(queue))


def _guard(module: nn.Module) -> Callable[[], bool]:
    """Whether modules and parameters are as they were: training, hooks, the parameters themselves.

    Written out as one expression, because it is evaluated at every call.
    """
    names: dict[str, Any] = {}
    tests: list[str] = []

    def hold(value: Any) -> str:
        name = f"v{len(names)}"
        names[name] = value
        return name

    for one in module.modules():
        if one is not module:
            for hooks in _HOOKS:
                found = one.__dict__[hooks]
                tests.append(f"len({hold(found)}) == {len(found)}" if found else f"not {hold(found)}")
        tests.append(f"{hold(one.__dict__)}['training'] is {one.training}")
        for held in (one._parameters, one._buffers):
            place = hold(held) if held else ""
            for name, tensor in held.items():
                tests.append(f"{place}.get({name!r}) is {hold(tensor)}")
                if type(tensor) is DTensor:
                    tests.append(f"{hold(tensor)}._layout is {hold(tensor._layout)}")
    return eval(f"lambda: {' and '.join(tests)}", names)
