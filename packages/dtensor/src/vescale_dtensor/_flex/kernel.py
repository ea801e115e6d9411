"""Attention on plain tensors: torch's flex_attention, compiled as the user's call is, or its stand-in.

Under a dispatch mode torch compiles nothing, and flex_attention raises: the modes are
taken off while it runs, and do not see it. On tensors without data it is attention without a mask, which has the same
shapes, keeps the same for backward, and as many operations as a mask that leaves out nothing. Who follows values
through a model (the planner) asks for the formula. Neither reads the lists of a block mask, and none are made then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from .._torch_private import flex_formula, without_dispatch_modes
from .door import FLEX, compiled

_formulas = 0  # blocks of `flex_formulas` that this is in
_without_data: Callable = F.scaled_dot_product_attention


@contextmanager
def flex_formulas() -> Iterator[None]:
    """Within the block flex_attention runs as the formula that torch has of it, operator by operator, so that a
    dispatch mode sees every one. All scores are in memory then."""
    global _formulas
    _formulas += 1
    try:
        yield
    finally:
        _formulas -= 1


@contextmanager
def flex_without_data(attention: Callable) -> Iterator[None]:
    """Within the block `attention`, which takes what F.scaled_dot_product_attention does, stands for flex_attention of
    tensors without data."""
    global _without_data
    before, _without_data = _without_data, attention
    try:
        yield
    finally:
        _without_data = before


def stands_in(query: Tensor) -> bool:
    """True if something else runs in flex_attention's place, for plain tensors too."""
    return _formulas > 0 or getattr(query, "is_meta", False)


def attend(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
    """Runs torch's flex_attention on plain tensors."""
    if not stands_in(query):
        with without_dispatch_modes():
            return compiled(FLEX)(query, key, value, **given)
    if _formulas:
        out, lse, largest = flex_formula(query, key, value, **given)
    else:
        out = _without_data(query, key, value, scale=given.get("scale"), enable_gqa=given.get("enable_gqa", False))
        lse = largest = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    aux = given.get("return_aux")
    if aux is not None:
        return out, AuxOutput(lse=lse if aux.lse else None, max_scores=largest if aux.max_scores else None)
    return (out, lse) if given.get("return_lse") else out


def reads_lists(device: Any) -> bool:
    """True if anybody is going to read the lists of a mask on this device."""
    return not _formulas and (device is None or torch.device(device).type != "meta")


def empty_lists(mask_mod: Callable, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, **given: Any) -> BlockMask:
    """A block mask that says of no block that it is seen; as `create_block_mask` in all else."""
    edge = given.get("BLOCK_SIZE", 128)
    edges = (edge, edge) if isinstance(edge, int) else tuple(edge)
    rows, columns = -(-Q_LEN // edges[0]), -(-KV_LEN // edges[1])
    with without_dispatch_modes():
        lists = torch.zeros(B or 1, H or 1, rows, columns, dtype=torch.int32, device=given["device"])
        return BlockMask.from_kv_blocks(
            lists[..., 0], lists, BLOCK_SIZE=edges, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
        )
