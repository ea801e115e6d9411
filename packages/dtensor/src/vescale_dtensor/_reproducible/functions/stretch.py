"""Stretching in the reproducible mode: the gradient of a stretched dim is a sum, so it is made in order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._rules.registry import Call, Decision, decomposed
from ..._rules.views import shape as shapes
from ..call import expanded, solved
from ..forms import form
from ..grid import Cut, Splits, fine_count
from .attention import repeated


@form(Tensor.expand, Tensor.broadcast_to, torch.broadcast_to)
def expand(call: Call, splits: Splits) -> Decision | None:
    signature = shapes.expand(call)
    found = solved(call, signature, adds=False)
    if found is None:
        return None
    labels = tuple(signature.outputs[0])
    kept = tuple(d for d, label in enumerate(found.inputs[0]) if label is not None)
    dims = tuple(d for d, label in enumerate(labels) if label not in found.inputs[0])
    shape = found.out.local_shape
    cuts = tuple(_full(shape[d]) for d in dims)
    run = found.decision.run

    def stretch(input: Tensor, *args, **kwargs) -> Tensor:
        if not dims or not input.requires_grad or 0 in shape:
            return run(input)
        return expanded(input, kept, shape, dims, cuts)

    return found.running(stretch)


def _full(size: int) -> Cut:
    count = fine_count(size)
    return Cut(count, size // count, tuple(range(count)))


@form(Tensor.expand_as)
def expand_as(call: Call, splits: Splits) -> Decision:
    return decomposed(lambda tensor, other: tensor.expand(tuple(other.shape)))


@form(Tensor.repeat)
def repeat(call: Call, splits: Splits) -> Decision:
    return shapes.repeat(call)


@form(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(call: Call, splits: Splits) -> Decision | None:
    """A number of times along a dim; counts given as a tensor run whole."""
    count, dim = call.get(1, "repeats"), call.get(2, "dim")
    if not isinstance(count, int) or not isinstance(dim, int) or call.kwargs.get("output_size") is not None:
        return None
    dim %= call.operands[0].ndim

    def run(tensor, *args, **kwargs):
        shape = tuple(tensor.shape)
        out = tensor.unsqueeze(dim + 1).expand(*shape[: dim + 1], count, *shape[dim + 1 :])
        return out.reshape(*shape[:dim], shape[dim] * count, *shape[dim + 1 :])

    return decomposed(run)


def grouped_attention(call: Call) -> Decision | None:
    """Grouped queries: keys and values are repeated, then it is attention of as many heads."""
    query, key = call.get(0, "query"), call.get(1, "key")
    if not call.get(7, "enable_gqa", False) or query.shape[-3] == key.shape[-3]:
        return None
    count = query.shape[-3] // key.shape[-3]

    def run(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        key, value = repeated(key, count), repeated(value, count)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)

    return decomposed(run)
