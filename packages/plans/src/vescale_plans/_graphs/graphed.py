"""A training step that the device repeats from a graph, where that is the same step."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import attach, local_only
from vescale_rng.state import Recorded, generators_of, recorded
from vescale_trace.stack import users_level
from vescale_trace.values import PLAIN, leaves, map_tensors, named, tensors_in

from .._capture.mode import watcher
from .._plan.parts import PlanError
from .._torch_private import version_of
from .held import Held, Optimizer, gradients_of, has_apart, parameters_of, set_gradients
from .host import Draws, Host, waits_of_host
from .reads import mark

MOST = 8
"""Graphs of one step, each for other inputs; the one that was not run for the longest time is dropped."""


class GraphWarning(UserWarning):
    """A step runs eagerly, and why."""


def graphed(step: Callable, *state: nn.Module | Optimizer) -> Graphed:
    """Returns a step that the device repeats from a graph (CUDA's): forward, backward, reductions, clipping, and the
    optimizer at the cost of one launch, with the results of eager code to the bit, random numbers included.

        def train_step(ids, labels):
            loss = model(ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        train_step = vescale.graphed(train_step, model, optimizer)

    The first calls are eager; one looks at what the step does on the host, and one captures the graph. From then on a
    call copies its tensors to where the graph reads them, and runs it. What it returns is a copy, without a graph of
    autograd's. A call is eager, and a `GraphWarning` says why, once for each reason, where its graph would be another
    step: for other sizes (each gets a graph of its own, at most 8), after `eval()` or a checkpoint that lies elsewhere,
    for a learning rate, or an attribute that Python reads, that is another number. A rate that changes has to be a
    tensor, which schedulers write to:
    `torch.optim.AdamW(params, lr=torch.tensor(1e-3, device=...), capturable=True)`. Calls in which ranks are compared
    are eager, too: one of a hundred.

    Refused, so that every call is eager: a step for which the host waits (`loss.item()`), one that counts or draws on
    the host, takes from an iterator, or returns an object, draws of sharded tensors, a pipeline, inputs on the host.
    On a CPU every call is eager, without a warning.

    Arguments:
        step: takes tensors on the device, and other values, for each of which there is a graph.
        state: the models and the optimizers that it works on.

    Communication: what the step sends. Raises PlanError for other state, and where capturing fails.
    """
    return Graphed(step, state)


class Graphed:
    """A step and its graphs.

    Attributes:
        why: why the last call was eager, "" if a graph was run.
    """

    def __init__(self, step: Callable, state: Sequence[nn.Module | Optimizer]) -> None:
        self._models = [one for one in state if isinstance(one, nn.Module)]
        self._optimizers = [one for one in state if isinstance(one, Optimizer)]
        if not callable(step) or len(self._models) + len(self._optimizers) < len(state) or not self._models:
            kinds = ", ".join(type(one).__name__ for one in (step, *state))
            rule = f"a step, and the models and the optimizers that it works on, are wanted, not {kinds}"
            raise PlanError("graphed", rule, (), [("graphed(train_step, model, optimizer)", "")])
        self._step, self._known = step, OrderedDict[tuple, _Inputs]()
        self._held = [model._vescale for model in self._models if hasattr(model, "_vescale")]
        self._roots = [held.inputs for held in self._held if held.inputs is not None]
        self._device = next((one.device for model in self._models for one in model.parameters()), torch.device("cpu"))
        self._side: torch.Stream | None = None  # on which the step runs: autograd keeps to one
        self._said: set[str] = set()
        self._trained = parameters_of(self._models, self._optimizers)
        self.why = "not called"
        update_wrapper(self, step, updated=())

    @property
    def graphs(self) -> int:
        """The number of graphs that there are."""
        return sum(one.graph is not None for one in self._known.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.why = self._never()
        if self.why:
            return self._step(*args, **kwargs)
        given = dict(named((args, kwargs), ""))
        tensors = [one for one in given.values() if isinstance(one, Tensor)]
        if wrong := _wrong(given):
            return self._on_side(args, kwargs, self._tell(wrong))
        gradients = gradients_of(self._trained)
        there = tuple(one is not None for one in gradients)
        alike = tuple(map([*map(id, tensors)].index, map(id, tensors)))  # which of them are one
        known = self._inputs((there, alike, *((place, *_kind(one)) for place, one in given.items())))
        if known.graph is None:
            return self._towards(known, args, kwargs, tensors)
        if why := self._due(known) or watcher() or self._left(known):
            return self._on_side(args, kwargs, why)
        return self._run(known, tensors, gradients)

    def _never(self) -> str:
        """Returns why no call is run from a graph."""
        kind = self._device.type
        if recorded() is not None:
            return "it is a part of a step that is captured"
        if kind in ("cpu", "meta") or not (kind == "cuda" or hasattr(torch.accelerator, "Graph")):
            return f"{kind} has no graphs"
        if any(held.runtime is not None for held in self._held):
            return self._tell("a pipeline waits for other stages")
        return ""

    def _inputs(self, key: tuple) -> _Inputs:
        known = self._known.setdefault(key, _Inputs())
        self._known.move_to_end(key)
        if len(self._known) > MOST:
            _, dropped = self._known.popitem(last=False)
            if dropped.graph is None:
                self._tell(_OTHERS)
        return known

    def _due(self, known: _Inputs) -> str:
        due = any(root.is_due(count) for root, count in zip(self._roots, known.counts))
        return "ranks are compared" if due else ""

    def _left(self, known: _Inputs) -> str:
        """Returns why the call is another step than the graph's. Where it stays so, one of the next is captured."""
        why = known.held.changed()
        if not why:
            return ""
        if known.other is not None and not known.other.changed():
            known.forget()
        else:
            known.other = Held(self._step, self._models, self._optimizers)
        return self._tell(f"{why}, which its graph does not know")

    def _tell(self, why: str) -> str:
        kind = why.partition(" went from ")[0]  # a number that changes in every call is one reason
        if kind not in self._said:
            self._said.add(kind)
            name = getattr(self._step, "__qualname__", type(self._step).__name__)
            warnings.warn(f"{name} runs eagerly: {why}", GraphWarning, stacklevel=users_level())
        return why

    # --- on the way to a graph --------------------------------------------------------------

    def _towards(self, known: _Inputs, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        """An eager call, one that is watched, or the one that captures."""
        if known.refused:
            return self._on_side(args, kwargs, self._tell(known.refused))
        why = self._due(known) or watcher()
        if known.state == "watched" and not why:
            return self._capture(known, args, kwargs, tensors)
        before = [root.calls for root in self._roots]
        if known.state == "called" and not why:
            out = self._watched(known, args, kwargs, tensors)
        else:
            out = self._on_side(args, kwargs, why or _NOT_YET)
            known.state = "called"
        known.counts = [root.calls - count for root, count in zip(self._roots, before)]
        return out

    def _watched(self, known: _Inputs, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        host, draws = Host(self._step, self._models, self._optimizers), Draws(self._device.type)
        versions, apart = [*map(version_of, tensors)], has_apart(self._trained)
        with waits_of_host(self._device.type) as waits:
            out = self._on_side(args, kwargs, _NOT_YET)
        changed = host.changed()
        if waits.where:
            known.refused = f"the host waits for the device ({waits.where}), which a graph cannot"
        elif versions != [*map(version_of, tensors)]:
            known.refused = "it writes to what it is given, which a graph has a copy of"
        elif changed:
            known.refused = f"it changes {changed} on the host, where a graph changes nothing{_REMEDY}"
        elif wrong := draws.refused(any(root.recipe.fit.checkpointed for root in self._held)):
            known.refused = wrong
        elif iterator := host.iterator():
            known.refused = f"it takes from {iterator} on the host, where a graph takes nothing"
        elif wrong := _not_copied(out):
            known.refused = f"it returns a {wrong}, whose tensors its next run would write to"
        elif apart or has_apart(self._trained):
            known.refused = "a gradient that stays is not as its parameter: sparse, or not reduced yet under ZeRO-3"
        known.state = "watched"
        return out

    def _on_side(self, args: tuple, kwargs: dict, why: str) -> Any:
        """An eager call."""
        self.why = why
        self._trained = parameters_of(self._models, self._optimizers)
        own = [*self._trained, *(one for model in self._models for one in model.buffers())]
        with self._aside([*tensors_in((args, kwargs)), *own, *tensors_in(gradients_of(self._trained))]) as leave:
            out = self._step(*args, **kwargs)
            leave(gradients_of(self._trained))
            return leave(out)

    @contextlib.contextmanager
    def _aside(self, tensors: Sequence[Tensor]) -> Iterator[Callable]:
        """The stream of the step, which comes after that of now, and before what comes next there. Gives what its
        results go through."""
        now = torch.accelerator.current_stream()
        self._side = self._side or torch.Stream(self._device)
        self._side.wait_stream(now)
        self._record(tensors, self._side)

        def leave(out: Any) -> Any:
            self._record(tensors_in(out), now)
            return out

        try:
            with self._side:
                yield leave
        finally:
            now.wait_stream(self._side)

    def _record(self, tensors: Sequence[Tensor], stream: torch.Stream) -> None:
        """The stream uses them, too, which others have made."""
        with local_only():
            for tensor in tensors:
                if tensor.device.type == self._device.type:
                    tensor.record_stream(stream)

    # --- a graph ------------------------------------------------------------------------------

    def _capture(self, known: _Inputs, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        self._trained = parameters_of(self._models, self._optimizers)
        gradients = gradients_of(self._trained)
        with self._aside(tensors), torch.no_grad(), local_only():
            known.inputs = [tensor.detach().clone() for tensor in tensors]
        known.draws = Recorded(generators_of(self._device.type)[1])
        standing = {id(tensor): kept for tensor, kept in zip(tensors, map(_like, tensors, known.inputs))}
        args, kwargs = map_tensors((args, kwargs), lambda tensor: standing[id(tensor)])
        graph = torch.cuda.CUDAGraph() if self._device.type == "cuda" else torch.accelerator.Graph()
        how = {"capture_error_mode": "thread_local"} if self._device.type == "cuda" else {}
        with self._aside([]), known.draws.capture():
            graph.capture_begin(**how)
            try:
                known.out = map_tensors(self._step(*args, **kwargs), Tensor.detach)
            except BaseException as error:
                known.refused = "it could not be captured"
                set_gradients(self._trained, gradients)  # nothing has run
                with contextlib.suppress(RuntimeError):  # the first error is the one to be told
                    graph.capture_end()
                if not isinstance(error, RuntimeError):
                    raise
                raise _failed(error) from error
            graph.capture_end()
        known.graph, known.held = graph, Held(self._step, self._models, self._optimizers)
        known.gradients = gradients, gradients_of(self._trained)
        set_gradients(self._trained, gradients)
        for root, count in zip(self._roots, known.counts):
            root.calls -= count  # the run counts them
        return self._run(known, tensors, gradients)

    def _run(self, known: _Inputs, tensors: list[Tensor], gradients: list[Tensor | None]) -> Any:
        self.why = ""
        before, after = known.gradients
        for root, count in zip(self._roots, known.counts):
            root.calls += count
        with self._aside([*tensors, *tensors_in(gradients)]) as leave, torch.no_grad():
            with local_only():
                for kept, tensor in zip((*known.inputs, *before), (*tensors, *gradients)):
                    if kept is not None and kept is not tensor:
                        kept.copy_(tensor)
            with known.draws.run():
                known.graph.replay()
            if any(one is not other for one, other in zip(after, gradients)):
                set_gradients(self._trained, after)
            return leave(map_tensors(known.out, Tensor.clone))


class _Inputs:
    """Calls of one kind: what is known of them, and their graph, with the memory that it reads and writes."""

    def __init__(self) -> None:
        self.refused, self.counts = "", []
        self.forget()

    def forget(self) -> None:
        self.state = "new"
        self.graph: Any = None
        self.draws: Any = None
        self.held: Any = None
        self.other: Held | None = None  # the state with which the last call was eager
        self.inputs: list[Tensor] = []
        self.gradients: tuple[list, list] = [], []  # where it reads them, and where it leaves them
        self.out: Any = None


_NOT_YET = "not captured yet"
_OTHERS = f"over {MOST} kinds of calls, by sizes and values: give a number that changes as a tensor on the device"
_REMEDY = ": do it between the calls; AdamW(..., capturable=True) counts on the device"


def _kind(value: Any) -> tuple:
    """Returns by what of an argument graphs differ: the sizes, the layout and the dtype of a tensor, else its value."""
    if not isinstance(value, Tensor):
        return (mark(value),)
    layout = value._layout if type(value) is DTensor else None
    return type(value), value.shape, value.stride(), value.dtype, value.device, layout


def _wrong(given: dict[str, Any]) -> str:
    """Returns what of the arguments no graph can take, "" for nothing."""
    for one in given.values():
        if not isinstance(one, Tensor):
            if type(one) not in PLAIN:
                return f"it is given a {type(one).__name__}, which may be another without a graph's knowing"
        elif one.is_cpu:
            return f"an input of {list(one.shape)} lies on the host: move the batch to the device before the call"
        elif one.requires_grad or one.layout is not torch.strided:
            return f"an input of {list(one.shape)} requires a gradient, or is sparse"
    return ""


def _not_copied(out: Any) -> str:
    """Returns the class of an object in what a step returns that may hold tensors, "" for none."""
    fixed = (Tensor, torch.dtype, torch.device, *PLAIN)
    return next((type(one).__name__ for one in leaves(out) if not isinstance(one, fixed)), "")


def _like(tensor: Tensor, kept: Tensor) -> Tensor:
    return attach(kept, tensor._layout) if type(tensor) is DTensor else kept


def _failed(error: RuntimeError) -> PlanError:
    return PlanError(
        "graphed",
        "the step cannot be captured; nothing of this call has run",
        [f"{type(error).__name__}  {str(error).strip().partition(chr(10))[0][:300]}"],
        [
            ("call the step itself", "eager: every call as before"),
            ("checkpoint(..., preserve_rng_state=False)", "where recomputation asks for the generator's state"),
        ],
    )
