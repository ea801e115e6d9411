"""What the steps of a random program may be: functions by name, and how to draw their arguments.

`RUN` has the functions, on one device and on DTensors alike. A row of `PROPOSALS`
looks at the values so far and answers (name, inputs, static arguments), or None. The
names in `KINKED` jump, or have a gradient that jumps, where values are equal or zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
}

# --- along dims -------------------------------------------------------------------------

REDUCE: dict[str, Callable] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "logsumexp": torch.logsumexp,
    "var": torch.var,
    "prod": torch.prod,
}
KINKED_REDUCE: dict[str, Callable] = {
    "amax": torch.amax,
    "amin": Tensor.amin,
    "std": torch.std,
    "norm": lambda x, dim, keepdim: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim),
    "max_values": lambda x, dim, keepdim: x.max(dim, keepdim)[0],
    "argmax": lambda x, dim, keepdim: x.argmax(dim, keepdim),
    "median_values": lambda x, dim, keepdim: x.median(dim, keepdim)[0],
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
}
KINKED_ALONG: dict[str, Callable] = {
    "sort_values": lambda x, dim: x.sort(dim)[0],
    "topk_values": lambda x, dim: x.topk(min(2, x.shape[dim]), dim)[0],
    "cummax_values": lambda x, dim: x.cummax(dim)[0],
}
WHOLE: dict[str, Callable] = {
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
}


def _written(x: Tensor, dim: int) -> Tensor:
    """A write to a slice of a copy."""
    y = x.clone()
    y[(slice(None),) * (dim % x.ndim) + (slice(1, None),)] = 0.5
    return y


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
}

RUN: dict[str, Callable] = {
    **UNARY, **KINKED_UNARY, **BINARY, **KINKED_BINARY, **MASKED, **REDUCE, **KINKED_REDUCE,
    **ALONG, **KINKED_ALONG, **WHOLE, **OTHERS,
}  # fmt: skip
KINKED = frozenset((*KINKED_UNARY, *KINKED_BINARY, *KINKED_REDUCE, *KINKED_ALONG))


# --- proposals: (name, inputs, static arguments), or None ---------------------------------


def unary(draw):
    return draw.rng.choice([*UNARY, *KINKED_UNARY]), (draw.floating(),), {}


def binary(draw):
    x = draw.floating()
    return draw.rng.choice([*BINARY, *KINKED_BINARY]), (x, draw.partner(x)), {}


def masked(draw):
    x = draw.floating()
    return draw.rng.choice([*MASKED]), (x, draw.mask(draw.shape(x))), {}


def reduce(draw):
    x = draw.floating(1)
    return draw.rng.choice([*REDUCE, *KINKED_REDUCE]), (x,), {"dim": _dim(draw, x), "keepdim": draw.rng.random() < 0.4}


def reduce_dims(draw):
    x = draw.floating(2)
    dims = draw.rng.sample(range(len(draw.shape(x))), 2)
    return draw.rng.choice(("sum_dims", "mean_dims")), (x,), {"dims": tuple(dims), "keepdim": draw.rng.random() < 0.4}


def along(draw):
    x = draw.floating(1)
    return draw.rng.choice([*ALONG, *KINKED_ALONG]), (x,), {"dim": _dim(draw, x)}


def whole(draw):
    return draw.rng.choice([*WHOLE]), (draw.floating(1),), {}


def regroup(draw):
    """reshape and view to another factorisation."""
    x = draw.floating()
    left, shape = math.prod(draw.shape(x)), []
    for _ in range(draw.rng.randint(0, 3)):
        size = draw.rng.choice([d for d in range(1, 13) if left % d == 0])
        shape.append(size)
        left = left // size
    shape.insert(draw.rng.randint(0, len(shape)), left)
    if left and draw.rng.random() < 0.3:
        shape[shape.index(left)] = -1
    return draw.rng.choice(("reshape", "view")), (x,), {"shape": tuple(shape)}


def reorder(draw):
    x = draw.floating(1)
    dims = list(range(len(draw.shape(x))))
    draw.rng.shuffle(dims)
    if draw.rng.random() < 0.5:
        return "permute", (x,), {"dims": tuple(dims)}
    return "transpose", (x,), {"a": dims[0], "b": dims[-1]}


def merge(draw):
    x = draw.floating(2)
    a = draw.rng.randrange(len(draw.shape(x)) - 1)
    return "flatten_dims", (x,), {"a": a, "b": draw.rng.randrange(a + 1, len(draw.shape(x)))}


def unmerge(draw):
    x = draw.floating(1)
    dim = _dim(draw, x)
    sizes = [(d, -1) for d in (2, 3, 4) if draw.shape(x)[dim] and draw.shape(x)[dim] % d == 0]
    return ("unflatten", (x,), {"dim": dim, "sizes": draw.rng.choice(sizes)}) if sizes else None


def widen(draw):
    x = draw.floating()
    shape = [draw.size() if size == 1 else size for size in draw.shape(x)]
    if draw.rng.random() < 0.5:
        return "expand", (x,), {"shape": (*[2] * draw.rng.randrange(2), *shape)}
    return "repeat", (x,), {"times": tuple(draw.rng.choice((1, 1, 2, 3)) for _ in shape) or (2,)}


def part(draw):
    """split, narrow, and indexing by numbers and slices."""
    x, rng = draw.floating(1), draw.rng
    dim = _dim(draw, x)
    size = draw.shape(x)[dim]
    kind = rng.choice(("split", "narrow", "getitem", "getitem"))
    if kind == "split":
        return kind, (x,), {"sizes": rng.randint(1, 4), "dim": dim, "take": rng.choice((0, -1))}
    if kind == "narrow":
        start = rng.randint(0, size)
        return kind, (x,), {"dim": dim, "start": start, "length": rng.randint(0, size - start)}
    index: list[Any] = []
    for _ in range(rng.randint(1, len(draw.shape(x)))):
        index.append(
            rng.choice(
                (slice(None), slice(1, None), slice(None, -1), slice(None, None, 2), slice(1, 6, 3), 0, -1, None, ...)
            )
        )
    if index.count(...) > 1:
        return None
    return "getitem", (x,), {"index": tuple(index)}


def pad(draw):
    x = draw.floating(1)
    widths = [draw.rng.choice((0, 1, 2, -1)) for _ in range(2 * draw.rng.randint(1, min(2, len(draw.shape(x)))))]
    return "pad", (x,), {"widths": tuple(widths)}


def join(draw):
    x = draw.floating(1)
    dim = _dim(draw, x)
    shape = list(draw.shape(x))
    shape[dim] = draw.size()
    return draw.rng.choice(("cat", "cat_three")), (x, draw.leaf(shape, draw.kind(x))), {"dim": dim}


def product(draw):
    x, rng = draw.floating(1), draw.rng
    shape, kind, width = draw.shape(x), draw.kind(x), draw.size()
    choice = rng.choice(("matmul", "mv", "linear", "linear", "addmm", "bmm", "baddbmm"))
    if choice == "mv":
        return choice, (x, draw.leaf(shape[-1:], kind)), {}
    if choice == "matmul":
        batch = shape[:-2] if rng.random() < 0.4 else ()
        return choice, (x, draw.leaf((*batch, shape[-1], width), kind)), {}
    if choice == "linear":
        bias = (draw.leaf((width,), kind),) if rng.random() < 0.6 else ()
        return choice, (x, draw.leaf((width, shape[-1]), kind), *bias), {}
    if choice == "addmm" and len(shape) == 2:
        bias = draw.broadcast((shape[0], width))
        return choice, (x, draw.leaf((shape[1], width), kind), draw.leaf(bias, kind)), {}
    if choice in ("bmm", "baddbmm") and len(shape) == 3:
        w = draw.leaf((shape[0], shape[2], width), kind)
        return choice, (x, w, *([draw.leaf((shape[0], shape[1], width), kind)] if choice == "baddbmm" else [])), {}
    return None


def contraction(draw):
    """einsum of two operands with any labels."""
    x, rng = draw.floating(1, 4), draw.rng
    shape = draw.shape(x)
    labels = "abcd"[: len(shape)]
    sizes = {**dict(zip(labels, shape)), "x": draw.size(), "y": draw.size()}
    second = "".join(rng.sample([*labels, "x", "y"], rng.randint(1, min(3, len(labels) + 2))))
    together = sorted({*labels, *second})
    result = "".join(rng.sample(together, rng.randint(0, min(4, len(together)))))
    y = draw.leaf([sizes[label] for label in second], draw.kind(x))
    return "einsum", (x, y), {"pattern": f"{labels},{second}->{result}"}


def attention(draw):
    x = draw.floating(3, 4)
    shape, kind = list(draw.shape(x)), draw.kind(x)
    shape[-2] = draw.size() or 1
    k = draw.leaf(shape, kind)
    return "attention", (x, k, draw.leaf(shape, kind)), {"causal": draw.rng.random() < 0.4}


def affine_norm(draw):
    x = draw.floating(2)
    shape, kind = draw.shape(x), draw.kind(x)
    if draw.rng.random() < 0.5:
        return "affine_layer_norm", (x, draw.leaf(shape[-1:], kind), draw.leaf(shape[-1:], kind)), {}
    groups = draw.rng.choice([g for g in (1, 2, 3) if shape[1] % g == 0])
    w, b = draw.leaf(shape[1:2], kind), draw.leaf(shape[1:2], kind)
    return "group_norm", (x, w, b), {"groups": groups}


def indexed(draw):
    x, rng = draw.floating(1), draw.rng
    shape, kind = draw.shape(x), draw.kind(x)
    dim = rng.randrange(len(shape))
    if not shape[dim]:
        return None
    below = f"i{shape[dim]}"
    some = [draw.size() for _ in range(rng.randint(1, 2))]
    other = [rng.randint(1, size) if size else 0 for size in shape]
    other[dim] = draw.size()
    choice = rng.choice(
        ("embedding", "index_select", "index", "index_second", "gather", "take_along_dim", "index_add", "scatter_add",
         "cross_entropy", "index_put_")
    )  # fmt: skip
    if choice in ("embedding", "index", "index_put_"):
        return choice, (x, draw.leaf(some, f"i{shape[0]}")), {}
    if choice == "index_second":
        return (choice, (x, draw.leaf(some, f"i{shape[1]}")), {}) if len(shape) > 1 and shape[1] else None
    if choice == "index_select":
        return choice, (x, draw.leaf(some[:1], below)), {"dim": dim}
    if choice == "index_add":
        added = [some[0] if d == dim else size for d, size in enumerate(shape)]
        return choice, (x, draw.leaf(some[:1], below), draw.leaf(added, kind)), {"dim": dim}
    if choice == "scatter_add":
        return choice, (x, draw.leaf(other, below), draw.leaf(other, kind)), {"dim": dim}
    if choice == "cross_entropy":
        if len(shape) < 2 or not shape[1]:
            return None
        return choice, (x, draw.leaf((shape[0], *shape[2:]), f"i{shape[1]}")), {}
    if choice == "take_along_dim":
        other = [draw.size() if d == dim else size for d, size in enumerate(shape)]
    return choice, (x, draw.leaf(other, below)), {"dim": dim}


def convolution(draw):
    x = draw.floating(3, 3)
    channels, out = draw.shape(x)[1], draw.size() or 1
    w, b = draw.leaf((out, channels, 3), draw.kind(x)), draw.leaf((out,), draw.kind(x))
    return ("conv1d", (x, w, b), {}) if channels else None


def _dim(draw, ref: int) -> int:
    ndim = len(draw.shape(ref))
    return draw.rng.randrange(-ndim, ndim)


# A row that is there twice is drawn twice as often.
PROPOSALS = (
    unary, unary, unary, unary, binary, binary, binary, binary, masked, masked, reduce, reduce, reduce, reduce_dims,
    along, along, along, along, whole, whole, regroup, regroup, reorder, reorder, merge, unmerge, widen, part, part,
    pad, join, product, product, product, contraction, contraction, attention, affine_norm, indexed, indexed, indexed,
    convolution,
)  # fmt: skip
