"""Dropout in all its forms: the noise is drawn in the layout of the input, which stays as it lies.

    dropout            noise as the input: its part is drawn in the order of the input's memory
    feature forms      one number per sample and channel: dims of one index, whole where the input is cut there
    alpha forms        times the noise, plus what keeps mean and variance: a constant, added once where partial
    partial input      the noise is whole and equal on all ranks: the product is linear in the input
    nothing drawn      p = 0, p = 1, or not training: no number is taken

What torch does on CPU (ATen/native/Dropout.cpp): noise = empty_like(input).bernoulli_(1 - p).div_(1 - p), then the
product; on CUDA `dropout`, out of place, has a kernel and an order of its own (ATen/native/cuda/Dropout.cu). On an
accelerator backward keeps what was kept, a byte per element; the scale is a number. On CPU it keeps the noise, as
torch's own does, for one product there is faster than two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import DTensor, Layout, register_rule
from vescale_dtensor.engine import (
    INVARIANT,
    PARTIAL,
    TABLE,
    attach,
    body_of,
    check_writable,
    gathered,
    handler,
    layout_of,
    local_only,
)
from vescale_dtensor.rules import Call, decomposed

from .._cpu.stream import Draw, fill
from .._cuda.numbers import fused_dropout_
from .fills import draws_for, fills_for

_PLAIN = {F.dropout, torch.dropout, torch.dropout_}
_FEATURE = {torch.feature_dropout, torch.feature_dropout_}
_ALPHA = {F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_}
_FEATURE_ALPHA = {F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_}
_FUNCTIONAL = {F.dropout, F.alpha_dropout, F.feature_alpha_dropout}
_FUNCTIONS = _PLAIN | _FEATURE | _ALPHA | _FEATURE_ALPHA
# Checks and views around feature_dropout: their Python bodies do.
_BODIES = [F.dropout1d, F.dropout2d, F.dropout3d]
_WHOLE = {function: TABLE[function].rule for function in (*_FUNCTIONS, *_BODIES)}
_SELU = 1.7580993408473766  # ATen's `alpha`: of SELU, scale times alpha


def drawn_noise(local: Tensor, layout: Layout, p: float, like: Tensor | None = None) -> Tensor:
    """This rank's part of the zeros and ones that one device draws into a fresh tensor, made like one of which `like`
    is the shard; `local` is overwritten."""
    return fill(local, layout, Draw(Tensor.bernoulli_, (1 - p,)), fresh=True, like=like)


@register_rule(_FUNCTIONS, exact=True)
def dropout(call: Call):
    """The rule of vescale_dtensor where nothing is drawn."""
    functional = call.function in _FUNCTIONAL
    p = call.get(1, "p", 0.5)
    training = call.get(2, "training" if functional else "train", functional)
    whole = _WHOLE[call.function](call)
    if not training or p in (0, 1):
        return whole
    on_device = whole.decomposition if whole is not None else gathered(call.function)
    feature, alpha = call.function in _FEATURE | _FEATURE_ALPHA, call.function in _ALPHA | _FEATURE_ALPHA
    return decomposed(_drop(p, feature, alpha, call.inplace, on_device))


def _drop(p: float, feature: bool, alpha: bool, inplace: bool, on_device: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> DTensor:
        x = args[0] if args else kwargs["input"]
        if not fills_for(x):
            return on_device(*args, **kwargs)
        if inplace:
            check_writable("dropout", x)
        layout = x._layout.base
        # On the shards: a checkpoint that finds a DTensor among what autograd saved compares its global shape.
        with local_only():
            if not (feature or alpha or inplace or draws_for(x)):
                return attach(_fused(x, layout, p), layout if torch.is_grad_enabled() else layout.untracked)
            noise = _noise(x, layout, p, feature)
            if not alpha and x.device.type not in ("cpu", "meta"):
                kept, scale = noise.bool(), scale_of(p, noise.dtype)
                del noise
                out = x.mul_(kept).mul_(scale) if inplace else (x * kept).mul_(scale)
                return x if inplace else attach(out, layout if torch.is_grad_enabled() else layout.untracked)
            noise, shift = _scaled(noise, layout, p, alpha)
            out = x.mul_(noise) if inplace else x * noise
            if shift is not None:
                out = out.add_(shift)
        if inplace:
            return x
        return attach(out, layout if torch.is_grad_enabled() else layout.untracked)

    return run


def _fused(x: Tensor, layout: Layout, p: float) -> Tensor:
    """Applies dropout as torch's fused kernel on CUDA does: x times zero or one, times the scale, in float, rounded
    once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        kept = torch.empty_like(x.detach())
        kept = fill(kept, layout.reduced, Draw(fused_dropout_, (p,)), fresh=True, like=x.detach()).bool()
        scale = torch.tensor(1 - p, dtype=wide).to(torch.float64).reciprocal().to(wide).item()
    return (x.to(wide) * kept).mul_(scale).to(x.dtype)


@lru_cache(maxsize=64)
def scale_of(p: float, dtype: torch.dtype) -> float:
    """Returns the value of the nonzero elements of noise of this dtype."""
    return torch.ones((), dtype=dtype).div_(1 - p).item()


def _noise(x: Tensor, layout: Layout, p: float, feature: bool) -> Tensor:
    """The shard's zeros and ones: as the input, or [N, C, 1, 1, ...]."""
    layout = layout.reduced
    with torch.no_grad():
        if not feature:
            return drawn_noise(torch.empty_like(x.detach()), layout, p, x.detach())
        if layout.ndim < 2:
            raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
        states = [INVARIANT if state.kind == "S" and state.dim > 1 else state for state in layout.states]
        layout = layout_of(layout.mesh, states, (*layout.shape[:2], *[1] * (layout.ndim - 2)))
        return drawn_noise(x.detach().new_empty(layout.local_shape), layout, p)


def _scaled(noise: Tensor, layout: Layout, p: float, alpha: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the factor of the input and the summand; the latter on the first rank only where the input is partial."""
    with torch.no_grad():
        if not alpha:
            return noise.div_(1 - p), None
        scale = 1 / sqrt((_SELU * _SELU * p + 1) * (1 - p))
        shift = noise.add(-1).mul_(_SELU * scale).add_(_SELU * scale * p)
        elsewhere = any(at and state is PARTIAL for at, state in zip(layout.mesh.coordinate, layout.states))
        return noise.mul_(scale), None if elsewhere else shift


@handler(_BODIES)
def feature_dropout(function: Callable, args: tuple, kwargs: dict) -> Any:
    return body_of(function)(*args, **kwargs)
