"""The graphs of one forward: what the compiler hands over, and how it runs on one rank, and on shards."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import INVARIANT, Mesh, layout_of, local_only

from .._torch_private import (
    _top_saved_tensors_default_hooks,
    backend_named,
    capture_settings,
    functorch_config,
)
from .passage import Passage, reach_of
from .refusals import Refused, check_traced
from .shards import Shards
from .steps import Steps
from .unguarded import Unguarded

_Remembers = type(functools.lru_cache(id))
"""The type of methods that libraries put on loggers to say a thing once (HuggingFace's `warning_once`)."""
_MOST = 8
"""Graphs of one forward, each for other sizes or other Python values; calls beyond them are eager."""

Made = tuple[Sequence[Tensor], list[tuple[Tensor, "Layout | None"]]]
"""A graph's results, and the new ones among them with their layouts (None: a plain tensor)."""
Run = Callable[["Region", list], Made]
"""Takes the region that is called and the inputs of the graph."""


class Region(Protocol):
    """A module whose forward is compiled: `front.Captured`."""

    module: nn.Module
    mesh: Mesh
    backend: str
    code: Code
    steps: Steps
    failure: str
    same: Shards | None  # whose results a call must have: of the call that it computes again
    used: Shards | None
    is_lowered: bool  # whether it has weights with which linear layers multiply in lower precision

    def run(self, run: Run, given: Sequence[Any]) -> Sequence[Any]:
        """Runs a graph in the call that is made."""


class Code:
    """The graphs of one forward, shared by all modules that run it alike. Calls of threads wait for one another: while
    one asks the compiler, the model's tables hold stand-ins.

    Attributes:
        graphs: how many were compiled.
        running: whose call asks the compiler, or runs a graph.
        has_said: whether a warning has told that calls of further sizes are eager.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.graphs = 0
        self.running: Region | None = None
        self.has_said = False
        self._traced = 0
        self._forward: Callable | None = None
        self._unguarded: Unguarded | None = None  # that graphs were made under
        functorch_config().donated_buffer = False  # backwards may run twice, as eager ones do; torch has one switch
        logging.getLogger("torch._dynamo.metrics_context").addFilter(_worth_saying)

    def refresh(self, forward: Callable) -> None:
        """Forgets all graphs if they are of another forward, or what guards do not ask has changed."""
        if self._forward != forward or (self._unguarded is not None and not self._unguarded.holds()):
            self._forward, self._unguarded = forward, None
            self.guarded = torch.compile(_own_code(forward), backend=self._compile, fullgraph=True)
            said_once = {one for one in vars(logging.Logger).values() if isinstance(one, _Remembers)}
            self.settings = capture_settings(said_once)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        """The compiler's backend: checks what was traced, and has a known backend compile it."""
        region = self.running
        try:
            with _unhooked():
                run = self._run_of(region, graph, inputs)
        except Refused as refused:
            region.failure = str(refused)
            raise
        self._unguarded = Unguarded(region.module)
        self._traced += 1
        return lambda *given: self.running.run(run, given)

    def _run_of(self, region: Region, graph: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        if self._traced == _MOST:
            raise Refused(f"its sizes, or the Python values that it reads, have changed {_MOST} times")
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        check_traced(nodes)
        is_plain = prod(region.mesh.sizes) == 1 and not region.is_lowered
        return _on_one_rank(region, graph, inputs) if is_plain else _on_shards(graph)


def _on_one_rank(region: Region, graph: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Returns the graph as it is: all layouts are one."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    (result,) = (node for node in graph.graph.nodes if node.op == "output")
    traced = [node.meta.get("example_value") for node in nodes]
    traced = [one for one in traced if isinstance(one, Tensor)]
    reach = reach_of(traced, [getattr(one, "meta", {}).get("example_value") for one in result.args[0]])
    compiled = backend_named(region.backend)(graph, inputs)
    region.code.graphs += 1
    name, mesh = type(region.module).__name__, region.mesh

    def run(region: Region, real: list) -> Made:
        with local_only():
            passage = Passage(name, reach)
            entered = iter(passage.enter([one for one in real if isinstance(one, Tensor)]))
            out = compiled(*[next(entered) if isinstance(one, Tensor) else one for one in real])
            passage.left(out)
            made = [one for one in out if isinstance(one, Tensor)]
            return out, [(one, layout_of(mesh, [INVARIANT] * mesh.ndim, tuple(one.shape))) for one in made]

    return run


def _on_shards(graph: fx.GraphModule) -> Run:
    """Returns the graph on shards, compiled for each set of layouts that comes."""
    known: dict[tuple, Shards] = {}

    def run(region: Region, real: list) -> Made:
        with local_only():
            key = (torch.is_grad_enabled(), *map(_key_of, real))
        shards = known.get(key) if region.same is None else region.same
        if shards is None:
            if len(known) == _MOST:
                raise Refused(f"it is compiled for {_MOST} other sizes and layouts", lasts=False)
            cut = getattr(region.module, "_cut_axes", ())
            with _unhooked():
                shards = known[key] = Shards(graph, region.steps, cut, real, region.backend)
            region.code.graphs += 1
        region.used = shards
        made = shards([one for one in real if isinstance(one, Tensor)])
        new = iter(made)
        out = [next(new) if place is None else real[place] for place in shards.places]
        tracked = torch.is_grad_enabled()
        layouts = [one if one is None or tracked else one.untracked for one in shards.results]
        return out, list(zip(made, layouts))

    return run


@contextlib.contextmanager
def _unhooked() -> Iterator[None]:
    """A block in which what autograd keeps stays as it is: a checkpoint around a call does not count it."""
    held: list[saved_tensors_hooks] = []
    while (top := _top_saved_tensors_default_hooks(True)) is not None:
        held.append(saved_tensors_hooks(*top))
        held[-1].__exit__()
    try:
        yield
    finally:
        for hooks in reversed(held):
            hooks.__enter__()


def _key_of(value: Any) -> Any:
    """Returns what a graph of shards is made for. Call with dispatch disabled."""
    if not isinstance(value, Tensor):
        return value
    layout = value._layout if type(value) is DTensor else None
    return layout, value.shape, value.stride(), value.dtype, value.device, value.requires_grad


def _own_code(forward: Callable) -> FunctionType:
    """Returns a function of a module and the arguments of its forward, under a code object of its own, by which a
    compiler keeps and counts what it made."""
    if hasattr(forward, "__self__") or not isinstance(forward, FunctionType):

        def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    else:

        def through(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(module, *args, **kwargs)

    through.__code__ = through.__code__.replace()
    return through


def _worth_saying(record: logging.LogRecord) -> bool:
    """Drops what torch before 2.13 logs of each graph: it tries to sort the methods that are passed over."""
    error = str(record.exc_info[1]) if record.exc_info else ""
    return not (error.startswith("'<' not supported") and "lru_cache" in error)
