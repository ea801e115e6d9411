"""batch_norm and group_norm, made of functions that have forms: means over samples, and rows of one group each."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._rules.registry import Call, Decision, decomposed
from ..._tensor.tensor import DTensor
from ..forms import form
from ..grid import Splits
from ..tree import wide


@form(F.batch_norm)
def batch_norm(call: Call, splits: Splits) -> Decision | None:
    """x [b, c, ...]: statistics over b and what follows c, or the running ones; these are updated."""
    x = call.get(0, "input")
    return decomposed(_batch_norm) if x.ndim > 1 and x.layout.numel else None


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    dims, each = (0, *range(2, input.ndim)), (-1, *[1] * (input.ndim - 2))
    count = prod(input.shape[d] for d in dims)
    x = wide(input)
    if training:
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        mean = x.mean(dims)
        x = x - mean.view(each)
        variance = (x * x).mean(dims)
        with torch.no_grad():
            for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
                if running is not None:
                    new = new.full_tensor() if type(new) is DTensor and type(running) is not DTensor else new
                    running.mul_(1 - momentum).add_((new * momentum).to(running.dtype))
    else:
        x, variance = x - running_mean.view(each), running_var
    x = x * (1 / (wide(variance) + eps).sqrt()).view(each)
    return _scaled(x, weight, bias, each).to(input.dtype)


@form(F.group_norm, torch.group_norm)
def group_norm(call: Call, splits: Splits) -> Decision | None:
    """x [b, c, ...]: every group of channels of a sample is a row."""
    return decomposed(_group_norm) if call.get(0, "input").layout.numel else None


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    rows = wide(input).reshape(input.shape[0], num_groups, -1)
    x = F.layer_norm(rows, rows.shape[-1:], eps=eps).view(input.shape)
    return _scaled(x, weight, bias, (-1, *[1] * (input.ndim - 2))).to(input.dtype)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, each: tuple[int, ...]) -> Tensor:
    x = x if weight is None else x * wide(weight).view(each)
    return x if bias is None else x + wide(bias).view(each)
