"""Rows and weights of experts as plain tensors: in which states both lie on the mesh meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn

from vescale_dtensor.engine import INVARIANT, REPLICATE, State, convert, sharded, to_plain

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
