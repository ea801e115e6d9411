"""(k) A Llama's training step on one GPU beside what people use: plain torch, compiled, compiled to CUDA graphs, FSDP2
on one rank, ours in each mode; and the time of the step's matrix products alone, below which nobody comes.

Layers of the sizes of Llama 3's 1B and 8B, as many of the latter as fit, in bfloat16. TorchTitan's step, which wants an
environment of its own, is `make torchtitan`'s; here a line says whether it is installed.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch
import torch.distributed as dist

from .one_device import SMALL, raced
from .part import Part, run

WAYS = ("torch", "torch, compiled", "torch, compiled to graphs", "FSDP2", "ours, eager", "ours, compile",
        "ours, compile to graphs")  # fmt: skip
ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32}
VOCABULARY, ROUNDS = 32000, 10


def products_of(sizes: dict[str, int], tokens: int, vocabulary: int) -> list[tuple[int, int, int, int]]:
    """(how many, m, n, k) of the matrix products of a forward, attention's left out: `model_of` has half as many heads
    of keys and values."""
    hidden, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    return [
        (2 * layers, tokens, hidden, hidden), (2 * layers, tokens, hidden // 2, hidden),
        (2 * layers, tokens, inner, hidden), (layers, tokens, hidden, inner), (1, tokens, vocabulary, hidden),
    ]  # fmt: skip


def alone(device: str, products: list[tuple[int, int, int, int]], dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds and floating-point operations of a step's products: those of the forward, and two of its backward
    for each."""
    milliseconds = flops = 0.0
    for count, m, n, k in products:
        for rows, columns, inner in ((m, n, k), (m, k, n), (n, k, m)):
            a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
            for timed in (False, True):
                finish(device)
                began = time.perf_counter()
                for _ in range(ROUNDS):
                    a @ b
                finish(device)
                milliseconds += count * 1e3 * (time.perf_counter() - began) / ROUNDS if timed else 0
            flops += 2.0 * count * m * n * k
    return milliseconds, flops


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def beside(device: str, sizes: dict[str, int], batch: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """`raced`, and of each way the share of its step in which its products could run, and the flops that it reaches."""
    products = products_of(sizes, batch[0] * batch[1], VOCABULARY if device == "cuda" else 64)
    milliseconds, flops = alone(device, products, dtype)
    found = raced(device, sizes, dtype, batch, WAYS)
    for way in WAYS:
        if "ms" in (said := found.get(way, {})):
            said["products alone"] = round(milliseconds / said["ms"], 3)
            said["TFLOPS"] = round(flops / said["ms"] / 1e9, 1)
    return found | {"products alone, ms": round(milliseconds, 2)}


def ask(part: Part) -> None:
    dist.init_process_group("second" if part.device == "second" else "cpu:gloo,cuda:nccl", store=dist.HashStore(),
                            rank=0, world_size=1)  # fmt: skip
    missing = importlib.util.find_spec("torchtitan") is None
    part.each("TorchTitan", lambda: {"not run": "not installed here" if missing else "see make torchtitan"})
    if part.device == "second":
        part.each("a small Llama", lambda: beside("second", SMALL, (2, 8), torch.float32))
        return
    part.each("1B", lambda: beside("cuda", ONE_B, (4, 2048), torch.bfloat16))
    part.each("8 layers of 8B", lambda: beside("cuda", EIGHT_B, (2, 4096), torch.bfloat16))


if __name__ == "__main__":
    run(ask)
