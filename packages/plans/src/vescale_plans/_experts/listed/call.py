"""One call of a block whose experts are a list: its two passes, and what happens between them (`lists.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import INVARIANT, PARTIAL, REPLICATE, State, convert, from_plain, layout_of
from vescale_trace.values import map_tensors, tensors_in

from ..._apply.generators import random_states, same_states, set_random_states
from ..._plan.parts import PlanError
from ..._plan.validate import CONTAINERS
from ..local_rows import row_states, swap_in
from ..route import Back, Out, Route
from .members import Members
from .rows import Draws, Rows
from .stand_ins import Answer, Child, Stubs


class Call:
    """See the module."""

    def __init__(self, members: Members, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self.members, self._block = members, block
        self._given = args, kwargs
        first = next((one for one in (*args, *kwargs.values()) if type(one) is DTensor and one.ndim > 1), None)
        if first is None:
            raise PlanError(
                members.name,
                "its experts are spread over ranks, but it is called without tokens [..., hidden] among its arguments",
                [f"{type(one).__name__}" for one in (*args, *kwargs.values())],
                [("expert_axis=None", "computes on every rank")],
            )
        self.was = first.mesh_layout.base
        states = row_states(self.was.states, members.spread, True, frozenset())
        self.rows = members.rows(states, self.was.shape)
        members.replicas = tuple(a for a, state in enumerate(states) if not state.is_sharded)
        self._open = contextlib.ExitStack()
        self._children: list[tuple[nn.Module, list[Tensor], Any, list[Tensor] | None]] = []
        self._experts: list[tuple[int, Tensor]] = []
        self._keep = self._replay = False

    # --- the passes -------------------------------------------------------------------------

    def note(self) -> None:
        """The first pass."""
        self._local, self._kept = self.local(self.rows), random_states()
        self._keep = True
        self.forward(self.rows, self._local, self._note)
        self._keep = False

    def forget(self) -> None:
        """The first pass has not been: its block computes in another way."""
        set_random_states(self._kept)

    def begin(self) -> tuple[tuple, dict]:
        """The experts, and the arguments of the second pass, which `close` and `finish` end."""
        set_random_states(self._kept)
        self._results = self._through_experts(self.tokens(self._local))
        self._replay, self._at, self._children_at = True, 0, 0
        self._open.enter_context(self._inside(self.rows, self._give))
        return self._copied(self._local)

    def forward(self, rows: Rows, given: tuple[tuple, dict], answer: Answer) -> Any:
        """Runs the block on `rows`, with `answer` in place of its experts."""
        args, kwargs = self._copied(given)
        with self._inside(rows, answer):
            return self._block.forward(*args, **kwargs)

    def close(self) -> None:
        """The block is as it was."""
        self._open.close()

    def finish(self, output: Any) -> Any:
        """Returns the block's output as DTensors."""
        if self._at != len(self._experts):
            raise self._strays()
        back = self._back

        def leave(tensor: Tensor) -> DTensor:
            if back.requires_grad and tensor.is_floating_point():
                tensor = _Tied.apply(tensor, back)
            full = self.rows.wrap(tensor, self.members.name)
            now, was = full.mesh_layout.base, self.was.states[self.members.spread.axis]
            if was.is_sharded and was.dim == 0:
                return full
            states = list(now.states)
            states[self.members.spread.axis] = REPLICATE if was is REPLICATE else INVARIANT
            return convert(full, now.with_states(states), f"{self.members.name} (experts)")

        return map_tensors(output, leave)

    def local(self, rows: Rows) -> tuple[tuple, dict]:
        """The arguments as plain tensors: of those with the batch in front, the rows of `rows`."""

        def local(one: Tensor) -> Tensor:
            if type(one) is not DTensor:
                return one
            layout = one.mesh_layout.base
            with_rows = layout.ndim and layout.shape[0] == self.was.shape[0]
            target = layout_of(rows.mesh, rows.states, layout.shape) if with_rows else layout.invariant
            return convert(one, target, f"{self.members.name} (experts)").to_local()

        return map_tensors(self._given, local)

    def tokens(self, given: tuple[tuple, dict]) -> Tensor:
        """Returns the first plain argument that has rows."""
        args, kwargs = given
        return next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.ndim > 1)

    def _copied(self, given: Any) -> Any:
        """A pass may write to what it is given, and there are two."""
        return map_tensors(given, lambda one: one.clone() if one.is_floating_point() else one)

    @contextlib.contextmanager
    def _inside(self, rows: Rows, answer: Answer) -> Iterator[None]:
        """The block's forward sees stand-ins for its modules, and its own parameters as plain tensors."""
        block = self._block
        modules = dict(block._modules)
        self._computing = rows
        parameters = swap_in(block, rows.states, f"{self.members.name} (experts)")
        for name, module in modules.items():
            if module is not None and not isinstance(module, CONTAINERS):
                block._modules[name] = Child(self.child, module)
        block._modules[self.members.key] = Stubs(self.members, answer)
        self._draws = Draws(rows)
        try:
            with self._draws:
                yield
        finally:
            block._modules.update(modules)
            block._parameters.update(parameters)

    # --- experts ----------------------------------------------------------------------------

    def _note(self, index: int, rows: Tensor) -> Tensor:
        self._experts.append((index, rows))
        return torch.zeros_like(rows)

    def _give(self, index: int, rows: Tensor) -> Tensor:
        if self._at >= len(self._experts):
            raise self._strays()
        noted, before = self._experts[self._at]
        if noted != index or before.shape != rows.shape:
            raise self._strays()
        self._at += 1
        return self._results[self._at - 1].view(rows.shape)

    def _strays(self) -> PlanError:
        return PlanError(
            self.members.name,
            f"which experts of {self.members.spread.name!r} it calls, or with how many rows, depends on what other "
            "experts gave: their rows cannot travel together",
            (),
            [("expert_axis=None", "computes on every rank")],
        )

    def _through_experts(self, tokens: Tensor) -> list[Tensor]:
        """Returns the experts' output for the rows of every call, in the order of the calls. `tokens`: this rank's."""
        members, width = self.members, self.rows.shape[-1]
        spread = members.spread
        parts = [rows.reshape(-1, width) for _, rows in self._experts]
        rows = torch.cat(parts) if parts else tokens.reshape(-1, width)[:0]
        device = rows.device
        indices = torch.tensor([index for index, _ in self._experts], dtype=torch.int64, device=device)
        sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
        called = torch.zeros(spread.experts, dtype=torch.int64, device=device)
        called[indices] = 1
        route = Route(spread, torch.repeat_interleave(indices, sizes), called)
        members.load = route.load
        moved = Out.apply(rows, route)
        if torch.is_grad_enabled() and not moved.requires_grad:  # a backward goes the same way on all ranks
            moved.requires_grad_(any(parameter.requires_grad for parameter in members.modules.parameters()))
        asked = {index for index, _ in self._experts}
        with members.state.computing(self.rows.states, len(asked) < len(self._experts)):
            computed = self._computed(moved, route)
        self._back = Back.apply(computed, route)
        given = self._back if members.gives is None else self._back.to(members.gives)
        return [part.clone() for part in given.split([len(part) for part in parts])]  # the block may write to its own

    def _computed(self, moved: Tensor, route: Route) -> Tensor:
        """Returns the output of this rank's experts for the rows that arrived, in their order."""
        members = self.members
        order = torch.argsort(route.arrived_ids(), stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        moved = self._over_splits(moved, REPLICATE)
        given = []
        for i, part in enumerate(moved.index_select(0, order).split(route.load)):
            # What travels has one dtype on all ranks, those too whose experts computed nothing.
            given.append(self.compute(members.spread.first + i, part).to(part.dtype) if route.asked[i] else part)
        return self._over_splits(torch.cat(given).index_select(0, back), PARTIAL)

    def _over_splits(self, rows: Tensor, inside: State) -> Tensor:
        """Into or out of experts that are split inside: alike outside, different work or parts of a sum within."""
        if not self.members.split:
            return rows
        outside = self.rows.untold(rows.shape)
        states = [inside if axis in self.members.split else state for axis, state in enumerate(outside.states)]
        within = outside.with_states(states)
        source, target = (outside, within) if inside is REPLICATE else (within, outside)
        return convert(from_plain(rows, source), target, f"{self.members.name} (experts)").to_local()

    def compute(self, index: int, rows: Tensor) -> Tensor:
        """One expert, on plain tensors."""
        return self.members.compute(index, rows, self.rows.states)

    # --- all else that the block calls -----------------------------------------------------------

    def child(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Computes on DTensors; in the second pass the answer of the first, where it was given the same."""
        given = tensors_in((args, kwargs))
        if self._replay and self._children_at < len(self._children):
            who, before, answer, drawn = self._children[self._children_at]
            self._children_at += 1
            if who is module and len(before) == len(given) and all(map(torch.equal, before, given)):
                if drawn is not None:
                    set_random_states(drawn)
                return answer
        states = random_states()
        self._draws.active = False
        try:
            answer = self._on_mesh(module, args, kwargs)
        finally:
            self._draws.active = True
        after = random_states()
        drew = not same_states(states, after)
        if self._keep:
            kept = [one.detach().clone() if one.is_floating_point() else one for one in given]
            self._children.append((module, kept, answer, after if drew else None))
        return answer

    def _on_mesh(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        rows, where = self._computing, f"{self.members.name} (experts)"

        def enter(one: Tensor) -> Tensor:
            return one if type(one) is DTensor else from_plain(one, rows.layout(one) or rows.untold(one.shape))

        def leave(one: Tensor) -> Tensor:
            layout = one.mesh_layout.base
            first = any(state.is_sharded and state.dim == 0 for state in layout.states)
            told = first or all(not state.is_sharded for state in rows.states)
            target = layout_of(rows.mesh, rows.states, layout.shape) if told else rows.untold(layout.shape)
            return convert(one, target, where).to_local()

        args, kwargs = map_tensors((args, kwargs), enter)
        return map_tensors(module(*args, **kwargs), leave)


class _Tied(torch.autograd.Function):
    """A block's output; its backward reaches the experts' exchange also where no token of this rank's called one."""

    @staticmethod
    def forward(ctx, output: Tensor, back: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None
