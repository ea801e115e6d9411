"""Expert parallelism: the experts of a mixture spread over a mesh axis, in any unmodified model.

An experts module is known by its structure: stacked weights (two or more parameters of three dims that share dim 0,
one slice per expert) and a forward that takes tokens [T, hidden], the indices [T, k] and the weights [T, k] of the
experts chosen for each token. Who chose them, and how, is the model's own business and runs as it is written.

The module's own forward computes, unmodified, on the experts that this rank holds. A step of its chain is around it:

- before, the tokens are sharded over the expert axis (they are already, where that is a data axis), every token is
  copied once per chosen expert, the copies are sorted by expert and exchanged: each rank receives those for its own
  experts. Forward then sees plain tensors, one expert per row with weight 1, and this rank's slices of the weights;
- after, the rows travel back, are put in order, weighted and summed over k.

Both exchanges are all-to-alls of exactly the rows that have to move, so nothing is padded, or dropped without a
capacity (`capacity.py`); one small all-to-all of counts goes ahead, the only time the host waits for the
device; a shared expert runs while the first is under way (`beside.py`). Backward makes the same two the other
way. Gradients of the experts are complete over the expert axis, and partial over the others like any parameter's.

Other mesh axes follow from the layouts: tokens sharded over a data axis leave expert gradients partial over it; expert
weights sharded over a tensor axis leave the result partial there.

In the reproducible mode the tokens stay and the experts come: which rows meet in a product must not depend on the mesh.
Forward sees the tokens as they are, and weights gathered over the expert axis, as under a plan without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Mesh,
    check_order,
    convert,
    fold_objects,
    from_plain,
    gather_objects,
    is_reproducible,
    layout_of,
)
from vescale_trace.effects import Kept

from .._calls.chain import add_step
from .._plan.parts import PlanError
from .added_last import added_last
from .beside import Beside
from .capacity import capacities, counted, positions
from .computed import Computed
from .counters import numbers_like
from .local_rows import row_states, swap_in
from .route import Route, Spread, Travel, of_any_rank, total_load
from .split import refuse_split, refuse_unsplit, split_axes, split_problem
from .told import Stack, Told
from .trial import LENT, Trial


class ExpertsBoundary:
    """The step around an experts module, whose parameters are on the mesh already."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        mesh: Mesh,
        axis: str,
        stack: Stack,
        *,
        block: nn.Module | None = None,
        capacity: float | None = None,
        needed: bool = True,
    ) -> None:
        """`block`: the module that calls it, with what else it calls. `capacity`: see `Plan.capacity_factor`. Where it
        is not `needed`, what cannot stay as rows are is computed as any module's forward is."""
        at, self.stack, experts = mesh.names.index(axis), stack, stack.count
        spread = any(p.mesh_layout.states[at].is_sharded for p in module.parameters(recurse=False))
        self.name, self.mesh, self.axis, self.spread = name, mesh, at, spread
        self.experts = Spread(name, mesh, at, experts, spread)
        self._numbers = numbers_like(module, experts)
        self.counters = self._numbers[0]
        self.capacity, self._needed, self._is_off = capacity, needed, False
        self.load: list[int] | Tensor = [0] * self.experts.local
        self.dropped = torch.zeros(experts, dtype=torch.int64)
        self.replicas: tuple[int, ...] = ()
        self.split, self.whole = split_axes(module.named_parameters(recurse=False), at)
        self._counts_known = self.experts.local == experts or bool(self.counters) and not self._numbers[1]
        self._tried = not (self.whole or self.split)
        self.writes: tuple[str, ...] = ()
        self._looks = {True: True, False: True}
        self.beside = Beside(block, module) if spread and block is not None else None
        self._running: list[tuple[_Call | _UnsplitCall, Computed, Kept | None] | None] = []  # None: as any module's
        add_step(module, "experts", self._enter, self._leave)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        computed = Computed(module, f"{self.name} (experts)")
        if not (self._needed or self._fits(module, args, kwargs)):
            computed.end()
            self._running.append(None)
            return args, kwargs
        try:
            self._look(module, args, kwargs)
            kept = None if self.writes else Kept(module, LENT, copies=False)
            if not (self._tried or self.writes):
                self._try_slices(module, args, kwargs)
            call = (_UnsplitCall if is_reproducible() or self.writes else _Call)(self, module, args, kwargs)
        except BaseException:
            computed.end()
            raise
        self._running.append((call, computed, kept))
        return call.args, call.kwargs

    def _fits(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """True if a call is one of experts whose rows can stay; alike on all ranks. Slices are tried once."""
        try:
            Told(self.name, self.stack, args, kwargs)
        except PlanError:
            return False
        try:
            if not (self._tried or self._is_off):
                self._try_slices(module, args, kwargs)
        except PlanError:
            self._is_off = True
        return not self._is_off

    def _look(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Finds the numbers by which its forward counts experts, and in the first call of each mode, what it writes of
        itself; on all ranks alike. Cost: once, some forwards on a few rows per expert, and small all-gathers."""
        looks, counts = self._looks[module.training], not (self._counts_known or is_reproducible())
        if self.writes or not (looks or counts):
            return
        trial = Trial(self.experts, self.stack, module, args, kwargs)
        if looks:
            self._looks[module.training] = False
            self.writes = of_any_rank(trial.written(self.counters), self.mesh)
            if self.writes:
                self._say(module)
        if counts and not self.writes:
            try:
                found, problem = trial.counters(self._numbers), None
            except PlanError as error:
                found, problem = self.counters, error
            problem = fold_objects(problem, lambda said: next(filter(None, said), None), self.mesh)
            if problem is not None:
                raise problem
            self.counters, self._counts_known = list(of_any_rank(tuple(found), self.mesh)), True

    def _say(self, module: nn.Module) -> None:
        what = f"{type(module).__name__} writes {self.writes[0]!r} of itself in its forward"
        if self.capacity is not None:
            raise PlanError(
                self.name,
                f"{what}, which must see all rows, and capacity_factor={self.capacity} drops rows before it",
                (),
                [("capacity_factor=None", "nothing is dropped"), ("write it outside of the forward", "")],
            )
        if not any(self.mesh.coordinate):
            warnings.warn(
                f"vescale_plans: {what}, so it computes on the whole batch, with all weights gathered. "
                "Two all-to-alls of rows are enough where that is written outside of the forward.",
                stacklevel=2,
            )

    def _try_slices(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Raises PlanError, on all ranks alike, where slices of experts do not give parts of one sum, and for what is
        whole where the rest is split, and is no bias added last.

        Cost: once, some forwards on a few rows per expert, and small all-gathers.
        """
        trial, held = Trial(self.experts, self.stack, module, args, kwargs), dict(module._parameters)

        def counted(parameters: Mapping[str, Tensor], rows: Tensor, experts: Tensor, count: int) -> Tensor:
            return trial.forward(parameters, rows, experts, dict.fromkeys(self.counters, count))

        like, width = trial.like, trial.width
        if self.whole:
            shapes = {key: one.mesh_layout.local_shape for key, one in held.items() if one is not None}
            slices = partial(counted, count=self.experts.local)
            wrong = {key: self.whole[key] for key in self.whole if not added_last(slices, shapes, key, width, like)}
            told = fold_objects(wrong, lambda said: next(filter(None, said), {}), self.mesh)
            refuse_unsplit(self.name, self.mesh, module.named_parameters(recurse=False), told)
        if self.split and not like.is_meta:
            layouts = {key: one.mesh_layout for key, one in held.items() if one is not None}
            with torch.no_grad():
                problem = split_problem(
                    partial(counted, count=1), layouts, self.experts.experts, self.split, self.whole, width, like
                )
            if problem is not None:
                refuse_split(self.name, self.mesh, self.split, held, problem)
        self._tried = True

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        running = self._running.pop()
        if running is None:
            return output
        call, computed, kept = running
        call.restore()
        computed.end()
        if written := [slot.name for slot in kept.written()] if kept is not None else []:
            raise PlanError(
                self.name,
                f"{type(module).__name__} writes {written[0]!r} of itself in its forward, from rows that travelled "
                "here, and did not when it was first looked at: otherwise it would have computed on the whole batch",
                [f"written  {', '.join(written)}"],
                [
                    ("write it from the first call on", "it computes on the whole batch"),
                    ("write it outside of the forward", "rows travel to their experts"),
                ],
            )
        return call.combine(output) if isinstance(output, Tensor) else output

    def total_load(self) -> list[int]:
        """Rows that every expert received in the last forward. Cost: one small all-gather."""
        return total_load(self.experts, self.load, self.replicas)

    def total_dropped(self) -> list[int]:
        """Rows that every expert had no capacity for in the last forward. Cost: one small all-gather."""
        everyone = gather_objects((self.mesh.coordinate, self.dropped.tolist()), self.mesh)
        counted = [drops for coordinate, drops in everyone if not any(coordinate[axis] for axis in self.replicas)]
        return [sum(drops) for drops in zip(*counted)]


class _Call:
    """One forward of an experts module: what was changed for it, and what puts the rows back."""

    def __init__(self, boundary: ExpertsBoundary, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._boundary, self._module = boundary, module
        self._told = told = Told(boundary.name, boundary.stack, args, kwargs)
        given = told.tokens, told.indices, told.weights
        self._was = told.tokens.mesh_layout.base
        rows = row_states(self._was.states, boundary.experts, boundary.spread, boundary.split)
        cause = f"{boundary.name} (experts)"
        tokens, indices, self._weights = (
            convert(one, layout_of(boundary.mesh, rows, tuple(one.shape)), cause).to_local() for one in given
        )
        self._rows = rows
        boundary.replicas = tuple(a for a, state in enumerate(rows) if not state.is_sharded)
        takes = None
        if boundary.capacity is not None and not indices.is_meta:
            layout = layout_of(boundary.mesh, rows, tuple(told.indices.shape))
            takes = capacities(indices, layout, boundary.experts.experts, boundary.capacity, boundary.name)
        if boundary.spread:
            fresh = self._dispatch(tokens, indices, takes)
        else:
            fresh = self._here(tokens, indices, takes)
        self.args, self.kwargs = told.arguments(*fresh, boundary.experts.local)
        self._parameters = swap_in(module, rows, cause, boundary.whole)
        for name in boundary.counters:
            setattr(module, name, boundary.experts.local)

    def _here(self, tokens: Tensor, indices: Tensor, takes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the forward's inputs if rows stay where they are: one row of zeros if there are none."""
        weights = self._counted(indices, takes)
        self._told.taken = None if takes is None else weights
        self._none = tokens.shape[0] == 0
        if not self._none:
            return tokens, indices, weights
        self._told.taken = None
        fresh = (torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (tokens, indices, weights))
        return tuple(fresh)

    def _counted(self, indices: Tensor, takes: Tensor | None) -> Tensor:
        """The weights of rows that stay; zeros for those that no expert takes."""
        boundary, flat = self._boundary, indices.reshape(-1)
        if indices.is_meta:
            boundary.load = []
            return self._weights
        counts = counted(flat, boundary.experts.experts)
        kept = counts if takes is None else torch.minimum(counts, takes)
        boundary.load, boundary.dropped = kept, counts - kept  # on the device: nobody waits for it here
        if takes is None:
            return self._weights
        order = torch.argsort(flat, stable=True)
        taken = torch.empty_like(flat, dtype=torch.bool)
        taken[order] = positions(flat[order]) < takes[flat[order]]
        return self._weights.where(taken.view(indices.shape), self._weights.new_zeros(()))

    def _dispatch(self, tokens: Tensor, indices: Tensor, takes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the forward's inputs: the rows that arrived, the local expert of each, ones."""
        self._shape = (*indices.shape, tokens.shape[1])
        self._route = route = Route(self._boundary.experts, indices, capacity=takes)
        self._boundary.load, self._boundary.dropped = route.load, route.dropped
        copies = tokens.unsqueeze(1).expand(self._shape).reshape(-1, self._shape[2])
        if self._boundary.beside is not None:
            route.begin(copies.detach())
            self._boundary.beside.run()
        moved, ids = Travel.apply(copies, route, True), route.arrived_ids()
        self._none = moved.shape[0] == 0
        if self._none:  # one row of zeros, so that the graph and its exchanges are the same on every rank
            moved, ids = torch.cat([moved, moved.new_zeros(1, moved.shape[1])]), ids.new_zeros(1)
        return moved, ids[:, None], self._weights.new_ones(len(moved), 1)

    def restore(self) -> None:
        self._module._parameters.update(self._parameters)
        for name in self._boundary.counters:
            setattr(self._module, name, self._boundary.experts.experts)

    def combine(self, output: Tensor) -> DTensor:
        """The result as a DTensor; where rows travelled, they go back to their tokens, are weighted and summed."""
        boundary = self._boundary
        output = self._told.in_order(output)[:0] if self._none else self._told.in_order(output)
        if boundary.spread:
            back = Travel.apply(output, self._route, False).view(*self._shape[:2], *output.shape[1:])
            output = (back * self._weights.unsqueeze(-1).to(back.dtype)).sum(1)
        states = [
            PARTIAL if axis in boundary.split and not state.is_sharded else state
            for axis, state in enumerate(self._rows)
        ]
        result = from_plain(output, layout_of(boundary.mesh, tuple(states), (self._was.shape[0], *output.shape[1:])))
        before = self._was.states[boundary.axis]
        if not boundary.spread or before.is_sharded and before.dim == 0:
            return result
        states[boundary.axis] = REPLICATE if before is REPLICATE else INVARIANT
        return convert(result, result.mesh_layout.base.with_states(states), f"{boundary.name} (experts)")


class _UnsplitCall:
    """One forward of an experts module in the reproducible mode, on the weights of all experts. Cost: all-gathers of
    the weights over the expert axis, and reductions of their gradients."""

    def __init__(self, boundary: ExpertsBoundary, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.args, self.kwargs, self._module = args, kwargs, module
        told = Told(boundary.name, boundary.stack, args, kwargs)
        tokens, indices = told.tokens, told.indices
        if boundary.capacity is not None:
            check_order("experts", f"{boundary.name}, whose experts have a capacity, drops rows")
        states = tokens.mesh_layout.states
        boundary.replicas = tuple(axis for axis, state in enumerate(states) if not state.is_sharded)
        local = indices.to_local() if type(indices) is DTensor else indices
        count = boundary.experts.experts
        boundary.load = [] if local.is_meta else counted(local.reshape(-1), count).tolist()
        self._parameters = dict(module._parameters)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                layout = parameter.mesh_layout.base
                states = [INVARIANT if axis == boundary.axis else state for axis, state in enumerate(layout.states)]
                module._parameters[name] = convert(parameter, layout.with_states(states), f"{boundary.name} (experts)")

    def restore(self) -> None:
        self._module._parameters.update(self._parameters)

    def combine(self, output: Tensor) -> Tensor:
        return output
