"""Compile mode: torch's compiler takes the forward as it is written, as on one device.

While the compiler traces and asks its guards, plain stand-ins without memory are in the places of parameters, buffers
and inputs: global tensors. What it made puts the real tensors back before it computes. On one rank, where local and
global tensors are the same, its graph of the root's forward is compiled as it is. On several, the graph of a block's
forward is run once on shards, and what that does is compiled. A call that is refused, or that the compiler cannot
take, is eager; nothing has run by then.

    Captured     stands before a forward, runs a call compiled, or eagerly
    code         the graphs of one forward
    stand_ins    what the compiler sees of parameters, buffers and inputs
    steps        what it sees of a plan's steps inside
    shards       a graph on this rank's shards
    passage      gradients that are None stay None
    refusals     what a graph would do otherwise than its code
    unguarded    what guards do not ask again
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import Mesh, attach, local_only
from vescale_trace.values import map_tensors, tensors_in

from .._calls.alone import Alone, State
from .._calls.meanwhile import meanwhile
from .._torch_private import compiler_errors
from .code import Code, Run
from .mode import watcher
from .refusals import Refused
from .shards import Shards
from .stand_ins import StandIns, placeholder
from .steps import Steps, has_step


class CompileWarning(UserWarning):
    """A model in compile mode runs eagerly, and why."""


class Captured(Alone):
    """Stands before the forward of a model's root on one rank, of a block on several.

    Arguments:
        module: whose forward it is.
        mesh: of the model.
        backend: a compiler's, by name.
        code: shared with other modules of the same class and steps.
        steps: of the modules inside.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, backend: str, code: Code, steps: Steps) -> None:
        self.module, self.backend, self.mesh = module, backend, mesh
        self.own = module.__dict__.get("forward")
        self.code, self.steps = code, steps
        self._is_checkpointed = has_step(module, "checkpoint")
        self.refusals: dict[tuple, str] = {}  # by what of a call never changes its code alone -> why it is eager
        self.last = "not called"
        self.same: Shards | None = None
        self.used: Shards | None = None
        self._stand_ins = StandIns(module)
        self.is_asking = False  # whether the compiler traces, or asks its guards
        self.failure = ""  # why the call that runs cannot be compiled
        self._real: dict[int, Tensor] = {}  # by the stand-in, of the call that runs
        self._made: list[tuple[Tensor, Layout | None]] | None = None  # results of the graph, once it has run
        module.__dict__["forward"] = self
        State(module)

    @property
    def forward(self) -> Callable:
        """The module's own."""
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    # --- a call ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.code.lock:
            return self._called(args, kwargs)

    def as_before(self) -> Callable:
        """Returns the forward for a call that computes the last one again: compiled or eager as that was, whoever looks
        by then."""
        return self.forward if self.last else partial(self._again, self.used)

    def _again(self, shards: Shards | None, *args: Any, **kwargs: Any) -> Any:
        with self.code.lock, meanwhile(self, same=shards):
            return self._called(args, kwargs, again=True)

    def _called(self, args: tuple, kwargs: dict, again: bool = False) -> Any:
        why = "" if again else watcher(self._is_checkpointed) or self.steps.watched()
        kind = (self.module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        why = why or self.refusals.get(kind, "")
        if not why:
            try:
                out = self._through_graph(args, kwargs)
                self.last = ""
                return out
            except Exception as error:  # while the compiler traces, nothing has run: an eager call says what is wrong
                if self._made is not None or not (self.is_asking or isinstance(error, (Refused, *compiler_errors()))):
                    raise
                why = self.failure or _reason(error)
                self._refuse(kind, why, getattr(error, "lasts", True))
            finally:
                self._put_back()
                self._real, self._made = {}, None
        self.last = why
        return self.forward(*args, **kwargs)

    def _refuse(self, kind: tuple, why: str, lasts: bool) -> None:
        if lasts:
            self.refusals[kind] = why
        elif self.code.has_said:
            return
        else:
            self.code.has_said = True
        warnings.warn(f"{type(self.module).__name__} runs eagerly: {why}", CompileWarning, stacklevel=5)

    def _through_graph(self, args: tuple, kwargs: dict) -> Any:
        self.failure, code = "", self.code
        code.refresh(self.own if self.own is not None else type(self.module).forward)
        if self._stand_ins.refresh():
            self.steps.find()
        self.steps.refresh()
        if self.steps.refused:
            raise Refused(self.steps.refused)
        kept = self._stand_ins.standing
        given = {id(tensor): (tensor, placeholder(tensor)) for tensor in tensors_in((args, kwargs))
                 if type(tensor) is DTensor and id(tensor) not in kept}  # fmt: skip
        standing = kept | given
        self._real = {id(stands): real for real, stands in standing.values()}
        self.is_asking = True
        self.steps.put()
        self._stand_ins.put()
        args, kwargs = map_tensors((args, kwargs), lambda one: standing[id(one)][1] if id(one) in standing else one)
        with code.settings, meanwhile(code, running=self):
            out = code.guarded(self.module, *args, **kwargs)
        if self._made is None and any(id(tensor) not in self._real for tensor in tensors_in(out)):
            raise Refused("the compiler leaves it to Python")
        return self._distributed(out)

    def _put_back(self) -> None:
        """The real tensors are in their places, if they are not yet."""
        if self.is_asking:
            self._stand_ins.take_off()
            self.steps.take_off()
            self.is_asking = False

    def _distributed(self, out: Any) -> Any:
        """Returns what the model returned with the graph's results as DTensors, those inside of other objects (a cache
        of keys and values) too, and with the real tensors in place of stand-ins."""
        known = dict(self._real)

        def shown(tensor: Tensor) -> Tensor:
            return known.get(id(tensor), tensor)

        with local_only():
            for one, layout in self._made or ():
                known[id(one)] = one if layout is None else attach(one, layout)
            out = map_tensors(out, shown)
            _fill_objects(out, shown)
        return out

    @property
    def is_lowered(self) -> bool:
        return any(one._layout.products for one in self._real.values())

    def run(self, run: Run, given: Sequence[Any]) -> Sequence[Any]:
        """Runs a graph of the forward's code in the call that is made: real tensors are in their places again."""
        self._put_back()
        real = [self._real.get(id(one), one) for one in given]
        out, self._made = run(self, real)
        return out

    # --- as an attribute of the module -------------------------------------------------------

    def leave(self, held: dict) -> None:
        if held.get("forward") is self:
            del held["forward"]
            if self.own is not None:
                held["forward"] = self.own

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    def __getattr__(self, name: str) -> Any:
        """Looks up what the forward says of itself (`__func__`, `__name__`, `__wrapped__`)."""
        return getattr(self.forward, name)

    def __deepcopy__(self, memo: dict) -> Any:
        module = memo.get(id(self.module))
        return type(self.module).forward.__get__(module) if module is not None else self


def _fill_objects(value: Any, shown: Callable[[Tensor], Tensor]) -> None:
    """Puts `shown(tensor)` in the place of each tensor in the attributes of objects that a call has made."""
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (Tensor, nn.Module, type)):
            continue
        seen.add(id(one))
        if isinstance(one, tuple):
            waiting += one
            continue
        held = one if isinstance(one, (dict, list)) else getattr(one, "__dict__", {})
        for key, item in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if not isinstance(item, Tensor):
                waiting.append(item)
            elif (new := shown(item)) is not item:
                held[key] = new


def _reason(error: Exception) -> str:
    """Returns a compiler's reason and the user's line."""
    what = str(error).strip().partition("\n")[0]
    stack = getattr(error, "real_stack", None)
    return f"{what} ({stack[-1].filename}:{stack[-1].lineno})" if stack else what
