"""The guard of a call: whether a module, and those below it, are as they were when it was recorded."""

from __future__ import annotations

from operator import attrgetter, getitem, is_, itemgetter

from torch import nn
from torch.utils.hooks import RemovableHandle

from vescale_dtensor import DTensor

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
_training, _layout = itemgetter("training"), attrgetter("_layout")


class Guard:
    """Whether modules and parameters are as they were: training, hooks, the parameters themselves and their layouts.

    Asked at every call, so the loops are C's, and modules without hooks are looked at only where somebody has
    registered a hook since: every registration, of whatever hook, counts `RemovableHandle.next_id` up.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        hooks = [one.__dict__[name] for one in modules if one is not module for name in _HOOKS]
        self._bare = [found for found in hooks if not found]
        self._hooked = [found for found in hooks if found]
        self._counts = list(map(len, self._hooked))
        self._registered = -1
        self._held = [one.__dict__ for one in modules]
        self._training = list(map(_training, self._held))
        places = [held for one in modules for held in (one._parameters, one._buffers)]
        self._places = [held for held in places for _ in held]
        self._names = [name for held in places for name in held]
        self._tensors = list(map(getitem, self._places, self._names))
        self._sharded = [tensor for tensor in self._tensors if type(tensor) is DTensor]
        self._layouts = list(map(_layout, self._sharded))

    def __call__(self) -> bool:
        try:
            return (
                (RemovableHandle.next_id == self._registered or self._are_bare())
                and list(map(len, self._hooked)) == self._counts
                and list(map(_training, self._held)) == self._training
                and all(map(is_, map(getitem, self._places, self._names), self._tensors))
                and list(map(_layout, self._sharded)) == self._layouts  # a layout equals itself alone
            )
        except KeyError:  # a parameter was taken away
            return False

    def _are_bare(self) -> bool:
        registered = RemovableHandle.next_id
        if any(self._bare):
            return False
        self._registered = registered
        return True
