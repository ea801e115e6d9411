"""Static mode: modules that were shown to compute on shards what they compute on DTensors run on plain tensors.

    site        stands before a module's forward: runs a region whose key fits, or lets a pass be recorded
    recording   an eager pass, written down; every call in it is judged by a trial (`trials/trial.py`)
    region      the largest module that is static with all that it calls; the rest stays eager

A key is what a caller may change: layouts, sizes, strides, dtypes and devices of the
tensors, all other arguments, grad mode, autocast. What is the module's own, training,
hooks and the parameters themselves, is asked of the module at each call (`Region.holds`).
A key that is new, or a guard that does not hold, records anew; what misses too often stays
eager, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vescale_dtensor.engine import Difference, check_order, grad_state, is_strict, wrap

from .._plan.parts import PlanError
from .._torch_private import _are_functorch_transforms_active, _len_torch_function_stack
from .compiling.graph import StaticWarning
from .compiling.one_rank import OneRank
from .frame import Frame
from .key import foreign_global_hooks, take_key
from .mode import check_compiler, is_watched
from .reads import Changed, Reads
from .record import Recording
from .site import DRAWN, EAGER, STATIC, UNSEEN, Site
from .static_region import Eager, Nested, Region, StaleRegion
from .threads import are_others_looking

MISSES = 8  # recordings of one module after its first; then it stays eager
_MISS = object()


class Static:
    """Static mode of one model.

    With `is_auto` it says nothing of what stays eager, and steps aside at calls that somebody looks at (`is_watched`):
    for `watchers`, those who look at the model by other means and say so, and for what the process is watched by.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.verify_every, self.backend = model, 0, ""
        self.is_auto, self.watchers = False, 0
        self.sites = {id(m): Site(self, m, name or type(m).__name__) for name, m in model.named_modules()}
        self.root = self.sites[id(model)]
        self._runtime = getattr(model._vescale, "runtime", None)  # of a pipeline, whose stages' units are called
        self._steps = self.placed = 0
        self._one_rank = OneRank(self)
        self._place()

    # --- where sites stand -----------------------------------------------------------

    def _place(self) -> None:
        """A site stands where something may have to be done; all other modules are as they were."""
        needed = {self.root}
        for site in self.sites.values():
            if site.regions:
                needed.add(site)
            for region in _regions_of(site):
                needed |= region.unseen
                needed |= {inner for inner, nested in region.nested.items() if nested.boundary or nested.drawn}
        for site in self.sites.values():
            stands = site in needed or (self._runtime is not None and site.verdict is UNSEEN)
            site.stand(stands and not (site.retired and site is not self.root))
        self.placed += 1

    def _welcome(self) -> None:
        """Modules, and forwards, that the model has since it became static."""
        self._register()
        changed = False
        for key, site in list(self.sites.items()):
            if site.is_covered:
                self.sites[key] = site.succeeded()
                changed = True
            else:
                changed = site.refresh() or changed
        if changed:
            self.root = self.sites[id(self.model)]
            for site in self.sites.values():
                site.regions.clear()

    def _register(self) -> None:
        """Sites for modules that came to the model since."""
        for name, module in self.model.named_modules():
            if id(module) not in self.sites:
                self.sites[id(module)] = Site(self, module, name)

    def sites_of(self, modules: Sequence[nn.Module]) -> list[Site]:
        """Of modules of the model, one that its own forward has just put in place among them."""
        if any(id(one) not in self.sites for one in modules):
            self._register()
        return [self.sites[id(one)] for one in modules]

    def _arm(self, module: nn.Module) -> None:
        for inner in module.modules():
            self.sites[id(inner)].stand(True)
        self.placed += 1

    # --- calls -----------------------------------------------------------------------

    def call(self, site: Site, args: tuple, kwargs: dict) -> Any:
        """A module with a site is called, and no pass is running."""
        if not self.is_auto:
            check_order("static", "a static module computes")
        elif self.watchers or is_watched():
            return site.forward(*args, **kwargs)
        if are_others_looking():
            return site.forward(*args, **kwargs)
        if self._runtime is not None:
            if self._runtime.is_above_units:
                return self._above_units(site, args, kwargs)
            if self._runtime.calls != self._steps:
                self._count_step(self._runtime.calls)
        elif site is self.root:
            self._count_step(self._steps + 1)
        if site.retired or is_strict() or _len_torch_function_stack() or _are_functorch_transforms_active():
            return site.forward(*args, **kwargs)
        key, unwrapped = take_key(args, kwargs)
        try:
            if key is None or foreign_global_hooks():
                region = None
            else:
                region = _MISS
                for each in site.regions.get(key, ()):
                    if each.holds():
                        region = each
                        break
                if site is self.root:
                    self._one_rank.key = key
                    if region is _MISS:
                        region = self._one_rank.at(key) or _MISS
            if isinstance(region, Region) and not (grad_state()[1] and region.may_save_itself()):
                try:
                    return region.run(args, kwargs, unwrapped)
                except StaleRegion as stale:
                    if self._one_rank.take_failure(region, stale):
                        site.again.add(key)
                    region = _MISS
        finally:
            wrap(unwrapped)
        if region is _MISS:
            return self._record(site, key, args, kwargs)
        return site.forward(*args, **kwargs)

    def _count_step(self, steps: int) -> None:
        """The model is called, for the `steps`th time."""
        self._steps = steps
        if self.verify_every and self._steps % self.verify_every == 0:
            self._forget()

    def _above_units(self, site: Site, args: tuple, kwargs: dict) -> Any:
        """Under a pipeline: user code that spans stages runs on placeholders; each unit that it calls is a root."""
        if site.verdict is UNSEEN and not _len_torch_function_stack():  # not the dry run, which calls every module
            why = "spans stages of the pipeline: its own code runs on placeholders for what other stages compute"
            site.verdict, site.reason = EAGER, Difference(why, site.line)
        return site.forward(*args, **kwargs)

    def _record(self, site: Site, key: tuple, args: tuple, kwargs: dict) -> Any:
        """An eager call, written down; what was found about it is in force from the next call on."""
        if site.retired or self._is_dry or self._is_retired_by(site, key):
            return site.forward(*args, **kwargs)
        recording = Recording()
        self._welcome()
        self._arm(site.module)
        before = self._one_rank.begin((args, kwargs)) if site is self.root and key is not None else None
        try:
            out = recording.run(site, args, kwargs)
            self._decide(recording.root, lambda frame: self._one_rank.region_of(frame, before, out))
        finally:
            self._place()
        return out

    @property
    def _is_dry(self) -> bool:
        return any(tensor.is_meta for tensor in self.model.parameters())

    def _is_retired_by(self, site: Site, key: tuple) -> bool:
        """Counts a recording that the module's own call has made necessary."""
        if key in site.again:
            site.again.remove(key)
            return False
        site.recordings += 1
        if site.recordings > MISSES + 1:
            self._retire(site, f"its inputs or its state differ at every call: recorded {MISSES} times anew")
            self._place()
        return bool(site.retired)

    def _retire(self, site: Site, why: str) -> None:
        for region in _regions_of(site):
            for inner in region.nested:
                inner.verdict, inner.reason = EAGER, Difference(f"is called by {site.name}: {why}", site.line)
        site.retired, site.verdict, site.reason = why, EAGER, Difference(why, site.line)
        site.regions.clear()
        if not self.is_auto:
            warnings.warn(f"{site.name} stays eager: {why}", StaticWarning, stacklevel=2)

    def _forget(self) -> None:
        """Every module is recorded anew; what is not as static as before stays eager."""
        self._one_rank.forget()
        for site in self.sites.values():
            site.was_static = site.verdict is STATIC
            site.again |= set(site.regions)
            site.regions.clear()

    # --- what was found --------------------------------------------------------------

    def _decide(self, root: Frame, whole_of: Callable[[Frame], Region | str]) -> None:
        """Makes the largest static frames regions, and notes the verdict on every module that was called. `whole_of`:
        what the model is where it is not static, a region all the same or a reason why not."""
        self._register()
        verdicts: dict[Site, tuple[str, Difference | None]] = {}
        waiting = [root]
        while waiting:
            frame = waiting.pop()
            site = frame.site
            region, reason = (None, None) if site.retired else _region_of(frame, self.sites, self.backend)
            if region is None and frame is root:
                region, reason = _one_graph_or_not(whole_of(frame), reason)
            if region is not None:
                if not any(each.holds() for each in site.regions.get(frame.key, ())):
                    site.regions.setdefault(frame.key, []).append(region)
                _note(verdicts, site, STATIC, None)
                for inner, nested in region.nested.items():
                    _note(verdicts, inner, DRAWN if nested.drawn is not None else STATIC, None)
                continue
            _note(verdicts, site, EAGER, reason if reason is not None else site.reason)
            waiting += frame.children
        if root.key is not None and EAGER in verdicts[root.site]:
            root.site.regions.setdefault(root.key, []).append(Eager(root.module))
        for site, (verdict, reason) in verdicts.items():
            if site.was_static and verdict is EAGER and not site.retired:
                self._retire(site, f"it was static, and is not any more: {reason.what}")
            site.verdict, site.reason, site.was_static = verdict, reason, False


