"""Experts in a ModuleList, which a block's own forward calls in a loop: each is whole on one rank.

The block runs as any module does, unmodified, on DTensors, which is what one device computes: it may write state of its
own, draw random numbers, drop rows, or hand to an expert what others gave. Whenever it calls an expert, the rank that
holds it computes its rows, for the others zeros stand in, and the sum of both is what all of them get:

    rows of expert 2, on every rank     rank 0, experts 0 1: zeros     rank 1, experts 2 3: expert 2 of the rows     sum

So ranks hold their experts alone, and compute them one after the other: that saves memory, not time. Rows of experts
in stacked weights travel together. Cost: per call of an expert its rows are made whole over the expert axis, and what
it gives is summed over it; per call of the block a small all-gather of what experts wrote.

What an expert writes of itself, its rank tells the others after the block's call, so that all hold what one device
would. Random numbers it may not draw: the ranks' generators would part.
"""

from __future__ import annotations

import pickle
import warnings
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Mesh,
    State,
    check_order,
    convert,
    fold_objects,
    from_plain,
    layout_of,
)

from .._apply.generators import random_states, same_states, set_random_states
from .._calls.chain import add_step
from .._plan.parts import PlanError
from .local_rows import row_states, swap_in
from .route import Spread, total_load
from .split import refuse_unsplit, split_axes
from .state import Kept

_DRAWS = "draws random numbers"


class ListBoundary:
    """The step around a block that calls the members of a list of experts. `name`: of the list, by the root."""

    def __init__(self, block: nn.Module, name: str, count: int, mesh: Mesh, axis: str) -> None:
        self.name, self.mesh, self._block, self._key = name, mesh, block, name.rpartition(".")[2]
        self.modules: nn.ModuleList = getattr(block, self._key)
        self._spread = Spread(name, mesh, mesh.names.index(axis), count)
        self._split, whole = split_axes(self.modules.named_parameters(), self._spread.axis)
        refuse_unsplit(name, mesh, self.modules.named_parameters(), whole)
        own = range(self._spread.first, self._spread.first + self._spread.local)
        self._own = [(f"{i}.{at}".rstrip("."), one) for i in own for at, one in self.modules[i].named_modules()]
        self._load, self._replicas = [0] * self._spread.local, ()
        self._gives: torch.dtype | None = None  # of an expert's answer; None until the first call
        self._running: list[tuple[Kept, dict[str, str]]] = []  # what experts held, and their faults, by name
        add_step(block, "list", self._enter, self._leave)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        check_order("experts", f"{self.name}, whose experts are spread over an axis, computes")
        self._load = [0] * self._spread.local
        self._running.append((Kept(self._own, deep=True), {}))
        block._modules[self._key] = _Stubs(self)

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        block._modules[self._key] = self.modules
        kept, faults = self._running.pop()
        if output is not None:  # it has not raised
            self._share(kept.written(), faults)
        return output

    def total_load(self) -> list[int]:
        """Rows that every expert received in the last forward. Cost: one small all-gather."""
        return total_load(self._spread, self._load, self._replicas)

    def total_dropped(self) -> list[int]:
        """Returns zeros: a list's rows have no order that all meshes share, and so no capacity."""
        return [0] * self._spread.experts

    # --- a call of an expert ----------------------------------------------------------------

    def answer(self, index: int, rows: Tensor) -> DTensor:
        """Computes expert `index` on rows of any layout, in that layout; whole if they are on no rank, in part or as a
        sum of parts."""
        spread, axes, cause = self._spread, {*self._split, self._spread.axis}, f"{self.name} (experts)"
        if type(rows) is not DTensor:  # the block made it: the same on all ranks
            rows = from_plain(rows, layout_of(self.mesh, (INVARIANT,) * len(self.mesh.sizes), tuple(rows.shape)))
        was = rows.mesh_layout.base
        outside = row_states(was.states, spread, False, frozenset())
        inside = _with(outside, axes, REPLICATE)
        local, here = convert(rows, was.with_states(inside), cause).to_local(), index - spread.first
        if self._gives is None:
            self._gives = self._tried(local, inside)
            self._say()
        if 0 <= here < spread.local:
            given = self._computed(index, local, inside).to(self._gives)
            self._load[here] += prod(local.shape[:-1])
        else:
            given = _Elsewhere.apply(local, self._gives)
        if torch.is_grad_enabled() and not given.requires_grad:  # a backward goes the same way on all ranks
            given.requires_grad_(any(one.requires_grad for one in self.modules[index].parameters()))
        parted = [axis for axis, state in enumerate(inside) if state.is_sharded]
        self._replicas = tuple(a for a in range(len(inside)) if a != spread.axis and a not in parted)
        parts = was.with_states(_with(inside, axes, PARTIAL))
        return convert(from_plain(given, parts), was.with_states(outside), cause)

    def _computed(self, index: int, rows: Tensor, states: tuple[State, ...]) -> Tensor:
        """One expert of this rank's, on plain tensors. `states`: of the layout of all rows."""
        member, held, before = self.modules[index], [], random_states()
        faults, name = self._running[-1][1], f"expert {index}"
        try:
            for module in member.modules():
                held.append((module, swap_in(module, states, f"{self.name}.{index}")))
            given = member(rows)
        finally:
            for module, parameters in held:
                module._parameters.update(parameters)
        if not same_states(before, random_states()):
            set_random_states(before)  # all ranks draw alike
            faults[name] = _DRAWS
        if given.shape != rows.shape:
            faults[name] = f"makes {list(given.shape)} of rows {list(rows.shape)}"
            return rows * 0
        if any(state.is_sharded for state in states):
            faults.setdefault("", self.mesh.names[next(a for a, state in enumerate(states) if state.is_sharded)])
        return given

    def _tried(self, rows: Tensor, states: tuple[State, ...]) -> torch.dtype:
        """Returns the dtype of what an expert gives, which all ranks must know, by a run on two rows of zeros that
        leaves nothing."""
        kept, states_before = Kept(self._own, deep=True), random_states()
        with torch.no_grad():
            given = self._computed(self._spread.first, rows.new_zeros(2, rows.shape[-1]), states)
        kept.restore()
        set_random_states(states_before)
        self._running[-1][1].pop("", None)
        return given.dtype

    def _say(self) -> None:
        if not any(self.mesh.coordinate) and self._spread.ranks > 1:
            warnings.warn(
                f"vescale_plans: the block of experts in a list {type(self._block).__name__} computes on the whole "
                "batch, its experts one after the other, which saves memory, not time. Experts in stacked weights "
                "compute at once, on the rows that are theirs.",
                stacklevel=2,
            )

    # --- what experts write -----------------------------------------------------------------

    def _share(self, names: tuple[str, ...], faults: dict[str, str]) -> None:
        """All ranks hold what an expert wrote of itself. Raises PlanError, on all alike, where they cannot."""
        apart, mine = faults.pop("", None), {}
        for name in names:
            module, key = self._place(name)
            value = (module._buffers if key in module._buffers else vars(module)).get(key)
            why = f"writes {key!r}, each rank of axis {apart!r} from its own rows" if apart else None
            if isinstance(value, Tensor) and value.requires_grad:
                why = f"writes {key!r} with a gradient, which would not come back"
            try:
                mine[name] = pickle.dumps(value.cpu() if isinstance(value, Tensor) and not value.is_meta else value)
            except Exception as error:
                why = f"writes {key!r}, which other ranks cannot be told: {error}"
            if why is not None:
                faults[f"expert {name.partition('.')[0]}"] = why
        told, faults = fold_objects((mine, faults), _merged, self.mesh)
        for name, why in sorted(faults.items()):
            raise PlanError(self.name, f"{name} of this list {why}", (), self._remedies())
        for name, value in told.items():
            if name not in mine:
                _put(*self._place(name), pickle.loads(value))

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self.modules.get_submodule(path), key

    def _remedies(self) -> list[tuple[str, str]]:
        axis = self.mesh.names[self._spread.axis]
        return [
            (f'parameters={{"{self.name}.*": {{"{axis}": Replicate()}}, ...}}', "whole on every rank, as any module"),
            ("experts as stacked weights [experts, ...]", "one module, recognised, or declared by experts={...}"),
        ]

    def refused(self, index: int, what: str) -> PlanError:
        return PlanError(self.name, f"expert {index} of {self.name!r} {what}", (), self._remedies())


