"""Functions of one row at a time: layer_norm, rms_norm, softmax, log_softmax; sums over the row by halves.

The row is whole on every rank: what shards it is gathered. Weights are spread over the rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..._dispatch.signature import Signature
from ..._rules.reductions.norm import _trailing
from ..._rules.registry import Call, Decision
from ..._rules.solvers.parts import dims_of
from ..call import expanded, solved
from ..forms import form
from ..grid import Splits
from ..tree import folded, unseen, unseen_backward, wide
from .position import position_independent


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last dim, which stays with size 1."""
    return folded(x, x.ndim - 1).unsqueeze(-1)


class Normalize(Function):
    """x [..., n] over its root mean square on the last dim, after its mean is taken off when `centered`. float32."""

    @staticmethod
    @unseen
    def forward(ctx, x: Tensor, centered: bool, eps: float) -> Tensor:
        n = x.shape[-1]
        if centered:
            x = x - row_sum(x) / n
        scale = 1 / (row_sum(x * x) / n + eps).sqrt()
        out = x * scale
        ctx.centered = centered
        ctx.save_for_backward(out, scale)
        return out

    @staticmethod
    @once_differentiable
    @unseen_backward
    def backward(ctx, saved, grad: Tensor):
        out, scale = saved
        n = out.shape[-1]
        inner = grad - out * (row_sum(grad * out) / n)
        if ctx.centered:
            inner = inner - row_sum(grad) / n
        return inner * scale, None, None


def _over_rows(call: Call, centered: bool) -> Decision | None:
    found = _trailing(call)
    if found is None:
        return None
    x, shape = found
    kept = x.ndim - len(shape)
    normalized = tuple(("n", d) for d in range(len(shape)))
    labels = (*[("b", d) for d in range(kept)], *normalized)
    inputs = [labels if operand is x else normalized for operand in call.operands]
    answer = solved(call, Signature(inputs, [labels], whole=set(normalized)))
    if answer is None or not x.layout.numel:
        return None
    dims, cuts = tuple(range(kept)), tuple(answer.cut(label) for label in labels[:kept])
    names = ("input", "normalized_shape", "weight", "bias", "eps") if centered else (
        "input", "normalized_shape", "weight", "eps")  # fmt: skip

    def run(*args, **kwargs) -> Tensor:
        given = dict(zip(names, args)) | kwargs
        x, weight, bias = given["input"], given.get("weight"), given.get("bias")
        eps = given.get("eps", 1e-5 if centered else None)
        eps = torch.finfo(wide(x).dtype).eps if eps is None else eps
        out = Normalize.apply(wide(x).reshape(*x.shape[:kept], -1), centered, eps).view(x.shape)
        full = tuple(out.shape)
        every = tuple(range(len(shape)))
        if weight is not None:
            out = out * expanded(wide(weight), every, full, dims, cuts)
        if bias is not None:
            out = out + expanded(wide(bias), every, full, dims, cuts)
        return out.to(x.dtype)

    return answer.running(run)


@form(F.layer_norm, torch.layer_norm)
def layer_norm(call: Call, splits: Splits) -> Decision | None:
    return _over_rows(call, centered=True)


@form(F.rms_norm, torch.rms_norm)
def rms_norm(call: Call, splits: Splits) -> Decision | None:
    return _over_rows(call, centered=False)


class Softmax(Function):
    """softmax, or its logarithm, over the last dim; a row of -inf gives zeros when `safe`, nan otherwise."""

    @staticmethod
    @unseen
    def forward(ctx, x: Tensor, log: bool, safe: bool) -> Tensor:
        top = x.amax(-1, keepdim=True)
        if safe or log:
            top = top.masked_fill(top.isinf(), 0)
        shifted = x - top
        powers = position_independent(torch.exp, [shifted], {})
        total = row_sum(powers)
        if log:
            out = shifted - position_independent(torch.log, [total], {})
        else:
            out = powers / (total.masked_fill(total == 0, 1) if safe else total)
        ctx.log = log
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    @unseen_backward
    def backward(ctx, saved, grad: Tensor):
        (out,) = saved
        if ctx.log:
            return grad - position_independent(torch.exp, [out], {}) * row_sum(grad), None, None
        product = grad * out
        return product - out * row_sum(product), None, None


@form(torch.softmax, Tensor.softmax, torch.log_softmax, Tensor.log_softmax, torch.special.softmax,
      torch.special.log_softmax, F.softmax, F.log_softmax)  # fmt: skip
def softmax(call: Call, splits: Splits) -> Decision | None:
    (x,) = call.operands
    dims = dims_of(call.get(1, "dim"), x.ndim) if call.get(1, "dim") is not None else None
    if dims is None or len(dims) != 1 or not x.layout.numel:
        return None
    (dim,) = dims
    labels = tuple(range(x.ndim))
    answer = solved(call, Signature([labels], [labels], whole={dim}))
    if answer is None:
        return None
    log = "log" in call.name

    def run(input: Tensor, *args, dtype: torch.dtype | None = None, **kwargs) -> Tensor:
        kind = dtype or next((a for a in args if isinstance(a, torch.dtype)), None) or input.dtype
        return Softmax.apply(wide(input).movedim(dim, -1), log, False).movedim(-1, dim).to(kind)

    return answer.running(run)
