"""`optimizer.state` between steps: for each parameter what one device would hold, over the memory that is here.

While it steps, an optimizer has plain local parts (`optim.py`). Whoever else looks, to reset the momentum of units that
died, to draw a second moment, to move or to clear states, sees dicts that hold nothing themselves: a state of the
parameter's shape is read as a DTensor over the real memory, and what is put in is cut as the parameter is
(`optim_states.ShardedStates`, the optimizers here, says how).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from .sharded_parameter import ShardedParameter


class _Shown(MutableMapping, dict):
    """A dict for who asks `isinstance`, whose items are elsewhere."""

    _items: dict

    def __iter__(self) -> Iterator:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __delitem__(self, key: Any) -> None:
        del self._items[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self._items else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self._items:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self._items and default:
            return default[0]
        value = self[key]
        del self._items[key]
        return value

    def copy(self) -> dict:
        return dict(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


class ShownState(_Shown):
    """The state of one parameter."""

    def __new__(cls, items: Mapping, *of: Any) -> Any:
        # Libraries that move a state to a device make another of its class, from a plain dict.
        return super().__new__(cls) if of else dict(items)

    def __init__(self, items: dict[str, Any], optimizer: Any, param: ShardedParameter | None) -> None:
        self._items, self._optimizer, self._param = items, optimizer, param

    def __getitem__(self, key: str) -> Any:
        return self._optimizer._as_dtensor(key, self._items[key], self._param)

    def __setitem__(self, key: str, value: Any) -> None:
        is_state = isinstance(value, Tensor) and self._param is not None
        self._items[key] = self._optimizer._taken_in(key, value, self._param) if is_state else value


class ShownStates(_Shown):
    """Parameter -> its state, made when it is asked for, as by the defaultdict that torch has."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def _items(self) -> dict[Tensor, dict[str, Any]]:
        return self._optimizer._held_states

    def __getitem__(self, parameter: Tensor) -> ShownState:
        return ShownState(self._items[parameter], self._optimizer, self._optimizer._parallel.param_of(parameter))

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        if not isinstance(state, Mapping):
            self._items[parameter] = state
            return
        given = dict(state)
        self._items[parameter] = {}
        self[parameter].update(given)
