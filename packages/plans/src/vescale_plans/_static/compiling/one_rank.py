"""Compile mode on a mesh of one rank: a compiler takes the model as it is, on plain tensors, as on one device.

There every layout says the same, no conversion moves anything, and a part is the whole. So what a region has to show
elsewhere (its code computes on shards what it computes on DTensors) holds by itself. What else its code may do is known
of modules that were looked through (`scan/`); of others, where they are those of libraries that are written for
compilers (`LIBRARIES`), the compiler reads the code, and asks its own guards in each call. What a compiler cannot be
asked is looked for in the recorded pass (`recorded.py`):

    random numbers   a graph draws its own
    hooks            of the user's, and those of a plan that do more than convert
    what is kept     a DTensor that outlives the call, beside what the model returns, would be a plain tensor next time;
                     a parameter that is returned would be another object
    what is written  to attributes of modules: values that change at each call would have it compiled at each call;
                     in place, to what a backward may need, which a compiler may compute again after the write

So nothing is compiled but after a recorded call. A call of other sizes runs as it is where the graph that there is
takes it (torch makes sizes dynamic that have changed). Where the compiler's guards fail, nothing has run yet, and the
call is recorded. Where the compiler gives up, regions are compiled as on any other mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import attach

from ..._apply.containers import map_tensors
from ..._torch_private import backend_named, compiler_errors, compiler_is_asked_otherwise, saying_once
from ..frame import Boundary, Frame, filled, layout_at, tensors_of
from ..reads import Changed, Reads
from ..static_region import Nested, Region, StaleRegion
from .graph import Place, let_graphs_be_retained, own_code
from .passage import Passage
from .recorded import Before, Refused, tensors_within

LIBRARIES = frozenset({"torch", "transformers"})
MOST_TIMES = 8  # that a model is recorded because its compiler's guards fail


class OneRank:
    """Whether a model's calls are compiled whole: on a mesh of one rank, until a compiler gives up."""

    def __init__(self, static: Any) -> None:
        self._static, self._times, self._given_up = static, 0, ""
        self._models: dict[tuple, WholeModel] = {}  # by keys without sizes
        self.key: tuple | None = None  # of the call that runs
        self.recorded: set[tuple] = set()  # keys that a graph may be made for, once each
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
            _check_known(frame)
            before.check(returned)
            found, kind = self.at(frame.key), _without_sizes(frame.key)
            if found is None:
                self._models[kind] = found = WholeModel(frame, self, self._static.backend, returned)
        except Refused as refused:
            _drop(self._static.root.regions.get(frame.key, []))
            return str(refused)
        self.recorded.add(frame.key)
        return found

    def at(self, key: tuple) -> WholeModel | None:
        """The model's region for calls of a key, which was found at another size perhaps."""
        found = self._models.get(_without_sizes(key)) if self._models else None
        return found if found is not None and found.holds() else None

    def take_failure(self, region: Region, why: StaleRegion) -> bool:
        """Notes that a call of a region did not run. Whether it was a model's, which is recorded anew."""
        if type(region) is not WholeModel:
            return False
        self._times += 1
        if isinstance(why, Refused):
            self._given_up = str(why)
        elif self._times > MOST_TIMES:
            self._given_up = f"its sizes, or Python state that it reads, have changed {self._times} times"
        if self._given_up:
            self.forget()
            for regions in self._static.root.regions.values():
                _drop(regions)
        return True

    def forget(self) -> None:
        """Every call is recorded anew."""
        self._models.clear()


def _drop(regions: list) -> None:
    """Takes models' regions out of a list."""
    regions[:] = [region for region in regions if type(region) is not WholeModel]


def _without_sizes(key: tuple) -> tuple:
    """A key, of layouts, tensors and values, as calls of other sizes have it."""
    found: list = []
    for part in key:
        if type(part) is Layout:
            found.append((part.mesh, part.states, part.ndim, part.is_untracked))
        elif type(part) is tuple and len(part) == 5 and type(part[0]) is torch.Size:
            shape, _, *kind = part
            found.append((len(shape), *kind))
        else:
            found.append(part)
    return tuple(found)


