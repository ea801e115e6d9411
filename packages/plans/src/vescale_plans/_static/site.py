"""Where static mode meets a module: a site stands before its forward, and holds what was found about it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from .._calls.alone import Alone, State
from .._calls.chain import Hook, hooks_after, hooks_before
from . import passes
from .static_region import Eager, Region

STATIC, DRAWN, EAGER, UNSEEN = "static", "static, draws its region", "eager", "not called"


class Sites(Protocol):
    """What a site belongs to: static mode of one model (`Static`)."""

    placed: int
    """How often sites have been put before forwards, or taken away."""

    def call(self, site: Site, args: tuple, kwargs: dict) -> Any:
        """The module's call, where no pass is running."""

    def sites_of(self, modules: Sequence[nn.Module]) -> list[Site]:
        """Of modules of the model."""


class Site(Alone):
    """Stands before the forward of one module; `forward` is the module's own."""

    def __init__(self, static: Sites, module: nn.Module, name: str) -> None:
        self.static, self.module, self.name = static, module, name
        self.forward, self.own = module.forward, None
        self.front = module.__dict__.get("forward")
        self.refresh()
        self.regions: dict[tuple, list[Region | Eager]] = {}
        self.recordings = 0
        self.again: set[tuple] = set()  # keys that are recorded anew to be verified: no misses
        self.retired = ""
        self.was_static = False
        self.verdict, self.reason = UNSEEN, None

    def refresh(self) -> bool:
        """Whether somebody has put another forward on the module, or on its class, which is taken from now on."""
        before, held = self.forward, self.module.__dict__.get("forward")
        if held is not self:
            self.front = held
            while isinstance(held, Site) and held.module is self.module:
                held = held.own  # a site that stood here, put back
            self.own = held  # where somebody has put one on the object
        self.forward = self.own if self.own is not None else type(self.module).forward.__get__(self.module)
        return self.forward != before

    @property
    def is_covered(self) -> bool:
        """Whether somebody has put another forward on the module since, which may well call this one."""
        held = self.module.__dict__.get("forward")
        return held is not None and held is not self and held is not self.own

    def succeeded(self) -> Site:
        """The site of the forward that covers this one, which from now on is the function that it stood before."""
        after = Site(self.static, self.module, self.name)
        after.recordings, after.retired = self.recordings, self.retired
        self.__class__ = _Covered
        return after

    def stand(self, stands: bool) -> None:
        """Puts the site before its module's forward, or takes it away."""
        held = self.module.__dict__
        if held.get("forward") is not self.front:
            return  # somebody's, which the next recording takes in
        self.front = self if stands else self.own
        if self.front is not None:
            held["forward"] = self.front
        else:
            held.pop("forward", None)
        if self.front is self:
            State(self.module)

    def leave(self, held: dict) -> None:
        if held.get("forward") is self:
            del held["forward"]
            if self.own is not None:
                held["forward"] = self.own

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    @property
    def line(self) -> str:
        """Where the module's forward is written."""
        code = getattr(inspect.unwrap(getattr(self.forward, "__func__", self.forward)), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = passes.running
        if now is not None:
            return now.enter(self, args, kwargs)
        return self.static.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the forward itself says of itself (`__func__`, `__name__`, `__wrapped__`)."""
        if name == "forward":
            raise AttributeError(name)
        return getattr(self.forward, name)

    def __deepcopy__(self, memo: dict) -> Any:
        """A copy of a model is eager: of its modules nothing is known yet."""
        module = memo.get(id(self.module))
        return type(self.module).forward.__get__(module) if module is not None else self

    def has_foreign_hooks(self) -> bool:
        """Whether hooks stand on the module that must see DTensors: it cannot be called inside a region."""
        backward = self.module._backward_hooks or self.module._backward_pre_hooks
        return bool(backward) or not all(hook.knows_plain for hook in self._hooks)

    def has_odd_boundary(self) -> bool:
        """Whether a boundary of ours stands on the module that changes what its forward computes with."""
        odd = [hook for hook in self._hooks if hook.is_ours and not hook.knows_plain]
        return any(hook.step is None or hook.step.name != "checkpoint" for hook in odd)

    @property
    def _hooks(self) -> list[Hook]:
        return [*hooks_before(self.module), *hooks_after(self.module)]


class _Covered(Site):
    """A site over which somebody has put a forward that may call it: the function that it stood before."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)
