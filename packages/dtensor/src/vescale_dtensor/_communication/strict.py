"""strict(): a collective that nobody asked for is an error, told in terms of what the user called.

A function may be computed by way of others (softmax by a maximum and a sum), and what would have to move is then a
tensor that the user never saw. So while it is on, this table stands before the one of rules: it sees which call is the
user's own, and where one fails it looks for layouts of that call's operands under which it needs no collective. They
are found by trying, on tensors of zeros under the layout in question: the fix that is named is one that works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vescale_trace.stack import user_line
from vescale_trace.values import map_tensors, tensors_in

from .._conversions.conversion import plan
from .._conversions.convert import describe
from .._dispatch.dispatch import look_into, ordinary_call
from .._errors import ImplicitCommunicationError, VescaleError
from .._layouts.layout import Layout
from .._layouts.state import INVARIANT, PARTIAL, State, sharded
from .._rules.registry import Entry
from .._tensor.tensor import DTensor, attach, local_only
from . import events

NAMED = 2  # fixes in a message
_TRIED = 200  # combinations of layouts that are looked at


class Strict:
    """The table while strict() is on: every function has the one entry that comes here first."""

    def __init__(self) -> None:
        self._entry = Entry(Strict, handler=self._call)
        self._inside = False
        self._below: Any = None

    def __enter__(self) -> Strict:
        events.strict_depth += 1
        self._below = look_into(self)
        return self

    def __exit__(self, *exception: object) -> None:
        events.strict_depth -= 1
        look_into(self._below)

    def __getitem__(self, function: Callable) -> Entry:
        return self._entry

    def _call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if self._inside:
            return ordinary_call(self._below, function, args, kwargs)
        self._inside = True
        try:
            return ordinary_call(self._below, function, args, kwargs)
        except ImplicitCommunicationError as error:
            told = self._told(function, args, kwargs, error)
            raise told from error.__cause__
        finally:
            self._inside = False

    def _told(self, function: Callable, args: tuple, kwargs: dict, error: Any) -> ImplicitCommunicationError:
        """The error about the user's own operands, at the user's line."""
        tensors = list({id(x): x for x in tensors_in((args, kwargs)) if type(x) is DTensor}.values())
        if not tensors:
            return error
        names = _names(function, args, kwargs, tensors)
        line = user_line()
        fixes: dict[tuple[str, str], dict[int, Layout]] = {}
        for fix in self._fixes(function, args, kwargs, tensors):
            if len(fixes) < NAMED:
                fixes.setdefault(_remedy(names, tensors, fix), fix)  # two layouts may have the same placements
        own = [(code, cost) for code, cost in error.remedies[:-1]] if len(tensors) == 1 else []
        told = ImplicitCommunicationError(
            events.function_name(function),
            error.rule,
            [describe(name, x, x._layout.base) for name, x in zip(names, tensors)],
            [*own, *fixes] or error.remedies,
        )
        told.add_note(f"called at {line}")
        told.fixes = [{names[i]: layout.placements for i, layout in fix.items()} for fix in fixes.values()]
        return told

    def _fixes(
        self, function: Callable, args: tuple, kwargs: dict, tensors: list[DTensor]
    ) -> Iterator[dict[int, Layout]]:
        """Layouts of operands under which the call needs no collective, what costs least first."""
        choices = [_layouts(x._layout.base) for x in tensors]
        combined = sorted(
            (sum(cost for cost, _ in chosen), at, [layout for _, layout in chosen])
            for at, chosen in enumerate(product(*choices))
        ) if len(tensors) < 4 else []  # fmt: skip
        whole = [x._layout.base.invariant for x in tensors]
        for layouts in [*[one for _, _, one in combined[:_TRIED]], whole]:
            if self._passes(function, args, kwargs, tensors, layouts):
                yield {i: a for i, (a, x) in enumerate(zip(layouts, tensors)) if a is not x._layout.base}

    def _passes(self, function: Callable, args: tuple, kwargs: dict, tensors: list[DTensor], layouts: list) -> bool:
        """True if the call passes on tensors of zeros under these layouts. Alike on all ranks: values do not count."""
        blanks = {id(x): _blank(x, layout) for x, layout in zip(tensors, layouts)}

        def blank(x: Tensor) -> Tensor:
            return blanks[id(x)] if type(x) is DTensor else x.detach().clone()

        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                ordinary_call(self._below, function, map_tensors(args, blank), map_tensors(kwargs, blank))
            return True
        except VescaleError:
            return False
        except (RuntimeError, ValueError, IndexError, TypeError):  # zeros are no input of it (a singular matrix)
            return True
        finally:
            torch.set_rng_state(state)


def _layouts(layout: Layout) -> list[tuple[float, Layout]]:
    """Layouts to try in an operand's place, with the elements that are received for each; its own is among them."""
    found = {layout: 0.0}
    for axis, state in enumerate(layout.states):
        if layout.mesh.sizes[axis] > 1 and (state.is_sharded or state is PARTIAL):
            for before in list(found):
                for other in _others(layout, axis):
                    states = [*before.states]
                    states[axis] = other
                    try:
                        target = before.with_states(states)
                        found.setdefault(target, float(sum(step.elements for step in plan(layout, target))))
                    except VescaleError:  # a cut that does not fit
                        continue
    return [(cost, one) for one, cost in found.items()]


def _others(layout: Layout, axis: int) -> list[State]:
    count = layout.mesh.sizes[axis]
    return [INVARIANT, *[sharded(d) for d, size in enumerate(layout.shape) if size >= count]]


def _blank(x: DTensor, layout: Layout) -> DTensor:
    with local_only():
        return attach(torch.zeros(layout.local_shape, dtype=x.dtype, device=x.device), layout)


def _remedy(names: list[str], tensors: list[DTensor], fix: dict[int, Layout]) -> tuple[str, str]:
    code = "; ".join(f"{names[i]} = {names[i]}.redistribute({layout.placements!r})" for i, layout in fix.items())
    steps = [
        f"{step.kind} on {layout.mesh.names[step.axis]!r}"
        for i, layout in fix.items()
        for step in plan(tensors[i]._layout.base, layout)
        if step.kind != "nothing"
    ]
    return code, ", ".join(steps) + ", asked for" if steps else "no communication"


def _names(function: Callable, args: tuple, kwargs: dict, tensors: list[DTensor]) -> list[str]:
    """Returns the function's names of its operands; x0, x1, ... where it does not say, or says `self`: methods of torch
    have signatures from 2.15 on, and nobody can write to that name."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = dict(kwargs)
    named = {id(value): name for name, value in bound.items() if isinstance(value, Tensor) and name != "self"}
    return [named.get(id(x), f"x{i}") for i, x in enumerate(tensors)]
