"""Elementwise kernels whose bits depend on an element's position, made independent of it.

On CPU a kernel walks through memory in vectors and does the rest, and everything that is strided, one by one; for
exp, gelu, silu and others the two round differently (measured: sigmoid of 48 float32 differs from the same 48
inside 64). A shard has its ends elsewhere than the whole. So these kernels see contiguous memory whose length is a
multiple of WIDTH, in forward and backward: every element is then done the same way. So do addition and subtraction
with `alpha` (a fused multiply in the vector, two roundings behind it), in place and in lists (optimizers) as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from vescale_trace.values import map_tensors

from ..._rules.elements.pointwise import FUNCTIONS
from ..._rules.registry import Call, both, is_inplace
from ..._torch_private import _special

WIDTH = 64  # two vectors of the widest instruction set, in elements of the narrowest type (AVX-512, bfloat16)

_NAMES = """acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh atan2 arctan2 cos cosh
    digamma erf erfc erfinv exp exp2 expm1 float_power hypot i0 lgamma log log10 log1p log2 logaddexp logaddexp2 logit
    igamma igammac ldexp pow rsqrt sigmoid sin sinc sinh tan tanh xlogy celu selu""".split()
_FUNCTIONAL = """gelu silu mish elu selu celu sigmoid logsigmoid hardswish hardsigmoid softplus softsign tanh
    tanhshrink""".split()
_OPERATORS = [Tensor.__pow__, Tensor.__rpow__, Tensor.__rtruediv__]
_SPECIAL = [getattr(_special, name) for name in dir(_special) if name.startswith("special_")]
POSITION_DEPENDENT = dict.fromkeys(
    function
    for function in (*both(*_NAMES), *[getattr(F, name) for name in _FUNCTIONAL], *_OPERATORS, *_SPECIAL)
    if not is_inplace(function)
)
_WEIGHTED = {name: getattr(torch, name) for name in ("add", "sub", "subtract", "rsub")}


def independent_form(call: Call) -> Callable | None:
    """Returns a replacement for an elementwise call whose bits do not depend on positions; None if they do not anyway.

    A user's function may have any kernel, so it is treated alike."""
    if call.function not in FUNCTIONS:
        from ..._dispatch.dispatch import local_form

        return local_form(call.function)
    name = call.name
    base = "__pow__" if name == "__ipow__" else name if name.endswith("__") else name.rstrip("_")
    if "alpha" in call.kwargs and base in _WEIGHTED:
        return _WEIGHTED[base]
    if not is_inplace(call.function):
        return call.function if call.function in POSITION_DEPENDENT else None
    return next((f for owner in (Tensor, torch, F) if (f := getattr(owner, base, None)) in POSITION_DEPENDENT), None)


def independent_run(form: Callable, inplace: bool) -> Callable:
    """A local function that computes `form` independently of positions; written into the first argument when
    `inplace`."""

    def run(*args, **kwargs) -> Tensor:
        if not inplace:
            return position_independent(form, args, kwargs)
        kwargs.pop("inplace", None)
        return args[0].copy_(position_independent(form, (args[0].clone(), *args[1:]), kwargs))

    return run


def is_position_dependent_list(call: Call) -> bool:
    """True if a call on lists may have the kernels of a POSITION_DEPENDENT function; all but `_foreach_*` may."""
    if not call.name.startswith("_foreach_"):
        return True
    base = call.name.removeprefix("_foreach_").rstrip("_")
    if base in _WEIGHTED:
        return "alpha" in call.kwargs
    return getattr(torch, base, None) in POSITION_DEPENDENT


def padded(function: Callable, inplace: bool) -> Callable:
    """`function` of lists on contiguous memory of a multiple of WIDTH per item; what it writes is copied back."""

    def run(*args, **kwargs):
        copies: list[tuple[Tensor, Tensor]] = []
        sizes: dict[int, torch.Size] = {}
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
        for items in zip(*[a for a in lists if len(a) == len(lists[0])]):
            shapes = {x.shape for x in items if isinstance(x, Tensor) and x.ndim}
            if len(shapes) == 1 and (shape := shapes.pop()).numel():
                sizes |= {id(x): shape for x in items if isinstance(x, Tensor) and x.ndim}

        def fit(x: Tensor) -> Tensor:
            if id(x) not in sizes:
                return x
            more = -x.numel() % WIDTH
            if not more and x.is_contiguous():
                return x.view(-1)
            copies.append((x, F.pad(x.reshape(-1), (0, more), value=1.0)))
            return copies[-1][1]

        out = function(*map_tensors(args, fit), **map_tensors(kwargs, fit))
        if inplace:
            for x, copy in copies:
                x.copy_(copy[: x.numel()].view(x.shape))
            return args[0] if out is not None else None
        return tuple(y[: x.numel()].view(x.shape) if id(x) in sizes else y for x, y in zip(args[0], out))

    return run


class Contiguous(Function):
    """The same values; the gradient arrives contiguous."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.contiguous()


def position_independent(function: Callable, args: Sequence, kwargs: dict) -> Tensor:
    """`function` of tensors of one shape."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    shape = (
        tensors[0].shape
        if len({x.shape for x in tensors}) == 1
        else torch.broadcast_shapes(*[x.shape for x in tensors])
    )
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
