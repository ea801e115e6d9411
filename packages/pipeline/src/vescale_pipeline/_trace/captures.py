"""Hooks by which a library collects what layers return, for the forward that calls them to return it too.

Of all hooks these alone are called in a dry run, and of a unit on every stage, with placeholders: they look at no value
and leave nothing behind but in a collector of the forward's. What any other would do with a placeholder nobody knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

LIBRARIES = frozenset(("transformers.utils.output_capturing",))
"""Modules whose hooks are of this kind."""


def captures(module: nn.Module) -> dict[int, Callable]:
    """Returns a module's forward hooks of this kind, by their ids."""
    return {key: hook for key, hook in module._forward_hooks.items() if is_capture(hook)}


def is_capture(hook: Callable) -> bool:
    return getattr(hook, "__module__", None) in LIBRARIES


def tell(module: nn.Module, args: tuple, out: Any) -> bool:
    """Calls them with what the module was given and has returned. Whether a collector has taken anything."""
    hooks = captures(module)
    if not hooks:
        return False
    before = _collected()
    for hook in hooks.values():
        hook(module, args, out)
    return _collected() > before


def _collected() -> int:
    """Returns how many values the forward's collector has."""
    held = [getattr(sys.modules.get(name), "_active_collector", None) for name in LIBRARIES]
    collectors = [one.get() for one in held if one is not None]
    return sum(len(values) for one in collectors if one for values in one.values() if isinstance(values, list))


@contextmanager
def untold(module: nn.Module) -> Iterator[None]:
    """The module's call calls none of them."""
    before = dict(module._forward_hooks)
    for key in captures(module):
        del module._forward_hooks[key]
    try:
        yield
    finally:
        module._forward_hooks.clear()
        module._forward_hooks.update(before)
