"""Tensors that a state ties and a checkpoint stores apart, as torch's do: one tensor if their values are the same."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vescale_dtensor.engine import local_only

from .format._dtypes import DTYPES
from .io._memory import bytes_of
from .io._read import Files, read_all
from .manifest import Manifest
from .plan._catalogue import local_of
from .plan._load_plan import Target, plan_reads
from .plan._restore import Apart, Restore


def compare_tied(files: Files, manifest: Manifest, restore: Restore, verify: bool) -> None:
    """Tells `restore` which names that it found stored apart are one tensor on this rank. Cost: both are read."""
    for apart in restore.apart:
        if _are_alike(files, manifest, apart, verify):
            restore.joined(apart.name)


def _are_alike(files: Files, manifest: Manifest, apart: Apart, verify: bool) -> bool:
    names = (apart.name, apart.first)
    one, two = (manifest.tensors[name] for name in names)
    if (one.dtype, one.shape) != (two.dtype, two.shape) or one.shape != tuple(apart.tensor.shape):
        return False
    targets = [Target(name, name, manifest.tensors[name], apart.pieces, one.dtype) for name in names]
    memories = [_blank(apart.tensor, DTYPES[one.dtype]) for _ in names]
    plan = plan_reads(targets, manifest.block_bytes)
    files.check(sorted(plan))
    read_all(files, plan, targets, memories, manifest.block_bytes, verify)
    return np.array_equal(*map(bytes_of, memories))


def _blank(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Host memory for this rank's part, the same wherever nothing is read into it."""
    with local_only():
        return torch.zeros(local_of(tensor).shape, dtype=dtype)
