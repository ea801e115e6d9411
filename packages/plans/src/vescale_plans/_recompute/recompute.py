"""Activation memory: modules whose activations are computed again in backward, gathered activations that are
gathered again, and those that lie on the host.

A checkpointed module is torch's own non-reentrant checkpoint, put around the module's
forward by a step of its chain (`checkpoint.py`), so that its forward, its names and its type stay.
What enters it is kept as it is sharded outside: a conversion at its boundary is inside,
and made again. A HuggingFace cache of keys and values does not enter it while gradients
are recorded: the second computation would append to it again, and attend to what the
first one left there.

Regathering keeps, in place of an activation that a conversion gathered, the shard that
it was gathered from (Korthikanti et al., arXiv 2205.05198, section 4.2.2: the
all-gather of a sequence-parallel linear is made again in its backward). While a module
runs, the conversions inside are watched; what autograd saves goes through hooks, which
know a gathered result by its storage and save a `Gathered` in its place. Linears that
share one gathered input share the second gather too.

Offloading puts what is left to keep in the host's memory, through the same hooks
(`host.py`): of a checkpointed module what it was called with, of a regathered
activation its shard.

Cost: forward one look-up per saved tensor; backward one all-gather per gathered activation.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vescale_dtensor import GradientError
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import Route, communicates, local_only, route_of, set_cause, set_watch

from .._calls.chain import add_step
from .._plan.validate import CONTAINERS
from .._torch_private import _top_saved_tensors_default_hooks
from .checkpoint import Checkpoint
from .host import Host, Placed

Watch = Callable[..., Tensor]
"""Argument of `set_watch`: called in place of a conversion, with what would make it."""
CAUSE = Cause("regather", direction="backward")


def install_recompute(
    model: nn.Module, checkpointed: tuple[str, ...], regathered: Mapping[str, bool], offloaded: Mapping[str, bool]
) -> Host | None:
    """Install before boundaries: what a boundary converts on the way in lies inside. Arguments: see `Fit`. Gives where
    activations are, if any are offloaded."""
    host = Host() if any(offloaded.values()) else None
    regions = {
        module: Saving(regathers, host if offloads else None) if regathers or offloads else Keeping()
        for module, regathers, offloads in _turns(model, regathered, offloaded, checkpointed)
    }
    for name in checkpointed:
        module = model.get_submodule(name)
        Checkpoint(module, regions.pop(module, None), host)
        add_step(module, "cache", before=_without_cache)
    for module, region in regions.items():
        add_step(module, "saving", region.enter, region.leave)
    return host


def _without_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """The arguments with None for a cache, as transformers' own checkpointing has them; runs both times."""
    known = sys.modules.get("transformers.cache_utils")
    if known is None or not torch.is_grad_enabled():
        return None
    if not any(isinstance(value, known.Cache) for value in (*args, *kwargs.values())):
        return None
    warnings.warn(
        "vescale_plans: a checkpointed module fills no cache of keys and values while gradients are recorded; "
        "config.use_cache=False says so to the model",
        stacklevel=2,
    )

    def kept(value: Any) -> Any:
        return None if isinstance(value, known.Cache) else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}


def _turns(
    model: nn.Module, regathered: Mapping[str, bool], offloaded: Mapping[str, bool], checkpointed: tuple[str, ...]
) -> Iterator[tuple[nn.Module, bool, bool]]:
    """The modules at which a decision is another than around them. A checkpoint gathers again by itself, and keeps
    nothing inside; what it is called with may be on the host."""
    effective = {"": (regathered.get("", False), offloaded.get("", False))}
    if any(effective[""]):  # a part, copied, of a model of which all that is around it regathers
        yield model, *effective[""]
    for name, module in model.named_modules():
        if not name:
            continue
        around = effective[name.rpartition(".")[0]]
        if isinstance(module, CONTAINERS):  # never called: what is around it goes on in it
            effective[name] = around
            continue
        inside = [one for one in checkpointed if f"{name}.".startswith(f"{one}.")]
        effective[name] = (
            regathered.get(name, around[0]) and not inside,
            offloaded.get(name, around[1]) and not any(one != name for one in inside),
        )
        if effective[name] != around and not any(one != name for one in inside):
            yield module, *effective[name]


