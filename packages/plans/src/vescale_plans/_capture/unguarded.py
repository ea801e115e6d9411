"""State that compiled graphs depend on and their guards do not ask about: asked in each call, before them."""

from __future__ import annotations

import os
from operator import is_

from torch import nn

from .refusals import is_read


class Unguarded:
    """The state that a graph was made under.

    The attributes of its modules' classes: a guard on one that a base class has does not see it overridden, nor a
    method replaced. The environment, where the traced code reads it.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: None for module in model.modules() for kind in type(module).__mro__}
        own = [kind for kind in kinds if not (kind.__module__ + ".").startswith(("torch.", "builtins.", "abc."))]
        self._classes = [(vars(kind), [*vars(kind)], [*vars(kind).values()]) for kind in own]
        self._environment = dict(os.environ) if is_read(os.environ) else None

    def holds(self) -> bool:
        """True if nothing of it has changed."""
        return (self._environment is None or self._environment == dict(os.environ)) and all(
            len(now) == len(names) and all(map(is_, now.values(), values)) and names == [*now]
            for now, names, values in self._classes
        )
