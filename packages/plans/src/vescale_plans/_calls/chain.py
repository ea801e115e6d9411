"""The chain of a module: its steps, in the order of `phases.py`, and the hooks by which torch comes to them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from .._torch_private import has_global_hooks
from .alone import Alone, State
from .copies import Copies, copies_of
from .phases import INNER_AFTER, INNER_BEFORE, OUTER_AFTER, OUTER_BEFORE, PHASES

_CALL = "_call_impl"
Before = Callable[[nn.Module, tuple, dict[str, Any]], tuple[tuple, dict[str, Any]] | None]
"""Takes a module and the arguments of its call; returns the arguments for the forward, None for the same."""
After = Callable[[nn.Module, tuple, dict[str, Any], Any], Any]
"""Takes a module, its forward's arguments, and its output; returns the output to use, None for the same."""


class Step:
    """One part of this library, in the calls of one module."""

    __slots__ = ("name", "phase", "before", "after", "ends")

    def __init__(self, name: str, before: Before | None, after: After | None) -> None:
        self.name, self.phase = name, PHASES[name]
        self.before, self.after, self.ends = before, after, self.phase.ends


class Order:
    """A chain's steps as a call comes to them. Never changed: a call that has begun ends with what it began with."""

    __slots__ = ("steps", "outer_before", "inner_before", "inner_after", "outer_after", "before", "after")

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = tuple(steps)
        before = [one for one in self.steps if one.before is not None]
        after = [one for one in self.steps if one.after is not None]
        # Of several steps of one phase, those that were added later stand further from the forward where users' hooks
        # are inside, and nearer to it where these are outside.
        self.outer_before = _sorted(before[::-1], OUTER_BEFORE)
        self.inner_before = _sorted(before, INNER_BEFORE)
        self.inner_after = _sorted(after[::-1], INNER_AFTER)
        self.outer_after = _sorted(after, OUTER_AFTER)
        self.before = self.outer_before + self.inner_before
        self.after = self.inner_after + self.outer_after


def _sorted(steps: list[Step], names: tuple[str, ...]) -> tuple[Step, ...]:
    return tuple(sorted((one for one in steps if one.name in names), key=lambda one: names.index(one.name)))


class _Running(threading.local):
    """Stack of the module calls by hooks in this thread, innermost last: each holds what it began and must end, or
    None."""

    def __init__(self) -> None:
        self.calls: list[tuple[Order, list[Step | Copies]] | None] = []


class Added(NamedTuple):
    """A step that can be taken away."""

    chain: Chain
    module: nn.Module
    step: Step

    def remove(self) -> None:
        """A call that runs still ends what it has begun."""
        self.chain.become(self.module, [one for one in self.chain.order.steps if one is not self.step])


