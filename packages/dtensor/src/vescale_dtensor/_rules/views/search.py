"""Functions of index values: one_hot, bucketize, searchsorted, isin, unravel_index.

All are elementwise in the values, which keep their sharding; what they are looked up
in is whole. None is differentiable. Partial inputs are reduced first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..._dispatch.signature import Signature
from ..registry import Call, Operand, decomposed, rule
from .gather import by_operand


@rule(F.one_hot)
def one_hot(call: Call):
    """The number of classes, when not given, is one more than the largest: read from the tensor."""
    x = call.operands[0]
    classes = call.get(1, "num_classes", -1)
    if classes == -1:
        return decomposed(lambda x, num_classes=-1: F.one_hot(x, int(x.max().item()) + 1)) if x.layout.numel else None
    labels = tuple(range(x.ndim))
    return Signature([labels], [(*labels, None)], shapes=[(*x.shape, classes)])


@rule(torch.bucketize)
def bucketize(call: Call):
    x, boundaries = call.get(0, "input"), call.get(1, "boundaries")
    if not isinstance(x, Operand) or not isinstance(boundaries, Operand):
        return None
    labels = tuple(range(x.ndim))
    return by_operand(call, {x: labels, boundaries: (None,)}, labels, x.shape)


@rule(torch.searchsorted)
def searchsorted(call: Call):
    """A sequence with more dims than one has one row per row of values: those dims may be sharded alike."""
    rows, values = call.get(0, "sorted_sequence"), call.get(1, "input")
    if not isinstance(rows, Operand) or not isinstance(values, Operand) or rows.ndim not in (1, values.ndim):
        return None
    labels = tuple(range(values.ndim))
    searched = (None,) if rows.ndim == 1 else (*labels[:-1], None)
    known = {rows: searched, values: labels}
    sorter = call.kwargs.get("sorter")
    if isinstance(sorter, Operand):
        known[sorter] = searched
    return by_operand(call, known, labels, values.shape)


@rule(torch.isin)
def isin(call: Call):
    elements, tested = call.get(0, "elements"), call.get(1, "test_elements")
    if not isinstance(elements, Operand):
        return None
    labels = tuple(range(elements.ndim))
    known = {elements: labels}
    if isinstance(tested, Operand):
        known[tested] = (None,) * tested.ndim
    return by_operand(call, known, labels, elements.shape)


@rule(torch.unravel_index)
def unravel_index(call: Call):
    x, shape = call.get(0, "indices"), call.get(1, "shape")
    count = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    labels = tuple(range(x.ndim))
    return Signature([labels], [labels] * count, shapes=[x.shape] * count, single=False)
