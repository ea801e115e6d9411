"""Stand-ins for the modules that a block calls, while its forward runs around a list of experts.

An expert's gives its rows to a function that answers for it; any other module's, its call to one that computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._plan.parts import PlanError
from .members import Members

Answer = Callable[[int, Tensor], Tensor]
"""An expert's index and its rows -> what is given for them."""


class Stub:
    """Stands for an expert while the block's forward runs."""

    def __init__(self, members: Members, answer: Answer, index: int) -> None:
        self._members, self._answer, self._index = members, answer, index

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise self._error(f"is called with {len(given)} arguments: its rows alone can travel")
        return self._answer(self._index, given[0])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._members.modules[self._index], name)
        if isinstance(value, (nn.Module, Tensor)):
            raise self._error(f"is asked for {name!r}, which is on one rank only: it can be called as a whole")
        return value

    def _error(self, what: str) -> PlanError:
        members = self._members
        remedies = [("expert_axis=None", "computes on every rank")]
        return PlanError(members.name, f"expert {self._index} of {members.spread.name!r} {what}", (), remedies)


class Child:
    """Stands for a module that the block calls besides its experts."""

    def __init__(self, compute: Callable[[nn.Module, tuple, dict], Any], module: nn.Module) -> None:
        self._compute, self._module = compute, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Stubs(list):
    """A ModuleList's stand-in: a forward may index it by a tensor of one number, and others walk over its modules."""

    def __init__(self, members: Members, answer: Answer) -> None:
        super().__init__(Stub(members, answer, i) for i in range(len(members.modules)))
        self._members = members.modules

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else int(index))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._members, name)
