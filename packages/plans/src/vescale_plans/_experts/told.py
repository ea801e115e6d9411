"""How the forward of an experts module is told which expert computes each row, in one call.

indices    tokens [T, hidden], and the indices and the weights [T, k] of the experts chosen for each, in any order
counts     rows [N, hidden], sorted by expert, and how many each expert has: a tensor [experts], or a list

Both are read as tokens, indices and weights; what is put in their place is told in the module's own form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.engine import INVARIANT, convert, from_plain, layout_of

from .._plan.fields import EXPERT_FORMS
from .._plan.parts import PlanError
from .capacity import counted


class Stack(NamedTuple):
    """A module with stacked weights: how many experts it has, and how its forward is told them."""

    count: int
    form: str = "indices"


class Told:
    """The tokens [T, hidden], indices and weights [T, k] of a call. Raises PlanError for a call of another form."""

    def __init__(self, name: str, stack: Stack, args: tuple, kwargs: dict) -> None:
        self._name, self._stack, self._arguments = name, stack, (args, kwargs)
        self._back: Tensor | None = None
        self.taken: Tensor | None = None  # of rows that stay: zeros for those beyond a capacity
        given = (*args, *kwargs.values())
        tensors = [one for one in given if isinstance(one, Tensor)]
        self.tokens, self.indices, self.weights = (
            self._of_counts(given) if stack.form == "counts" else self._of_indices(tensors)
        )

    def _of_indices(self, tensors: list[Tensor]) -> tuple[DTensor, DTensor, DTensor]:
        """Finds the three by kind: of the floating point ones tokens come first, then weights."""
        floating = [one for one in tensors if one.is_floating_point()]
        integers = [one for one in tensors if not one.is_floating_point()]
        if len(floating) == 2 and len(integers) == 1:
            tokens, weights, indices = *floating, integers[0]
            fits = tokens.ndim == 2 and indices.shape == weights.shape and tokens.shape[0] == indices.shape[0]
            if fits and all(type(one) is DTensor for one in (tokens, indices, weights)):
                self._given = tokens, indices, weights
                return self._given
        raise self._unlike("it must be called with tokens [T, hidden], indices [T, k] and weights [T, k]")

    def _of_counts(self, given: tuple) -> tuple[DTensor, DTensor, DTensor]:
        count, cause = self._stack.count, f"{self._name} (experts)"
        rows = [one for one in given if type(one) is DTensor and one.ndim == 2 and one.is_floating_point()]
        sizes = [one for one in given if (type(one) is list or isinstance(one, Tensor) and one.ndim == 1)]
        if len(rows) != 1 or len(sizes) != 1 or len(sizes[0]) != count:
            raise self._unlike(f"it must be called with rows [N, hidden] and counts [{count}]")
        self._given = rows[0], sizes[0]
        here = sizes[0]
        if type(here) is DTensor:
            here = convert(here, here.mesh_layout.base.invariant, cause).to_local()
        tokens, here = rows[0], torch.as_tensor(here, device=rows[0].device)
        total = len(tokens) if here.is_meta else int(here.sum())
        if total != len(tokens):
            raise self._unlike(f"its counts must add up to its rows, but they add up to {total}")
        ids = torch.arange(count, device=here.device).repeat_interleave(here.long(), output_size=total)
        layout = layout_of(tokens.mesh_layout.mesh, (INVARIANT,) * len(tokens.mesh_layout.states), (total, 1))
        weights = torch.ones(total, 1, dtype=tokens.dtype, device=tokens.device)
        return tokens, from_plain(ids[:, None], layout), from_plain(weights, layout)

    def arguments(self, rows: Tensor, indices: Tensor, weights: Tensor, local: int) -> tuple[tuple, dict]:
        """Returns the call's arguments with plain rows in place of its own, of `local` experts."""
        fresh: tuple[Any, ...] = (rows, indices, weights)
        if self._stack.form == "counts":
            order = torch.argsort(indices[:, 0], stable=True)
            self._back = torch.empty_like(order)
            self._back[order] = torch.arange(len(order), device=order.device)
            sizes = counted(indices[:, 0], local)
            was = self._given[1]
            fresh = rows.index_select(0, order), sizes.tolist() if type(was) is list else sizes.to(was.dtype)
        replaced, (args, kwargs) = dict(zip(map(id, self._given), fresh)), self._arguments
        kept = {key: replaced.get(id(one), one) for key, one in kwargs.items()}
        return tuple(replaced.get(id(one), one) for one in args), kept

    def in_order(self, output: Tensor) -> Tensor:
        """Puts what the forward gave for these into the order of the rows, of which those that no expert takes add
        nothing."""
        if self._back is None:
            return output
        output = output.index_select(0, self._back)
        return output if self.taken is None else output * self.taken.to(output.dtype)

    def _unlike(self, rule: str) -> PlanError:
        args, kwargs = self._arguments
        given = [
            f"{type(one).__name__} {one.dtype} {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
            for one in (*args, *kwargs.values())
        ]
        declared = [(f'experts={{"{self._name}": "{form}"}}', what) for form, what in EXPERT_FORMS.items()]
        remedies = [("expert_axis=None", "shards inside the experts only")]
        other = [one for one, form in zip(declared, EXPERT_FORMS) if form != self._stack.form]
        return PlanError(self._name, f"its experts are spread over ranks, so {rule}", given, [*other, *remedies])
