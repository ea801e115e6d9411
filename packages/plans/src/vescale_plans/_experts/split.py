"""Experts that are split inside: over which axes, and whether they give parts of one sum, which is tried once, with
random weights of one expert.

Their forward runs on each rank's slices, and what it returns is summed over the axes that split. That is right where
rows of one weight meet columns of another, and not where local code cuts a packed weight (gate and up in one) whose
halves each rank has only one of: `Shard(1)` there, where `InterleavedShard(1, 2)` is meant. Nothing tells from outside,
so whole weights are compared with the sum over slices of the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import INVARIANT, Mesh, convert, from_plain, gather_objects

from .._apply.generators import random_states, same_states, set_random_states
from .._plan.parts import PlanError

Forward = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
_ROWS = 4


def split_axes(
    parameters: Iterable[tuple[str, DTensor]], experts: int
) -> tuple[frozenset[int], dict[str, tuple[int, ...]]]:
    """The axes over which the weights of single experts are split: what forward returns is partial there; and the
    parameters that are whole on some of these axes."""
    states = {key: parameter.mesh_layout.states for key, parameter in parameters}
    split = {axis for own in states.values() for axis, state in enumerate(own) if state.is_sharded and axis != experts}
    whole = {key: tuple(axis for axis in sorted(split) if not own[axis].is_sharded) for key, own in states.items()}
    return frozenset(split), {key: axes for key, axes in whole.items() if axes}


def refuse_unsplit(name: str, mesh: Mesh, parameters: Iterable[tuple[str, DTensor]], whole: dict[str, tuple[int, ...]]):
    """Raises PlanError for parameters that are whole on an axis that splits the others, if there are any."""
    if whole:
        axis = mesh.names[next(iter(whole.values()))[0]]
        why = f"but {', '.join(whole)} is not: the experts do more with it than add it to their result, so each rank's "
        raise _refused(name, axis, f"{why}part of the sum cannot be known", dict(parameters))


def refuse_split(
    name: str, mesh: Mesh, split: frozenset[int], held: Mapping[str, DTensor | None], problem: str
) -> None:
    """Raises PlanError: experts cannot be split inside as they are."""
    remedy = ("InterleavedShard(dim, 2)", "of a weight that holds two, as gate and up, each cut alike")
    raise _refused(name, mesh.names[min(split)], f"and {problem}", held, remedy)


def _refused(
    name: str, axis: str, why: str, parameters: Mapping[str, DTensor | None], *remedies: tuple[str, str]
) -> PlanError:
    return PlanError(
        name,
        f"over axis {axis!r} its experts are split inside, {why}",
        [f"{key}  {list(one.mesh_layout.states)}" for key, one in parameters.items() if one is not None],
        [*remedies, (f"leave {axis!r} out of the placements of its parameters", "experts are whole there")],
    )


def split_problem(
    forward: Forward, layouts: Mapping[str, Layout], experts: int, split: Sequence[int],
    whole: Mapping[str, Sequence[int]], width: int, like: Tensor,
) -> str | None:  # fmt: skip
    """Says why the ranks' results for one expert are no parts of one sum, the same text on all; None if they are.

    Arguments:
        forward: the output [rows, hidden] for parameters by name, rows [rows, width], and the expert of each.
        layouts: of the parameters; those with `experts` in dim 0 are made with one.
        split: the axes over which single experts are split.
        whole: parameters that are whole on some of these axes, where all ranks but the first hold zeros.
        like: whose dtype and device the trial takes.

    Cost: two forwards over a few rows, and an all-gather of what they give.
    """
    mesh = next(iter(layouts.values())).mesh
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)

    full, local = {}, {}
    for name, layout in layouts.items():
        shape = (1, *layout.shape[1:]) if layout.shape[:1] == (experts,) else layout.shape
        states = [state if axis in split else INVARIANT for axis, state in enumerate(layout.states)]
        full[name] = random(*shape) / 4
        placed = from_plain(full[name].clone(), layout.with_shape(shape).invariant)
        part = convert(placed, placed.mesh_layout.with_states(states), "experts").to_local()
        local[name] = part * 0 if any(mesh.coordinate[axis] for axis in whole.get(name, ())) else part
    rows, first = random(_ROWS, width), torch.zeros(_ROWS, dtype=torch.int64, device=like.device)
    kept = random_states()
    problem = part = None
    try:
        expected = forward(full, rows, first)
    except Exception:
        expected = None  # it does not run with one expert: nothing is known
    draws = not same_states(kept, random_states())
    if expected is not None and not draws:
        try:
            part = forward(local, rows, first)
        except Exception as error:
            problem = f"its forward raises {type(error).__name__} on slices of its weights: {error}"
    set_random_states(kept)
    everyone = gather_objects((mesh.coordinate, problem, None if part is None else part.double().cpu()), mesh)
    told = next((problem for _, problem, _ in everyone if problem is not None), None)
    if told is None and all(part is not None for *_, part in everyone):
        expected = expected.double().cpu()
        bound = (5e-2 if like.itemsize < 4 else 1e-3) * expected.abs().max()
        for here, _, _ in everyone:  # of every group of ranks, so that all say the same
            found = sum(part for at, _, part in everyone if _together(at, here, split))
            if found.shape != expected.shape or (found - expected).abs().max() > bound:
                return "what its ranks give does not add up to what whole experts give: it cuts a weight in parts"
    return told


def _together(one: Sequence[int], other: Sequence[int], split: Sequence[int]) -> bool:
    return all(a == b for axis, (a, b) in enumerate(zip(one, other)) if axis not in split)
