"""torch's non-reentrant checkpoint around a module's forward, put there by a step of its chain.

What users' hooks do to a call counts once, wherever they stand. Those that the call passes before the checkpoint
(of all modules, from before `parallelize`, or with `prepend=True`) lie outside of it: what they made of the
arguments is what is kept. Those behind it lie inside, as the forward does, and run again with
it, on what they were given the first time. The hooks are those of the first pass, on the module and on those inside:
one that is taken off before backward, or put on, changes nothing; neither does `eval()`. Buffers are read as the first
pass found them, and written once. What this library has on the module (gathers, boundaries) runs both times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every
from torch.utils import checkpoint
from torch.utils.hooks import BackwardHook

from vescale_rng.state import recorded

from .._calls.chain import Hook, add_step, hooks_after, hooks_before, is_ours
from .._capture.front import Captured
from .._torch_private import (
    _DEFAULT_DETERMINISM_MODE,
    _checkpoint_without_reentrant_generator,
    global_backward_hooks,
    global_forward_hook_kinds,
    global_forward_hooks,
)
from .buffers import Buffers, Found
from .host import Host, Parked


class Checkpoint:
    """The step of one module."""

    def __init__(self, module: nn.Module, region: Any = None, host: Host | None = None) -> None:
        """`region`: whose `enter` and `leave` are to be around it, once per call; `host`: where arguments wait."""
        self._running: list[tuple[Generator, Again]] = []
        self._buffers = Buffers(module)
        self._region, self._host = region, host
        add_step(module, "checkpoint", self._enter, self._leave)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        again = Again(module, self._buffers.now())
        if self._region is not None:
            self._region.enter(module, args, kwargs)
        if self._host is not None and self._host.is_open and torch.is_grad_enabled():
            tensors = [one for one in args if isinstance(one, Tensor)]
            device = [one.detach().new_empty(0) for one in tensors[:1]]  # whose generator's state torch keeps
            args = (Parked(self._host, args), *device)
        keeps = recorded() is None  # a graph draws nothing there, and nobody may ask the generator
        around = _checkpoint_without_reentrant_generator(
            again, keeps, checkpoint.noop_context_fn, _DEFAULT_DETERMINISM_MODE, False, True, *args, **kwargs
        )
        next(around)
        self._running.append((around, again))

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        around, again = self._running.pop()
        again.returns()
        next(around, None)
        if self._region is not None:
            self._region.leave(module, args, kwargs, output)


class Again:
    """The call of a module as it is made again in backward: what of it lies inside the checkpoint, and what must be
    opened and closed around it."""

    def __init__(self, module: nn.Module, found: Found) -> None:
        self._module, self._inside, self._found = module, Inside(module), found
        held = hooks_before(module)
        at = _place(held)
        self._before = [*_ours(held[:at]), *held[at + 1 :]]
        self._after: list[Hook] = []
        self._closing: list[Hook] = []
        self._forward = module.forward
        self._is_watched = any((module._backward_hooks, module._backward_pre_hooks, *global_backward_hooks()))

    def returns(self) -> None:
        """The forward is through: which hooks come after it, and which buffers it has written."""
        self._found.check_written()
        module = self._module
        if isinstance(captured := module.__dict__.get("forward"), Captured):
            self._forward = captured.as_before()
        with_kwargs, _ = global_forward_hook_kinds()
        everywhere = [
            Hook(hook, id_ in with_kwargs, False, id_)
            for id_, hook in global_forward_hooks()[1].items()
            if not is_ours(hook)
        ]
        held = hooks_after(module)
        at = _place(held)
        self._after = [*everywhere, *held[:at]]
        self._closing = _ours(hook for hook in (*held[:at], *held[at + 1 :]) if hook.always)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Parked):
            args = args[0].arguments()
        module, output = self._module, None
        before, after = global_forward_hooks()
        _, always = global_forward_hook_kinds()
        closing = [Hook(hook, False, True, id_) for id_, hook in after.items() if id_ in always]
        closing, begun = [*_ours(closing), *self._closing], []
        try:
            for hook in before.values():
                if is_ours(hook):
                    hook(module, args)
            for hook in self._before:
                if hook.takes_kwargs:
                    answer = hook.call(module, args, kwargs)
                    args, kwargs = (args, kwargs) if answer is None else answer
                    begun.append(hook.step)
                else:
                    answer = hook.call(module, args)
                    args = args if answer is None else answer if isinstance(answer, tuple) else (answer,)
            if self._is_watched:  # what the forward was given went through torch's identity
                args = BackwardHook(module, [], []).setup_input_hook(args)
            with self._inside.as_it_was(), self._found.in_place():
                output = self._forward(*args, **kwargs)
            for hook in self._after:
                closing = [one for one in closing if one is not hook]
                answer = _after(hook, module, args, kwargs, output)
                output = output if answer is None else answer
        finally:  # torch ends it by an exception once all that was kept is there again
            for hook in closing:
                if hook.step is None or hook.step in begun:
                    _after(hook, module, args, kwargs, output)


_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class Inside:
    """All that decides how a module and those inside are called: their hooks, the hooks of all modules, `training`."""

    def __init__(self, module: nn.Module) -> None:
        held = [each.__dict__ for each in module.modules()]
        tables = [one[name] for one in held for name in _HOOKS]
        tables += [getattr(every, f"_global{name}") for name in _HOOKS if hasattr(every, f"_global{name}")]
        self._tables = [(table, tuple(table.items())) for table in tables]
        self._training = [(one, one["training"]) for one in held]

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        other = [(table, then, tuple(table.items())) for table, then in self._tables if tuple(table.items()) != then]
        turned = [one for one, training in self._training if one["training"] is not training]
        try:
            for table, then, _ in other:
                _fill(table, then)
            for one in turned:
                one["training"] = not one["training"]
            yield
        finally:
            for table, _, now in other:
                _fill(table, now)
            for one in turned:
                one["training"] = not one["training"]


def _fill(table: dict, items: tuple) -> None:
    table.clear()
    table.update(items)


def _place(hooks: list[Hook]) -> int:
    """Returns the checkpoint's place among a module's hooks."""
    return next(i for i, hook in enumerate(hooks) if hook.step is not None and hook.step.name == "checkpoint")


def _ours(hooks: Iterable[Hook]) -> list[Hook]:
    return [hook for hook in hooks if is_ours(hook.call)]


def _after(hook: Hook, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    return hook.call(module, args, kwargs, output) if hook.takes_kwargs else hook.call(module, args, output)
