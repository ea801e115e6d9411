"""Compile mode on a mesh of one rank: a compiler takes the model as it is, on plain tensors, as on one device.

There every layout says the same, no conversion moves anything, and a part is the whole. So what a region has to show
elsewhere (its code computes on shards what it computes on DTensors) holds by itself, and the model need not be looked
through: a compiler reads its code, and asks its own guards in each call. What a compiler cannot be asked is looked for
in the recorded pass:

    random numbers   a graph draws its own
    hooks            of the user's, and those of a plan that do more than convert
    what is kept     a DTensor that outlives the call, beside what the model returns, would be a plain tensor next time
    what is written  to attributes of modules: values that change at each call would have it compiled at each call;
                     in place, to what a backward may need, which a compiler may compute again after the write

Where the compiler's guards fail, the call is recorded, and looked at, again. Where it gives up, or the model is not
one graph, regions are compiled as on any other mesh.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import attach, local_only

from ..._apply.containers import map_tensors, tensors_in
from ..._apply.generators import drawn_from, random_states, same_states
from ..._torch_private import backend_named, compiler_errors, compiler_is_asked_otherwise, saying_once
from ..frame import Boundary, Frame, layout_at
from ..reads import Reads
from ..static_region import Nested, Region, StaleRegion
from .graph import Place, alias, aliases, let_graphs_be_retained, own_code

_KEEPS_STATISTICS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")
MOST_TIMES = 3  # that a model is compiled anew because Python state that it reads has changed


class Refused(StaleRegion):
    """Why a model's call is not compiled whole."""


class OneRank:
    """Whether a model's calls are compiled whole: on a mesh of one rank, until a compiler gives up."""

    def __init__(self, static: Any) -> None:
        self._static, self._times, self._given_up = static, 0, ""
        held = static.model._vescale
        self._applies = held.device_mesh.size() == 1 and getattr(held, "runtime", None) is None

    def begin(self, given: Any) -> Before | None:
        """What is asked before a pass is recorded, of the arguments `given`; None: nothing."""
        return Before(self._static.model, given) if self._applies and self._static.backend else None

    def region_of(self, frame: Frame, before: Before | None, returned: Any) -> WholeModel | str:
        """The model's region, when the pass has ended that `before` is of; or why there is none."""
        if before is None or self._given_up:
            return self._given_up
        try:
            before.check(returned)
            return WholeModel(frame, self._static.backend, returned)
        except Refused as refused:
            return str(refused)

    def has_failed(self, region: Region, why: StaleRegion) -> bool:
        """Notes that a call of a region did not run. Whether it was a model's, which is recorded anew."""
        if type(region) is not WholeModel:
            return False
        self._times += 1
        if isinstance(why, Refused):
            self._given_up = str(why)
        elif self._times > MOST_TIMES:
            self._given_up = f"Python state that it reads has changed {self._times} times"
        return True


class Before:
    """How things were before a recorded pass."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        self._model, self._states, self._drawn, self._alive = model, random_states(), drawn_from(), _alive()
        self._held = _held_by(model)
        self._lasting = [*_lasting_of(model), *tensors_in(given)]
        self._versions = _versions_of(self._lasting)

    def check(self, returned: Any) -> None:
        """Raises Refused where the pass did what a graph would do otherwise, or do once."""
        if not same_states(self._states, random_states()) or self._drawn != drawn_from():
            raise Refused("it draws random numbers")
        now = _held_by(self._model)
        if len(now) != len(self._held) or not all(map(is_, now, self._held)):
            raise Refused("its modules hold other values after the call than before")
        if _versions_of(self._lasting) != self._versions:
            raise Refused("it writes to its buffers or its arguments in place")
        own = [*self._model.parameters(), *self._model.buffers()]
        remembered = tensors_within([tensor.__dict__ for tensor in own])  # conversions that later calls may share
        known = {id(tensor) for tensor in (*self._alive, *tensors_within(returned), *own, *remembered)}
        if _is_held_anywhere([tensor for tensor in _alive() if id(tensor) not in known]):
            raise Refused("a tensor of its call outlives it, beside what it returns")


def _held_by(model: nn.Module) -> list:
    """The values of all modules' attributes, parameters and buffers."""
    tables = [table for one in model.modules() for table in (one.__dict__, one._parameters, one._buffers)]
    return [value for table in tables for name, value in table.items() if name != "forward"]  # sites come and go


