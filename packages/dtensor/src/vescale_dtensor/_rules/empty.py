"""Empty shards, for functions that refuse tensors without elements.

A rank whose shard is empty answers with an empty (or zero) result that still hangs on
its inputs, so that the backward of every rank asks for the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._layouts.layout import Layout


def guarded(function: Callable, addend: Callable | None = None) -> Callable[[tuple[Layout, ...]], Callable]:
    """`local` of a Signature: `function`, which is not asked about empty shards.

    addend: from the same arguments, what an empty sum still has added to it (a bias).
    """

    def local(outs: tuple[Layout, ...]) -> Callable:
        def run(*args, **kwargs):
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if all(t.numel() for t in tensors):
                return function(*args, **kwargs)
            tie = sum(t.reshape(-1)[:0].sum() for t in tensors if t.is_floating_point())
            zeros = [tensors[0].new_zeros(out.local_shape) for out in outs]
            if addend is not None:
                tie = tie + addend(*args, **kwargs)
            results = [zeros[0] + tie, *[z.to(torch.int64) for z in zeros[1:]]]
            return results[0] if len(results) == 1 else tuple(results)

        return run

    return local
