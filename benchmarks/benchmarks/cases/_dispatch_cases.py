"""One operator on 4x4 local tensors, as four subjects see it.

`plain` is the torch operator. `pass-through` is a subclass whose `__torch_function__` does
nothing: what Python asks of anybody who wants to see a call at all, so the floor that dispatch
is measured against. `veScale` and `torch DTensor` hold the same 4x4 shards of larger tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from timeit import Timer

import torch
import torch.nn.functional as F

from benchmarks.cases._budgets import budget_of
from benchmarks.cases._pairwise import timer

SIDE = 4
PLAIN, PASS_THROUGH, VESCALE, TORCH = "plain", "pass-through", "veScale", "torch DTensor"
_NO_KEYWORDS: dict = {}


class PassThrough(torch.Tensor):
    """The empty `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=_NO_KEYWORDS):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """A statement over `x, y` [n, 4] sharded on dim 0 and `w` [4, 4] replicated.

    `graph` statements get operands that require gradients; there `loss` is
    `relu(x @ w).sum()`, and `deep` the sum of a chain of 16 such layers.
    `budget` is the most that veScale's time over `floor`'s may be; None: reported only.
    """

    name: str
    statement: str
    floor: str = PASS_THROUGH
    graph: bool = False

    @property
    def budget(self) -> float | None:
        return budget_of("bench_dispatch.Dispatch.track_over_floor", self.name, VESCALE)


CASES = (
    Case("torch.add(x, y)", "torch.add(x, y)"),
    Case("x + y", "x + y"),
    Case("x * 2.0", "x * 2.0"),
    Case("torch.relu(x)", "torch.relu(x)"),
    Case("torch.matmul(x, w)", "torch.matmul(x, w)"),
    Case("F.linear(x, w)", "F.linear(x, w)"),
    Case("x.view", "x.view(n, 2, 2)"),
    Case("x.mean(-1, keepdim=True)", "x.mean(-1, keepdim=True)"),
    Case("x.transpose", "x.transpose(0, 1)"),
    Case("relu(x @ w).sum(), both ways", "torch.relu(x @ w).sum().backward()", PLAIN, True),
    Case("relu(x @ w).sum(), backward", "loss.backward(retain_graph=True)", PLAIN, True),
    Case("16 such layers, backward", "deep.backward(retain_graph=True)", PLAIN, True),
)

# What a subject makes of a local tensor and the dim it is sharded on (None: replicated).
Place = Callable[[torch.Tensor, int | None], torch.Tensor]


def contenders(case: Case, mesh) -> dict[str, Callable[[], Timer]]:
    """name -> a function that makes the case's statement over its operands; one text for all."""

    def by(place: Place) -> Timer:
        return timer(case.statement, **operands(case, place))

    def by_vescale() -> Timer:
        # Here, so that the other contenders run where the library is not installed.
        from vescale_dtensor import DTensor, Replicate, Shard

        return by(_from_local(DTensor, Replicate, Shard, mesh))

    def by_torch() -> Timer:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        return by(_from_local(DTensor, Replicate, Shard, mesh))

    return {
        PLAIN: lambda: by(lambda local, dim: local),
        PASS_THROUGH: lambda: by(lambda local, dim: local.as_subclass(PassThrough)),
        VESCALE: by_vescale,
        TORCH: by_torch,
    }


def _from_local(dtensor, replicate, shard, mesh) -> Place:
    def place(local: torch.Tensor, dim: int | None) -> torch.Tensor:
        return dtensor.from_local(local, mesh, (replicate() if dim is None else shard(dim),))

    return place


def operands(case: Case, place: Place) -> dict:
    """The names that the statement uses; values are the same for every subject."""
    generator = torch.Generator().manual_seed(0)

    def operand(dim: int | None) -> torch.Tensor:
        local = torch.randn(SIDE, SIDE, generator=generator)
        return place(local, dim).requires_grad_(case.graph)

    x, y, w = operand(0), operand(0), operand(None)
    found = {"torch": torch, "F": F, "x": x, "y": y, "w": w, "n": x.shape[0]}
    if case.graph:
        found["loss"] = torch.relu(x @ w).sum()
        deep = x
        for _ in range(16):
            deep = torch.relu(deep @ w)
        found["deep"] = deep.sum()
        if type(x) is PassThrough:  # its results are plain: let `backward` too be seen once
            found["loss"] = found["loss"].as_subclass(PassThrough)
            found["deep"] = found["deep"].as_subclass(PassThrough)
    return found