class WholeModel(Region):
    """A model on a mesh of one rank under one key: one graph, on plain tensors."""

    def __init__(self, frame: Frame, one_rank: OneRank, backend: str, returned: Any) -> None:
        """`returned`: what the recorded pass returned.

        Raises Refused where a hook stands on a module inside that does more than convert, and where a backward may
        begin at what no graph's end is told of.
        """
        self._one_rank = one_rank
        shown = {*map(id, tensors_of(returned))}
        if any(tensor.requires_grad for tensor in tensors_within(returned) if id(tensor) not in shown):
            raise Refused("it returns tensors with gradients inside of an object")  # where a backward may begin
        nested = {each.site: Nested(Boundary()) for each in _frames_in(frame)}
        super().__init__(frame, nested, {}, set(), backend)
        self.boundary = Boundary()
        if not all(self._hooks_of(site) is not None for site in nested):
            raise Refused("it has hooks inside that take global tensors")
        self._returned = [(*_kind_of(tensor), layout_at(tensor)) for tensor in tensors_within(returned)]
        frame.guard.watch(_reads_of(frame))

    def _graph_of(self, frame: Frame, backend: str, others: Sequence[Tensor]) -> OneGraph:
        return OneGraph(frame, self._one_rank, backend, self._places)

    def _may_straighten(self, frame: Frame) -> bool:
        return True

    def may_save_itself(self) -> bool:
        """A graph saves other tensors than its model, and hooks on what is saved may ask which."""
        return True

    def _attach(self, out: Any) -> Any:
        """Its tensors as DTensors again, those inside of other objects (a cache of keys and values) where they are."""
        found = tensors_within(out)
        if [_kind_of(tensor) for tensor in found] != [tuple(kind) for *kind, _ in self._returned]:
            raise Refused("compiled, it returns other tensors")
        given = {id(tensor): layout for tensor, (*_, layout) in zip(found, self._returned)}
        out = map_tensors(out, lambda tensor: _attached(tensor, given[id(tensor)]))
        for tensor in found:
            _attached(tensor, given[id(tensor)])
        return out


def _check_known(frame: Frame) -> None:
    """Raises Refused for a module whose code was not looked through, and is of no library that is known."""
    for each in (frame, *_frames_in(frame)):
        if each.reads is None and not all(_module_of(layer) in LIBRARIES for layer in _layers_of(each.site.forward)):
            raise Refused(f"the code of {each.site.name} is not looked through")


def _layers_of(forward: Any) -> Iterator[Any]:
    """A function, and what it wraps (`functools.wraps`)."""
    layer = getattr(forward, "__func__", forward)
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def _module_of(function: Any) -> str:
    """The package that a function is written in, whatever it says of itself."""
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]


def _reads_of(frame: Frame) -> Reads:
    """What was read by code that was looked through; of all modules, whether they train, and their classes' code."""
    reads = Reads()
    try:
        for each in (frame, *_frames_in(frame)):
            if each.reads is not None:
                reads.merge(each.reads)
        for module in frame.module.modules():
            reads.item(module.__dict__, "training")
            reads.attr(reads.kind(module), "forward")
    except Changed as changed:
        raise Refused(f"it finds another {changed} in one of the modules that it calls") from None
    return reads


def _frames_in(frame: Frame) -> Iterator[Frame]:
    for child in frame.children:
        yield child
        yield from _frames_in(child)


def _attached(tensor: Tensor, layout: Layout | None) -> Tensor:
    if layout is None or type(tensor) is DTensor:
        return tensor
    here = layout.with_shape(tensor.shape)
    return attach(tensor, here.untracked if layout.is_untracked else here)


def _kind_of(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.ndim, tensor.dtype


class OneGraph:
    """A model's forward under a compiler that asks its own guards. It is made for calls that were recorded."""

    has_failed = False

    def __init__(self, frame: Frame, one_rank: OneRank, backend: str, places: list[Place]) -> None:
        let_graphs_be_retained()
        self._name, self._reach = type(frame.module).__name__, frame.reach
        self._places, self._one_rank = places, one_rank
        self._backend = backend_named(backend)
        self._guarded = torch.compile(own_code(frame.site.forward), backend=self._compile, fullgraph=True)

    def _compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        if self._one_rank.key not in self._one_rank.recorded:
            raise Unrecorded
        self._one_rank.recorded.remove(self._one_rank.key)
        return self._backend(graph, inputs, **options)

    def __call__(self, args: tuple, kwargs: dict, hooks: object) -> Any:
        """The forward on plain tensors. Raises StaleRegion where the compiler's guards fail, Refused where it gives
        up; nothing has run then."""
        if compiler_is_asked_otherwise():
            raise Refused("torch.compiler is set otherwise")
        usual = [table[name] for table, name in self._places]
        given, passage = (args, kwargs), Passage(self._name, self._reach)
        entered = passage.enter([*usual, *tensors_of(given)])
        args, kwargs = filled(given, entered[len(usual) :])
        for (table, name), tensor in zip(self._places, entered):
            table[name] = tensor
        may_be_made = self._one_rank.key in self._one_rank.recorded
        try:
            with saying_once() if may_be_made else contextlib.nullcontext():
                return passage.leave(self._guarded(*args, **kwargs))
        except compiler_errors() as error:
            if not may_be_made:
                raise StaleRegion("model") from None
            raise Refused(str(error).strip().partition("\n")[0]) from None
        finally:
            for (table, name), tensor in zip(self._places, usual):
                table[name] = tensor


class Unrecorded(Exception):
    """A compiler's guards failed: it would compile a call that was not recorded."""
