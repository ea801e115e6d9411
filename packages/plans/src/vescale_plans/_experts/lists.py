"""Experts in a ModuleList, which a block's own forward calls in a loop: each is whole on one rank.

The block runs as any module does, unmodified, on DTensors, which is what one device computes: it may write state of its
own, draw random numbers, drop rows, or hand to an expert what others gave. Whenever it calls an expert, the rank that
holds it computes its rows, for the others zeros stand in, and the sum of both is what all of them get:

    rows of expert 2, on every rank     rank 0, experts 0 1: zeros     rank 1, experts 2 3: expert 2 of the rows     sum

So ranks hold their experts alone, and compute them one after the other: that saves memory, not time. Rows of experts
in stacked weights travel together. Cost: per call of an expert its rows are made whole over the expert axis, and what
it gives is summed over it; per call of the block a small all-gather of what experts wrote.

What an expert writes of itself, its rank tells the others after the block's call, so that all hold what one device
would, and so it does where an expert raises: meanwhile zeros stand in for it, too, so that no rank waits for another.
Of a call that does not end, as torch ends a recomputation, attributes are taken back: they are written once. Random
numbers experts may not draw: the ranks' generators would part.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

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
from vescale_trace.effects import Kept

from .._apply.generators import random_states, same_states, set_random_states
from .._calls.chain import add_step, hooks_before
from .._plan.parts import PlanError
from .local_rows import row_states, swap_in
from .route import Spread, total_load
from .split import refuse_unsplit, split_axes
from .trial import LENT


class _Running(NamedTuple):
    """A call of the block."""

    held: Any  # in the list's place before
    load: list[int]
    kept: list[Kept]  # what experts of this rank held before they wrote
    written: set[tuple[str, str]]  # what they wrote: module, by the list's names, and attribute or buffer
    faults: dict[str, str]  # expert -> what it may not do


class ListBoundary:
    """The step around a block that calls the members of a list of experts. `name`: of the list, by the root."""

    def __init__(self, block: nn.Module, name: str, count: int, mesh: Mesh, axis: str) -> None:
        self.name, self.mesh, self._block, self._key = name, mesh, block, name.rpartition(".")[2]
        self.modules: nn.ModuleList = getattr(block, self._key)
        self._spread = Spread(name, mesh, mesh.names.index(axis), count)
        self._split, whole = split_axes(self.modules.named_parameters(), self._spread.axis)
        refuse_unsplit(name, mesh, self.modules.named_parameters(), whole)
        self._refuse_recomputed()
        self._load, self._replicas = [0] * self._spread.local, ()
        self._gives: dict[tuple, torch.dtype] = {}  # what an answer's dtype depends on -> it
        self._running: list[_Running] = []
        add_step(block, "list", self._enter, self._leave)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        check_order("experts", f"{self.name}, whose experts are spread over an axis, computes")
        self._running.append(_Running(block._modules[self._key], [0] * self._spread.local, [], set(), {}))
        block._modules[self._key] = _Stubs(self)

    def _leave(self, block: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        running = self._running.pop()
        block._modules[self._key] = running.held
        if output is None:  # it raises, here alone perhaps: no rank is told; buffers are the recomputation's business
            for kept in reversed(running.kept):
                kept.restore(buffers=False)
        else:
            self._load = running.load
            self._share(running.written, running.faults)
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
        held = 0 <= here < spread.local
        given = self._computed(index, local, inside) if held else None
        gives = self._dtype(local, given)
        if held:
            self._running[-1].load[here] += prod(local.shape[:-1])
            if given is not None and given.dtype != gives:
                self._running[-1].faults[f"expert {index}"] = f"gives {given.dtype}, where others gave {gives}"
        given = torch.zeros_like(local, dtype=gives) if given is None else given.to(gives)
        if torch.is_grad_enabled() and not given.requires_grad:  # a backward goes the same way on all ranks
            given.requires_grad_(any(one.requires_grad for one in self.modules[index].parameters()))
        given = _Answer.apply(given, local)
        parted = [axis for axis, state in enumerate(inside) if state.is_sharded]
        self._replicas = tuple(a for a in range(len(inside)) if a != spread.axis and a not in parted)
        parts = was.with_states(_with(inside, axes, PARTIAL))
        return convert(from_plain(given, parts), was.with_states(outside), cause)

    def _computed(self, index: int, rows: Tensor, states: tuple[State, ...]) -> Tensor | None:
        """One expert of this rank's, on plain tensors; None where it is at fault. `states`: those of all rows."""
        member, held, before = self.modules[index], [], random_states()
        kept, version = Kept(member, LENT), None if rows.is_inference() else rows._version
        for module in member.modules():
            held.append((module, swap_in(module, states, f"{self.name}.{index}")))
        try:
            given, fault = member(rows if version is not None else rows.clone()), None
        except Exception as error:
            given, fault = None, f"raises {type(error).__name__}: {error}"
        finally:
            for module, parameters in held:
                module._parameters.update(parameters)
        if not same_states(before, random_states()):
            set_random_states(before)  # all ranks draw alike
            fault = fault or "draws random numbers"
        if written := [slot.name for slot in kept.written()]:
            self._running[-1].kept.append(kept)
            self._running[-1].written.update(self._place(f"{index}.{name}") for name in written)
        apart = [self.mesh.names[axis] for axis, state in enumerate(states) if state.is_sharded]
        if fault is None and written and apart:
            fault = f"writes {written[0]!r}, each rank of axis {apart[0]!r} from its own rows"
        if fault is None and version is not None and rows._version != version:
            fault = "writes to the rows that it is given, which other ranks hold, too (rows = rows.clone() first)"
        if fault is None and not (isinstance(given, Tensor) and given.shape == rows.shape):
            made = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            fault = f"makes {made} of rows {list(rows.shape)}"
        if fault is None:
            return given
        self._running[-1].faults[f"expert {index}"] = fault
        return None

    def _dtype(self, rows: Tensor, given: Tensor | None) -> torch.dtype:
        """Returns the dtype of what experts give, on all ranks alike, who were told once."""
        kind = rows.device.type
        key = rows.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        if key not in self._gives:
            if not self._gives:
                self._say()
            own = None if given is None else given.dtype
            told = fold_objects(own, lambda said: next(filter(None, said), None), self.mesh)
            if told is None:  # the expert is at fault, or in a dry run another rank's
                return rows.dtype
            self._gives[key] = told
        return self._gives[key]

    def _say(self) -> None:
        if not any(self.mesh.coordinate) and self._spread.ranks > 1:
            warnings.warn(
                f"vescale_plans: the block of experts in a list {type(self._block).__name__} computes on the whole "
                "batch, its experts one after the other, which saves memory, not time. Experts in stacked weights "
                "compute at once, on the rows that are theirs.",
                stacklevel=2,
            )

    # --- what experts write -----------------------------------------------------------------

    def _share(self, written: Iterable[tuple[str, str]], faults: dict[str, str]) -> None:
        """All ranks hold what an expert wrote of itself. Raises PlanError, on all alike, where they cannot."""
        mine = {}
        for path, key in written:
            module = self.modules.get_submodule(path)
            value = (module._buffers if key in module._buffers else vars(module)).get(key)
            why = None
            if isinstance(value, Tensor) and value.requires_grad:
                why = f"writes {key!r} with a gradient, which would not come back"
            try:
                value = value.cpu() if isinstance(value, Tensor) and not value.is_meta else value
                mine[path, key] = pickle.dumps(value)
            except Exception as error:
                why = f"writes {key!r}, which other ranks cannot be told: {error}"
            if why is not None:
                faults.setdefault(f"expert {path.partition('.')[0]}", why)
        told, faults = fold_objects((mine, faults), _merged, self.mesh)
        for name, why in sorted(faults.items()):
            raise PlanError(self.name, f"{name} of this list {why}", (), self._remedies())
        for (path, key), value in told.items():
            if (path, key) not in mine:
                _put(self.modules.get_submodule(path), key, pickle.loads(value))

    def _place(self, name: str) -> tuple[str, str]:
        """Returns the module that this name leads through last, and its attribute."""
        path, _, key = name.rpartition(".")
        return (path, key) if path in dict(self.modules.named_modules()) else self._place(path)

    def _remedies(self) -> list[tuple[str, str]]:
        axis = self.mesh.names[self._spread.axis]
        return [
            (f'parameters={{"{self.name}.*": {{"{axis}": Replicate()}}, ...}}', "whole on every rank, as any module"),
            ("experts as stacked weights [experts, ...]", "one module, recognised, or declared by experts={...}"),
        ]

    def _refuse_recomputed(self) -> None:
        """Raises PlanError for an expert that is to be recomputed alone: its rank would then hold no rows to a backward
        that communicates."""
        for at, member in self.modules.named_modules(prefix=self.name):
            if any(hook.step is not None and hook.step.name == "checkpoint" for hook in hooks_before(member)):
                block = self.name.rpartition(".")[0]
                rule = f"checkpointing names {at!r}, one expert of a list, which computes inside its block's call"
                raise PlanError("parallelize", rule, (), [(f'checkpointing={{"{block}": True}}', "the whole block")])

    def refused(self, index: int, what: str) -> PlanError:
        return PlanError(self.name, f"expert {index} of {self.name!r} {what}", (), self._remedies())


