"""Random tensors on a mesh: torch's factories with a mesh and placements. Only the shard is allocated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, distribute_tensor, empty
from vescale_dtensor.engine import mesh_of
from vescale_dtensor.placement import Placements
from vescale_trace.arguments import torch_call

from .._cpu.stream import Draw
from .fills import draw_into, fills_for

Seed = Generator | None


@torch_call
def rand(*size, device_mesh: DeviceMesh, placements: Placements, generator: Seed = None, **options) -> DTensor:
    """`torch.rand` of global `size`: bitwise its values on one device. A Partial axis has them on its first rank."""
    return _made(torch.rand, Tensor.uniform_, (), size, device_mesh, placements, generator, options)


@torch_call
def randn(*size, device_mesh: DeviceMesh, placements: Placements, generator: Seed = None, **options) -> DTensor:
    """`torch.randn` of global `size`: bitwise its values on one device. A Partial axis has them on its first rank."""
    return _made(torch.randn, Tensor.normal_, (), size, device_mesh, placements, generator, options)


@torch_call
def randint(
    *bounds, device_mesh: DeviceMesh, placements: Placements, generator: Seed = None, dtype=torch.int64, **options
) -> DTensor:
    """`torch.randint([low,] high, size)` of global `size`: bitwise its values on one device."""
    *limits, size = bounds
    limits = (0, *limits)[-2:]
    options["dtype"] = dtype
    return _made(torch.randint, Tensor.random_, limits, (size,), device_mesh, placements, generator, options)


@torch_call
def randperm(n: int, *, device_mesh: DeviceMesh, placements: Placements, generator: Seed = None, **options) -> DTensor:
    """`torch.randperm(n)`, sharded. Every rank makes it whole, because each element depends on all before it."""
    options.setdefault("device", mesh_of(device_mesh).device_type)
    return distribute_tensor(torch.randperm(n, generator=generator, **options), device_mesh, placements)


def _made(
    whole: Callable, function: Callable, bounds: tuple, size, device_mesh, placements, generator, options: dict
) -> DTensor:
    """An empty tensor, filled as torch's factory does; on devices other than CPU and CUDA, the whole, sliced."""
    wants_grad = options.pop("requires_grad", False)
    seeded = {} if generator is None else {"generator": generator}
    fresh = empty(*size, device_mesh=device_mesh, placements=placements, **options)
    if fills_for(fresh):
        fresh = draw_into(fresh, Draw(function, bounds, seeded), fresh=True)
    else:
        options.setdefault("device", fresh.device)
        drawn = whole(*bounds, tuple(fresh.shape), **seeded, **options)
        fresh = distribute_tensor(drawn, device_mesh, placements)
    return fresh.requires_grad_(wants_grad)
