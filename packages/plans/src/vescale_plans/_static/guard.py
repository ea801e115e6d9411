"""The guard of a call: whether a module, and those below it, are as they were when it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, contains, getitem, is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only

from .reads import Reads, Unchanged

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
_layout, _forward, _requires_grad = attrgetter("_layout"), itemgetter("forward"), attrgetter("requires_grad")
_FORWARD = repeat("forward")


def has_gradient_hooks(tensors: Iterable[Tensor]) -> bool:
    """Whether somebody has hooks on the gradient of one of them, which run amid backward: those for what is added up
    (`register_post_accumulate_grad_hook`) as well, for sums over ranks start among them."""
    with local_only():
        return any(one._backward_hooks or _accumulate_hooks(one) for one in tensors)


def _accumulate_hooks(tensor: Tensor) -> Any:
    """Users' own; where gradients are reduced, a bucket has one beside, and keeps theirs."""
    owner = tensor.__dict__.get("_owner")
    return tensor._post_accumulate_grad_hooks if owner is None or owner.hooks is None else owner.hooks


class Guard:
    """Whether modules are as they were: their forwards, children, parameters (the very objects, their layouts, and
    whether they are frozen: what a frozen one's gradient would need is not recorded), buffers, hooks (on gradients of
    parameters there are none, see `judge`); and all that their forwards read beside these (`watch`).

    Asked at every call, so the loops are C's, and what had no hooks is looked at only where somebody has
    registered a hook since: every registration, of whatever hook, counts `RemovableHandle.next_id` up. What sites do
    to a module's attributes is no change: they say which forward there should be. Made while all stand.
    """

    def __init__(self, module: nn.Module, static: Any) -> None:
        modules = list(module.modules())
        hooks = [one.__dict__[name] for one in modules if one is not module for name in HOOKS]
        self._bare = [found for found in hooks if not found]
        self._registered = -1
        tables = [one.__dict__[name] for one in modules for name in _TABLES]
        self._empty = [found for found in tables if not found]
        filled = [found for found in (*hooks, *tables) if found]
        self._sized, self._sizes = filled, list(map(len, filled))
        places = [(table, name) for table in tables for name in table]
        self._places, self._names = [place for place, _ in places], [name for _, name in places]
        self._things = list(map(getitem, self._places, self._names))
        self._sharded = [thing for thing in self._things if type(thing) is DTensor]
        self._layouts = list(map(_layout, self._sharded))
        self._tensors = [thing for thing in self._things if isinstance(thing, Tensor)]  # plain buffers as well
        self._trained = self._are_trained()
        self._static, self._sites = static, static.sites_of(modules)
        self._placed = -1
        self._unchanged: Callable[[], bool] = bool  # nothing holds before `watch`

    def watch(self, reads: Reads) -> None:
        """From now on what was read is guarded as well."""
        self._unchanged = Unchanged(reads)

    def __call__(self) -> bool:
        if self._static.placed != self._placed:
            self._look_at_sites()
        try:
            return (
                (RemovableHandle.next_id == self._registered or self._are_bare())
                and not any(self._empty)
                and list(map(len, self._sized)) == self._sizes
                and all(map(is_, map(getitem, self._places, self._names), self._things))
                and list(map(_layout, self._sharded)) == self._layouts  # a layout equals itself alone
                and self._are_trained() == self._trained
                and all(map(is_, map(_forward, self._fronted), self._fronts))
                and not any(map(contains, self._bare_fronts, _FORWARD))
                and self._unchanged()
            )
        except KeyError:  # something was taken away
            return False

    def _look_at_sites(self) -> None:
        self._placed = self._static.placed
        fronted = [site for site in self._sites if site.front is not None]
        self._fronted, self._fronts = [site.module.__dict__ for site in fronted], [site.front for site in fronted]
        self._bare_fronts = [site.module.__dict__ for site in self._sites if site.front is None]

    def _are_trained(self) -> list[bool]:
        with local_only():  # once: entering costs more than a look
            return list(map(_requires_grad, self._tensors))

    def _are_bare(self) -> bool:
        registered = RemovableHandle.next_id
        if any(self._bare) or has_gradient_hooks(self._sharded):
            return False
        self._registered = registered
        return True