class _Stub:
    """Stands for an expert while the block's forward runs."""

    def __init__(self, boundary: ListBoundary, index: int) -> None:
        vars(self).update(_boundary=boundary, _index=index)

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

    def __getitem__(self, key: Any) -> Any:
        raise self._boundary.refused(self._index, f"is asked for its part {key!r}: it can be called as a whole")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._boundary.modules[self._index], name, value)


class _Stubs(list):
    """A ModuleList's stand-in: a forward may index it by a tensor of one number, and others walk over its modules."""

    def __init__(self, boundary: ListBoundary) -> None:
        super().__init__(_Stub(boundary, i) for i in range(len(boundary.modules)))
        self._modules_of = boundary.modules

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index if isinstance(index, slice) else int(index))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._modules_of, name)


class _Answer(torch.autograd.Function):
    """An expert's answer, or the zeros that stand for it: its backward reaches the rows on all ranks, and it keeps a
    tensor, so that they end a recomputation at the same place."""

    @staticmethod
    def forward(ctx, given: Tensor, rows: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows.new_empty(0))
        ctx.rows = rows.shape, rows.dtype
        return given.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor | None):
        _ = ctx.saved_tensors
        shape, dtype = ctx.rows
        return gradient, None if gradient is None else gradient.new_zeros(shape, dtype=dtype)


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
