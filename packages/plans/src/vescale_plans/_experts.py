"""Expert parallelism: the experts of a mixture spread over a mesh axis, in any unmodified model.

An experts module is known by its structure: stacked weights (two or more parameters of three dims that share dim 0,
one slice per expert) and a forward that takes tokens [T, hidden], the indices [T, k] and the weights [T, k] of the
experts chosen for each token. Who chose them, and how, is the model's own business and runs as it is written.

The module's own forward computes, unmodified, on the experts that this rank holds. Two hooks stand around it:

- before, the tokens are sharded over the expert axis (they are already, where that is a data axis), every token is
  copied once per chosen expert, the copies are sorted by expert and exchanged: each rank receives those for its own
  experts. Forward then sees plain tensors, one expert per row with weight 1, and this rank's slices of the weights;
- after, the rows travel back, are put in order, weighted and summed over k.

Both exchanges are all-to-alls of exactly the rows that have to move, so nothing is dropped or padded; one small
all-to-all of counts goes ahead, the only time the host waits for the device. Backward makes the same two the other
way. Gradients of the experts are complete over the expert axis, and pending over the others like any parameter's.

Other mesh axes follow from the layouts: tokens sharded over a data axis leave expert gradients pending over it; expert
weights sharded over a tensor axis leave the result pending there.

In the reproducible mode the tokens stay and the experts come: which rows meet in a product must not depend on the mesh.
Forward sees the tokens as they are, and weights gathered over the expert axis, as under a plan without it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Placement, Replicate, Shard
from vescale_dtensor.debug import Cause
from vescale_dtensor.engine import (
    INVARIANT,
    PENDING,
    VARYING,
    Mesh,
    State,
    convert,
    exchange_rows,
    from_plain,
    gather_objects,
    is_reproducible,
    layout_of,
    set_cause,
    sharded,
)

from ._parts import PlanError
from .plan import Plan

Placed = dict[str, dict[str, Placement]]


def stacked_experts(module: nn.Module) -> int:
    """How many experts a module holds as slices of stacked weights; 0 when it is not an experts module."""
    stacks = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    counted = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
    takes = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return stacks.pop() if len(stacks) == 1 and len(counted) >= 2 and len(takes) >= 3 else 0


def find_experts(plan: Plan, model: nn.Module) -> dict[str, int]:
    """module name -> how many experts, of every experts module, when the plan has an expert axis.

    Raises PlanError when there is none.
    """
    if plan.expert_axis is None:
        return {}
    found = {name: count for name, module in model.named_modules() if (count := stacked_experts(module))}
    if not found:
        raise PlanError(
            "parallelize",
            f"the plan spreads experts over axis {plan.expert_axis!r}, and the model has none: no module with stacked "
            "weights [experts, ...] and a forward of tokens, indices and weights",
            (),
            [
                ("expert_axis=None", "for a dense model"),
                ("nn.Parameter(torch.stack(...)) of the experts' weights", "when they are a ModuleList"),
            ],
        )
    return found


def place_experts(plan: Plan, model: nn.Module, experts: dict[str, int], placed: Placed) -> Placed:
    """`placed` with the parameters of experts sharded over the expert axis.

    What the plan itself says of that axis stands: experts that it keeps whole there compute the rows that are there.
    """
    added = {}
    for module, count in experts.items():
        own = {
            name: {plan.expert_axis: Shard(0), **placed[name]}
            for leaf, parameter in model.get_submodule(module).named_parameters(recurse=False)
            if parameter.shape[:1] == (count,) and (name := f"{module}.{leaf}")
        }
        kinds = {placements[plan.expert_axis] for placements in own.values()}
        if len(kinds) > 1 or not kinds <= {Shard(0), Replicate()}:
            raise PlanError(
                "parallelize",
                f"the parameters of {module!r}, one slice per expert, lie differently on axis {plan.expert_axis!r}",
                [f"{name}  {dict(placements)}" for name, placements in own.items()],
                [(f"leave {plan.expert_axis!r} out of their placements", "each expert is on one rank, whole")],
            )
        if kinds == {Shard(0)}:
            _check_enough(plan, module, count)
        added.update(own)
    return {**placed, **added}


def _check_enough(plan: Plan, name: str, count: int) -> None:
    """Every rank must hold an expert: a forward over none is nothing that a model is written for."""
    ranks = plan.mesh[plan.expert_axis]
    used = _ranks_used(count, ranks)
    if used < ranks:
        best = max(n for n in range(1, ranks) if _ranks_used(count, n) == n)
        raise PlanError(
            "parallelize",
            f"{name!r} has {count} experts, and torch.chunk over the {ranks} ranks of axis {plan.expert_axis!r} "
            f"leaves {ranks - used} without one",
            [f"mesh  {plan.mesh}"],
            [(f"{plan.expert_axis!r}: {best}", "every rank holds an expert")],
        )


def _ranks_used(count: int, ranks: int) -> int:
    """How many of `ranks` get something when torch.chunk cuts `count`."""
    return -(-count // -(-count // ranks))


class ExpertsBorder:
    """The two hooks around an experts module, whose parameters are on the mesh already."""

    def __init__(self, module: nn.Module, name: str, mesh: Mesh, axis: str, experts: int) -> None:
        self.name, self.mesh, self.experts = name, mesh, experts
        self.axis = mesh.names.index(axis)
        self.spread = any(p.mesh_layout.states[self.axis].is_sharded for p in module.parameters(recurse=False))
        self.ranks = mesh.sizes[self.axis] if self.spread else 1
        chunk = -(-experts // self.ranks)
        self.held = [min((rank + 1) * chunk, experts) - rank * chunk for rank in range(self.ranks)]
        self.mine = mesh.coordinate[self.axis] if self.spread else 0
        self.local = self.held[self.mine]
        # A forward may count its experts by an attribute; inside it there are as many as this rank holds.
        self.counters = [
            key for key, value in vars(module).items() if type(value) is int and value == experts and "expert" in key
        ]
        self.load = [0] * self.local
        self.replicas: tuple[int, ...] = ()
        self.split = _split_axes(module, name, mesh, self.axis)
        self._running: list[_Call | _WholeCall] = []
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True, prepend=True)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        call = (_WholeCall if is_reproducible() else _Call)(self, module, args, kwargs)
        self._running.append(call)
        return call.args, call.kwargs

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not self._running:  # the pre-hook itself raised
            return output
        call = self._running.pop()
        call.restore()
        return call.combine(output) if isinstance(output, Tensor) else output

    def total_load(self) -> list[int]:
        """Rows that every expert received in the last forward. Cost: one small all-gather."""
        totals = [0] * self.experts
        for coordinate, counts in gather_objects((self.mesh.coordinate, self.load), self.mesh):
            if not any(coordinate[axis] for axis in self.replicas):
                first = sum(self.held[: coordinate[self.axis]]) if len(counts) < self.experts else 0
                for i, count in enumerate(counts):
                    totals[first + i] += count
        return totals


def _split_axes(module: nn.Module, name: str, mesh: Mesh, experts: int) -> frozenset[int]:
    """The axes over which the weights of single experts are split: what forward returns is pending there."""
    states = {key: parameter.mesh_layout.states for key, parameter in module.named_parameters(recurse=False)}
    split = {axis for own in states.values() for axis, state in enumerate(own) if state.is_sharded and axis != experts}
    for axis in split:
        whole = [key for key, own in states.items() if not own[axis].is_sharded]
        if whole:  # added by every rank of the axis, it would count that many times
            raise PlanError(
                name,
                f"over axis {mesh.names[axis]!r} its experts are split inside, and {', '.join(whole)} is not: what "
                "each rank adds to its part of the sum cannot be known",
                [f"{key}  {list(own)}" for key, own in states.items()],
                [(f"leave {mesh.names[axis]!r} out of the placements of its parameters", "experts are whole there")],
            )
    return frozenset(split)


class _Call:
    """One forward of an experts module: what was changed for it, and what puts the rows back."""

    def __init__(self, border: ExpertsBorder, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._border, self._module = border, module
        given = _tokens_indices_weights(border.name, args, kwargs)
        self._was = given[0].mesh_layout.base
        rows = self._row_states()
        tokens, indices, self._weights = (
            convert(one, layout_of(border.mesh, rows, tuple(one.shape)), f"{border.name} (experts)").to_local()
            for one in given
        )
        self._rows = rows
        border.replicas = tuple(a for a, state in enumerate(rows) if not state.is_sharded)
        if border.spread:
            fresh = self._dispatch(tokens, indices)
        else:
            border.load = _load(indices, border.experts)
            fresh = (tokens, indices, self._weights)
        replaced = dict(zip(map(id, given), fresh))
        self.args = tuple(replaced.get(id(one), one) for one in args)
        self.kwargs = {key: replaced.get(id(one), one) for key, one in kwargs.items()}
        self._swap_in()

    def _dispatch(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the module's forward gets: the rows that arrived, the local expert of each, ones."""
        self._shape = (*indices.shape, tokens.shape[1])
        self._route = route = _Route(self._border, indices)
        self._border.load = route.arrived.sum(0).tolist()
        copies = tokens.unsqueeze(1).expand(self._shape).reshape(-1, self._shape[2])
        moved, ids = _Out.apply(copies, route), route.arrived_ids()
        self._none = moved.shape[0] == 0
        if self._none:  # one row of zeros, so that the graph and its exchanges are the same on every rank
            moved, ids = torch.cat([moved, moved.new_zeros(1, moved.shape[1])]), ids.new_zeros(1)
        return moved, ids[:, None], self._weights.new_ones(len(moved), 1)

    def _row_states(self) -> tuple[State, ...]:
        """Of tokens, indices and weights alike: sharded over the expert axis, elsewhere as they are, or whole."""
        states = []
        for axis, state in enumerate(self._was.states):
            if state.is_sharded and state.dim == 0:
                states.append(state)
            elif axis == self._border.axis and self._border.spread:
                states.append(sharded(0))
            else:  # where the weights are split, ranks do different work with the same tokens
                states.append(VARYING if axis in self._border.split or state is VARYING else INVARIANT)
        return tuple(states)

    def _swap_in(self) -> None:
        """The module holds this rank's weights as plain tensors until `restore`."""
        module = self._module
        self._parameters = dict(module._parameters)
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            layout = parameter.mesh_layout.base
            states = [
                state if state.is_sharded else INVARIANT if rows is INVARIANT else VARYING
                for state, rows in zip(layout.states, self._rows)
            ]
            module._parameters[name] = convert(
                parameter, layout.with_states(states), f"{self._border.name} (experts)"
            ).to_local()
        for name in self._border.counters:
            setattr(module, name, self._border.local)

    def restore(self) -> None:
        self._module._parameters.update(self._parameters)
        for name in self._border.counters:
            setattr(self._module, name, self._border.experts)

    def combine(self, output: Tensor) -> DTensor:
        """The result as a DTensor; where rows travelled, they go back to their tokens, are weighted and summed."""
        border = self._border
        if border.spread:
            output = output[:0] if self._none else output
            back = _Back.apply(output, self._route).view(self._shape)
            output = (back * self._weights.unsqueeze(-1).to(back.dtype)).sum(1)
        states = [
            PENDING if axis in border.split and not state.is_sharded else state for axis, state in enumerate(self._rows)
        ]
        result = from_plain(output, layout_of(border.mesh, tuple(states), self._was.shape))
        before = self._was.states[border.axis]
        if not border.spread or before.is_sharded and before.dim == 0:
            return result
        states[border.axis] = VARYING if before is VARYING else INVARIANT
        return convert(result, result.mesh_layout.base.with_states(states), f"{border.name} (experts)")


