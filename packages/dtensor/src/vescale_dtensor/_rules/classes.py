"""Losses over classes: cross entropy and nll, their class dim sharded or not.

A class dim that is sharded (vocabulary-parallel) is never gathered. Each rank computes,
per sample, what the loss needs of its own classes: their logsumexp, the logit of the
target if it is one of them, and, where asked for, weighted sums. These few numbers
are gathered, [*batch, ranks, k], in one collective; the logsumexp of the ranks'
logsumexps is that of all classes, and all else adds up. The result is the same on
all ranks of the axis (I), so that the backward needs no communication at all.
(The forward of Megatron-LM, arXiv:1909.08053 section 3, with one gather instead of
three reductions.)

A mean divides by the count of targets (or the sum of their weights) of the whole
batch: one number, reduced where the target is sharded.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn._reduction import legacy_get_string

from .._layout import Layout, layout_of
from .._signature import Signature, solve
from .._state import INVARIANT, PENDING, sharded
from .._tensor import local_only
from .body import run_body
from .loss import bound, reduction_of
from .owned import check_range, held_ranges, nothing, owned
from .registry import Call, Decision, Operand, composite, rule


def through_rule(function, *args):
    """`function` through its rule: its parts here are no functions of torch."""
    from .._dispatch import call

    return call(function, *args)


@rule(F.cross_entropy, F.nll_loss)
def class_loss(call: Call):
    """input [N, C, ...] or [C]; target: indices without the class dim, or (cross entropy) probabilities with it.

    Class dim whole: local. Class dim sharded: cross entropy as told above; nll picks
    the target's entry where it is -> P. A pending input is reduced.
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
    found = _solved(call, own, target, weight, dim)
    if found is None:
        return None
    targets, out = found
    if out.is_replicated:
        return Decision(targets=targets, out=out if reduction == "none" else out.with_shape(()))
    split = any(state is PENDING for state in out.states)
    if not split and reduction == "none":
        return Decision(targets=targets, out=out)
    return composite(partial(_reduced, call.function, split, likely, dim))


def _labels(ndim: int, dim: int) -> tuple:
    return tuple("c" if d == dim else ("n", d) for d in range(ndim))


def _solved(call: Call, own: Operand, target: Operand, weight: Operand | None, dim: int):
    """Where the operands go, and the layout of the losses before reduction: pending where classes are split."""
    labels = _labels(own.ndim, dim)
    each = tuple(label for label in labels if label != "c")
    names = {own.index: labels, target.index: labels if target.shape == own.shape else each}
    if weight is not None:
        names[weight.index] = ("c",)
    shape = tuple(size for d, size in enumerate(own.shape) if d != dim)
    decision = solve(
        call, Signature([names[o.index] for o in call.operands], [each], summed={"c"}, shapes=[shape])
    )
    return None if decision is None else (decision.targets, decision.out)


