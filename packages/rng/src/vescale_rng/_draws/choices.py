"""multinomial of a tensor that is sharded by rows: every rank draws for its rows, and nothing is communicated.

What torch does on CPU for one sample, or without replacement (ATen/native/Distributions.cpp, multinomial): the
probabilities over exponential numbers, drawn like them; the largest wins. With replacement
(ATen/native/cpu/MultinomialKernel.cpp) a uniform number in double precision for each sample, row by row, and the first
category whose cumulated probability is no less. Probabilities that are cut along a row, or partial, are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import attach, gathered, handler, local_only

from .._cpu.stream import Draw, fill
from .fills import draws_for


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
        and own.device.type == "cpu"
        and own.shape[1] > 0
        and (given.get("replacement", False) or samples <= own.shape[1])
        and not own._layout.is_partial
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
        drawn = _by_search if given.get("replacement", False) and samples > 1 else _by_race
        layouts = layout, layout.with_shape((own._layout.shape[0], samples))
        return attach(drawn(local, samples, *layouts, {"generator": given.get("generator")}), layouts[1])


def _by_race(local: Tensor, samples: int, probabilities: Layout, results: Layout, seeded: dict) -> Tensor:
    noise = torch.empty_like(local)
    fill(noise, probabilities, Draw(Tensor.exponential_, (1,), seeded), fresh=True)
    scores = torch.div(local, noise, out=noise)
    if not local.numel():
        return torch.empty((0, samples), dtype=torch.int64)
    return scores.argmax(-1, keepdim=True) if samples == 1 else scores.topk(samples).indices


def _by_search(local: Tensor, samples: int, probabilities: Layout, results: Layout, seeded: dict) -> Tensor:
    noise = torch.empty(results.local_shape, dtype=torch.float64)
    fill(noise, results, Draw(Tensor.uniform_, (), seeded), fresh=True)
    wide = local if local.dtype == torch.float64 else local.to(torch.float32)
    # One by one in the probabilities' precision, as torch's kernel: its own cumsum adds in a wider one.
    cumulated = torch.from_numpy(np.add.accumulate(wide.numpy(), axis=-1))
    if not bool((cumulated[:, -1] > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    cumulated = cumulated / cumulated[:, -1:]
    cumulated[:, -1] = 1
    return torch.searchsorted(cumulated.to(torch.float64), noise)