class _WholeCall:
    """One forward of an experts module in the reproducible mode, on the weights of all experts. Cost: all-gathers of
    the weights over the expert axis, and reductions of their gradients."""

    def __init__(self, border: ExpertsBorder, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.args, self.kwargs, self._module = args, kwargs, module
        tokens, indices, _ = _tokens_indices_weights(border.name, args, kwargs)
        states = tokens.mesh_layout.states
        border.replicas = tuple(axis for axis, state in enumerate(states) if not state.is_sharded)
        border.load = _load(indices, border.experts)
        self._parameters = dict(module._parameters)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                layout = parameter.mesh_layout.base
                states = [INVARIANT if axis == border.axis else state for axis, state in enumerate(layout.states)]
                module._parameters[name] = convert(parameter, layout.with_states(states), f"{border.name} (experts)")

    def restore(self) -> None:
        self._module._parameters.update(self._parameters)

    def combine(self, output: Tensor) -> Tensor:
        return output


class _Route:
    """Which rows go where: a stable sort of the chosen experts, and the counts that ranks exchange."""

    def __init__(self, border: ExpertsBorder, indices: Tensor) -> None:
        self.border = border
        dry = indices.is_meta
        flat = torch.arange(indices.numel()) % border.experts if dry else indices.reshape(-1)  # dry: an even load
        self.order = torch.argsort(flat, stable=True)
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(flat.numel(), device=flat.device)
        counts = _counts(flat, border.experts)
        set_cause(Cause("expert counts", border.name))
        arrived = exchange_rows(counts, border.held, [border.local] * border.ranks, border.mesh, border.axis)
        if dry:
            arrived = counts.split(border.held)[border.mine].repeat(border.ranks)
        self.arrived = arrived.view(border.ranks, border.local)
        sent = torch.stack([part.sum() for part in counts.split(border.held)])
        numbers = torch.cat([sent, self.arrived.sum(1)]).tolist()  # the one wait for the device
        self.sends, self.receives = numbers[: border.ranks], numbers[border.ranks :]

    def arrived_ids(self) -> Tensor:
        """The local expert of every row that arrived: by rank of origin, then by expert."""
        border = self.border
        experts = torch.arange(border.local, device=self.arrived.device).repeat(border.ranks)
        return torch.repeat_interleave(experts, self.arrived.view(-1))

    def exchange(self, rows: Tensor, sends: list[int], receives: list[int], cause: Cause) -> Tensor:
        set_cause(cause)
        return exchange_rows(rows, sends, receives, self.border.mesh, self.border.axis)


def _counts(indices: Tensor, experts: int) -> Tensor:
    return torch.bincount(indices, minlength=experts)


def _load(indices: Tensor, experts: int) -> list[int]:
    """How many of this rank's rows go to each of all experts."""
    local = indices.to_local() if type(indices) is DTensor else indices
    return [] if local.is_meta else _counts(local.reshape(-1), experts).tolist()


class _Out(torch.autograd.Function):
    """Copies of tokens [t * k, hidden], sorted by expert, to the ranks that hold the experts. Backward is `_Back`."""

    @staticmethod
    def forward(ctx, copies: Tensor, route: _Route, direction: str = "forward") -> Tensor:
        ctx.route = route
        cause = Cause("expert dispatch", route.border.name, direction=direction)
        return route.exchange(copies.index_select(0, route.order), route.sends, route.receives, cause)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _Back.apply(gradient, ctx.route, "backward"), None, None


class _Back(torch.autograd.Function):
    """Rows of the experts to where their tokens are, in the order of the tokens. Backward is `_Out`."""

    @staticmethod
    def forward(ctx, rows: Tensor, route: _Route, direction: str = "forward") -> Tensor:
        ctx.route = route
        cause = Cause("expert combine", route.border.name, direction=direction)
        return route.exchange(rows, route.receives, route.sends, cause).index_select(0, route.back)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _Out.apply(gradient, ctx.route, "backward"), None, None


def _tokens_indices_weights(name: str, args: tuple, kwargs: dict) -> tuple[DTensor, DTensor, DTensor]:
    """By kind: the integers are the indices; of the floating point ones the tokens come first, then the weights."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    floating = [one for one in tensors if one.is_floating_point()]
    whole = [one for one in tensors if not one.is_floating_point()]
    if len(floating) == 2 and len(whole) == 1:
        tokens, weights, indices = *floating, whole[0]
        fits = tokens.ndim == 2 and indices.shape == weights.shape and tokens.shape[0] == indices.shape[0]
        if fits and all(type(one) is DTensor for one in (tokens, indices, weights)):
            return tokens, indices, weights
    raise PlanError(
        name,
        "its experts are spread over ranks, so that it takes tokens [T, hidden], indices [T, k] and weights [T, k]",
        [f"{type(one).__name__} {one.dtype} {list(one.shape)}" for one in tensors],
        [("expert_axis=None", "shards inside the experts only")],
    )
