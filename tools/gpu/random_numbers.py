"""(a) Random numbers on shards against the device's own, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor
from vescale_testkit import run_ranks

from .part import Part, run

SHAPES = ((7,), (64, 33), (130, 1031))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def draws() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """By name; each takes a tensor, whole or distributed, and returns what was drawn."""
    fills = {
        "uniform_": (-1.0, 2.0), "normal_": (0.5, 2.0), "exponential_": (1.5,), "cauchy_": (0.0, 1.0),
        "geometric_": (0.3,), "log_normal_": (0.0, 1.0), "bernoulli_": (0.3,), "random_": (3, 900),
    }  # fmt: skip
    for name, args in fills.items():
        yield name, lambda x, name=name, args=args: getattr(torch.zeros_like(x), name)(*args)
    yield "rand_like", torch.rand_like
    yield "randn_like", torch.randn_like
    yield "dropout", lambda x: F.dropout(x, 0.3)
    yield "alpha_dropout", lambda x: F.alpha_dropout(x, 0.3, True)


def compared(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, list[str]]:
    """Run on each rank: draws whose shards, gathered, are not the device's own, and those that raised."""
    mesh, odd, raised = _mesh(device), [], []
    source = torch.ones(shape, dtype=dtype, device=device)
    for name, draw in draws():
        for placement in [Replicate(), *(Shard(dim) for dim in range(len(shape)))]:
            try:
                torch.manual_seed(17)
                torch.rand(5, device=device)  # not from the stream's begin
                wanted, after = draw(source), torch.rand(3, device=device)
                torch.manual_seed(17)
                torch.rand(5, device=device)
                found = draw(distribute_tensor(source, mesh, [placement]))
                same = torch.equal(_whole(found), wanted) and torch.equal(torch.rand(3, device=device), after)
            except Exception as error:
                raised.append(f"{name} {placement}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if not same:
                odd.append(f"{name} {placement}")
    return {"other bits": odd, "raised": raised}


def attention(device: str) -> list[str]:
    """Placements under which attention's dropout is not that of a replicated call."""
    mesh = _mesh(device)
    torch.manual_seed(0)
    given = [torch.randn(4, 4, 16, 8, device=device) for _ in range(3)]
    results = {}
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        torch.manual_seed(3)
        inputs = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in given]
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.25)
        out.square().sum().backward()
        results[str(placement)] = [_whole(t) for t in (out.detach(), *(x.grad for x in inputs))]
    first = results.pop(str(Replicate()))
    close = partial(torch.allclose, rtol=1e-4, atol=1e-5)
    return [name for name, found in results.items() if not all(map(close, found, first))]


def followed() -> dict[str, Any]:
    """Fills that torch does not draw on this device as the closed form has it: every rank draws the whole of them."""
    from vescale_rng._cuda.fill import is_followed
    from vescale_rng._cuda.numbers import fused_dropout_

    names = "uniform_ normal_ exponential_ cauchy_ geometric_ log_normal_ random_ bernoulli_".split()
    functions = [*(getattr(Tensor, name) for name in names), fused_dropout_]
    device = torch.device("cuda", torch.cuda.current_device())
    asked = [(function, dtype) for function in functions for dtype in DTYPES]
    odd = [f"{function.__name__} of {dtype}" for function, dtype in asked if not is_followed(function, dtype, device)]
    return {"holds": not odd, "asked": len(asked), "drawn whole": odd}


def _mesh(device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    torch.zeros((), device=device)  # a mesh gives a device that nobody has used yet to each rank: here they share one
    return init_device_mesh(device, (torch.distributed.get_world_size(),))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if type(tensor) is DTensor else tensor


def ask(part: Part) -> None:
    world = "second" if part.device == "second" else "cpu"  # of gloo's ranks, which share one GPU
    for dtype in DTYPES:
        for shape in SHAPES:

            def one(dtype: torch.dtype = dtype, shape: tuple[int, ...] = shape) -> dict[str, Any]:
                found = run_ranks(part.ranks, compared, part.device, dtype, shape, timeout=100, device=world)[0]
                return {"holds": not any(found.values()), **found}

            part.each(f"{str(dtype).removeprefix('torch.')} {list(shape)}", one)

    def dropped() -> dict[str, Any]:
        odd = run_ranks(part.ranks, attention, part.device, timeout=100, device=world)[0]
        return {"holds": not odd, "other than replicated": odd}

    if part.device == "cuda":
        part.each("the closed form of fills", followed)
    part.each("attention dropout, sharded against replicated", dropped)


if __name__ == "__main__":
    run(ask)
