"""Shared experts, while tokens travel: what a block calls beside its experts runs between the start of their dispatch
and the wait for it.

    the block's own order       experts(dispatch, compute, combine), shared(x)
    what happens                dispatch starts, shared(x), dispatch is waited for, compute, combine

Which modules these are is seen in the first calls: those that the block calls after its experts, with the very tensor
that it was given itself, and that draw no random numbers. From then on they run early, and the block's own call of
them, if it is the same, is answered with what they gave. Values and their sums are as without.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vescale_dtensor.engine import local_only

from .._apply.generators import random_states, same_states, set_random_states
from .._calls.chain import add_step
from .._plan.validate import CONTAINERS
from .._torch_private import _top_saved_tensors_default_hooks

WATCHED_CALLS = 2


class Beside:
    """The step around the block of an experts module."""

    def __init__(self, block: nn.Module, experts: nn.Module) -> None:
        self._block, self._experts = block, experts
        self._held: dict[str, nn.Module] = {}  # during a call: what stands where it may run early
        self._watching = {True: WATCHED_CALLS, False: WATCHED_CALLS}  # by whether it trains
        self._found: dict[bool, list[str]] = {True: [], False: []}
        self._tokens: Tensor | None = None
        self._passed = False
        if self._candidates():
            add_step(block, "beside", self._enter, self._leave)

    def _candidates(self) -> dict[str, nn.Module]:
        """Modules of the block that compute with parameters of their own; all but the experts."""
        children = self._block.named_children()
        others = {n: each for n, each in children if each is not self._experts and not isinstance(each, CONTAINERS)}
        return {name: each for name, each in others.items() if next(each.parameters(), None) is not None}

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self._tokens = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        self._passed = False
        if _top_saved_tensors_default_hooks(True) is not None:  # a checkpoint: tensors are saved in one order
            self._tokens = None
        if self._tokens is None:
            return
        self._held = self._candidates()
        if self._watching[block.training] > 0:
            self._watching[block.training] -= 1
            self._found[block.training] = []
            block._modules.update({name: _Watch(self, name, child) for name, child in self._held.items()})

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        block._modules.update(self._held)
        self._held, self._tokens = {}, None

    def run(self) -> None:
        """The experts' tokens are under way: what can run meanwhile does."""
        block, tokens, self._passed = self._block, self._tokens, True
        if tokens is None or self._watching[block.training] > 0:
            return
        for name in list(self._found[block.training]):
            child, states = self._held.get(name), random_states()
            if child is None:
                continue
            answer = child(tokens)
            if same_states(states, random_states()):
                block._modules[name] = _Done(child, tokens, answer)
            else:  # it has begun to draw: its turn is the block's to tell
                set_random_states(states)
                self._found[block.training].remove(name)

    def called(self, name: str, args: tuple, kwargs: dict) -> Any:
        """A call that is watched."""
        states, child = random_states(), self._held[name]
        answer = child(*args, **kwargs)
        draws = not same_states(states, random_states())
        if self._passed and not draws and not kwargs and len(args) == 1 and args[0] is self._tokens:
            self._found[self._block.training].append(name)
        return answer


class _Watch:
    """Stands for a module during a call in which it is seen when and with what it is called."""

    def __init__(self, beside: Beside, name: str, child: nn.Module) -> None:
        self._beside, self._name, self._child = beside, name, child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._beside.called(self._name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)


class _Done:
    """Stands for a module that has run already; another call than that one computes."""

    def __init__(self, child: nn.Module, tokens: Tensor, answer: Any) -> None:
        self._child, self._tokens, self._answer = child, tokens, answer
        self._version = _version(tokens)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0] is self._tokens and _version(self._tokens) == self._version:
            answer, self._tokens, self._answer = self._answer, None, None
            return answer
        return self._child(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)


def _version(tensor: Tensor) -> int:
    with local_only():
        return tensor._version
