"""Convolution as a product: every window of the input against every filter, in blocks of samples and channels.

    b c w..., o c k... -> b o l...     its gradients are products of the same labels, summed over b and l..., and over o

Windows are views (`Tensor.unfold`); a gradient adds up those that overlap, per sample and channel, which is in order on
any mesh. Spatial dims are whole on every rank, as ever (`products/conv.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._rules.products import conv as convolutions
from ..._rules.registry import Call, Decision
from ..call import expanded, solved
from ..forms import form
from ..grid import Cut, Splits, block_count
from .product import Labels, Product


@form(torch.conv1d, torch.conv2d, torch.conv3d)
def convolution(call: Call, splits: Splits) -> Decision | None:
    """Convolves batches; samples without a batch and grouped channels run whole."""
    x, weight = call.operands[:2]
    n = weight.ndim - 2
    if call.get(6, "groups", 1) != 1 or x.ndim != n + 2 or not x.layout.numel:
        return None
    signature = convolutions.conv(call)
    found = solved(call, signature)
    if found is None:
        return None
    windows, taps = [("l", d) for d in range(n)], [("k", d) for d in range(n)]
    shape = signature.shapes[0]
    cuts = {
        "b": found.cut("b", block_count(x.shape[0], splits.batch), "batch"),
        "c": found.cut("c", block_count(x.shape[1], splits.hidden)),
        "o": found.cut("o", block_count(weight.shape[0], splits.hidden)),
        **{label: Cut(1, size, (0,)) for label, size in zip((*windows, *taps), (*shape[2:], *weight.shape[2:]))},
    }
    labels = Labels(("b", "c", *windows, *taps), ("o", "c", *taps), ("b", "o", *windows))
    others = (0, *range(2, n + 2))
    spread: tuple = ()
    if len(call.operands) == 3:
        spread = (found.cut("b"), *[cuts[label] for label in windows])

    def run(input: Tensor, weight: Tensor, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
        columns = _windows(input, weight.shape[2:], *[_each(value, n) for value in (stride, padding, dilation)])
        out = Product.apply(columns, weight, labels, cuts)
        return out if bias is None else out + expanded(bias, (0,), tuple(out.shape), others, spread)

    return found.running(run)


def _each(value, n: int) -> tuple:
    """One value for all spatial dims, or one each."""
    if isinstance(value, (int, str)):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)


def _windows(x: Tensor, kernel: torch.Size, stride: tuple, padding: tuple, dilation: tuple) -> Tensor:
    """[b, c, w...] -> [b, c, l..., k...]."""
    reach = [(k - 1) * d for k, d in zip(kernel, dilation)]
    sides = []
    for at, pad in enumerate(padding):
        total = reach[at] if pad == "same" else 0 if pad == "valid" else 2 * pad
        sides = [total // 2, total - total // 2, *sides]  # F.pad begins with the last dim
    if any(sides):
        x = F.pad(x, sides)
    for d, (span, step) in enumerate(zip(reach, stride)):
        x = x.unfold(2 + d, span + 1, step)[..., :: dilation[d]]
    return x
