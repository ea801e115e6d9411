"""softmax, log_softmax, softmin, logsumexp.

    dim whole            local, every other sharding stays
    dim sharded          x stays sharded: the maximum is gathered and the sum of the exponentials
                         all-reduced, one value per row each, never x itself
    partial input        reduces first
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._tensor.tensor import DTensor
from ..registry import Call, decomposed, rule
from ..solvers.parts import along, dims_and_keepdim, dims_of, only_split, reduced, reducing, reduction, source_of
from .reduce import upcast


def exponentials(x: DTensor, dims: tuple[int, ...], *, finite: bool = False) -> tuple[DTensor, DTensor, DTensor]:
    """(x - top, exp of it, top); top is the maximum, without gradient.

    finite: an infinite maximum counts as zero, so that -inf rows and +inf elements come out right in a logarithm.
    """
    top = x.detach().amax(dims, keepdim=True)
    if finite:
        top = torch.where(top.abs() == float("inf"), 0.0, top)
    shifted = x - top
    return shifted, shifted.exp(), top


def _softmax(x: DTensor, dim: int) -> DTensor:
    _, powers, _ = exponentials(x, (dim,))
    return powers / reduced(powers.sum(dim, keepdim=True), "softmax")


def _log_softmax(x: DTensor, dim: int) -> DTensor:
    shifted, powers, _ = exponentials(x, (dim,))
    return shifted - reduced(powers.sum(dim, keepdim=True), "log_softmax").log()


_FORMS = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "softmin": lambda x, dim: _softmax(-x, dim),
}


@rule(
    torch.softmax, Tensor.softmax, torch.log_softmax, Tensor.log_softmax, torch.special.softmax,
    torch.special.log_softmax, F.softmax, F.log_softmax, F.softmin,
)  # fmt: skip
def softmax(call: Call):
    if len(call.operands) != 1:
        return None
    (x,) = call.operands
    functional = call.function in (F.softmax, F.log_softmax, F.softmin)
    dim = call.get(1, "dim")
    if functional and dim is None:  # torch's old implicit choice; it warns when run
        dim = 0 if x.ndim in (0, 1, 3) else 1
    dims = dims_of(dim, x.ndim) if isinstance(dim, int) else None
    if dims is None:
        return None
    if not only_split(call, dims) or not x.layout.numel:
        return along(call, dims)
    form = _FORMS[call.name.removeprefix("special_")]
    dtype = call.get(3 if functional else 2, "dtype")

    def run(*args, **kwargs) -> DTensor:
        x = reduced(source_of(args, kwargs), call.function)
        x = x if dtype is None else x.to(dtype)
        out = form(upcast(x), dims[0])
        return (out if out.dtype == x.dtype else out.to(x.dtype)).contiguous()  # as torch's kernels leave it

    return decomposed(run)


@rule(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(call: Call):
    found = dims_and_keepdim(call)
    if found is None:
        return None
    dims, keepdim = found
    if not call.operands[0].layout.numel:
        return reduction(call, dims, keepdim)

    def run(x: DTensor) -> DTensor:
        x = reduced(x, call.function)
        _, powers, top = exponentials(upcast(x), dims, finite=True)
        out = reduced(powers.sum(dims, keepdim=True), call.function).log() + top
        out = out if keepdim else out.sum(dims)  # dims of size one
        return out if out.dtype == x.dtype or not x.dtype.is_floating_point else out.to(x.dtype)

    return reducing(call, dims, keepdim, run)
