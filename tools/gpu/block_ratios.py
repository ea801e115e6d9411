"""(d) Blocks written by hand, ours in each mode, torch's DTensor: one rank of eight, in a world without processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vescale
from vescale import Replicate, Shard

from .part import Part, run

RANKS, BLOCKS, TOKENS = 8, 4, 512
WIDTHS = (64, 1024, 4096)
ROUNDS = 12


class Block(nn.Module):
    """A feed-forward block; `ranks` cut its hidden features, as by hand."""

    def __init__(self, width: int, ranks: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width // ranks, bias=False)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)
        self.shares = ranks > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.shares:
            y = _Copied.apply(y)
        y = self.down(F.gelu(self.up(y)))
        return x + (_Summed.apply(y) if self.shares else y)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def made(way: str, width: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    if way == "by hand":
        return nn.Sequential(*(Block(width, RANKS) for _ in range(BLOCKS))).to(device)
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS))).to(device)
    if way == "torch DTensor":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh(device, (RANKS,))
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    parameters = {"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}}
    boundary = {"*.down": vescale.Boundary(output={"tp": Replicate()})}
    plan = vescale.Plan(mesh={"tp": RANKS}, parameters=parameters, boundaries=boundary, data_axis=None)
    return vescale.parallelize(plan, model, mode=way.removeprefix("ours, "))[0]


WAYS = ("by hand", "ours, eager", "torch DTensor")


def raced(width: int, device: str) -> dict[str, Any]:
    """Milliseconds of a forward and backward, medians of rounds in turn, over those by hand; and, on a GPU, how much
    of the time the device waits for its next kernel."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        x = torch.randn(TOKENS, width, device=device)
        steps: dict[str, Callable[[], None]] = {}
        failed = {}
        for way in WAYS:
            try:
                model = made(way, width, device)

                def step(model: nn.Module = model) -> None:
                    model(x).sum().backward()
                    for parameter in model.parameters():
                        parameter.grad = None

                for _ in range(6):
                    step()
                steps[way] = step
            except Exception as error:
                failed[way] = f"{type(error).__name__}: {str(error)[:300]}"
        times: dict[str, list[float]] = {way: [] for way in steps}
        for _ in range(ROUNDS):
            for way, step in steps.items():
                _finish(device)
                began = time.perf_counter()
                step()
                _finish(device)
                times[way].append(1e3 * (time.perf_counter() - began))
        took = {way: statistics.median(found) for way, found in times.items()}
        first = took.get("by hand")
        found = {
            way: {"ms": round(ms, 3), "ratio": round(ms / first, 3) if first else None} for way, ms in took.items()
        }
        if device == "cuda":
            for way, step in steps.items():
                found[way]["gaps"] = round(_gaps(step), 3)
        return found | ({"failed": failed} if failed else {})
    finally:
        from vescale_plans._apply.join import forget_meshes

        forget_meshes()
        dist.destroy_process_group()


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _gaps(step: Callable[[], None]) -> float:
    """Of the time between the first kernel and the last, the part in which none ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return 0.0
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / max(end - spans[0][0], 1e-9)


def ask(part: Part) -> None:
    for width in WIDTHS if part.device == "cuda" else WIDTHS[:1]:
        part.each(f"hidden {width}", lambda width=width: raced(width, part.device))


if __name__ == "__main__":
    run(ask)
