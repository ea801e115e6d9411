"""Tensors' memory as bytes: views without copies where there can be any, checksums, strided copies."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from ..format._box import Piece, shape_of


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, as a writable view of its memory."""
    return as_bytes(tensor).numpy()


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor of any device as one of bytes, over the same memory."""
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    if flat.stride(0) != 1:  # of one element at most: to torch it is contiguous, whatever its stride is
        flat = flat.as_strided(flat.shape, (1,))
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def checksum_of(tensor: Tensor) -> str:
    """CRC-32C over the values of a plain tensor on any device, as text; "" of one on the meta device."""
    if tensor.device.type == "meta":
        return ""
    value = tensor.detach().resolve_conj().resolve_neg()
    return f"{crc32c(bytes_of(value.cpu().contiguous())):08x}"


def block_checks(data: Any, block: int) -> str:
    """CRC-32C of each block of the bytes, as the manifest writes them."""
    size = len(data)
    if size <= block:
        return f"{crc32c(data):08x}" if size else ""
    view = memoryview(data)
    return hexadecimal([crc32c(view[at : at + block]) for at in range(0, size, block)])


def hexadecimal(checks: Sequence[int]) -> str:
    """Checksums as the manifest writes them, one after the other."""
    return struct.pack(f">{len(checks)}I", *checks).hex()


def view_of(flat: Tensor, piece: Piece) -> Tensor:
    """The piece of a flat local tensor, in its box's shape."""
    return flat.as_strided(shape_of(piece.box), piece.strides, flat.storage_offset() + piece.offset)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses the garbage collector: it walks torch's whole heap, again and again, while plans make small tuples."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
