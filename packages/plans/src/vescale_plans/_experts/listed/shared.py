"""State that experts of a list write: what the rank of an expert has computed, all ranks hold, as on one device.

All rows of an expert meet on one rank, so what it writes there is what one device would write. A list whose experts
have buffers, or wrote anything in the calls that are checked, is looked at in every call, and what changed is told.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor.engine import State, fold_objects

from ..._plan.parts import PlanError
from ..route import Spread
from ..state import Kept, attributes_of


class SharedState:
    """See the module. `is_checked`: whether a list without buffers is looked at, too.

    Arguments:
        split: axes along which experts are split inside.
        remedy: of a plan that does not spread them.
    """

    def __init__(self, spread: Spread, modules: nn.ModuleList, split: tuple[int, ...], remedy: tuple[str, str]) -> None:
        self._spread, self._modules, self._split, self._remedy = spread, modules, split, remedy
        self._own = [
            (f"{index}.{name}".rstrip("."), module)
            for index in range(spread.first, spread.first + spread.local)
            for name, module in modules[index].named_modules()
        ]
        self._writes = any(True for _ in modules.buffers())  # the same on all ranks
        self.is_checked = True

    @contextlib.contextmanager
    def computing(self, states: tuple[State, ...], twice: bool = False) -> Iterator[None]:
        """Around what this rank's experts compute for rows of a layout with `states`. `twice`: whether rows of several
        calls of one expert meet in one. Raises PlanError for a write that began after the checked calls, and, on all
        ranks alike, for one that the others cannot be told of.

        Cost: of a list that is looked at, a copy of what its experts hold, and a small all-gather.
        """
        if self._writes or self.is_checked:
            kept = Kept(self._own, deep=True)
            yield
            self._share(kept.written(), states, twice)
            return
        before = [attributes_of(module) for _, module in self._own]
        yield
        for (_, module), was in zip(self._own, before):
            now = attributes_of(module)
            if len(now) != len(was) or not all(map(is_, now.values(), was.values())):
                raise self._refused("its experts began to write attributes after the calls that are checked", ())

    def _share(self, names: tuple[str, ...], states: tuple[State, ...], twice: bool) -> None:
        spread, mesh = self._spread, self._spread.mesh
        several = "from the rows of several calls in one forward, which meet in one"
        told = fold_objects({name: several if twice else self._told(name) for name in names}, _merged, mesh)
        if not told:
            return
        self._writes = True
        wrong = [f"{name}  {value}" for name, value in told.items() if isinstance(value, str)]
        if wrong:
            raise self._refused("its experts write what other ranks cannot be told", wrong)
        apart = [
            mesh.names[axis] for axis, one in enumerate(states)
            if one.is_sharded and axis != spread.axis and axis not in self._split and mesh.sizes[axis] > 1
        ]  # fmt: skip
        if apart:
            raise self._refused(f"its experts write state, each rank of axis {apart[0]!r} from its own rows", [*told])
        for name, value in told.items():
            if not spread.first <= int(name.partition(".")[0]) < spread.first + spread.local:
                _put(*self._place(name), *pickle.loads(value))

    def _told(self, name: str) -> bytes | str:
        """Pickled: whether it is there, and the value; or why it cannot be."""
        module, key = self._place(name)
        held = module._buffers if key in module._buffers else vars(module)
        value = held.get(key)
        if isinstance(value, Tensor) and value.requires_grad:
            return "has a gradient, which would not come back"
        try:
            return pickle.dumps(
                (key in held, value.cpu() if isinstance(value, Tensor) and not value.is_meta else value)
            )
        except Exception as error:
            return str(error)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self._modules.get_submodule(path), key

    def _refused(self, rule: str, operands: Any) -> PlanError:
        return PlanError(self._spread.name, rule, operands, [self._remedy])


def _merged(said: list[dict]) -> dict:
    return {name: value for one in said for name, value in one.items()}


def _put(module: nn.Module, key: str, is_there: bool, value: Any) -> None:
    """A buffer keeps its memory where it may."""
    held = module._buffers if key in module._buffers else vars(module)
    before = held.get(key)
    if not is_there:
        held.pop(key, None)
    elif isinstance(value, Tensor) and isinstance(before, Tensor):
        if before.shape == value.shape and before.dtype == value.dtype:
            with torch.no_grad():
                before.copy_(value)
        else:
            held[key] = value.to(before.device)
    else:
        held[key] = value