def _region_of(frame: Frame, sites: dict[int, Site], backend: str) -> tuple[Region | None, Difference | None]:
    """The region of a frame, or why there is none."""
    if frame.reason is not None:
        return None, frame.reason
    if frame.key is None:
        return None, Difference("takes something that no guard can compare", frame.site.line)
    nested: dict[Site, Nested] = {}
    boundaries: dict[Any, Any] = {}
    waiting = [frame]
    while waiting:
        one = waiting.pop()
        for converter, step in one.crossed.items():
            if boundaries.setdefault(converter, step) != step:
                return None, Difference("meets a boundary of the plan with inputs in two layouts", frame.site.line)
        for child in one.children:
            if child.reason is not None and not child.draws:
                return None, Difference(f"calls {child.site.name}, which is eager", child.reason.line)
            boundary = child.boundary if child.draws else child.boundary.inside()
            drawn = tuple(child.layouts) if child.draws else None
            found = Nested(boundary, drawn, child.first, child.boundary.is_compilable)
            if nested.setdefault(child.site, found) != found:
                return None, Difference(f"calls {child.site.name} with inputs in two layouts", child.site.line)
            waiting.append(child)
    try:
        reads = _reads_of(frame)
    except Changed as changed:
        return None, Difference(f"finds another {changed} in one of the modules that it calls", frame.site.line)
    frame.guard.watch(reads)
    unseen = {sites[id(m)] for m in frame.module.modules()} - set(nested) - {frame.site}
    return Region(frame, nested, boundaries, unseen, backend, reads.plain_tensors() if backend else []), None


