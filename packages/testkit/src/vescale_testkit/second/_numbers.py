"""Tensors of the second device as NCCL takes them: which it refuses, and how it adds them up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._extension import extension

DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def check(kind: str, *tensors: Tensor) -> None:
    """Raises what NCCL does of tensors that it does not take."""
    for tensor in tensors:
        if tensor.device.type != "second":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type} ({kind})")
        if not tensor.is_contiguous():
            raise ValueError(f"Tensors must be contiguous ({kind}, shape {list(tensor.shape)}, {tensor.stride()})")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


def check_pair(kind: str, output: Tensor, input: Tensor, outputs: int, inputs: int, size: int) -> None:
    """Checks a collective of `size` ranks, in which `outputs` outputs make `inputs` inputs."""
    check(kind, output, input)
    if output.dtype != input.dtype:
        raise TypeError(f"{kind}: output tensor must have the same type as input tensor")
    if output.numel() * outputs != input.numel() * inputs:
        raise ValueError(f"{kind}: output of {output.numel()}, input of {input.numel()}, {size} ranks")


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    return extension().on_cpu(tensor)


def told(tensor: Tensor) -> str:
    """Its dtype and size, as errors have it."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"


def numbers_of(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)


def reduced(rows: list[Tensor], op: str, chunk: int) -> Tensor:
    """The reduction of one chunk, in the order of a ring: it begins at the rank after the chunk's."""
    combine, count = _REDUCE[op], len(rows)
    order = [rows[(chunk + 1 + step) % count] for step in range(count)]
    total = order[0].clone()
    for row in order[1:]:
        total = combine(total, row)
    return total / count if op == "avg" else total.to(order[0].dtype)


def bytes_of_splits(tensor: Tensor, splits: list[int], size: int) -> list[int]:
    """Bytes per rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"Tensor's dim 0 does not divide equally across group size: {rows} by {size}")
        splits = [rows // size] * size
    elif sum(splits) != rows:
        raise ValueError(f"Split sizes doesn't match total dim 0 size: {splits}, {rows}")
    width = tensor.nbytes // rows if rows else 0
    return [split * width for split in splits]
