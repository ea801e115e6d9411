"""The single-device run as the oracle of a function on DTensors. For tests; call it on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Layout, distribute_tensor, from_local
from vescale_dtensor._communication import events as _events
from vescale_dtensor._layouts.region import divides
from vescale_dtensor.engine import INVARIANT, Event, State, layout_of, mesh_of
from vescale_dtensor.placement import Partial, Placement, Replicate, Shard

from ._torch_private import tree_flatten
from .slices import slice_of


def spread(tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], seed: int = 0) -> DTensor:
    """The DTensor of a whole tensor; on Partial axes every rank holds a different, non-zero part of the sum."""
    mesh = mesh_of(device_mesh)
    if not any(isinstance(p, Partial) for p in placements):
        return distribute_tensor(tensor, device_mesh, placements)
    partial = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
    parts = 1
    for axis in partial:
        parts *= mesh.sizes[axis]
    mine = 0
    for axis in partial:
        mine = mine * mesh.sizes[axis] + mesh.coordinate[axis]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        others = [
            torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor.dtype) for _ in range(parts - 1)
        ]  # whole numbers, so that small values add up without rounding away
        part = tensor - sum(others) if mine == 0 else others[mine - 1]
        cut = [Replicate() if axis in partial else p for axis, p in enumerate(placements)]
        local = distribute_tensor(part, device_mesh, cut).to_local()
    out = from_local(local, device_mesh, placements, shape=tuple(tensor.shape))
    return out.detach().requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def compare(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    placements: Sequence[Sequence[Placement] | None],
    device_mesh: DeviceMesh,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    bitwise: bool = False,
) -> list[Event]:
    """Runs `function(*tensors)` on one device and on DTensors; values and input gradients must agree.

    `placements[i]` is None for a tensor that stays plain. Tensors that require grad
    are differentiated with a random cotangent per differentiable output. Returns the
    collectives of the sharded FORWARD, for a test to count.
    """
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    expected = function(*leaves)
    sharded = [
        t.detach().clone().requires_grad_(t.requires_grad) if p is None else spread(t, device_mesh, p, seed=i)
        for i, (t, p) in enumerate(zip(tensors, placements))
    ]
    events: list[Event] = []
    _events.listeners.append(events.append)
    try:
        actual = function(*sharded)
    finally:
        _events.listeners.remove(events.append)
    context = f"placements {placements}"
    wanted, found = tree_flatten(expected)[0], tree_flatten(actual)[0]
    assert len(wanted) == len(found), f"{len(found)} outputs for {len(wanted)}: {context}"
    for want, have in zip(wanted, found):
        _same(want, have, rtol, atol, bitwise, f"value, {context}")
    pairs = [(w, h) for w, h in zip(wanted, found) if isinstance(w, Tensor) and w.requires_grad]
    if not pairs:
        return events
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(w.shape, generator=generator).to(w.dtype) for w, _ in pairs]
    torch.autograd.backward([w for w, _ in pairs], [s.clone() for s in seeds])
    torch.autograd.backward([h for _, h in pairs], seeds)
    for i, (leaf, shard) in enumerate(zip(leaves, sharded)):
        if leaf.requires_grad:
            assert (leaf.grad is None) == (shard.grad is None), f"gradient {i} is missing on one side: {context}"
            if leaf.grad is not None:
                _same(leaf.grad, shard.grad, rtol, atol, bitwise, f"gradient of input {i}, {context}")
    return events


def placements_for(
    shape: Sequence[int], axes: int, *, partial: bool = True, kinds: Sequence[Placement] = ()
) -> list[tuple[Placement, ...]]:
    """Every combination, over `axes` mesh axes, of Replicate, Partial, Shard of each dim, and `kinds`.

    A grid of more than a dozen is a third of itself, whole with VESCALE_GRID=full.
    """
    one = [Replicate(), *([Partial()] if partial else []), *[Shard(d) for d in range(len(shape))], *kinds]
    grid = list(itertools.product(one, repeat=axes))
    return slice_of(grid, 3) if len(grid) > 12 else grid


class ImaginedMesh:
    """The part of a mesh that a layout needs, without processes: for tests of geometry alone."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.ndim, self.names = sizes, len(sizes), tuple("abcdef"[: len(sizes)])
        self.coordinate = (0,) * len(sizes)

    @property
    def coordinates(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.sizes))


def imagined_layout(mesh: ImaginedMesh, states: Sequence[State], shape: Sequence[int]) -> Layout | None:
    """The layout, or None when a cut does not divide at some coordinate."""
    rest = [INVARIANT] * mesh.ndim
    for axis, state in enumerate(states):
        before = layout_of(mesh, [*states[:axis], *rest[axis:]], shape)  # type: ignore[arg-type]
        if state.is_sharded and not all(divides(state, before.shape_at(c)[state.dim]) for c in mesh.coordinates):
            return None
    return layout_of(mesh, states, shape)  # type: ignore[arg-type]


def shard_of(tensor: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """Returns the shard of a whole tensor under `layout` for the rank at `coordinate`."""
    for dim, ranges in enumerate(layout.region_at(coordinate)):
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
        tensor = torch.cat(parts or [tensor.narrow(dim, 0, 0)], dim)
    return tensor


def _same(want: Any, have: Any, rtol, atol, bitwise: bool, context: str) -> None:
    if not isinstance(want, Tensor):
        assert want == have, f"{have!r} for {want!r}: {context}"
        return
    if isinstance(have, DTensor):
        assert tuple(have.shape) == tuple(want.shape), f"shape {tuple(have.shape)} for {tuple(want.shape)}: {context}"
        have = have.detach().full_tensor()  # type: ignore[attr-defined]
    options = {"rtol": 0, "atol": 0} if bitwise else {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(have, want.detach(), msg=lambda text: f"{context}: {text}", equal_nan=True, **options)


# Of an [8, 8] tensor: views that lie in memory in another order than their dims, with gaps, or over themselves.
STRIDED_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda x: x.unfold(0, 3, 2),
    "unfold of the last": lambda x: x.unfold(1, 4, 1),
    "unfold, transposed": lambda x: x.unfold(1, 2, 2).transpose(0, 2),
    "transposed slice": lambda x: x[1:7, ::2].t(),
    "steps": lambda x: x[::3, 1::2],
    "heads": lambda x: x.view(8, 2, 4).transpose(0, 1),
    "heads, cut": lambda x: x.view(8, 2, 4).permute(2, 0, 1)[1:3],
    "expanded": lambda x: x[:, None].expand(8, 2, 8),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(0, 4, 2).unfold(1, 4, 4).flatten(2),
    "select": lambda x: x.view(2, 4, 8).select(1, 2),
    "moved dims": lambda x: x.view(2, 4, 8).movedim(0, 1),
}  # fmt: skip
