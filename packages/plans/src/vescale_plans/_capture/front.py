"""Compile mode on a mesh of one rank: torch's compiler takes the model's forward, as on one device.

There local and global tensors are the same, so the forward is given to the compiler as it is written, while plain
stand-ins without memory are in the places of parameters, buffers and inputs. They are there only while the compiler
traces and asks its guards: what it made puts the real tensors back before it computes. A call that is refused, or that
the compiler cannot take, is eager; nothing has run by then.

    Captured     stands before the root's forward, runs a call compiled, or eagerly
    stand_ins    what the compiler sees of parameters, buffers and inputs
    passage      gradients that are None stay None
    refusals     what a graph would do otherwise than its code
    unguarded    what guards do not ask again
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import INVARIANT, Mesh, attach, layout_of, local_only
from vescale_trace.values import map_tensors, tensors_in

from .._calls.alone import Alone, State
from .._calls.chain import Call, hooks_after, hooks_before
from .._torch_private import backend_named, capture_settings, compiler_errors, functorch_config
from .mode import watcher
from .passage import Passage, reach_of
from .refusals import Refused, check_compiled, check_traced
from .stand_ins import StandIns, placeholder
from .unguarded import Unguarded

_Remembers = type(functools.lru_cache(id))
"""Of methods that libraries put on loggers to say a thing once (HuggingFace's `warning_once`)."""
_MOST = 8
"""Graphs of one model, each for other sizes or other Python values; calls beyond them are eager."""


class CompileWarning(UserWarning):
    """A model in compile mode runs eagerly, and why."""


class Captured(Alone):
    """Stands before the forward of a model's root. Calls of several threads wait for one another: while one asks the
    compiler, the model's tables hold stand-ins."""

    def __init__(self, model: nn.Module, mesh: Mesh, backend: str) -> None:
        self.module, self.backend, self.mesh = model, backend, mesh
        self.own = model.__dict__.get("forward")
        self._lock = threading.RLock()
        self.graphs = 0
        self._inside = _steps_inside(model)
        self.refusals: dict[tuple, str] = {}  # by what of a call never changes its code alone -> why it is eager
        self.last = "not called"
        self._stand_ins = StandIns(model)
        self.is_asking = False  # whether the compiler traces, or asks its guards
        self._real: dict[int, Tensor] = {}  # by the stand-in, of the call that runs
        self._made: list[Tensor] | None = None  # results of the graph of the call that runs, once it has run
        self._failure = ""
        functorch_config().donated_buffer = False  # backwards may run twice, as eager ones do; torch has one switch
        logging.getLogger("torch._dynamo.metrics_context").addFilter(_worth_saying)
        self._begin()
        model.__dict__["forward"] = self
        State(model)

    def _begin(self) -> None:
        """Forgets all graphs."""
        self._captured = self.forward
        self._guarded = torch.compile(_own_code(self._captured), backend=self._compile, fullgraph=True)
        self._unguarded: Unguarded | None = None  # that graphs were made under
        self._said_once = {one for one in vars(logging.Logger).values() if isinstance(one, _Remembers)}

    @property
    def forward(self) -> Callable:
        """The model's own."""
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    # --- a call ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._called(args, kwargs)

    def _called(self, args: tuple, kwargs: dict) -> Any:
        why = watcher()
        kind = (self.module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        why = why or self.refusals.get(kind, "")
        if not why and self._inside:
            self._refuse(kind, why := self._inside)
        if not why:
            try:
                out = self._through_graph(args, kwargs)
                self.last = ""
                return out
            except (Refused, *compiler_errors()) as error:
                if self._made is not None:
                    raise
                why = self._failure or _reason(error)
                self._refuse(kind, why)
            finally:
                self._put_back()
                self._real, self._made = {}, None
        self.last = why
        return self.forward(*args, **kwargs)

    def _refuse(self, kind: tuple, why: str) -> None:
        self.refusals[kind] = why
        name = type(self.module).__name__
        warnings.warn(f"{name} runs eagerly: {why}", CompileWarning, stacklevel=5)

    def _through_graph(self, args: tuple, kwargs: dict) -> Any:
        self._failure = ""
        if self._captured != self.forward or (self._unguarded is not None and not self._unguarded.holds()):
            self._begin()
        self._stand_ins.refresh()
        kept = self._stand_ins.standing
        with local_only():
            given = {id(tensor): (tensor, placeholder(tensor)) for tensor in tensors_in((args, kwargs))
                     if type(tensor) is DTensor and id(tensor) not in kept}  # fmt: skip
        standing = kept | given
        self._real = {id(stands): real for real, stands in standing.values()}
        self.is_asking = True
        self._stand_ins.put()
        args, kwargs = map_tensors((args, kwargs), lambda one: standing[id(one)][1] if id(one) in standing else one)
        with capture_settings(self._said_once):
            out = self._guarded(*args, **kwargs)
        if self._made is None and any(id(tensor) not in self._real for tensor in tensors_in(out)):
            raise Refused("the compiler leaves it to Python")
        return self._distributed(out)

    def _put_back(self) -> None:
        """The real tensors are in their places, if they are not yet."""
        if self.is_asking:
            self._stand_ins.take_off()
            self.is_asking = False

    def _distributed(self, out: Any) -> Any:
        """Returns what the model returned with the graph's results as DTensors, those inside of other objects (a cache
        of keys and values) too, and with the real tensors in place of stand-ins."""
        known = dict(self._real)

        def shown(tensor: Tensor) -> Tensor:
            return known.get(id(tensor), tensor)

        with local_only():
            for one in self._made or ():
                layout = layout_of(self.mesh, [INVARIANT] * self.mesh.ndim, tuple(one.shape))
                known[id(one)] = attach(one, layout)
            out = map_tensors(out, shown)
            _fill_objects(out, shown)
        return out

    # --- what the compiler asks for --------------------------------------------------------

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        """The compiler's backend: checks what was traced, and has a known backend compile it."""
        try:
            return self._compiled(graph, inputs)
        except Refused as refused:
            self._failure = str(refused)
            raise

    def _compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        if self.graphs == _MOST:
            raise Refused(f"its sizes, or the Python values that it reads, have changed {_MOST} times")
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (result,) = (node for node in graph.graph.nodes if node.op == "output")
        check_traced(nodes)
        traced = [node.meta.get("example_value") for node in nodes]
        traced = [one for one in traced if isinstance(one, Tensor)]
        reach = reach_of(traced, [getattr(one, "meta", {}).get("example_value") for one in result.args[0]])
        run = backend_named(self.backend)(graph, inputs)
        check_compiled(nodes)
        self._unguarded = Unguarded(self.module)
        self.graphs += 1
        name = type(self.module).__name__

        def call(*given: Any) -> Any:
            self._put_back()
            self._made = []
            real = [self._real.get(id(one), one) for one in given]
            with local_only():
                passage = Passage(name, reach)
                entered = iter(passage.enter([one for one in real if isinstance(one, Tensor)]))
                out = run(*[next(entered) if isinstance(one, Tensor) else one for one in real])
                passage.left(out)
            self._made = [one for one in out if isinstance(one, Tensor)]
            return out

        return call

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
        """What the forward itself says of itself (`__func__`, `__name__`, `__wrapped__`)."""
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


def _steps_inside(model: nn.Module) -> str:
    """Returns what a step of this library does in calls of a module inside, "" if there is none."""
    for name, module in model.named_modules():
        if module is model or not isinstance(module.__dict__.get("_call_impl"), Call):
            continue
        phases = [hook.step.phase for hook in (*hooks_before(module), *hooks_after(module)) if hook.step is not None]
        return f"in each call of {name}, {phases[0].before or phases[0].after}"
    return ""


def _own_code(forward: Callable) -> FunctionType:
    """Returns `forward` under a code object of its own, by which a compiler keeps and counts what it made."""

    def through(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    through.__code__ = through.__code__.replace()
    return through


def _reason(error: Exception) -> str:
    """Returns a compiler's reason and the user's line."""
    what = str(error).strip().partition("\n")[0]
    stack = getattr(error, "real_stack", None)
    return f"{what} ({stack[-1].filename}:{stack[-1].lineno})" if stack else what


def _worth_saying(record: logging.LogRecord) -> bool:
    """Drops what torch before 2.13 logs of each graph: it tries to sort the methods that are passed over."""
    error = str(record.exc_info[1]) if record.exc_info else ""
    return not (error.startswith("'<' not supported") and "lru_cache" in error)
