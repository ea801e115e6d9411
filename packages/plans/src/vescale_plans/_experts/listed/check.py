"""The first calls of a block with a list of experts: may they be spread, and may the block see this rank's rows alone?

written_by          what a run of its forward writes of the block itself: it needs the whole batch (`whole.py`)
check_token_wise    whether it treats every token by itself: what `lists.py` does is right for no other block
check_experts       whether rows can travel to each expert, or its ranks alone can compute it
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from math import prod

import torch
from torch import Tensor

from vescale_dtensor.engine import INVARIANT, State, fold_objects
from vescale_trace.values import map_tensors, tensors_in

from ..._apply.generators import random_states, same_states, set_random_states
from ..._plan.parts import PlanError
from ..route import of_any_rank
from ..state import Kept
from .call import Call

FEW = 0.01
"""The share of tokens that may differ: a router's near tie may fall either way when a product has other sizes."""


def check_token_wise(call: Call) -> None:
    """Raises PlanError, on all ranks alike, unless the block treats every token by itself.

    Cost: an all-gather of the block's input, and five forwards without experts. What they write is taken back.
    """
    members, kept = call.members, random_states()
    full = members.rows(tuple(_unsharded(state) for state in call.rows.states), call.was.shape)
    with torch.no_grad():
        here, everywhere = call.local(call.rows), call.local(full)  # communicates: outside of what may raise
        try:
            problem = _tried(call, ((full, everywhere, 1.0), (call.rows, here, 1.0), (call.rows, here, 0.0)), kept)
            problem = problem or _crowded(call, (full, everywhere), (call.rows, here), kept)
            problem = problem or _unfit(call, call.tokens(here))
        except Exception as error:
            problem = error.rule if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    set_random_states(kept)
    _refuse(call, problem)


def check_experts(call: Call) -> None:
    """Raises PlanError, on all ranks alike, for experts that one rank cannot compute for all."""
    with torch.no_grad():
        here = call.local(call.rows)
        try:
            problem = _unfit(call, call.tokens(here))
        except Exception as error:
            problem = error.rule if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    _refuse(call, problem)


def written_by(call: Call) -> tuple[str, ...]:
    """Returns the names of all state that a forward of the block writes, its experts aside, the same on all ranks. It
    is as it was then.

    Cost: one forward without experts, a copy of what these modules hold, and a small all-gather.
    """
    members, states = call.members, random_states()
    with torch.no_grad():
        here, kept = call.local(call.rows), Kept(members.around(), deep=True)
        with suppress(Exception):  # what it wrote until then counts; if it writes nothing, the checks raise the same
            call.forward(call.rows, here, partial(_stand_in, [], 1.0, members.spread.experts))
        found = kept.written()
        kept.restore()
    set_random_states(states)
    return of_any_rank(found, members.mesh)


def _refuse(call: Call, problem: str | None) -> None:
    members = call.members
    problem = fold_objects(problem, lambda said: next((one for one in said if one is not None), None), members.mesh)
    if problem is not None:
        raise PlanError(
            members.name,
            f"the experts of this list cannot be spread over ranks: {problem}",
            [f"input  {call.was}"],
            [
                ("experts as stacked weights [experts, ...]", "one module that takes tokens, indices and weights"),
                members.on_every_rank(),
            ],
        )


def _tried(call: Call, trials, kept: list) -> str | None:
    """Compares three forwards, each (rows, arguments, factor of the function in the experts' place): over the tokens of
    all ranks, over this rank's, and over this rank's with another function."""
    found, ends, asked = [], [], []
    for rows, arguments, factor in trials:
        set_random_states(kept)
        asked.append([])
        output = call.forward(rows, arguments, partial(_stand_in, asked[-1], factor, call.members.spread.experts))
        found.append(tensors_in(output))
        ends.append(random_states())
    problem = _difference(call, found[0], found[1])
    if not same_states(ends[0], ends[1]):
        problem = "it draws random numbers at places that are not rows of its input"
    (_, first, second) = asked
    alike = [who for who, _ in first] == [who for who, _ in second]
    if not alike or not all(torch.equal(one, other) for (_, one), (_, other) in zip(first, second)):
        problem = "what it hands to an expert depends on what others gave"
    return problem


def _crowded(call: Call, full: tuple, local: tuple, kept: list) -> str | None:
    """Compares two forwards over tokens that are all alike, and so choose the same experts: a capacity that no batch
    has filled so far drops some of them."""
    first = call.tokens(full[1])
    if not first.numel():
        return None
    one = first[(0,) * (first.ndim - 1)]
    found = []
    for rows, arguments in (full, local):
        tokens = call.tokens(arguments)
        alike = map_tensors(arguments, lambda now, tokens=tokens: one.expand_as(now).clone() if now is tokens else now)
        set_random_states(kept)
        answer = partial(_stand_in, [], 1.0, call.members.spread.experts)
        found.append(tensors_in(call.forward(rows, alike, answer)))
    return _difference(call, *found)


def _stand_in(asked: list[tuple[int, Tensor]], factor: float, experts: int, index: int, rows: Tensor) -> Tensor:
    asked.append((index, rows))
    return rows * factor * (1 + index / experts)


def _difference(call: Call, full: list[Tensor], local: list[Tensor]) -> str | None:
    if len(full) != len(local):
        return "over this rank's tokens it returns other tensors than over all"
    for i, (theirs, ours) in enumerate(zip(full, local)):
        if not ours.ndim or ours.shape[0] not in (call.rows.local[0], call.rows.local_tokens):
            return f"tensor {i} of what it returns, {list(ours.shape)}, has no row per token"
        tokens = len(call.rows.local) - 1
        leading = tokens if tuple(ours.shape[:tokens]) == tuple(call.rows.local[:tokens]) else 1
        flat = (prod(ours.shape[:leading]), prod(ours.shape[leading:]))
        expected = call.rows.part(theirs).reshape(flat).double()
        differs = (expected - ours.reshape(flat).double()).abs() > 1e-4 * (1 + expected.abs())
        if differs.any(1).sum() > max(1, FEW * flat[0]):
            return f"what it computes for a token depends on other tokens (tensor {i} of what it returns)"
    return None


def _unfit(call: Call, tokens: Tensor) -> str | None:
    """Says why the rows of one expert of this rank's, tried on rows of zeros, cannot travel."""
    members = call.members
    before, row = random_states(), tokens.new_zeros(2, call.rows.shape[-1])  # of one there are no statistics
    kept = Kept(members.modules[members.spread.first].named_modules(), deep=True)
    try:
        given = call.compute(members.spread.first, row)
    finally:
        kept.restore()
    if not same_states(before, random_states()):
        return "its experts draw random numbers"
    members.gives = given.dtype
    return None if given.shape == row.shape else f"its experts make {list(given.shape)} of {list(row.shape)}"


def _unsharded(state: State) -> State:
    return INVARIANT if state.is_sharded else state
