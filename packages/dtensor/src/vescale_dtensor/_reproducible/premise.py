"""Premises of the reproducible mode about kernels, checked on the machine at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vescale_trace.arguments import torch_call

from .._torch_private import DisableTorchFunction
from .functions.lookup import add_rows
from .functions.position import POSITION_DEPENDENT, WIDTH, position_independent
from .grid import ReproducibleError
from .merging import batched

# Blocks of products as models have them, and odd ones, of which kernels treat the edges apart.
SHAPES = ((1, 8, 8), (2, 4, 16), (4, 16, 16), (16, 16, 48), (32, 64, 32), (128, 128, 128), (7, 33, 65))
SHAPES += ((13, 25, 52), (49, 51, 53), (50, 26, 1), (1, 53, 26), (13, 2, 13), (67, 39, 5))
ENTRIES, ROWS = 12, 36


@torch_call
def check_premise(device: torch.device | str = "cpu", shapes: Sequence[tuple[int, int, int]] = SHAPES) -> list[str]:
    """Lists the operations that do not behave on this device as the reproducible mode requires; empty if all do.

    It tests every entry of a batched product of blocks [m, k] x [k, n] (`shapes`), additions, adding up rows by index,
    and the elementwise functions on contiguous memory of a multiple of 64 elements. The same input must give the same
    bits again, among fewer entries and alone, at another memory alignment, and with another number of threads. It takes
    a second or two, and changes the number of threads meanwhile. No communication.

    Example:
        >>> vescale.check_premise()
        []
    """
    device, threads = torch.device(device), torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    found = []
    try:
        for name, run, inputs in _operations(shapes, generator, device):
            torch.set_num_threads(1)
            wanted = run(*inputs)
            counts = (1, 2, 4) if device.type == "cpu" else (1,)
            for what, others in (
                ("again", inputs),
                ("at another alignment", [_moved(x) for x in inputs]),
                ("among fewer", [x[: len(x) // 3] for x in inputs]),
                ("alone", [x[: len(x) // ENTRIES] for x in inputs]),
            ):
                if not _same(run(*others), wanted):
                    found.append(f"{name}: other bits {what}")
            for count in counts[1:]:
                torch.set_num_threads(count)
                if not _same(run(*inputs), wanted):
                    found.append(f"{name}: other bits with {count} threads")
    finally:
        torch.set_num_threads(threads)
    return found


@lru_cache(maxsize=8)
def require_premise(device_type: str) -> None:
    """Asks `check_premise` of an accelerator, once: that it holds on CPUs is tested, of accelerators nobody knows.

    Raises ReproducibleError with what does not hold.
    """
    if device_type in ("cpu", "meta"):
        return
    with DisableTorchFunction():  # the mode may be on
        found = check_premise(device_type)
    if found:
        raise ReproducibleError(
            "reproducible",
            f"kernels of {device_type} do not give the same bits for the same numbers, which the mode relies on",
            found,
            [
                ("torch.use_deterministic_algorithms(True)", "with CUBLAS_WORKSPACE_CONFIG=:4096:8, from the start"),
                ("run on the CPU", "where it holds"),
            ],
        )


def _operations(shapes, generator, device) -> Iterator[tuple[str, Callable, list[Tensor]]]:
    """(name, function, inputs whose first dim is that of entries)."""

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    for m, k, n in shapes:
        left, right = drawn(ENTRIES, m, k), drawn(ENTRIES, n, k)
        yield f"bmm of [{m}, {k}] x [{k}, {n}]", batched, [left, right]
    pair = [drawn(ROWS, WIDTH), drawn(ROWS, WIDTH)]
    yield "add", torch.add, pair
    yield "mul", torch.mul, pair
    yield "div", torch.div, pair
    yield "sqrt", lambda x: x.abs().sqrt(), pair[:1]
    yield "rows added by index", _rows_added, pair[:1]
    for function in _unary():
        name = getattr(function, "__name__", str(function))
        yield name, lambda x, function=function: position_independent(function, [x.abs()], {}), pair[:1]


def _rows_added(x: Tensor) -> Tensor:
    """Every third row into one: the blocks of a table's gradient."""
    index = torch.arange(len(x), device=x.device) // 3
    return add_rows(x.new_zeros(len(x) // 3, x.shape[1]), index, x)


def _unary() -> list[Callable]:
    names = ("exp", "log", "tanh", "sigmoid", "erf", "rsqrt", "sin", "cos", "gelu", "silu", "softplus")
    return [function for function in POSITION_DEPENDENT if getattr(function, "__name__", "") in names]


def _moved(x: Tensor) -> Tensor:
    """The same values, begun one element later in memory."""
    memory = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return memory.copy_(x)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other[: len(one)])
