"""Losses over classes: cross entropy and nll, their class dim sharded or not.

A class dim that is sharded (vocabulary-parallel) is never gathered: `class_parts`. A mean
divides by the count of targets (or the sum of their weights) of the whole batch: one
number, reduced where the target is sharded.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dispatch.signature import Signature, solve
from ..._layouts.state import PARTIAL
from ..._tensor.tensor import local_only
from ..._torch_private import legacy_get_string
from ..body import run_body
from ..registry import Call, Decision, decomposed, rule
from ..solvers.class_parts import OUT_OF_BOUNDS, at_index, class_parts, loss_of_parts, solved, wide
from ..solvers.owned import check_range, held_ranges, nothing, owned
from .loss import bound, reduction_of


def through_rule(function, *args):
    """`function` through its rule: its parts here are no functions of torch."""
    from ..._dispatch.dispatch import call

    return call(function, *args)


@rule(F.cross_entropy, F.nll_loss)
def class_loss(call: Call):
    """input [N, C, ...] or [C]; target: indices without the class dim, or (cross entropy) probabilities with it.

    Class dim whole: local. Class dim sharded: cross entropy as told above; nll picks
    the target's entry where it is -> P. A partial input is reduced.
    """
    given = bound(call)
    reduction = reduction_of(call)
    own, target, weight = given["input"], given["target"], given["weight"]
    if not own.ndim or reduction not in ("none", "mean", "sum"):
        return None
    dim = min(own.ndim - 1, 1)
    batch = (*own.shape[:dim], *own.shape[dim + 1 :])
    likely = call.function is F.cross_entropy and target.shape == own.shape
    if not likely and target.shape != batch or weight is not None and weight.shape != own.shape[dim : dim + 1]:
        return None
    found = solved(call, own, target, weight, dim)
    if found is None:
        return None
    targets, out = found
    if out.is_replicated:
        return Decision(targets=targets, out=out if reduction == "none" else out.with_shape(()))
    split = any(state is PARTIAL for state in out.states)
    if not split and reduction == "none":
        return Decision(targets=targets, out=out)
    return decomposed(partial(_reduced, call.function, split, likely, dim))


def _reduced(
    function, split: bool, likely: bool, dim: int,
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    """The loss as a decomposition: losses per sample, then their sum over the count of the whole batch."""
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce, emit_warning=False)
    if split and function is F.nll_loss:
        each = through_rule(picked, input, target, weight, ignore_index)
    elif split:
        dtype = _result_dtype(input)
        parts = through_rule(class_parts, input, target, weight, ignore_index, label_smoothing)
        each = through_rule(
            loss_of_parts, parts, None if likely else target, ignore_index, weight is not None, label_smoothing,
            input.shape[dim], dtype if reduction == "none" else None,
        )  # fmt: skip
    else:
        smoothing = () if function is F.nll_loss else (label_smoothing,)
        each = through_rule(function, input, target, weight, None, ignore_index, None, "none", *smoothing)
    if reduction == "none":
        return each
    count = None
    if reduction == "mean":
        count = float(prod(each.shape)) if likely else through_rule(counted, each, target, weight, ignore_index)
    if not (split and function is F.cross_entropy):
        dtype = _local_dtype(each)
    return through_rule(total, each, count, dtype)


@rule(getattr(F, "linear_cross_entropy", None))
def linear_cross_entropy(call: Call):
    """Its definition, linear then cross_entropy, each by its own rule: a weight sharded on classes gives sharded
    logits. `options`, which chunk the batch to save memory, are not used."""
    body = run_body(call.function, call.mesh)
    return decomposed(lambda *args, options=None, **kwargs: body(*args, **kwargs))


# --- the parts, each a function with a rule ------------------------------------------


def picked(input, target, weight, ignore_index):
    """-weight * input at the target, zero if it is ignored: nll_loss on a sharded class dim. Only as a rule."""
    raise NotImplementedError


@rule(picked)
def picked_rule(call: Call):
    """Each rank picks what it holds -> P. No communication."""
    own, target, weight = call.args[:3]
    dim = min(own.ndim - 1, 1)
    targets, out = solved(call, own, target, weight, dim)
    classes, ranges = own.shape[dim], held_ranges(targets[own.index] or own.layout, dim)

    def run(input, target, weight, ignore_index):
        check_range((target == ignore_index) | (target >= 0) & (target < classes), OUT_OF_BOUNDS)
        if not input.shape[dim]:
            return nothing((input,), tuple(target.shape))
        index, mine = owned(target, ranges)
        mine = mine & (target != ignore_index)
        loss = -input.gather(dim, index.unsqueeze(dim)).squeeze(dim)
        if weight is not None:
            loss = loss * at_index(weight.detach(), index, mine)
        return loss.masked_fill(~mine, 0)

    return Decision(targets=targets, out=out, run=run)


def counted(each, target, weight, ignore_index):
    """Counts the targets that are not ignored, or sums their weights. Only as a rule.

    `each`, the losses, only says which mesh this is on: target and weight may be plain.
    """
    raise NotImplementedError


@rule(counted)
def counted_rule(call: Call):
    """Each rank counts the targets, and looks up the weights, that it holds -> P."""
    target, weight = call.args[1:3]
    operands = [operand for operand in (target, weight) if operand is not None]
    batch = tuple(("n", d) for d in range(target.ndim))
    names = [batch, ("c",)][: len(operands)]
    asked = Call(call.function, call.args, call.kwargs, operands, call.mesh)
    decision = solve(asked, Signature(names, [()], summed={*batch, "c"}, shapes=[()]))
    ranges = () if weight is None else held_ranges(decision.targets[1] or weight.layout, 0)
    decision.targets = (None, *decision.targets)

    def run(each, target, weight, ignore_index):
        kept = target != ignore_index
        if weight is None:
            return kept.sum()
        index, mine = owned(target, ranges)
        return at_index(weight.detach(), index, mine & kept).sum()

    decision.run = run
    return decision


def total(each, count, dtype):
    """The sum of all losses, divided by `count` if there is one; summed in float32 at least."""
    whole = each.sum(dtype=wide(each.dtype))
    return (whole if count is None else whole / count).to(dtype)


@rule(total)
def total_rule(call: Call):
    """A sum over sharded samples is P, and divided by a whole count."""
    each = call.operands[0]
    batch = tuple(("n", d) for d in range(each.ndim))
    names = [batch, ()][: len(call.operands)]
    return Signature(names, [()], summed=set(batch), linear=[(0,)], shapes=[()])


def _local_dtype(tensor: Tensor) -> torch.dtype:
    with local_only():
        return tensor.dtype


def _result_dtype(input: Tensor) -> torch.dtype:
    """Returns cross_entropy's dtype: the input's, or float32 under autocast."""
    with local_only():
        dtype, device = input.dtype, input.device.type
    known = torch.amp.is_autocast_available(device)  # not for meta tensors, in a dry run
    return wide(dtype) if known and torch.is_autocast_enabled(device) else dtype


# In traces and errors they are parts of what the user called.
for _part in (class_parts, loss_of_parts, picked, counted, total):
    _part.__name__ = "nll_loss" if _part is picked else "cross_entropy"
