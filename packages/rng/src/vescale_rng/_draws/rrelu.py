"""rrelu of a sharded tensor: what is counted is communicated, not the tensor.

What torch does on CPU (ATen/native/Activation.cpp, _rrelu_with_noise_train): it goes through the tensor row-major and
draws for what is at most zero, in double precision; the result is x times the number, or x. So where in the sequence a
shard's numbers lie depends on how many elements before them, on other ranks too, are at most zero. A shard is runs of
elements that follow each other in the whole, as many as it has indices of the dims before the last one that is cut:
every rank tells how many numbers each of its runs takes, which is a tensor sharded as the input is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import DTensor, Layout, register_rule
from vescale_dtensor.engine import TABLE, attach, check_writable, gathered, local_only
from vescale_dtensor.rules import Call, decomposed

from .._cpu.stream import Draw, fill, fill_region
from .._region import Ranges, Region
from .._select import current_stream
from .fills import draws_for

_FUNCTIONS = {F.rrelu, torch.rrelu, torch.rrelu_}
_WHOLE = {function: TABLE[function].rule for function in _FUNCTIONS}


@register_rule(_FUNCTIONS, exact=True)
def rrelu(call: Call):
    """The rule of vescale_dtensor where nothing is drawn."""
    if not call.get(3, "training", False):
        return _WHOLE[call.function](call)
    lower, upper = call.get(1, "lower", 1.0 / 8), call.get(2, "upper", 1.0 / 3)
    return decomposed(_drawing(call.function, lower, upper, call.inplace))


def _drawing(function: Callable, lower: float, upper: float, inplace: bool) -> Callable:
    def run(*args: Any, **kwargs: Any) -> DTensor:
        x = args[0] if args else kwargs["input"]
        layout = x._layout.base
        # bfloat16 rounds what it keeps for backward only; bounds that close have another backward.
        seeded = kwargs.get("generator") is not None or function is not F.rrelu and len(args) > 4
        known = x.dtype in (torch.float32, torch.float64) and upper - lower > 1e-6 and not seeded and x.numel()
        plain = all(state.in_one_piece and state.units is None for state in layout.states)
        if not known or not plain or layout.is_partial or not draws_for(x):
            return gathered(function)(*args, **kwargs)
        if inplace:
            check_writable("rrelu_", x)
        noise = _noise(x, layout, lower, upper)
        with local_only():
            out = x.mul_(noise) if inplace else x * noise
        return x if inplace else attach(out, layout if torch.is_grad_enabled() else layout.untracked)

    return run


def _noise(x: DTensor, layout: Layout, lower: float, upper: float) -> Tensor:
    """Returns the factors of the shard."""
    draw = Draw(Tensor.uniform_)
    low, high = torch.tensor((lower, upper), dtype=x.dtype).tolist()
    with torch.no_grad():
        with local_only():
            below = x.detach() <= 0
            noise = torch.ones_like(below, dtype=x.dtype, memory_format=torch.contiguous_format)
        if current_stream() == "philox":
            drawn = fill(torch.empty_like(noise, dtype=torch.float64), layout, draw, fresh=True)[below]
        else:
            count, runs = _runs(below, layout)
            drawn = torch.empty(int(below.sum()), dtype=torch.float64)
            fill_region(drawn, Region((count,), (runs,)), draw)
        noise[below] = drawn.mul_(high - low).add_(low).to(x.dtype)  # rounded twice, as there
    return noise


def _runs(below: Tensor, layout: Layout) -> tuple[int, Ranges]:
    """Returns how many numbers are drawn for the whole, and the shard's intervals of them, in its order.

    Communication: 8 bytes per run from every rank that holds others.
    """
    last = max((state.dim for state in layout.states if state.kind == "S"), default=-1)
    if last < 0:
        count = int(below.sum())
        return count, ((0, count),)
    ranks = prod(layout.mesh.sizes[axis] for axis in layout.axes_of(last))
    counts = layout.with_shape((*layout.shape[:last], ranks))
    mine = below.flatten(last).sum(-1, keepdim=True)
    sizes = mine.view(-1).tolist()
    everyone = attach(mine, counts.untracked).full_tensor().contiguous()  # cut along a later dim it may not be
    ends = everyone.view(-1).cumsum(0)
    starts = ends.view(everyone.shape) - everyone
    for dim, held in enumerate(counts.region_at(counts.mesh.coordinate)):
        starts = torch.cat([starts.narrow(dim, low, high - low) for low, high in held or ((0, 0),)], dim)
    spans = zip(starts.reshape(-1).tolist(), sizes)
    return int(ends[-1]), tuple((start, start + size) for start, size in spans if size)
