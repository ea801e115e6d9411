"""Activation memory: modules whose activations are computed again in backward, and gathered activations that are
gathered again.

A checkpointed module is torch's own non-reentrant checkpoint, put around the module's
forward by hooks (`checkpoint.py`), so that its forward, its names and its type stay.
What enters it is kept as it is sharded outside: a conversion at its border is inside,
and made again. A HuggingFace cache of keys and values does not enter it while gradients
are recorded: the second computation would append to it again, and attend to what the
first one left there.

Regathering keeps, in place of an activation that a conversion gathered, the shard that
it was gathered from (Korthikanti et al., arXiv 2205.05198, section 4.2.2: the
all-gather of a sequence-parallel linear is made again in its backward). While a module
runs, the conversions inside are watched; what autograd saves goes through hooks, which
know a gathered result by its storage and save a `Gathered` in its place. Linears that
share one gathered input share the second gather too.

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
from vescale_dtensor.engine import Route, communicates, local_only, route_between, set_cause, set_watch

from .._plan.validate import CONTAINERS
from .checkpoint import Checkpoint

Watch = Callable[..., Tensor]
"""What `set_watch` takes: called in place of a conversion, with what would make it."""
CAUSE = Cause("regather", direction="backward")


def install_recompute(model: nn.Module, checkpointed: tuple[str, ...], regathered: Mapping[str, bool]) -> None:
    """Install before boundaries: what a border converts on the way in lies inside. Arguments: see `Fit`."""
    for name in checkpointed:
        module = model.get_submodule(name)
        Checkpoint(module)
        module.register_forward_pre_hook(_without_cache, with_kwargs=True)
    for module, regathers in _turns(model, regathered, checkpointed):
        region = Regathering() if regathers else Keeping()
        module.register_forward_pre_hook(region.enter, prepend=True)
        module.register_forward_hook(region.leave, always_call=True)


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
    model: nn.Module, decided: Mapping[str, bool], checkpointed: tuple[str, ...]
) -> Iterator[tuple[nn.Module, bool]]:
    """The modules at which the decision is another than around them. A checkpoint gathers again by itself."""
    effective = {"": decided.get("", False)}
    if effective[""]:  # a part, copied, of a model of which all that is around it regathers
        yield model, True
    for name, module in model.named_modules():
        if not name:
            continue
        around = effective[name.rpartition(".")[0]]
        if isinstance(module, CONTAINERS):  # never called: what is around it goes on in it
            effective[name] = around
            continue
        inside_one = any(f"{name}.".startswith(f"{one}.") for one in checkpointed)
        effective[name] = decided.get(name, around) and not inside_one
        if effective[name] != around:
            yield module, effective[name]


class Gathered:
    """A gathered activation that is not kept: its shard, and how to gather it."""

    def __init__(self, shard: Tensor, route: Route, version: int) -> None:
        self._shard, self._route = shard, route
        self._version = shard._version
        self.version = version  # of the whole, when it was gathered
        self.saved = 0
        self._asked = 0
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        """Gathered again; kept until all who saved it have asked. Call with dispatch disabled."""
        if self._shard._version != self._version:
            what = "a shard that is to be gathered again was written in place after it was gathered"
            raise _written(what, self._shard)
        whole = self._whole
        if whole is None:
            set_cause(CAUSE)
            whole = self._whole = self._route(self._shard)
        self._asked += 1
        if self._asked >= self.saved:
            self._whole, self._asked = None, 0
        return whole


class View(NamedTuple):
    """What is saved in place of a tensor over a gathered storage."""

    of: Gathered
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Kept(NamedTuple):
    """What is saved of any other tensor: itself. Under hooks autograd does not check that nobody wrote to it."""

    tensor: Tensor
    version: int


class Regathering:
    """The hooks of a module inside which gathered activations are not kept for backward."""

    def __init__(self) -> None:
        self._running: list[tuple[saved_tensors_hooks, Watch | None]] = []
        self._known: dict[int, tuple[StorageWeakRef, Gathered]] = {}

    def enter(self, module: nn.Module, args: tuple) -> None:
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        _active.append(hooks)
        around = set_watch(None)
        set_watch(self._watch_over(around, hooks))
        self._running.append((hooks, around))

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._running:
            return
        hooks, around = self._running.pop()
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
                        self._note(tensor, out, route_between(source, target))
            return out

        return watch

    def _note(self, shard: Tensor, whole: Tensor, route: Route) -> None:
        storage = whole.untyped_storage()
        known = self._known.get(storage._cdata)  # the weak reference keeps the address taken
        if known is None or known[1].version != whole._version:
            self._known[storage._cdata] = (StorageWeakRef(storage), Gathered(shard.detach(), route, whole._version))

    def _pack(self, tensor: Tensor) -> Kept | View:
        with local_only():
            known = self._known.get(tensor.untyped_storage()._cdata)
            if known is None or known[1].version != tensor._version:
                return Kept(tensor.detach(), tensor._version)
            known[1].saved += 1
            return View(known[1], tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


class Keeping:
    """The hooks of a module that keeps what autograd saves, inside a regathering one."""

    def __init__(self) -> None:
        self._paused: list[saved_tensors_hooks | None] = []

    def enter(self, module: nn.Module, args: tuple) -> None:
        hooks = _active[-1] if _active else None
        if hooks is not None:
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is not None and top[0] is hooks.pack_hook:
                hooks.__exit__(None, None, None)
            else:  # somebody else's hooks are inside ours, and see what is saved
                hooks = None
        self._paused.append(hooks)
        _active.append(None)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._paused:
            return
        _active.pop()
        hooks = self._paused.pop()
        if hooks is not None:
            hooks.__enter__()


# The regathering modules that run, innermost last; None for one that keeps.
_active: list[saved_tensors_hooks | None] = []


def _unpack(saved: Kept | View) -> Tensor:
    """What autograd gets back in backward."""
    with local_only(), torch.no_grad():
        if isinstance(saved, View):
            return saved.of.whole().as_strided(saved.shape, saved.stride, saved.offset)
        if saved.tensor._version != saved.version:
            raise _written("a tensor that backward needs was written in place after it was used", saved.tensor)
        return saved.tensor


def _written(what: str, tensor: Tensor) -> GradientError:
    return GradientError(
        "backward", what, [f"local shape  {list(tensor.shape)}"], [("x = x + y", "in place of x += y")]
    )