class _Stub:
    """Stands for an expert while the block's forward runs."""

    def __init__(self, boundary: ListBoundary, index: int) -> None:
        self._boundary, self._index = boundary, index

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise self._boundary.refused(self._index, f"is called with {len(given)} arguments: it may take rows alone")
        return self._boundary.answer(self._index, given[0])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._boundary.modules[self._index], name)
        if isinstance(value, (nn.Module, Tensor)):
            what = f"is asked for {name!r}, which is on one rank only: it can be called as a whole"
            raise self._boundary.refused(self._index, what)
        return value


class _Stubs(list):
    """A ModuleList's stand-in: a forward may index it by a tensor of one number, and others walk over its modules."""

    def __init__(self, boundary: ListBoundary) -> None:
        super().__init__(_Stub(boundary, i) for i in range(len(boundary.modules)))
        self._modules_of = boundary.modules

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else int(index))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._modules_of, name)


class _Elsewhere(torch.autograd.Function):
    """Stands for an expert of other ranks: zeros, whose backward reaches the rows as the others' does."""

    @staticmethod
    def forward(ctx, rows: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = rows.dtype
        return torch.zeros_like(rows, dtype=dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return torch.zeros_like(gradient, dtype=ctx.dtype), None


def _with(states: tuple[State, ...], axes: set[int], other: State) -> tuple[State, ...]:
    return tuple(other if axis in axes else state for axis, state in enumerate(states))


def _merged(said: list[tuple[dict, dict]]) -> tuple[dict, dict]:
    return tuple({name: value for part in parts for name, value in part.items()} for parts in zip(*said))


def _put(module: nn.Module, key: str, value: Any) -> None:
    """A buffer keeps its memory where it may."""
    held = module._buffers if key in module._buffers else vars(module)
    before = held.get(key)
    if not (isinstance(value, Tensor) and isinstance(before, Tensor)):
        held[key] = value
    elif before.shape == value.shape and before.dtype == value.dtype:
        with torch.no_grad():
            before.copy_(value)
    else:
        held[key] = value.to(before.device)
