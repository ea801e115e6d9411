"""multinomial of a tensor that is sharded by rows: every rank draws for its rows, and nothing is communicated.

What torch does on CPU for one sample, or without replacement (ATen/native/Distributions.cpp, multinomial): the
probabilities over exponential numbers, drawn like them; the largest wins. With replacement it draws while it
searches: that, and probabilities that are cut along a row or pending, gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.engine import gathered, handler, local_only, stamp

from ._fills import draws_for
from ._stream import Draw, fill


@handler(torch.multinomial, Tensor.multinomial)
def multinomial(function: Callable, args: tuple, kwargs: dict) -> Any:
    """[rows, samples] of int64, sharded as the rows are."""
    given = dict(zip(("input", "num_samples", "replacement"), args)) | kwargs
    own, samples = given["input"], given["num_samples"]
    by_rows = (
        type(own) is DTensor
        and draws_for(own)
        and own.ndim == 2
        and given.get("out") is None
        and (samples == 1 or not given.get("replacement", False))
        and samples <= own.shape[1]
        and not own._layout.is_pending
        and own._layout.flat_axis is None
        and not own._layout.axes_of(1)
    )
    if not by_rows:
        return gathered(function)(*args, **kwargs)
    layout = own._layout.base
    with torch.no_grad(), local_only():
        local = own.detach()
        if not bool(((local >= 0) & local.isfinite()).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        noise = torch.empty_like(local)
        fill(noise, layout, Draw(Tensor.exponential_, (1,), {"generator": given.get("generator")}), fresh=True)
        scores = torch.div(local, noise, out=noise)
        if not local.numel():
            drawn = torch.empty((0, samples), dtype=torch.int64)
        else:
            drawn = scores.argmax(-1, keepdim=True) if samples == 1 else scores.topk(samples).indices
        return stamp(drawn, layout.with_shape((own._layout.shape[0], samples)))
