"""A region: a module that runs, with all that it calls, on plain local tensors, and the guard that it runs under."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import (
    attach,
    convert_numbered,
    convert_unwrapped,
    crossing,
    number_of,
    plain_class,
    requires_grad,
    unwrap,
    wrap,
)

from .._apply.boundary import replaceable
from .._apply.containers import map_first
from .._apply.generators import random_states, set_random_states
from .._calls.chain import hooks_after, hooks_before
from .._torch_private import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from . import passes
from .compiling.graph import Compiled
from .compiling.passage import apart, held_in
from .frame import Boundary, Frame, Step, filled, parameter_place, tensors_of
from .guard import FORWARD_HOOKS


class StaleRegion(BaseException):
    """A region came to a module that the recorded pass did not call. Its call is made again, eagerly."""


@dataclass
class Nested:
    """A module inside a region: what its boundary converts, and, for one that draws by region, its layouts."""

    boundary: Boundary
    drawn: tuple[Layout | None, ...] | None = None
    first: int | str | None = None  # the argument that a plan's boundary converts, where that is a tensor itself
    is_compilable: bool = True  # whether a compiler takes it with its boundary, on every rank


class Eager:
    """A module that was found to be eager under a key."""

    def __init__(self, module: nn.Module) -> None:
        training = module.training
        self.holds = lambda: module.training is training


class Region:
    """How one module runs under one key. Made from its frame, when that and all frames below are static."""

    def __init__(
        self,
        frame: Frame,
        nested: dict[Any, Nested],
        boundaries: dict[Any, Step],
        unseen: set[Any],
        backend: str = "",
        others: Sequence[Tensor] = (),
    ) -> None:
        """`backend`: of the compiler that the region goes to. `others`: plain tensors that it reads, for that."""
        self.site = frame.site
        self.boundary = frame.boundary
        self.nested = nested  # every module that the recorded pass called
        self.unseen = unseen
        self._boundaries = boundaries
        self._outputs = tuple(frame.outputs)
        self._attaches = any(layout is not None for layout in frame.outputs)
        module = frame.module
        self._weights = [tensor for tensor in module.parameters() if type(tensor) is DTensor]
        classes = [(tensor, plain_class(tensor)) for tensor in self._weights]
        self._numbers = [(tensor, kind) for tensor, kind in classes if kind is not nn.Parameter]
        self._others = [tensor for tensor in module.buffers() if type(tensor) is DTensor]
        self._places = held_in(module)
        self._random = any(each.drawn is not None for each in nested.values()) and bool(unseen)
        self._made: list[Tensor] = []
        self._hooks: tuple[Callable, Callable] | None = None  # for what operators save, in the call that runs
        self.holds = frame.guard
        self._compiled = self._graph_of(frame, backend, others) if backend else None
        self._stands = list(self._straightened()) if self._may_straighten(frame) else []

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None and not self._compiled.has_failed

    def _graph_of(self, frame: Frame, backend: str, others: Sequence[Tensor]) -> Compiled | None:
        """What a compiler is given, None where it is given nothing."""
        module = frame.module
        if frame.shares or _is_one_kernel(module) or not self._is_one_graph():
            return None
        plain = [tensor for tensor in module.buffers() if type(tensor) is not DTensor]
        held = self._places, self._before(), [*others, *plain], frame.reach
        return Compiled(frame.site.name, frame.site.forward, backend, *held)

    def _may_straighten(self, frame: Frame) -> bool:
        """Whether the plan's hooks inside have nothing to remember."""
        return not frame.shares

    def _is_one_graph(self) -> bool:
        """Whether a compiler can see all of it: boundaries of the plan, and no leaf that draws or converts itself.

        The same on all ranks: a graph's collectives may come in another order than those of its module.
        """
        return all(
            nested.is_compilable and nested.drawn is None and self._hooks_of(site) is not None
            for site, nested in self.nested.items()
        )

    def _before(self) -> dict[tuple[int, str], Callable]:
        """By the places of parameters, what modules inside convert of them: a bias that one rank adds."""
        found = {}
        for site, nested in self.nested.items():
            for step in nested.boundary.before:
                table, name = parameter_place(site.module, step.at)
                found[id(table), name] = crossing(step.route, step.cause)
        return found

    def run(self, args: tuple, kwargs: dict, unwrapped: list[DTensor]) -> Any:
        """The module's forward on plain tensors; `unwrapped`: its inputs, plain already. Communicates as in eager."""
        hooks = _saved_tensors_hooks(True)
        if hooks is not None:  # a hook keeps the very object that an operator saves, where that has no gradient
            args, kwargs = apart((args, kwargs))
        made: list[Tensor] = []
        outer, self._made, self._hooks = (self._made, self._hooks), made, hooks
        before, passes.running = passes.running, self
        state = random_states() if self._random else None
        if self._others:
            unwrapped += unwrap(self._others)
        plain, sharded = nn.Parameter, DTensor
        for tensor in self._weights:
            tensor.__class__ = plain
        for tensor, kind in self._numbers:
            tensor.__class__ = kind
        registered = RemovableHandle.next_id
        for held, straight, was in self._stands:
            was["forward"] = held.get("forward")
            held.update(straight)
        try:
            forward = self.site.forward if self._compiled is None else self._through_compiler
            out = self._across(self.boundary, self.site, forward, args, kwargs)
        except StaleRegion:
            if state is not None:
                set_random_states(state)
            raise
        finally:
            passes.running = before
            self._made, self._hooks = outer
            for held, _, was in self._stands:
                held.update(was)
                if was["forward"] is None:
                    del held["forward"]
            if RemovableHandle.next_id != registered:
                self._keep_registered()
            for tensor in self._weights:
                tensor.__class__ = sharded
            wrap(unwrapped)
            if made:
                wrap(made)
        if hooks is not None:
            out = apart(out)
        return self._attach(out) if self._attaches else out

    def _keep_registered(self) -> None:
        """Hooks that somebody registered while the region ran stay registered."""
        for _, straight, was in self._stands:
            for hooks in FORWARD_HOOKS:
                was[hooks].update(straight[hooks])
                straight[hooks].clear()

    def may_save_itself(self) -> bool:
        """Whether hooks on saved tensors could be handed a parameter or a buffer, which is a DTensor again later."""
        return bool(self._others) or not all(requires_grad(tensor) for tensor in self._weights)

    def _through_compiler(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(args, kwargs, self._hooks)

    def _hooks_of(self, site: Any) -> tuple[tuple, tuple] | None:
        """The converters of a module's hooks; None where a hook does something else."""
        before, after = replaceable(hooks_before(site.module)), replaceable(hooks_after(site.module))
        return None if before is None or after is None else (before, after)

    def _straightened(self) -> Iterator[tuple[dict, dict, dict]]:
        """Of each module inside whose hooks are a plan's boundaries and scopes: its attributes, what they are for the
        time that the region runs, when its forward converts by itself and it has no hooks, and what they are else.
        Likewise of those whose own boundaries a graph makes before all else.

        Only where no conversion is shared: then scopes, which are hooks too, have nothing to remember.
        """
        for site, nested in self.nested.items():
            hooks = self._hooks_of(site)
            gone = self._compiled is not None and bool(nested.boundary)
            if not hooks or not (hooks[0] or hooks[1] or gone):
                continue
            ways = [[self._way(self._boundaries[c]) for c in found if c in self._boundaries] for found in hooks]
            inner = self._entering(site) if not gone and (nested.boundary or nested.drawn) else site.forward
            forward = _across_once(inner, nested.first, *ways)
            held = site.module.__dict__
            straight = {**{hooks: OrderedDict() for hooks in FORWARD_HOOKS}, "forward": forward}
            usual = {name: held[name] for name in (*FORWARD_HOOKS, "_call_impl") if name in held}
            if "_call_impl" in usual:
                straight["_call_impl"] = type(site.module)._call_impl.__get__(site.module)
            yield held, straight, usual

    def _way(self, step: Step) -> Callable[[Tensor], Tensor]:
        """A conversion of a plan's boundary, as a function; one operator where a compiler is to trace it."""
        route, cause = step.route, step.cause
        if self._compiled is None:
            return crossing(route, cause)
        number = number_of(route)
        return lambda tensor: convert_numbered(tensor, number)

    def _entering(self, site: Any) -> Callable:
        return lambda *args, **kwargs: self.enter(site, args, kwargs)

    def _attach(self, out: Any) -> Any:
        layouts = self._outputs
        if type(out) is Tensor:
            return out if layouts[0] is None else attach(out, layouts[0])
        before, numbers = tensors_of(out), False
        after = list(before)
        for i, (tensor, layout) in enumerate(zip(before, layouts, strict=True)):
            if layout is not None and type(tensor) is not DTensor:
                after[i] = attach(tensor, layout)
                numbers = numbers or after[i] is not tensor  # all else is attached where it stands
        return filled(out, after) if numbers else out

    def enter(self, site: Any, args: tuple, kwargs: dict) -> Any:
        """A module inside: called on plain tensors."""
        nested = self.nested.get(site)
        if nested is None:
            raise StaleRegion(site.name)
        if nested.drawn is not None:
            return self._draw(nested, site, args, kwargs)
        if nested.boundary:
            return self._across(nested.boundary, site, site.forward, args, kwargs)
        return site.forward(*args, **kwargs)

    def _across(self, boundary: Boundary, site: Any, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not boundary:
            return forward(*args, **kwargs)
        swapped = []
        try:
            if boundary.before:
                inputs = None
                for step in boundary.before:
                    if isinstance(step.at, str):
                        owner, name = parameter_place(site.module, step.at)
                        swapped.append((owner, name, owner[name]))
                        owner[name] = self._converted(owner[name], step.route, step.cause)
                        continue
                    if inputs is None:
                        inputs = tensors_of((args, kwargs))
                    old = inputs[step.at]
                    new = self._converted(old, step.route, step.cause)
                    inputs = [new if tensor is old else tensor for tensor in inputs]
                if inputs is not None:
                    args, kwargs = filled((args, kwargs), inputs)
            out = forward(*args, **kwargs)
        finally:
            for owner, name, parameter in reversed(swapped):
                owner[name] = parameter
        if boundary.after:
            outputs = tensors_of(out)
            for step in boundary.after:
                outputs[step.at] = self._converted(outputs[step.at], step.route, step.cause)
            out = filled(out, outputs)
        return out

    def _draw(self, nested: Nested, site: Any, args: tuple, kwargs: dict) -> Any:
        """A leaf that draws: its input is a DTensor for the time of the call, so that it draws its region."""
        inputs = tensors_of((args, kwargs))
        for i, layout in enumerate(nested.drawn):
            if layout is not None:
                inputs[i] = attach(inputs[i], layout)
        args, kwargs = filled((args, kwargs), inputs)
        own = [tensor for tensor in site.module.parameters() if "_layout" in tensor.__dict__]
        wrap(own)
        passes.running = None
        try:
            out = site.forward(*args, **kwargs)
        finally:
            passes.running = self
            unwrap((*own, *inputs))
        unwrap(tensors_of(out))
        return out

    def at_boundary(self, converter: Any, tensor: Tensor) -> Tensor:
        """A plan's boundary inside the region."""
        step = self._boundaries.get(converter)
        if step is None:
            return tensor
        return self._converted(tensor, step.route, converter)

    def _converted(self, tensor: Tensor, route: Any, cause: Any) -> Tensor:
        """What is kept of a conversion is a DTensor again when the region has run, so a hook gets another object."""
        out = convert_unwrapped(tensor, route, cause, self._made)
        return out.detach() if self._hooks is not None and not out.requires_grad else out


def _is_one_kernel(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that calls one kernel: a compiler would leave it, and ask its guards."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules


def _across_once(inner: Callable, first: int | str | None, before: list[Callable], after: list[Callable]) -> Callable:
    """`inner` with the conversions of a plan's boundary around it."""
    if not before and not after:
        return inner
    if first == 0 and len(before) == len(after) == 1:
        enter, leave = before[0], after[0]

        def straight(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = inner(enter(x), *args, **kwargs)
            return leave(out) if type(out) is Tensor else map_first(out, leave)

        return straight

    def around(*args: Any, **kwargs: Any) -> Any:
        for enter in before:
            if isinstance(first, str):
                kwargs[first] = enter(kwargs[first])
            else:
                args, kwargs = map_first((args, kwargs), enter)
        out = inner(*args, **kwargs)
        for leave in after:
            out = map_first(out, leave)
        return out

    return around
