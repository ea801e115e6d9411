"""The bits of a plain tensor, whatever its strides are."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of its elements in order, flat and uint8, on its device; a copy only where they do not lie so.

    One element may have any stride: to torch it is contiguous all the same, and is then no view of bytes. Nor is what
    is conjugate or negative by a bit of the tensor. Call with dispatch disabled where it may be a DTensor.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
