"""The norm of whole tensors, as clipping takes it: squares summed over the tree of every dim, in float32 for half
precision. Gathered are only those whose shards are not made of blocks: uneven ones, and parts of what is flattened
(ZeRO). What several tensors of one layout are reduced by is one all-reduce."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..._conversions.convert import convert
from ..._layouts.layout import Layout
from ..._rules.registry import Call, Decision, decomposed
from ..._tensor.tensor import DTensor
from ..._torch_private import _foreach_norm
from ..forms import form
from ..grid import ReproducibleError, Splits, cut_of, fine_count
from ..tree import wide


@form(_foreach_norm)
def foreach_norm(call: Call, splits: Splits) -> Decision | None:
    if call.get(1, "ord", 2) != 2 or call.get(2, "dtype") is not None:
        return None
    return decomposed(lambda tensors, *args, **kwargs: norms(tensors))


@form(torch.linalg.vector_norm, torch.norm, Tensor.norm)
def norm(call: Call, splits: Splits) -> Decision | None:
    """Norms of order 2 over all dims; others run whole."""
    order = call.get(1, "ord" if call.function is torch.linalg.vector_norm else "p", 2)
    others = [*call.args[2:], *[value for name, value in call.kwargs.items() if name not in ("ord", "p", "x", "input")]]
    if order not in (2, "fro", None) or any(value not in (None, False) for value in others):
        return None
    return decomposed(lambda x, *args, **kwargs: norms([x])[0])


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """sqrt(sum of squares) of each, in its own dtype."""
    sums = [_square_sum(x) for x in tensors]
    groups: dict[object, list[int]] = {}
    for i, one in enumerate(sums):
        groups.setdefault((one._layout.base if type(one) is DTensor else None, one.dtype), []).append(i)
    for members in groups.values():
        roots = torch.stack([sums[i] for i in members]).sqrt()
        for i, root in zip(members, roots.unbind()):
            sums[i] = root.to(tensors[i].dtype)
    return sums


def _square_sum(x: Tensor) -> Tensor:
    if type(x) is DTensor and x._layout.is_partial:  # reduced once, not once per factor
        x = convert(x, x._layout.reduced)
    x = wide(x)
    if type(x) is DTensor and not _in_blocks(x._layout.base):
        x = convert(x, x._layout.base.invariant)
    return (x * x).sum()


@lru_cache(maxsize=65536)
def _in_blocks(layout: Layout) -> bool:
    if layout.flat_axis is not None:
        return False
    try:
        for dim, extent in enumerate(layout.shape):
            cut_of("norm", layout, dim, fine_count(extent), "hidden")
    except ReproducibleError:
        return False
    return True
