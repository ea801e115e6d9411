"""Random functions: every rank draws the whole, as one device would, and keeps its part.

So the values are one device's for every layout, and all generators end in the same
state; the price is the whole tensor's time and memory on every rank. (vescale_rng
registers rules that draw the part alone.) Nothing is communicated where the old
values do not count:

    fills, nn.init, *_like       drawn whole, sliced into the layout
    dropout                      the mask is drawn whole and sliced; the input stays as it lies, partial too
    dropout that drops nothing   the input itself, in any layout
    all others                   the fallback: inputs gathered
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..._conversions.convert import convert_plain
from ..._dispatch.fallback import gathered
from ..._layouts.strides import global_stride
from ..._tensor.tensor import DTensor, local_only
from ..._torch_private import is_non_overlapping_and_dense_or_false
from ..registry import Call, declare, decomposed, handler, rule
from ..traits import Trait
from .pointwise import elementwise

_FILLS = "normal_ uniform_ exponential_ cauchy_ geometric_ log_normal_ random_ bernoulli_".split()
# nn.init functions that come whole; those that draw by way of Tensor methods need no entry.
_FIXED = ("constant_", "ones_", "zeros_", "eye_", "dirac_")
_INITS = "normal_ uniform_ kaiming_uniform_".split()


def _blank(tensor: DTensor) -> Tensor:
    """An empty plain tensor of the global shape, its dims in memory as one device's: drawing follows their order, and
    not whether there are gaps between them, but for that there are some."""
    layout = tensor._layout.base
    shape = layout.shape
    if layout.flat_axis is not None:  # flattened row-major
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    with local_only():
        strides = tensor.stride()
        if not layout.is_replicated:
            strides = global_stride(strides, tensor.shape, layout) or strides
        lies = torch.empty_strided(shape, strides, device="meta")
        dense = lies.numel() == 0 or is_non_overlapping_and_dense_or_false(lies)
        strides = torch.empty_like(lies).stride()
        if dense:
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        # Every other element of twice the memory: not dense, either.
        return torch.empty_strided(shape, [2 * s for s in strides], dtype=tensor.dtype, device=tensor.device)


@handler([getattr(Tensor, name) for name in _FILLS], traits=Trait.DRAWS)
def fill(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Fills in place; the old values do not count, so nothing is gathered."""
    own, *rest = args
    if type(own) is not DTensor or any(type(a) is DTensor for a in (*rest, *kwargs.values())):
        return gathered(function)(*args, **kwargs)
    return _overwrite(function, own, lambda blank: function(blank, *rest, **kwargs))


def _overwrite(function: Callable, own: DTensor, draw: Callable[[Tensor], Any]) -> DTensor:
    layout = own._layout.base
    whole = _blank(own)
    with torch.no_grad():
        draw(whole)
        drawn = convert_plain(whole, layout.mesh, layout, function)
    return own.copy_(drawn)


@handler([getattr(nn.init, name) for name in _INITS], traits=Trait.DRAWS)
def initialize(function: Callable, args: tuple, kwargs: dict) -> Any:
    """`nn.init`: as one device would, on the whole; gradients are off, as they are there."""
    own = args[0] if args else kwargs["tensor"]
    rest, named = args[1:], {name: value for name, value in kwargs.items() if name != "tensor"}
    with torch.no_grad():
        return _overwrite(function, own, lambda blank: function(blank, *rest, **named))


@handler(nn.init.constant_)
def constant(function: Callable, args: tuple, kwargs: dict) -> Any:
    own = args[0] if args else kwargs["tensor"]
    with torch.no_grad():
        return own.fill_(args[1] if len(args) > 1 else kwargs["val"])


@handler(torch.rand_like, torch.randn_like, torch.randint_like, traits=Trait.DRAWS | Trait.METADATA)
def like(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Draws in the input's layout; if that is partial the result is whole."""
    kwargs = dict(kwargs)
    own, *rest = args if args else (kwargs.pop("input"),)
    layout = own._layout.reduced
    requires_grad = kwargs.pop("requires_grad", False)
    with torch.no_grad():
        whole = function(_blank(own), *rest, **kwargs)
        return convert_plain(whole, layout.mesh, layout, function).requires_grad_(requires_grad)


_MULTIPLYING = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.dropout_, torch.feature_dropout,
    torch.feature_dropout_,
})  # fmt: skip
_FUNCTIONAL = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
})  # fmt: skip
_SHIFTING = frozenset({
    F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
})  # fmt: skip


@rule(_MULTIPLYING, _SHIFTING, exact=True, traits=Trait.DRAWS | Trait.ELEMENTWISE)
def dropout(call: Call):
    """Free when nothing is dropped (p = 0, or not training) and when everything is (p = 1): neither draws.

    Else the input times a mask, which is what `function` makes of ones. The alpha forms also add: they run whole.
    """
    functional = call.function in _FUNCTIONAL
    p = call.get(1, "p", 0.5)
    training = call.get(2, "training" if functional else "train", functional)
    if training and p not in (0, 1):
        return decomposed(_drop(call.function, p, call.inplace)) if call.function in _MULTIPLYING else None
    return elementwise(call, linear=[(0,)])


def _drop(function: Callable, p: float, inplace: bool) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        layout = x._layout.reduced
        with torch.no_grad():
            mask = function(_blank(x).fill_(1), p, True)
            mask = convert_plain(mask, layout.mesh, layout, function)
        return x.mul_(mask) if inplace else x * mask

    return run


@rule(F.rrelu, torch.rrelu, torch.rrelu_, traits=Trait.DRAWS | Trait.ELEMENTWISE)
def rrelu(call: Call):
    """Elementwise unless it draws."""
    return None if call.get(3, "training", False) else elementwise(call)


# What draws by another rule, or by none.
_OTHERS = """bernoulli binomial multinomial normal poisson rnn_relu rnn_tanh lstm gru native_dropout
    fractional_max_pool2d fractional_max_pool3d gumbel_softmax fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices""".split()
declare(
    [getattr(owner, name, None) for owner in (torch, Tensor, F) for name in _OTHERS],
    [value for name, value in vars(nn.init).items() if name.endswith("_") and name[0] != "_" and name not in _FIXED],
    traits=Trait.DRAWS,
)
