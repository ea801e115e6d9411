"""Four Llama blocks, forward and backward, under tensor and sequence parallelism: who takes part."""

from __future__ import annotations

from collections.abc import Callable
from timeit import Timer

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases._budgets import budget_of
from benchmarks.cases._pairwise import timer
from benchmarks.models._llama_blocks import Sizes, activations, blocks, rotary_table
from benchmarks.models._llama_by_hand import blocks_by_hand
from benchmarks.models._llama_torch import parallelize_by_torch
from benchmarks.models._llama_vescale import parallelize_by_vescale, tokens_by_vescale

BY_HAND, VESCALE, TORCH = "by hand", "veScale", "torch DTensor"
BUDGET = budget_of("bench_dispatch.LlamaBlocks.track_over_by_hand", VESCALE)
SIZES = Sizes()


def contenders(mesh) -> dict[str, Callable[[], Timer]]:
    """name -> a function that makes its step: forward and backward, without an optimizer."""
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    whole = activations(SIZES)
    tokens = whole.chunk(ranks, dim=1)[rank].contiguous()

    def by_hand():
        return step(blocks_by_hand(blocks(SIZES), SIZES, group, rank, ranks), tokens)

    def by_vescale():
        model = parallelize_by_vescale(blocks(SIZES), mesh)
        return step(model, tokens_by_vescale(whole, mesh))

    def by_torch():
        return step(parallelize_by_torch(blocks(SIZES), mesh), tokens)

    return {BY_HAND: by_hand, VESCALE: by_vescale, TORCH: by_torch}


def step(model: torch.nn.Module, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor] | None = None) -> Timer:
    """Forward, sum, backward. The input needs a gradient, as behind an embedding.

    Gradients are dropped before every call and outside its time: accumulating into them, or
    walking the parameters to drop them, is the optimizer's side of a step.
    """
    x = x.detach().requires_grad_()
    leaves = [x, *model.parameters()]
    cos, sin = rotary_table(SIZES) if tables is None else tables

    def clear():
        for leaf in leaves:
            leaf.grad = None

    return timer("model(x, cos, sin).sum().backward()", clear, model=model, x=x, cos=cos, sin=sin)


class _Count(TorchDispatchMode):
    NOT_COUNTED = ("wait", "wrap")  # parts of a functional collective that send nothing

    def __init__(self):
        super().__init__()
        self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives += not any(part in func.__name__ for part in self.NOT_COUNTED)
        # What arrives is below any subclass already: a saved DTensor stands for its shard here.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def collectives(step: Timer) -> int:
    """How many a step issues, both ways: equal work is issuing equally many."""
    with _Count() as count:
        step.timeit(1)
    return count.collectives
