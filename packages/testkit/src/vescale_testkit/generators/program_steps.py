"""Draws the steps of a random program: `PROPOSALS`.

Each looks at the values so far (a `programs.Draw`) and answers (name of a function,
inputs, static arguments), or None. What it proposes may not fit: then it is not taken.
"""

from __future__ import annotations

import math
from typing import Any

from .program_functions import (
    ALONG,
    BINARY,
    KINKED_ALONG,
    KINKED_BINARY,
    KINKED_REDUCE,
    KINKED_UNARY,
    MASKED,
    ON_FULL,
    REDUCE,
    UNARY,
)  # fmt: skip


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


def on_full(draw):
    return draw.rng.choice([*ON_FULL]), (draw.floating(1),), {}


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


def move(draw):
    x = draw.floating()
    return "redistribute", (x,), {"placements": draw.placements(draw.shape(x), True)}


def indexed_twice(draw):
    x, rng = draw.floating(2), draw.rng
    shape, kind = draw.shape(x), draw.kind(x)
    some = [draw.size() for _ in range(rng.randint(1, 2))]
    choice = rng.choice(("index_two", "index_add_scaled", "set_rows", "embedding_rows", "bilinear", "scatter_reduce"))
    if choice == "index_two":
        return choice, (x, draw.leaf(some, f"i{shape[0]}"), draw.leaf(some[-1:], f"i{shape[1]}")), {}
    if choice == "bilinear":
        y = draw.leaf((*shape[:-1], draw.size()), kind)
        return choice, (x, y, draw.leaf((draw.size(), shape[-1], draw.shape(y)[-1]), kind)), {}
    if choice == "scatter_reduce":
        return choice, (x, draw.leaf(shape, f"i{shape[1]}"), draw.leaf(shape, kind)), {"dim": 1}
    return choice, (x, draw.leaf(some[:1] if choice == "index_add_scaled" else some, f"i{shape[0]}")), {}


def loss(draw):
    x = draw.floating(2, 3)
    shape = draw.shape(x)
    target = draw.leaf((shape[0], *shape[2:]), f"i{shape[1]}")
    if draw.rng.random() < 0.4:
        return "cross_entropy_smooth", (x, target), {}
    return "nll_weighted", (x, draw.leaf(shape[1:2], draw.kind(x)), target), {"ignore": draw.rng.choice((-100, 0, 1))}


def image(draw):
    x = draw.leaf([draw.size() or 1, draw.size() or 1, 5, draw.rng.choice((4, 7))])
    return "conv2d", (x, draw.leaf((draw.size() or 1, draw.shape(x)[1], 3, 2), draw.kind(x))), {}


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
    along, along, along, along, on_full, on_full, regroup, regroup, reorder, reorder, merge, unmerge, widen, part, part,
    pad, join, product, product, product, contraction, contraction, attention, affine_norm, indexed, indexed, indexed,
    convolution, move, move, indexed_twice, loss, image,
)  # fmt: skip