def _lasting_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, whose values a backward may need. A compiler computes some of what a backward needs
    again, then, from what a write has changed (pytorch #197039: wrong gradients). Of batch norm's running statistics
    no backward needs anything."""
    for module in model.modules():
        yield from module._parameters.values()
        if type(module).__module__ not in _KEEPS_STATISTICS:
            yield from module._buffers.values()


def _versions_of(tensors: list[Tensor]) -> list[int]:
    with local_only():
        return [0 if one is None or one.is_inference() else one._version for one in tensors]


def _alive() -> list[DTensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is DTensor]


def _is_held_anywhere(tensors: list[DTensor]) -> bool:
    """Whether anything of Python's holds one of them; what autograd saved, C++ alone holds."""
    return any(holder is not tensors for holder in gc.get_referrers(*tensors)) if tensors else False


class WholeModel(Region):
    """A model on a mesh of one rank under one key: one graph, on plain tensors."""

    def __init__(self, frame: Frame, backend: str, returned: Any) -> None:
        """`returned`: what the recorded pass returned.

        Raises Refused where a hook stands on a module inside that does more than convert.
        """
        nested = {site: Nested(Boundary()) for site in _called_by(frame)}
        super().__init__(frame, nested, {}, set(), backend)
        if not all(self._hooks_of(site) is not None for site in nested):
            raise Refused("it has hooks inside that take global tensors")
        self._shapes = [_kind_of(tensor) for tensor in tensors_within(returned)]
        trained = Reads()
        for module in frame.module.modules():
            trained.item(module.__dict__, "training")
        frame.guard.watch(trained)

    def _graph_of(self, frame: Frame, backend: str, others: Sequence[Tensor]) -> OneGraph:
        return OneGraph(frame.site.forward, backend, self._places)

    def _may_straighten(self, frame: Frame) -> bool:
        return True

    def may_save_itself(self) -> bool:
        """A graph saves other tensors than its model, and hooks on what is saved may ask which."""
        return True

    def _attach(self, out: Any) -> Any:
        """Its tensors as DTensors again, those inside of other objects (a cache of keys and values) where they are."""
        found = tensors_within(out)
        if [_kind_of(tensor)[:2] for tensor in found] != [kind[:2] for kind in self._shapes]:
            raise Refused("compiled, it returns other tensors")
        layouts = iter([layout for *_, layout in self._shapes])
        given = {id(tensor): layout for tensor, layout in zip(found, layouts)}
        out = map_tensors(out, lambda tensor: _attached(tensor, given[id(tensor)]))
        for tensor in found:
            _attached(tensor, given[id(tensor)])
        return out


def _called_by(frame: Frame) -> Iterator[Any]:
    """The sites of all modules that a call has called."""
    for child in frame.children:
        yield child.site
        yield from _called_by(child)


def _attached(tensor: Tensor, layout: Layout | None) -> Tensor:
    return tensor if layout is None or type(tensor) is DTensor else attach(tensor, layout)


def _kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, Layout | None]:
    return tensor.shape, tensor.dtype, layout_at(tensor)


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors of what a model returns, each once, in order; also those in attributes of objects there."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.setdefault(id(one), one)
        elif id(one) not in seen:
            seen.add(id(one))
            waiting += reversed(_parts_of(one))
    return list(found.values())


def _parts_of(value: Any) -> list:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, (type, nn.Module)) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())


class OneGraph:
    """A model's forward under a compiler that asks its own guards; it is compiled once."""

    def __init__(self, forward: Callable, backend: str, places: list[Place]) -> None:
        let_graphs_be_retained()
        self._places, self._made = places, 0
        self._backend = backend_named(backend)
        self._guarded = torch.compile(own_code(forward), backend=self._compile, fullgraph=True, dynamic=False)

    has_failed = False

    def _compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self._made += 1
        if self._made > 1:
            raise Again
        return self._backend(graph, inputs, **options)

    def __call__(self, args: tuple, kwargs: dict, hooks: object) -> Any:
        """The forward on plain tensors. Raises StaleRegion where the compiler's guards fail, Refused where it gives
        up; nothing has run then."""
        if compiler_is_asked_otherwise():
            raise Refused("torch.compiler is set otherwise")
        usual = [table[name] for table, name in self._places]
        held = aliases(usual)
        args, kwargs = map_tensors((args, kwargs), alias)
        for (table, name), tensor in zip(self._places, held):
            table[name] = tensor
        try:
            with contextlib.nullcontext() if self._made else saying_once():
                return self._guarded(*args, **kwargs)
        except compiler_errors() as error:
            if self._made > 1:
                raise StaleRegion("model") from None
            raise Refused(str(error).strip().partition("\n")[0]) from None
        finally:
            for (table, name), tensor in zip(self._places, usual):
                table[name] = tensor


class Again(Exception):
    """A compiler's guards failed: it would compile a call that was not recorded."""
