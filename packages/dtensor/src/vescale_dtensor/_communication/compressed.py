"""Numbers in fewer bits, for a sum over ranks that sends them: narrower floats, or int8 with a scale per block.

A row of n numbers as int8 is one run of bytes, all rows of one size:

    scales   float32, one per BLOCK numbers: the largest magnitude among them / 127
    codes    int8: round(number / scale), -127 to 127; -128 stands for -0.0

-0.0 keeps its sign because who sums gradients reads off it that nobody used a parameter.
A block that holds an infinity or a NaN comes back as NaN in every place, so that whoever looks for
one finds it. The error of a number is at most half its block's scale: 1/254 of the largest there.
Blocks with absolute scales: Dettmers, "8-bit approximations for parallelism in deep learning" (2015).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
_TOP, _NEGATIVE_ZERO = 127, -128


def sent_numel(numbers: int, sent: torch.dtype) -> int:
    """Elements of `sent` that a row of so many numbers takes."""
    if sent.is_floating_point:
        return numbers
    blocks = -(-numbers // BLOCK)
    return blocks * (4 + BLOCK)


def compress(rows: Tensor, sent: torch.dtype) -> Tensor:
    """Rows [n, numbers] of a floating dtype as [n, sent_numel] of `sent`."""
    if sent.is_floating_point:
        return rows.to(sent)
    count, numbers = rows.shape
    blocks = -(-numbers // BLOCK)
    values = pad(rows.float(), (0, blocks * BLOCK - numbers)).view(count, blocks, BLOCK)
    scales = values.abs().amax(-1) / _TOP
    divisors = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    codes = (values / divisors).round_().nan_to_num_(0).clamp_(-_TOP, _TOP)
    codes.masked_fill_((values == 0) & values.signbit(), _NEGATIVE_ZERO)
    return torch.cat([scales.view(torch.int8), codes.to(torch.int8).view(count, -1)], dim=1)


def expand(rows: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """The numbers that `compress` was given, as near as they were sent: [n, numbers] of `dtype`."""
    if rows.dtype.is_floating_point:
        return rows.to(dtype)
    count = rows.shape[0]
    blocks = -(-numbers // BLOCK)
    scales = rows[:, : blocks * 4].contiguous().view(torch.float32)
    codes = rows[:, blocks * 4 :].reshape(count, blocks, BLOCK)
    values = codes.float().mul_(scales.unsqueeze(-1))
    values.masked_fill_(codes == _NEGATIVE_ZERO, -0.0)
    return values.view(count, -1)[:, :numbers].to(dtype)