class Gathered:
    """A gathered activation that is not kept: its shard, and how to gather it."""

    def __init__(self, shard: Tensor, route: Route, version: int) -> None:
        self._shard: Tensor | Placed = shard
        self._route = route
        self._version = shard._version
        self.version = version  # of the full tensor, when it was gathered
        self.saved = 0
        self._asked = 0
        self._full: Tensor | None = None

    def full(self) -> Tensor:
        """Gathered again; kept until all who saved it have asked. Call with dispatch disabled."""
        shard, full = self._shard, self._full
        if isinstance(shard, Tensor) and shard._version != self._version:
            what = "a shard that is to be gathered again was written in place after it was gathered"
            raise _written(what, shard)
        if full is None:
            shard = shard if isinstance(shard, Tensor) else shard.tensor()
            set_cause(CAUSE)
            full = self._full = self._route(shard)
        self._asked += 1
        if self._asked >= self.saved:
            self._full, self._asked = None, 0
        return full

    def offload(self, host: Host) -> None:
        """The shard lies on the host, unless it is written already, or worth no way."""
        if isinstance(self._shard, Tensor) and self._shard._version == self._version:
            self._shard = host.place(self._shard) or self._shard


class View(NamedTuple):
    """Saved in place of a tensor over a gathered storage."""

    of: Gathered
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Kept(NamedTuple):
    """Any other tensor, saved as itself. Under hooks autograd does not check that nobody wrote to it."""

    tensor: Tensor
    version: int


class Saving:
    """The hooks of a module inside which gathered activations are not kept for backward, or what is kept lies on a
    host."""

    def __init__(self, regathers: bool, host: Host | None) -> None:
        self._regathers, self._host = regathers, host
        self._running: list[tuple[saved_tensors_hooks, Watch | None]] = []
        self._known: dict[int, tuple[StorageWeakRef, Gathered]] = {}

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        _active.append(hooks)
        around = set_watch(None)
        set_watch(self._watch_over(around, hooks) if self._regathers else around)
        if self._host is not None:
            self._host.enter(module)
        self._running.append((hooks, around))

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        hooks, around = self._running.pop()
        if self._host is not None:
            self._host.leave()
        set_watch(around)
        _active.pop()
        hooks.__exit__(None, None, None)
        if not self._running:
            self._known.clear()

    def _watch_over(self, around: Watch | None, hooks: saved_tensors_hooks) -> Watch:
        def watch(make, tensor: Tensor, source, target, *how) -> Tensor:
            out = around(make, tensor, source, target, *how) if around else make(tensor, source, target, *how)
            if _active[-1] is hooks and torch.is_grad_enabled() and communicates(source, target):
                with local_only():
                    if out.numel() > tensor.numel():
                        self._note(tensor, out, route_of(source, target))
            return out

        return watch

    def _note(self, shard: Tensor, full: Tensor, route: Route) -> None:
        storage = full.untyped_storage()
        known = self._known.get(storage._cdata)  # the weak reference keeps the address taken
        if known is None or known[1].version != full._version:
            self._known[storage._cdata] = (StorageWeakRef(storage), Gathered(shard.detach(), route, full._version))

    def _pack(self, tensor: Tensor) -> Kept | View | Placed:
        with local_only():
            known = self._known.get(tensor.untyped_storage()._cdata) if self._known else None
            if known is None or known[1].version != tensor._version:
                with torch.no_grad():
                    placed = self._host.place(tensor) if self._host is not None else None
                return placed or Kept(tensor.detach(), tensor._version)
            if self._host is not None:
                with torch.no_grad():
                    known[1].offload(self._host)
            known[1].saved += 1
            return View(known[1], tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


class Keeping:
    """The hooks of a module that keeps what autograd saves, inside a regathering one."""

    def __init__(self) -> None:
        self._paused: list[saved_tensors_hooks | None] = []

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        hooks = _active[-1] if _active else None
        if hooks is not None:
            top = _top_saved_tensors_default_hooks(True)
            if top is not None and top[0] is hooks.pack_hook:
                hooks.__exit__(None, None, None)
            else:  # somebody else's hooks are inside ours, and see what is saved
                hooks = None
        self._paused.append(hooks)
        _active.append(None)

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        _active.pop()
        hooks = self._paused.pop()
        if hooks is not None:
            hooks.__enter__()


# The regathering modules that run, innermost last; None for one that keeps.
_active: list[saved_tensors_hooks | None] = []


def _unpack(saved: Kept | View | Placed) -> Tensor:
    """Returns the tensor that autograd gets back in backward."""
    with local_only(), torch.no_grad():
        if isinstance(saved, Placed):
            return saved.tensor()
        if isinstance(saved, View):
            return saved.of.full().as_strided(saved.shape, saved.stride, saved.offset)
        if saved.tensor._version != saved.version:
            raise _written("a tensor that backward needs was written in place after it was used", saved.tensor)
        return saved.tensor


def _written(what: str, tensor: Tensor) -> GradientError:
    return GradientError(
        "backward", what, [f"local shape  {list(tensor.shape)}"], [("x = x + y", "in place of x += y")]
    )
