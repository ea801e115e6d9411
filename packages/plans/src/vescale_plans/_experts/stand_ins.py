"""Stand-ins for the modules that a block calls, while its forward runs around a list of experts.

An expert's is asked for an answer to its rows; any other module's computes as `Call.child` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._plan.parts import PlanError

if TYPE_CHECKING:
    from .lists import Call


class Stub:
    """Stands for an expert while the block's forward runs."""

    def __init__(self, call: Call, index: int) -> None:
        self._call, self._index = call, index

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise self._error(f"is called with {len(given)} arguments: its rows alone can travel")
        return self._call.answer(self._index, given[0])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._call.border.members[self._index], name)
        if isinstance(value, (nn.Module, Tensor)):
            raise self._error(f"is asked for {name!r}, which is on one rank only: it can be called as a whole")
        return value

    def _error(self, what: str) -> PlanError:
        border = self._call.border
        remedies = [("expert_axis=None", "computes on every rank")]
        return PlanError(border.name, f"expert {self._index} of {border.spread.name!r} {what}", (), remedies)


class Child:
    """Stands for a module that the block calls besides its experts."""

    def __init__(self, call: Call, module: nn.Module) -> None:
        self._call, self._module = call, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call.child(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Stubs(list):
    """A ModuleList's stand-in: a forward may index it by a tensor of one number, and others walk over its modules."""

    def __init__(self, call: Call, members: nn.ModuleList) -> None:
        super().__init__(Stub(call, i) for i in range(len(members)))
        self._members = members

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else int(index))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._members, name)