def _one_graph_or_not(found: Region | str, reason: Difference | None) -> tuple[Region | None, Difference | None]:
    """Of a model that is no region as others are: the one that it is on a mesh of one rank, or why it is none."""
    if isinstance(found, Region):
        return found, None
    if found and reason is not None:
        reason = replace(reason, what=f"{reason.what}; on one rank it is not compiled whole, for {found}")
    return None, reason


def _reads_of(frame: Frame) -> Reads:
    """What the code of a frame, and of all that it calls, has read."""
    reads, waiting = Reads(), [frame]
    while waiting:
        one = waiting.pop()
        reads.merge(one.reads)
        waiting += one.children
    return reads


def _note(verdicts: dict, site: Site, verdict: str, reason: Difference | None) -> None:
    """A module that is called several times is as static as its least static call."""
    if site not in verdicts or verdict is EAGER:
        verdicts[site] = (verdict, reason)


def _regions_of(site: Site) -> Iterator[Region]:
    for regions in site.regions.values():
        yield from (region for region in regions if isinstance(region, Region))


# --- in use --------------------------------------------------------------------------


def static(model: nn.Module, verify_every: int = 0, *, compiler: str = "") -> nn.Module:
    """Puts a parallelized model into static mode, in place: from the second call on, modules whose code gives the same
    result on local tensors run on plain tensors.

    Arguments:
        model: a parallelized model.
        verify_every: every so many calls of the model, everything is recorded and tried again, eagerly. A module that
            no longer holds stays eager, with a StaticWarning. 0: never.
        compiler: a backend of torch.compile ("inductor") that compiles each of the largest static modules as one graph,
            with its collectives; "": none. A module that draws random numbers, or does not compile to one graph, stays
            uncompiled.

    Returns: the model. Without a compiler, results are bitwise those of eager mode.

    Raises PlanError if the model is not parallelized, or if "inductor" finds no compiler for its generated code. No
    communication.
    """
    if not hasattr(model, "_vescale"):
        raise PlanError("static", "the model is not parallelized", (), [("parallelize(plan, model) first", "")])
    if verify_every < 0:
        raise PlanError(
            "static", f"verify_every is {verify_every}, which is not a number of steps", (), [("0: never", "")]
        )
    check_compiler("static", compiler, model._vescale.device_mesh.device_type)
    run_static(model, verify_every, compiler)
    return model


def run_static(model: nn.Module, verify_every: int = 0, compiler: str = "", is_auto: bool = False) -> None:
    """Puts a parallelized model under static mode, or changes how it runs there."""
    held = model._vescale
    if held.static is None:
        held.static = Static(model)
    held.static.verify_every, held.static.backend, held.static.is_auto = verify_every, compiler, is_auto
