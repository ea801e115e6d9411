"""The functions that a random program is made of, by name: `RUN`.

Each runs on one device and on DTensors alike. Those of `KINKED` jump, or have a
gradient that jumps, where values are equal or zero. The tables tell how to call them:
`UNARY` by one tensor, `ALONG` by a tensor and a dim, and so on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._torch_private import _foreach_add

# --- elementwise ------------------------------------------------------------------------

UNARY: dict[str, Callable] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "gelu": F.gelu,
    "silu": F.silu,
    "sin": Tensor.sin,
    "neg": operator.neg,
    "square": lambda x: x**2,
    "plus": lambda x: x + 1.5,
    "rsub": lambda x: 3 - x,
    "times": lambda x: 2.5 * x,
    "over": lambda x: x / 4,
    "softplus": F.softplus,
    "clone": Tensor.clone,
    "contiguous": Tensor.contiguous,
    "double": Tensor.double,
    "float": Tensor.float,
    "add_": lambda x: x.clone().add_(1.0),
    "mul_": lambda x: x.clone().mul_(-0.5),
    "tanh_": lambda x: x.clone().tanh_(),
    "zero_": lambda x: x.clone().zero_() + x,
    "ones_like": lambda x: torch.ones_like(x) - x,
    "new_full": lambda x: x.new_full(x.shape, 2.0) * x,
    "no_grad": lambda x: torch.no_grad()(lambda: x * 2 + 1)(),
    "checkpoint": lambda x: checkpoint(lambda y: F.gelu(y) * y.sum(), x, use_reentrant=False),
    "inner_gradient": lambda x: torch.enable_grad()(_inner_gradient)(x) + x,
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.empty_like(x.detach())),
    "view_add_": lambda x: _in_place_on_view(x.clone(), lambda y: y.view(-1).add_(1.0)),
    "dropout_eval": lambda x: F.dropout(x, 0.5, training=False),
    "to_half_way": lambda x: x.to(dtype=x.dtype, copy=True),
    "sum_to_python": lambda x: x * (1 + x.detach().mean().tanh().item() if x.numel() else 1),
    "numel": lambda x: x * x.numel() + x.ndim,
}
KINKED_UNARY: dict[str, Callable] = {
    "relu": F.relu,
    "abs": torch.abs,
    "leaky_relu": F.leaky_relu,
    "clamp_min": lambda x: x.clamp(min=0.0),
    "sign": torch.sign,
    "relu_": lambda x: F.relu(x.clone(), inplace=True),
    "positive": lambda x: x > 0,
    "not_positive": lambda x: ~(x > 0),
    "masked_by_itself": lambda x: x.masked_fill(x < 0, 0.25),
    "select_positive": lambda x: x[x > 0],
    "set_positive": lambda x: _assigned(x.clone(), x > 0, 0.5),
    "any": lambda x: (x > 0).any() | (x < -1).all(),
    "count": lambda x: torch.count_nonzero(x > 0, dim=0 if x.ndim else None),
    "hardswish": F.hardswish,
    "aminmax": lambda x: torch.stack(list(torch.aminmax(x))) if x.numel() else x,
}
BINARY: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda x, y: x / (y.tanh() + 2),
    "add_alpha": lambda x, y: torch.add(x, y, alpha=-2),
    "lerp": lambda x, y: torch.lerp(x, y.to(x.dtype), 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y.to(x.dtype), y.to(x.dtype), value=0.5),
    "iadd": lambda x, y: x.clone().add_(y),
    "imul": lambda x, y: x.clone().mul_(y),
    "isub_operator": lambda x, y: operator.isub(x.clone(), y),
    "copy_": lambda x, y: x.clone().copy_(y),
    "mse": lambda x, y: F.mse_loss(x, y.to(x.dtype).expand_as(x)),
    "expand_as": lambda x, y: y.expand_as(x),
    "cosine": lambda x, y: F.cosine_similarity(x, y.to(x.dtype) + 2, dim=-1),
    "where_pair": lambda x, y: torch.where((y * 0 == 0).expand_as(x), x, y),
    "huber_sum": lambda x, y: F.huber_loss(x, y.to(x.dtype).expand_as(x), reduction="sum"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.to(x.dtype).expand_as(x).sigmoid()),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), y.to(x.dtype).expand_as(x).softmax(-1), reduction="batchmean"),
    "hypot": lambda x, y: (x * x + y * y + 1).sqrt(),
    "outer": lambda x, y: torch.outer(x.flatten(), y.to(x.dtype).flatten()),
    "stack_pair": lambda x, y: torch.stack([x, y.to(x.dtype).expand_as(x)], -1),
    "set_first": lambda x, y: _assigned(x.clone(), 0, y.expand_as(x)[0]),
    "foreach": lambda x, y: _foreach_add([x, x], [y, y], alpha=2)[1],
    "row_add_": lambda x, y: _in_place_on_view(x.clone(), lambda z: z[-1].add_(y.expand_as(x)[-1])),
    "transposed_mul_": lambda x, y: _in_place_on_view(x.clone(), lambda z: z.transpose(0, -1).mul_(y.expand_as(x).mT)),
}
KINKED_BINARY: dict[str, Callable] = {
    "maximum": torch.maximum,
    "greater": torch.gt,
    "l1": lambda x, y: F.l1_loss(x, y.expand_as(x)),
}
MASKED: dict[str, Callable] = {
    "where": lambda x, m: torch.where(m, x, -x),
    "where_scalar": lambda x, m: torch.where(m, x, 0.5),
    "masked_fill": lambda x, m: x.masked_fill(m, 1.5),
    "masked_fill_": lambda x, m: x.clone().masked_fill_(m, -1.0),
    "mask_sum": lambda x, m: m.sum(-1) if m.ndim else m.sum(),
    "mask_times": lambda x, m: x * m,
    "mask_and": lambda x, m: (m & ~m) | m,
    "mask_any": lambda x, m: m.any(-1) if m.ndim else m.any(),
    "mask_long": lambda x, m: (m.long() + 2) * 3,
    "mask_double": lambda x, m: m.double() - x,
    "set_masked": lambda x, m: _assigned(x.clone(), m.expand_as(x), -2.0),
    "masked_select": lambda x, m: x.masked_select(m.expand_as(x)),
}

# --- along dims -------------------------------------------------------------------------

REDUCE: dict[str, Callable] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "logsumexp": torch.logsumexp,
    "var": torch.var,
    "prod": torch.prod,
    "var_mean": lambda x, dim, keepdim: sum(torch.var_mean(x, dim, keepdim=keepdim)),
    "nansum": lambda x, dim, keepdim: x.nansum(dim, keepdim),
    "sum_float": lambda x, dim, keepdim: x.sum(dim, keepdim, dtype=torch.float64),
    "softmin_sum": lambda x, dim, keepdim: (x * F.softmin(x, dim)).sum(dim, keepdim),
}
KINKED_REDUCE: dict[str, Callable] = {
    "amax": torch.amax,
    "amin": Tensor.amin,
    "std": torch.std,
    "norm": lambda x, dim, keepdim: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim),
    "max_values": lambda x, dim, keepdim: x.max(dim, keepdim)[0],
    "argmax": lambda x, dim, keepdim: x.argmax(dim, keepdim),
    "median_values": lambda x, dim, keepdim: x.median(dim, keepdim)[0],
    "kthvalue": lambda x, dim, keepdim: x.kthvalue(1, dim, keepdim)[0],
    "norm_one": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 1, dim, keepdim),
    "norm_inf": lambda x, dim, keepdim: torch.linalg.vector_norm(x, float("inf"), dim, keepdim),
    "argmax_taken": lambda x, dim, keepdim: x.take_along_dim(x.argmax(dim, True), dim),
}
ALONG: dict[str, Callable] = {
    "softmax": torch.softmax,
    "log_softmax": F.log_softmax,
    "cumsum": torch.cumsum,
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: torch.roll(x, 2, dim),
    "unbind": lambda x, dim: torch.unbind(x, dim)[-1],
    "diff": lambda x, dim: x.diff(dim=dim),
    "unsqueeze": Tensor.unsqueeze,
    "squeeze": Tensor.squeeze,
    "select": lambda x, dim: x.select(dim, -1),
    "normalize": lambda x, dim: F.normalize(x + 3, dim=dim),
    "repeat_interleave": lambda x, dim: x.repeat_interleave(2, dim),
    "chunk_last": lambda x, dim: x.chunk(3, dim)[-1],
    "chunk_sum": lambda x, dim: sum(c.sum() for c in x.chunk(2, dim)),
    "glu": F.glu,
    "stack": lambda x, dim: torch.stack([x, -x], dim),
    "doubled": lambda x, dim: torch.cat([x, x], dim),
    "setitem": lambda x, dim: _written(x, dim),
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "movedim": lambda x, dim: x.movedim(dim, 0),
    "unfold": lambda x, dim: x.unfold(dim, 2, 1),
    "rot90": lambda x, dim: x.rot90(1, (dim, dim - 1)),
    "tensor_split": lambda x, dim: x.tensor_split(3, dim)[1],
    "split_joined": lambda x, dim: torch.cat([*reversed(x.split(2, dim))], dim),
    "unbind_stacked": lambda x, dim: torch.stack([y.tanh() for y in x.unbind(dim)], -1),
    "narrow_add_": lambda x, dim: _in_place_on_view(x.clone(), lambda y: y.narrow(dim, 0, 1).add_(2.0)),
    "std_of_shifted": lambda x, dim: (x + torch.arange(x.shape[dim]).mean(dtype=torch.float64) * 0).var(dim),
    "weight_norm": lambda x, dim: x / (torch.linalg.vector_norm(x, dim=dim, keepdim=True) + 1),
}
KINKED_ALONG: dict[str, Callable] = {
    "sort_values": lambda x, dim: x.sort(dim)[0],
    "topk_values": lambda x, dim: x.topk(min(2, x.shape[dim]), dim)[0],
    "cummax_values": lambda x, dim: x.cummax(dim)[0],
    "argsort_gathered": lambda x, dim: x.gather(dim, x.argsort(dim, descending=True)),
    "one_hot": lambda x, dim: F.one_hot(x.argmax(dim), x.shape[dim]) * 1.5,
    "max_pool": lambda x, dim: F.max_pool1d(x.movedim(dim, -1).flatten(0, -2), 2),
}
ON_FULL: dict[str, Callable] = {
    "sum_all": torch.sum,
    "mean_all": Tensor.mean,
    "flatten": torch.flatten,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-3),
    "mT": lambda x: x.mT,
    "tril": lambda x: torch.tril(x),
    "gram": lambda x: x @ x.mT,
    "diagonal": lambda x: x.diagonal(),
    "cov": lambda x: torch.einsum("...ij,...ik->...jk", x, x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "avg_pool": lambda x: F.avg_pool1d(x, 2, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "einsum_diagonal": lambda x: torch.einsum("...ii->...i", x),
    "einsum_three": lambda x: torch.einsum("...ij,...kj,...kl->...il", x, x, x),
    "trace": lambda x: torch.trace(x),
    "diag_embed": torch.diag_embed,
    "adaptive_pool": lambda x: F.adaptive_avg_pool1d(x, 2),
    "mean_float": lambda x: torch.mean(x, dtype=torch.float64),
    "hstack": lambda x: torch.hstack([x, x]),
    "norm_all": lambda x: torch.linalg.vector_norm(x + 4),
    "tuple_index": lambda x: x[0, ..., -1],
    "iterate": lambda x: sum(row.sum() * i for i, row in enumerate(x)),
}


def _written(x: Tensor, dim: int) -> Tensor:
    """A write to a slice of a copy."""
    y = x.clone()
    y[(slice(None),) * (dim % x.ndim) + (slice(1, None),)] = 0.5
    return y


def _assigned(y: Tensor, index, value) -> Tensor:
    y[index] = value
    return y


def _in_place_on_view(y: Tensor, write: Callable) -> Tensor:
    write(y)
    return y


def _inner_gradient(x: Tensor) -> Tensor:
    """Gradient of a function of x, by itself."""
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y.sin() * y).sum(), y)[0]


def _moved(x: Tensor, placements) -> Tensor:
    return x.redistribute(placements) if hasattr(x, "redistribute") else x


# --- with static arguments, or other tensors ----------------------------------------------

OTHERS: dict[str, Callable] = {
    "sum_dims": lambda x, dims, keepdim: x.sum(dims, keepdim),
    "mean_dims": lambda x, dims, keepdim: torch.mean(x, dims, keepdim=keepdim),
    "reshape": lambda x, shape: x.reshape(shape),
    "view": lambda x, shape: x.contiguous().view(shape),
    "permute": lambda x, dims: x.permute(dims),
    "transpose": lambda x, a, b: x.transpose(a, b),
    "flatten_dims": lambda x, a, b: x.flatten(a, b),
    "unflatten": lambda x, dim, sizes: x.unflatten(dim, sizes),
    "expand": lambda x, shape: x.expand(shape),
    "repeat": lambda x, times: x.repeat(times),
    "split": lambda x, sizes, dim, take: x.split(sizes, dim)[take],
    "narrow": lambda x, dim, start, length: x.narrow(dim, start, length),
    "getitem": lambda x, index: x[index],
    "pad": lambda x, widths: F.pad(x, widths, value=0.5),
    "cat": lambda x, y, dim: torch.cat([x, y], dim),
    "cat_three": lambda x, y, dim: torch.cat([y, x, y], dim),
    "matmul": torch.matmul,
    "mv": lambda x, w: x @ w,
    "linear": F.linear,
    "addmm": lambda x, w, b: torch.addmm(b, x, w, beta=0.5),
    "bmm": torch.bmm,
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w),
    "einsum": lambda x, y, pattern: torch.einsum(pattern, x, y),
    "attention": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    "affine_layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    "group_norm": lambda x, w, b, groups: F.group_norm(x, groups, w, b),
    "embedding": lambda table, i: F.embedding(i, table),
    "index_select": lambda x, i, dim: x.index_select(dim, i),
    "index": lambda x, i: x[i],
    "index_second": lambda x, i: x[:, i],
    "gather": lambda x, i, dim: x.gather(dim, i),
    "take_along_dim": lambda x, i, dim: x.take_along_dim(i, dim),
    "index_add": lambda x, i, y, dim: x.index_add(dim, i, y),
    "scatter_add": lambda x, i, y, dim: x.scatter_add(dim, i, y),
    "cross_entropy": F.cross_entropy,
    "index_put_": lambda x, i: x.clone().index_put_((i,), torch.tensor(0.5, dtype=x.dtype)),
    "conv1d": lambda x, w, b: F.conv1d(x, w, b, padding=1),
    "redistribute": _moved,
    "nll_weighted": lambda x, w, i, ignore: F.cross_entropy(x, i, w.detach() ** 2 + 0.1, ignore_index=ignore),
    "cross_entropy_smooth": lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1, reduction="sum"),
    "conv2d": lambda x, w: F.conv2d(x, w, stride=2, padding=1),
    "index_two": lambda x, i, j: x[i, j],
    "index_add_scaled": lambda x, i: x.clone().index_add_(0, i, x[i], alpha=0.5),
    "set_rows": lambda x, i: _assigned(x.clone(), i, 0.5),
    "bilinear": F.bilinear,
    "embedding_rows": lambda table, i: F.embedding(i, table).mean(-2),
    "scatter_reduce": lambda x, i, y, dim: x.scatter_reduce(dim, i, y, "mean"),
}

RUN: dict[str, Callable] = {
    **UNARY, **KINKED_UNARY, **BINARY, **KINKED_BINARY, **MASKED, **REDUCE, **KINKED_REDUCE,
    **ALONG, **KINKED_ALONG, **ON_FULL, **OTHERS,
}  # fmt: skip
KINKED = frozenset((*KINKED_UNARY, *KINKED_BINARY, *KINKED_REDUCE, *KINKED_ALONG))
