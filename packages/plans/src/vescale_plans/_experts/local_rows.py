"""Rows and weights of experts as plain tensors: in which states both lie on the mesh meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import INVARIANT, REPLICATE, State, convert, sharded, to_plain

from .._plan.parts import PlanError
from .route import Spread


def row_states(now: Sequence[State], experts: Spread, spread: bool, split: frozenset[int]) -> tuple[State, ...]:
    """States of tokens, indices and weights alike: sharded over the expert axis, elsewhere as they are, or whole."""
    states = []
    for axis, state in enumerate(now):
        if state.is_sharded and state.dim == 0:
            states.append(state)
        elif axis == experts.axis and spread:
            states.append(sharded(0))
        else:  # where the weights are split, ranks do different work with the same tokens
            states.append(REPLICATE if axis in split or state is REPLICATE else INVARIANT)
    return tuple(states)


def swap_in(
    module: nn.Module, rows: tuple[State, ...], cause: str, whole: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, nn.Parameter | None]:
    """The module holds this rank's weights as plain tensors; returns the parameters that it held itself.

    `whole`: what counts once over some axes: all their ranks but the first hold zeros.
    """
    held = dict(module._parameters)
    for name, parameter in held.items():
        if parameter is None:
            continue
        layout = parameter.mesh_layout.base
        states = [
            state if state.is_sharded else INVARIANT if row is INVARIANT else REPLICATE
            for state, row in zip(layout.states, rows)
        ]
        local = to_plain(convert(parameter, layout.with_states(states), cause))
        counts = not any(layout.mesh.coordinate[axis] for axis in whole.get(name, ()))
        module._parameters[name] = local if counts else local * 0
    return held


def tokens_indices_weights(name: str, args: tuple, kwargs: dict) -> tuple[DTensor, DTensor, DTensor]:
    """Finds the three by kind: the integers are the indices; of the floating point ones tokens come first, then
    weights."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    floating = [one for one in tensors if one.is_floating_point()]
    integers = [one for one in tensors if not one.is_floating_point()]
    if len(floating) == 2 and len(integers) == 1:
        tokens, weights, indices = *floating, integers[0]
        fits = tokens.ndim == 2 and indices.shape == weights.shape and tokens.shape[0] == indices.shape[0]
        if fits and all(type(one) is DTensor for one in (tokens, indices, weights)):
            return tokens, indices, weights
    raise PlanError(
        name,
        "its experts are spread over ranks, so it must be called with tokens [T, hidden], indices [T, k] and "
        "weights [T, k]",
        [f"{type(one).__name__} {one.dtype} {list(one.shape)}" for one in tensors],
        [("expert_axis=None", "shards inside the experts only")],
    )
