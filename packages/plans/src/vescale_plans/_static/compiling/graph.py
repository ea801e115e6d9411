"""A region's forward as one graph of a compiler, called past the compiler's guards where all that they ask is known.

A compiler's guards ask what a module and its arguments are, some hundred questions in each call, and the region was
found by asking the same: its key holds what a call gives, its own guard what the forward reads. What these leave is
asked here: of what kind its tensors are, and how torch is set.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import (
    checkpoint_of,
    compiled_code,
    compiler_errors,
    compiler_is_asked_otherwise,
    functorch_config,
    global_state,
)
from ..frame import filled, tensors_of
from .passage import Passage, Reach

Place = tuple[dict, str]
MOST_TIMES = 8  # that a region is compiled anew
_FACTS = attrgetter("shape", "dtype", "device")


class StaticWarning(UserWarning):
    """A module in static mode fell back to eager, or stayed uncompiled, and why."""


class Compiled:
    """The forward of one region, compiled when it is first called."""

    def __init__(
        self,
        name: str,
        forward: Callable,
        backend: str,
        places: list[Place],
        before: dict[tuple[int, str], Callable],
        others: list[Tensor],
        reach: Reach | None,
    ) -> None:
        """`places`: tables of parameters and buffers, and the names there of what the region unwraps. `before`: what
        becomes of some of them, by table and name, before the graph begins. `others`: plain tensors that it reads.
        `reach`: of its outputs, among `places` and its inputs."""
        let_graphs_be_retained()
        self._name, self._forward, self._reach = name, forward, reach
        self._places = [(table, key, before.get((id(table), key))) for table, key in places]
        self._others, self._backend, self._times = others, backend, 0
        self._guarded: Callable | None
        self._begin()

    def _begin(self) -> None:
        """Anew, as for the first time."""
        self._own = own_code(self._forward)
        self._guarded = torch.compile(self._own, backend=self._backend, fullgraph=True, dynamic=False)
        self._graph: Callable | None = None  # what the compiler made of it, without guards
        self._state: Any = None
        self._facts: list = []

    @property
    def has_failed(self) -> bool:
        """Whether the compiler gave up: the forward runs as it is."""
        return self._guarded is None

    def __call__(self, args: tuple, kwargs: dict, hooks: tuple[Callable, Callable] | None) -> Any:
        """The forward on plain tensors, on views: what it keeps for its backward must still be plain tensors then.

        That goes for its results as well, of which autograd keeps those without gradient (indices) as they are.
        `hooks`: where what is saved for backward goes, of which a graph knows when it is made.
        """
        compiles = self._guarded is not None and (hooks is None or self._runs_under(hooks))
        usual = [table[name] for table, name, _ in self._places]  # a boundary's conversions, at their time
        facts = _facts_of([*usual, *self._others]) if compiles else []
        if compiles and self._graph is not None and facts != self._facts:
            self._times += 1
            if self._times > MOST_TIMES:
                self._give_up("its weights, or tensors that it reads, are of another kind at many calls")
                return self(args, kwargs, hooks)
            self._begin()
        given = args, kwargs
        passage, entered = Passage(self._name, self._reach), usual
        if compiles:
            entered = passage.enter([*usual, *tensors_of(given)])
            args, kwargs = filled(given, entered[len(usual) :])
        try:
            for (table, name, way), held in zip(self._places, entered):
                table[name] = held if way is None else way(held)
            if not compiles:
                return self._forward(*args, **kwargs)
            if self._graph is not None and hooks is None and self._is_set_alike():
                return passage.leave(self._graph(*args, **kwargs))
            out = self._guarded(*args, **kwargs)
            if hooks is None:
                self._take_graph(facts)
            return passage.leave(out)
        except compiler_errors() as error:
            self._give_up(str(error).strip().partition("\n")[0])
        finally:
            for (table, name, _), tensor in zip(self._places, usual):
                table[name] = tensor
        return self(*given, hooks)

    def _give_up(self, why: str) -> None:
        self._guarded = None
        warnings.warn(f"{self._name} is not compiled: {why}", StaticWarning, stacklevel=3)

    def _runs_under(self, hooks: tuple[Callable, Callable]) -> bool:
        """Whether the graph runs: not where a checkpoint's forward ran without it, and is run again. A graph saves
        other tensors."""
        frame, again = checkpoint_of(hooks)
        if frame is None:
            return True
        ran = frame.__dict__.setdefault("_vescale_compiled", set())
        if not again:
            ran.add(self)
        return self in ran

    def _is_set_alike(self) -> bool:
        return self._state.check() and not compiler_is_asked_otherwise()

    def _take_graph(self, facts: list) -> None:
        """The code that the compiler put in the forward's place: from the next call on it runs as it is."""
        code = compiled_code(self._own)
        if code is not None and code.co_freevars == self._own.__code__.co_freevars:
            self._graph = FunctionType(code, self._own.__globals__, closure=self._own.__closure__)
            self._state, self._facts = global_state(), facts


def _facts_of(tensors: list[Tensor]) -> list:
    return [*map(_FACTS, tensors), *map(Tensor.stride, tensors)]


def let_graphs_be_retained() -> None:
    """Compiled backwards may run twice, as eager ones do and as a pipeline's split backward needs.

    A compiled backward writes into what was saved for it, where nobody asked for the graph to be retained when it was
    made; another process may have made it, and left it in the compiler's cache on disk. torch has one switch for that,
    which is read again in every backward. Of the process; it costs memory of backwards that would have been reused.
    """
    functorch_config().donated_buffer = False


def own_code(forward: Callable) -> FunctionType:
    """`forward` under a code object of its own.

    A compiler keeps what it made, and the limit of how often it makes it anew, by code object, which all layers of one
    class share: regions, each of one layout and one shape, would count as recompilations of each other.
    """

    def through(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    through.__code__ = through.__code__.replace()
    return through
