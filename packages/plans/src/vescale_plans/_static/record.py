"""The recorded pass: modules run eagerly, each call is written down as a frame and judged as it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from vescale_dtensor import Layout
from vescale_dtensor.engine import (
    Conversion,
    Crossing,
    Difference,
    Storages,
    Taping,
    current_cause,
    local_only,
    refs_of,
    set_watch,
    user_line,
    wrap,
)

from .compiling.passage import reach_of
from .frame import Frame, layout_at, tensors_of
from .guard import Guard
from .key import take_key
from .passes import entered
from .scan.scan import scan
from .scan.state import Unseen
from .trials.trial import explained, judge


class Recording:
    """The pass that writes down. `root`: the outermost frame, when it has ended."""

    def __init__(self) -> None:
        self.root: Frame | None = None
        self._storages = Storages()
        self._taping = Taping(self._storages)
        self._stack: list[Frame] = []
        self._by: object = None
        self._token = object()

    def run(self, site: Any, args: tuple, kwargs: dict) -> Any:
        """The module's forward, eagerly, with all that it calls."""
        before = set_watch(self._watch)
        try:
            with entered(self), self._taping:
                return self.enter(site, args, kwargs)
        finally:
            set_watch(before)

    def enter(self, site: Any, args: tuple, kwargs: dict) -> Any:
        """Runs a module's forward as a frame of its own."""
        key, unwrapped = take_key(args, kwargs)
        wrap(unwrapped)
        frame = Frame(site, args, kwargs, key, Guard(site.module, site.static))
        self.root = self.root or frame
        if self._stack:
            parent = self._stack[-1]
            parent.children.append(frame)
            with local_only():
                inputs = refs_of((args, kwargs), self._storages)
            parent.tape.append(Crossing(frame, inputs))
        self._stack.append(frame)
        self._taping.tapes.append(frame.tape)
        try:
            frame.out = out = site.forward(*args, **kwargs)
        except BaseException:  # whoever called it may go on
            frame.reason = Difference("raises an error", site.line)
            raise
        finally:
            self._taping.tapes.pop()
            self._stack.pop()
        self._end(frame)
        return out

    def _end(self, frame: Frame) -> None:
        frame.outputs = [layout_at(tensor) for tensor in tensors_of(frame.out)]
        if frame.site.static.backend:
            frame.reach = reach_of(frame)
        with _silent(self._taping):
            seen = _looked_through(frame)
            frame.reason = _outside(frame) or seen or judge(frame, self._storages)
        for child in frame.children:
            child.forget()
        if not self._stack:
            frame.forget()

    def at_boundary(self, converter: Any, tensor: Tensor) -> Tensor:
        """Converts, noting whose boundary it is."""
        before, self._by = self._by, converter
        try:
            return converter.convert(tensor)
        finally:
            self._by = before

    def _watch(self, make: Callable, tensor: Tensor, source: Layout, target: Layout, *how: bool) -> Tensor:
        """In place of every conversion: makes it, and writes it down as one item."""
        taping = self._taping
        if taping.paused or not taping.tapes:
            return make(tensor, source, target, *how)
        cause, line = current_cause(), user_line()
        with _silent(taping):
            result = make(tensor, source, target, *how)
        if result is not tensor:
            if result.__dict__.get("_recorded") is self._token:
                for frame in self._stack:
                    frame.shares = True
            result._recorded = self._token
        with local_only():
            refs = (self._storages.ref(tensor), self._storages.ref(result))
        taping.tapes[-1].append(Conversion(tensor, source, result, target, cause, line, self._by, refs))
        return result


def _outside(frame: Frame) -> Difference | None:
    """What hooks and boundaries say against a region."""
    if frame.site.has_odd_boundary():
        return Difference("has a boundary of the plan that changes its parameters for the call", frame.site.line)
    for child in frame.children:
        if child.site.has_foreign_hooks():
            return Difference(f"calls {child.site.name}, which has hooks of yours", child.site.line)
    return None


def _looked_through(frame: Frame) -> Difference | None:
    """What the module's own code reads; a difference where that cannot be known: then it is not run again either."""
    blind = next((child for child in frame.children if child.reads is None), None)
    if blind is not None:
        return Difference(f"calls {blind.site.name}, which is eager", blind.reason.line)
    try:
        frame.reads, frame.returns = scan(frame)
    except Unseen as unseen:
        return explained(Difference(unseen.what, unseen.line))
    return None


@contextlib.contextmanager
def _silent(taping: Taping) -> Iterator[None]:
    """Nothing is written on the tape."""
    before, taping.paused = taping.paused, True
    try:
        yield
    finally:
        taping.paused = before
