"""Normalisation layers over the last dims: layer_norm, rms_norm and instance_norm.

    batch dims sharded          local; weight and bias whole (R: their gradients are partial)
    normalized dims sharded     x stays sharded, weight and bias alike; the statistics, one or two values
                                per row, are all-reduced
    partial input               reduces first
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..._dispatch.signature import Signature
from ..._tensor.tensor import DTensor
from ..empty import guarded
from ..registry import Call, Operand, decomposed, rule
from ..solvers.parts import reduced, splits
from .reduce import upcast


def _trailing(call: Call):
    """(x, sizes of the normalized dims), or None when they are not the last dims of x."""
    x, shape = call.get(0, "input"), call.get(1, "normalized_shape")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(x, Operand) or not shape or x.shape[-len(shape) :] != shape:
        return None
    return x, shape


def _over_rows(call: Call, *, centered: bool):
    """Local where the normalized dims are whole; on statistics over shards where they are not."""
    found = _trailing(call)
    if found is None:
        return None
    x, shape = found
    kept = x.ndim - len(shape)
    normalized = tuple(("n", d) for d in range(len(shape)))
    labels = (*[("b", d) for d in range(kept)], *normalized)
    if not splits(x.layout, range(kept, x.ndim)):
        inputs = [labels if operand is x else normalized for operand in call.operands]
        return Signature(inputs, [labels], whole=set(normalized))
    return decomposed(_layer_norm if centered else _rms_norm)


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps: float = 1e-5, *_) -> DTensor:
    return _normalized(input, normalized_shape, weight, bias, eps, centered=True).contiguous()  # as torch's kernel


def _rms_norm(input, normalized_shape, weight=None, eps: float | None = None) -> DTensor:
    return _normalized(input, normalized_shape, weight, None, eps, centered=False).contiguous()


def _normalized(x: DTensor, shape, weight, bias, eps: float | None, *, centered: bool) -> DTensor:
    """x over its root mean square on the last dims, after its mean is taken off when `centered`."""
    dims = tuple(range(x.ndim - (1 if isinstance(shape, int) else len(shape)), x.ndim))
    dtype, name = x.dtype, "layer_norm" if centered else "rms_norm"
    x = upcast(reduced(x, name))
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    if centered:
        x = x - reduced(x.mean(dims, keepdim=True), name)
    out = x * (reduced((x * x).mean(dims, keepdim=True), name) + eps).rsqrt()
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out if out.dtype == dtype else out.to(dtype)


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(call: Call):
    return _over_rows(call, centered=True)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(call: Call):
    return _over_rows(call, centered=False)


@rule(F.instance_norm)
def instance_norm(call: Call) -> Signature | None:
    """x [b, c, ...], weight [c], bias [c], each channel of each sample by itself; without running statistics."""
    x = call.operands[0]
    others = [call.get(3, "weight"), call.get(4, "bias")]
    given = [one for one in others if isinstance(one, Operand)]
    if x.ndim < 3 or call.operands != [x, *given]:
        return None
    labels = ("b", "c", *[None] * (x.ndim - 2))
    return Signature([labels, *[("c",)] * len(given)], [labels], shapes=[x.shape], local=guarded(call.function))