def _reduced(
    function, split: bool, likely: bool, dim: int,
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    """The loss as a composite: losses per sample, then their sum over the count of the whole batch."""
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
    return composite(lambda *args, options=None, **kwargs: body(*args, **kwargs))


# --- the parts, each a function with a rule ------------------------------------------


class ClassParts(Function):
    """x [..., C, ...] -> per sample: the largest x (no gradient), the logsumexp above it, and x at the target.

    One buffer of the size of x, forward and backward. The backward under create_graph is made of
    differentiable operations and needs more.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor | None, mine: Tensor | None, dim: int):
        wide = _wide(x.dtype)
        batch = (*x.shape[:dim], *x.shape[dim + 1 :])
        if not x.shape[dim]:
            top, above = x.new_full(batch, -torch.inf, dtype=wide), x.new_zeros(batch, dtype=wide)
            base = above
        else:
            top = x.amax(dim).to(wide)
            base = top.masked_fill(top.isinf(), 0)  # of a row of -inf: its exponentials are 0, not nan
            powers = (x - base.unsqueeze(dim)) if x.dtype is wide else x.to(wide).sub_(base.unsqueeze(dim))
            above = powers.exp_().sum(dim).log_()
            above.masked_fill_(top == -torch.inf, 0)
            base = base + above
        if index is None or not x.shape[dim]:
            at_target = torch.zeros_like(above)
        else:
            at_target = x.gather(dim, index.unsqueeze(dim)).squeeze(dim).to(wide).masked_fill_(~mine, 0)
        ctx.dim = dim
        ctx.save_for_backward(x, index, mine, base, above)
        ctx.mark_non_differentiable(top)
        return top, above, at_target

    @staticmethod
    def backward(ctx, _, of_above: Tensor, of_target: Tensor):
        with local_only():
            x, index, mine, base, above = ctx.saved_tensors
            dim = ctx.dim
            if torch.is_grad_enabled():
                # `base` is a constant to autograd; written as (base - above) + above it is the logsumexp of x.
                lse = (base - above.detach()).unsqueeze(dim) + above.unsqueeze(dim)
                grad = (x.to(base.dtype) - lse).exp() * of_above.unsqueeze(dim)
            else:
                grad = x - base.unsqueeze(dim) if x.dtype is base.dtype else x.to(base.dtype).sub_(base.unsqueeze(dim))
                grad.exp_().mul_(of_above.unsqueeze(dim))
            if index is not None and x.shape[dim]:
                at_target = of_target.masked_fill(~mine, 0).unsqueeze(dim)
                if torch.is_grad_enabled():
                    grad = grad.scatter_add(dim, index.unsqueeze(dim), at_target)
                else:
                    grad.scatter_add_(dim, index.unsqueeze(dim), at_target)
            return grad.to(x.dtype), None, None, None


def class_parts(input, target, weight, ignore_index, label_smoothing):
    """[*batch, ranks, k]: what each rank of a sharded class dim knows per sample. Only as a rule."""
    raise NotImplementedError


@rule(class_parts, exact=True)
def class_parts_rule(call: Call):
    """k: largest logit, logsumexp above it, then for indices the target's logit, (its weight), (the weighted sum
    of logits, the sum of weights, for smoothing); for probabilities the sums of them alone and times logits."""
    own, target, weight, ignore_index, smoothing = call.args
    dim = min(own.ndim - 1, 1)
    targets, out = _solved(call, own, target, weight, dim)
    logits = targets[own.index] or own.layout
    classes, ranges = own.shape[dim], held_ranges(logits, dim)
    likely = target.shape == own.shape
    ranks = prod(size for size, state in zip(call.mesh.sizes, out.states) if state is PENDING)
    width = 4 if likely else 3 + (weight is not None) + 2 * bool(smoothing)
    states = tuple(sharded(out.ndim) if state is PENDING else state for state in out.states)
    layout = layout_of(call.mesh, states, (*out.shape, ranks, width))

    def along(one: Tensor, ndim: int) -> Tensor:
        return one.view(-1, *[1] * (ndim - dim - 1))

    def probabilities(x: Tensor, target: Tensor, weight: Tensor | None) -> list[Tensor]:
        top, above, _ = ClassParts.apply(x, None, None, dim)
        shares = target.to(top.dtype) * (1 - smoothing) + smoothing / classes
        if weight is not None:
            shares = shares * along(weight, x.ndim)
        return [top, above, shares.sum(dim), (shares * x).sum(dim)]

    def indices(x: Tensor, target: Tensor, weight: Tensor | None) -> list[Tensor]:
        check_range((target == ignore_index) | (target >= 0) & (target < classes), _out_of_bounds)
        index, mine = owned(target, ranges)
        parts = [*ClassParts.apply(x, index, mine, dim)]
        if weight is not None:
            parts.append(_at(weight.detach(), index, mine))
        if smoothing:
            scale = x.new_ones(x.shape[dim]) if weight is None else weight
            parts.append((x.to(parts[0].dtype) * along(scale, x.ndim)).sum(dim))
            parts.append(scale.sum().expand(target.shape))
        return parts

    def run(input, target, weight, ignore_index, label_smoothing):
        parts = (probabilities if likely else indices)(input, target, weight)
        return torch.stack([part.to(parts[0].dtype) for part in parts], -1).unsqueeze(-2)

    return Decision(targets=targets, out=layout, run=run)


def loss_of_parts(parts, target, ignore_index, weighted, label_smoothing, classes, dtype):
    """The losses [*batch] from whole parts [*batch, ranks, k]; `target` is None for probabilities."""
    top, above, *rest = parts.unbind(-1)
    highest = top.amax(-1, keepdim=True)
    above = torch.logsumexp(above + (top - highest), -1)
    highest, rest = highest.squeeze(-1), [part.sum(-1) for part in rest]
    if target is None:
        shares, products = rest
        loss = shares * (above + highest) - products
    else:
        loss = above + (highest - rest.pop(0))
        if weighted:
            loss = loss * rest.pop(0)
        if label_smoothing:
            logits, scale = rest
            smooth = scale * (above + highest) - logits
            loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / classes)
        loss = loss.masked_fill(target == ignore_index, 0)
    return loss if dtype is None else loss.to(dtype)


@rule(loss_of_parts, exact=True)
def loss_of_parts_rule(call: Call):
    """The parts are made whole and alike (I) over the class axes: an all-gather, whose backward is a slice."""
    parts = call.operands[0]
    dim = parts.ndim - 2
    whole = parts.layout.with_states(
        INVARIANT if state.kind == "S" and state.dim == dim else state for state in parts.states
    )
    operands = [Operand(whole, parts.plain, 0), *call.operands[1:]]
    batch = tuple(("n", d) for d in range(dim))
    names = [(*batch, None, None), *[batch] * (len(operands) - 1)]
    decision = solve(
        Call(call.function, call.args, call.kwargs, operands, call.mesh), Signature(names, [batch], shapes=[parts.shape[:-2]])
    )
    decision.targets = (decision.targets[0] or whole, *decision.targets[1:])
    return decision


def picked(input, target, weight, ignore_index):
    """-weight * input at the target, zero where it is ignored: nll_loss on a sharded class dim. Only as a rule."""
    raise NotImplementedError


@rule(picked)
def picked_rule(call: Call):
    """Each rank picks what it holds -> P. No communication."""
    own, target, weight, ignore_index = call.args
    dim = min(own.ndim - 1, 1)
    targets, out = _solved(call, own, target, weight, dim)
    classes, ranges = own.shape[dim], held_ranges(targets[own.index] or own.layout, dim)

    def run(input, target, weight, ignore_index):
        check_range((target == ignore_index) | (target >= 0) & (target < classes), _out_of_bounds)
        if not input.shape[dim]:
            return nothing((input,), tuple(target.shape))
        index, mine = owned(target, ranges)
        mine = mine & (target != ignore_index)
        loss = -input.gather(dim, index.unsqueeze(dim)).squeeze(dim)
        if weight is not None:
            loss = loss * _at(weight.detach(), index, mine)
        return loss.masked_fill(~mine, 0)

    return Decision(targets=targets, out=out, run=run)


def counted(each, target, weight, ignore_index):
    """How many targets are not ignored, or the sum of their weights. Only as a rule.

    `each`, the losses, only says which mesh this is on: target and weight may be plain.
    """
    raise NotImplementedError


@rule(counted)
def counted_rule(call: Call):
    """Each rank counts the targets, and looks up the weights, that it holds -> P."""
    each, target, weight, ignore_index = call.args
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
        return _at(weight.detach(), index, mine & kept).sum()

    decision.run = run
    return decision


def total(each, count, dtype):
    """The sum of all losses, divided by `count` if there is one; summed in float32 at least."""
    whole = each.sum(dtype=_wide(each.dtype))
    return (whole if count is None else whole / count).to(dtype)


@rule(total)
def total_rule(call: Call):
    """A sum over sharded samples is P, and divided by a whole count."""
    each = call.operands[0]
    batch = tuple(("n", d) for d in range(each.ndim))
    names = [batch, ()][: len(call.operands)]
    return Signature(names, [()], summed=set(batch), linear=[(0,)], shapes=[()])


_out_of_bounds = "Target is out of bounds."


def _at(values: Tensor, index: Tensor, mine: Tensor) -> Tensor:
    """values[index] where it is mine, else 0; `values` may be empty."""
    if not values.numel():
        return values.new_zeros(index.shape)
    return values[index].masked_fill(~mine, 0)


def _local_dtype(tensor: Tensor) -> torch.dtype:
    with local_only():
        return tensor.dtype


def _result_dtype(input: Tensor) -> torch.dtype:
    """What cross_entropy returns: the input's dtype, or float32 under autocast."""
    dtype = _local_dtype(input)
    with local_only():
        return _wide(dtype) if torch.is_autocast_enabled(input.device.type) else dtype


# In traces and errors they are parts of what the user called.
for _part in (class_parts, loss_of_parts, picked, counted, total):
    _part.__name__ = "nll_loss" if _part is picked else "cross_entropy"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