class Chain:
    """The steps of one module.

    torch comes to them by hooks of the module: two before the forward and two behind it, between which users' hooks
    stand where they are, and a last one that is always called and ends what a call has begun, where it raises. While
    nobody else has hooks there, a `Call` of the module goes through the steps itself.
    """

    def __init__(self) -> None:
        self.order = Order(())
        self.running = _Running()
        self._hooks: dict[str, Any] = {}

    def become(self, module: nn.Module, steps: Iterable[Step]) -> None:
        """Has these steps from the next call on."""
        self.order = order = Order(steps)
        hooks = self._hooks
        if order.steps and not hooks:
            hooks["enter"] = module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            hooks["leave"] = module.register_forward_hook(self._leave, with_kwargs=True)
            hooks["end"] = module.register_forward_hook(self._end, with_kwargs=True, always_call=True)
            module.__dict__.setdefault(_CALL, Call(self, module))
        if order.inner_before and "enter inside" not in hooks:
            hooks["enter inside"] = module.register_forward_pre_hook(self._enter_inside, with_kwargs=True)
        if order.inner_after and "leave inside" not in hooks:
            hooks["leave inside"] = module.register_forward_hook(self._leave_inside, with_kwargs=True, prepend=True)
        if not order.steps:
            for handle in hooks.values():
                handle.remove()
            hooks.clear()
            if isinstance(call := module.__dict__.get(_CALL), Call):
                call.leave(module.__dict__)

    def is_alone(self, held: dict[str, Any]) -> bool:
        """True if nobody else has hooks on a module, whose dict `held` is, or on all modules."""
        hooks, before, after = self._hooks, held["_forward_pre_hooks"], held["_forward_hooks"]
        return (
            len(before) + len(after) == len(hooks)
            and hooks["enter"].id in before
            and hooks["leave"].id in after
            and not held["_backward_hooks"]
            and not held["_backward_pre_hooks"]
            and not has_global_hooks()
        )

    # --- a call, as torch comes to it ---------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        order, begun = call = self.order, []
        self.running.calls.append(call)
        return _begin(order.outer_before, begun, module, args, kwargs)

    def _enter_inside(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        order, begun = self.running.calls[-1]
        return _begin(order.inner_before, begun, module, args, kwargs)

    def _leave_inside(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        order, begun = self.running.calls[-1]
        return _finish(order.inner_after, begun, module, args, kwargs, output)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        order, begun = self.running.calls[-1]
        output = _finish(order.outer_after, begun, module, args, kwargs, output)
        _give_back(begun)
        return output

    def _end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls = self.running.calls
        if calls and calls[-1] is not None:
            _, begun = calls.pop()
            end(begun, module, args, kwargs, output)


class Call(Alone):
    """Stands before a module's call, in place of torch's `_call_impl`."""

    __slots__ = ("_chain", "_module")

    def __init__(self, chain: Chain, module: nn.Module) -> None:
        self._chain, self._module = chain, module
        State(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chain, module = self._chain, self._module
        if not chain.is_alone(module.__dict__):
            return self._by_hooks(args, kwargs)
        order, begun, output = chain.order, [], None
        try:
            args, kwargs = _begin(order.before, begun, module, args, kwargs)
            output = module.forward(*args, **kwargs)
            output = _finish(order.after, begun, module, args, kwargs, output)
            _give_back(begun)
            return output
        except BaseException:
            end(begun, module, args, kwargs, output)
            raise

    def _by_hooks(self, args: tuple, kwargs: dict) -> Any:
        module, calls = self._module, self._chain.running.calls
        calls.append(None)
        try:
            return type(module)._call_impl(module, *args, **kwargs)
        finally:
            while (call := calls.pop()) is not None:  # torch ends nothing where a program is interrupted
                end(call[1], module, args, kwargs, None)

    @property
    def order(self) -> Order:
        """The module's steps."""
        return self._chain.order

    def is_alone(self) -> bool:
        """True if nobody else has hooks on the module, or on all modules."""
        return self._chain.is_alone(self._module.__dict__)

    def leave(self, held: dict[str, Any]) -> None:
        if held.get(_CALL) is self:
            del held[_CALL]


def _begin(
    steps: tuple[Step, ...], begun: list[Step | Copies], module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    for step in steps:
        given = step.before(module, args, kwargs)
        if step.ends:
            begun.append(step)
        if given is not None:
            if step.phase.converts and (copies := copies_of((args, kwargs), given)) is not None:
                begun.append(copies)
            args, kwargs = given
    return args, kwargs


def _finish(
    steps: tuple[Step, ...], begun: list[Step | Copies], module: nn.Module, args: tuple, kwargs: dict, output: Any
) -> Any:
    for step in steps:
        if step.ends:
            begun.remove(step)
        given = step.after(module, args, kwargs, output)
        if given is not None:
            output = given
    return output


def _give_back(begun: list[Step | Copies]) -> None:
    """Writes back what a call's forward wrote to copies, the last made first."""
    while begun:
        begun.pop().give_back()


def end(begun: list[Step | Copies], module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """Ends the steps that a call that raised has begun, the last first."""
    for step in reversed(begun):
        try:
            step.after(module, args, kwargs, output)
        except Exception as error:  # the first one is on its way
            what = f"vescale_plans: of a call that raised, what {step.name!r} began could not be ended: {error}"
            warnings.warn(what, stacklevel=2)


def clear(module: nn.Module) -> None:
    """Takes all steps off a module. Its hooks keep their places among users' for steps to come; see `drop_empty`."""
    for chain in _chains(module):
        chain.order = Order(())


def drop_empty(module: nn.Module) -> None:
    """Takes the hooks of a module away for which no steps have come."""
    for chain in _chains(module):
        chain.become(module, chain.order.steps)


def add_step(module: nn.Module, name: str, before: Before | None = None, after: After | None = None) -> Added:
    """A step of the module's calls from now on, in the phase of that name."""
    chain = next(_chains(module), None) or Chain()
    step = Step(name, before, after)
    chain.become(module, (*chain.order.steps, step))
    return Added(chain, module, step)


# --- what others ask of it --------------------------------------------------------------


class Hook(NamedTuple):
    """A hook of anybody's, or a step of ours, before or behind a module's forward."""

    call: Callable[..., Any]
    takes_kwargs: bool
    always: bool
    key: int  # in torch's tables of the module
    step: Step | None = None


def hooks_before(module: nn.Module) -> list[Hook]:
    """Returns the module's own hooks in the order of a call, ours step by step."""
    found = []
    for id_, hook in module._forward_pre_hooks.items():
        chain, part = _part(hook)
        if chain is None:
            found.append(Hook(hook, id_ in module._forward_pre_hooks_with_kwargs, False, id_))
        else:
            steps = chain.order.outer_before if part == "_enter" else chain.order.inner_before
            found += [Hook(step.before, True, False, id_, step) for step in steps]
    return found


def hooks_after(module: nn.Module) -> list[Hook]:
    """Returns the module's own hooks in the order of a call, ours step by step."""
    found = []
    for id_, hook in module._forward_hooks.items():
        chain, part = _part(hook)
        if chain is None:
            takes_kwargs, always = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
            found.append(Hook(hook, id_ in takes_kwargs, id_ in always, id_))
        elif part != "_end":
            steps = chain.order.outer_after if part == "_leave" else chain.order.inner_after
            found += [Hook(step.after, True, step.ends, id_, step) for step in steps]
    return found


def is_ours(hook: Any) -> bool:
    """True if a hook is one of this library's."""
    return (getattr(hook, "__module__", "") or "").startswith("vescale")


def _chains(module: nn.Module) -> Iterator[Chain]:
    """Yields the chain of a module, if it has one."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    yield from dict.fromkeys(chain for chain, _ in map(_part, hooks) if chain is not None)


def _part(hook: Any) -> tuple[Chain | None, str]:
    chain = getattr(hook, "__self__", None)
    return (chain, hook.__name__) if isinstance(chain, Chain) else (None, "")
