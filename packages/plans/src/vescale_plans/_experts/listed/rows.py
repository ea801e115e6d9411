"""Rows of tokens in plain tensors of a block's own: how they lie on the mesh, and what is drawn for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import REPLICATE, Mesh, State, convert, from_plain, layout_of

from ..._plan.parts import PlanError

DRAWS = frozenset(
    "uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_ rand_like randn_like randint_like "
    "bernoulli dropout dropout_ alpha_dropout feature_dropout multinomial".split()
)


class Rows:
    """Layout on the mesh of a block's plain tensors, whose dim 0 is the batch or the tokens."""

    def __init__(self, mesh: Mesh, states: tuple[State, ...], shape: Sequence[int]) -> None:
        self.mesh, self.states, self.shape = mesh, states, tuple(shape)
        self.batch = layout_of(mesh, states, self.shape)
        self.local = tuple(self.batch.local_shape)
        self.tokens, self.local_tokens = prod(self.shape[:-1]), prod(self.local[:-1])
        flat, each = layout_of(mesh, states, (self.tokens,)), prod(self.shape[1:-1])
        self._flattens = all(
            flat.shape_at(where)[0] == self.batch.shape_at(where)[0] * each
            for where in itertools.product(*map(range, mesh.sizes))
        )

    def layout(self, tensor: Tensor) -> Layout | None:
        """Layout of a plain tensor with rows in dim 0; None if no layout says which rows this rank holds."""
        batch, tokens = (self.shape[0], self.local[0], True), (self.tokens, self.local_tokens, self._flattens)
        for rows, here, known in (batch, tokens) if tensor.ndim == len(self.shape) else (tokens, batch):
            if tensor.ndim and tensor.shape[0] == here:
                return layout_of(self.mesh, self.states, (rows, *tensor.shape[1:])) if known else None
        return None

    def untold(self, shape: Sequence[int]) -> Layout:
        """Layout of rows whose places no layout tells: every rank works on its own, as if they were all."""
        states = tuple(REPLICATE if state.is_sharded else state for state in self.states)
        return layout_of(self.mesh, states, tuple(shape))

    def wrap(self, tensor: Tensor, where: str) -> DTensor:
        """A plain tensor that leaves the block. Raises PlanError for one without rows."""
        layout = self.layout(tensor)
        if layout is not None:
            return from_plain(tensor, layout)
        if not tensor.ndim or tensor.shape[0] != self.local_tokens:
            raise PlanError(
                where,
                "its experts are a list that is spread over ranks, but it returns something without a row per token",
                [f"{list(tensor.shape)}, of input {list(self.local)} on this rank"],
                [("experts as stacked weights [experts, ...]", ""), ("expert_axis=None", "computes on every rank")],
            )
        rest = tuple(tensor.shape[1:])
        apart = layout_of(self.mesh, self.states, (*self.shape[:-1], *rest))
        return from_plain(tensor.reshape(*self.local[:-1], *rest), apart).flatten(0, len(self.shape) - 2)

    def part(self, full: Tensor) -> Tensor:
        """This rank's rows of a plain tensor that all ranks hold."""
        rest = tuple(full.shape[1:])
        rest = rest if full.shape[0] == self.shape[0] else (*self.shape[1:-1], *full.shape[1:])
        full = full.reshape(self.shape[0], *rest)
        target = layout_of(self.mesh, self.states, tuple(full.shape))
        return convert(from_plain(full, target.invariant), target, "experts").to_local()


class Draws(TorchFunctionMode):
    """The block's own random numbers: those of one device, at the places of this rank's rows."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows, self.active = rows, True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.active and getattr(function, "__name__", "") in DRAWS and args and type(args[0]) is Tensor:
            layout = self.rows.layout(args[0])
            if layout is not None:
                placed = from_plain(args[0], layout)
                drawn = function(placed, *args[1:], **kwargs)
                return args[0] if drawn is placed else drawn.to_local()
        return function(*args, **kwargs)
