"""Elementwise kernels whose bits depend on where an element lies, made steady.

On CPU a kernel walks through memory in vectors and does the rest, and everything that is strided, one by one; for
exp, gelu, silu and others the two round differently (measured: sigmoid of 48 float32 differs from the same 48
inside 64). A shard has its ends elsewhere than the whole. So these kernels see contiguous memory whose length is a
multiple of WIDTH, in forward and backward: every element is then done the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .._rules.registry import both

WIDTH = 64  # two vectors of the widest instruction set, in elements of the narrowest type (AVX-512, bfloat16)

_NAMES = """acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh atan2 arctan2 cos cosh
    digamma erf erfc erfinv exp exp2 expm1 float_power hypot i0 lgamma log log10 log1p log2 logaddexp logaddexp2 logit
    pow reciprocal rsqrt sigmoid sin sinc sinh sqrt square tan tanh xlogy celu selu""".split()
_FUNCTIONAL = """gelu silu mish elu selu celu sigmoid logsigmoid hardswish hardsigmoid softplus softsign tanh
    tanhshrink""".split()
_OPERATORS = [Tensor.__pow__, Tensor.__rpow__, Tensor.__rtruediv__]
# Forms in place have other kernels' names and no copy to write to: they are left to the whole tensor.
STEADY: dict[Callable, bool] = {
    function: True
    for function in (*both(*_NAMES), *[getattr(F, name) for name in _FUNCTIONAL], *_OPERATORS)
    if not (getattr(function, "__name__", "").endswith("_") and not getattr(function, "__name__", "").endswith("__"))
}


class Contiguous(Function):
    """The same values; the gradient arrives contiguous."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.contiguous()


def steadied(function: Callable, args: list, kwargs: dict) -> Tensor:
    """`function` of tensors of one shape."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    count = shape.numel()
    more = -count % WIDTH

    def flat(x):
        if not isinstance(x, Tensor) or x.ndim == 0 and shape:
            return x
        x = x.expand(shape).contiguous().view(-1)
        return F.pad(x, (0, more), value=1.0) if more else x

    out = function(*[flat(x) for x in args], **{name: flat(x) for name, x in kwargs.items()})
    if out.requires_grad:
        out = Contiguous.apply(out)
    return (out[:count] if more else out).view(shape)
