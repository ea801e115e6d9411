"""Class losses from what each rank of a sharded class dim knows per sample.

Each rank computes what the loss needs of its own classes: their largest logit and the
logsumexp above it, the logit of the target if it is one of them, and, where asked for,
weighted sums. These few numbers are gathered, [*batch, ranks, k], in one collective;
the logsumexp of the ranks' logsumexps is that of all classes, and all else adds up.
The result is the same on all ranks of the axis (I), so that the backward needs no
communication at all. (Megatron-LM's vocabulary-parallel cross entropy,
arXiv:1909.08053 section 3, with one gather instead of three reductions.)
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.autograd import Function

from ..._dispatch.signature import Signature, solve
from ..._layouts.layout import layout_of
from ..._layouts.state import INVARIANT, PARTIAL, sharded
from ..._tensor.tensor import local_only
from ..registry import Call, Decision, Operand, rule
from .owned import check_range, held_ranges, owned

OUT_OF_BOUNDS = "Target is out of bounds."


def _labels(ndim: int, dim: int) -> tuple:
    return tuple("c" if d == dim else ("n", d) for d in range(ndim))


def solved(call: Call, own: Operand, target: Operand, weight: Operand | None, dim: int):
    """Places the operands, and lays out the losses before reduction: partial if classes are split."""
    labels = _labels(own.ndim, dim)
    each = tuple(label for label in labels if label != "c")
    names = {own.index: labels, target.index: labels if target.shape == own.shape else each}
    if weight is not None:
        names[weight.index] = ("c",)
    shape = tuple(size for d, size in enumerate(own.shape) if d != dim)
    decision = solve(call, Signature([names[o.index] for o in call.operands], [each], summed={"c"}, shapes=[shape]))
    return None if decision is None else (decision.targets, decision.out)


class ClassParts(Function):
    """x [..., C, ...] -> per sample: the largest x (no gradient), the logsumexp above it, and x at the target.

    One buffer of the size of x, forward and backward. The backward under create_graph is made of
    differentiable operations and needs more.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor | None, mine: Tensor | None, dim: int):
        kind = wide(x.dtype)
        batch = (*x.shape[:dim], *x.shape[dim + 1 :])
        if not x.shape[dim]:
            top, above = x.new_full(batch, -torch.inf, dtype=kind), x.new_zeros(batch, dtype=kind)
            base = above
        else:
            top = x.amax(dim).to(kind)
            base = top.masked_fill(top.isinf(), 0)  # of a row of -inf: its exponentials are 0, not nan
            powers = (x - base.unsqueeze(dim)) if x.dtype is kind else x.to(kind).sub_(base.unsqueeze(dim))
            above = powers.exp_().sum(dim).log_()
            above.masked_fill_(top == -torch.inf, 0)
            base = base + above
        if index is None or not x.shape[dim]:
            at_target = torch.zeros_like(above)
        else:
            at_target = x.gather(dim, index.unsqueeze(dim)).squeeze(dim).to(kind).masked_fill_(~mine, 0)
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
    targets, out = solved(call, own, target, weight, dim)
    logits = targets[own.index] or own.layout
    classes, ranges = own.shape[dim], held_ranges(logits, dim)
    likely = target.shape == own.shape
    ranks = prod(size for size, state in zip(call.mesh.sizes, out.states) if state is PARTIAL)
    width = 4 if likely else 3 + (weight is not None) + 2 * bool(smoothing)
    states = tuple(sharded(out.ndim) if state is PARTIAL else state for state in out.states)
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
        check_range((target == ignore_index) | (target >= 0) & (target < classes), OUT_OF_BOUNDS)
        index, mine = owned(target, ranges)
        parts = [*ClassParts.apply(x, index, mine, dim)]
        if weight is not None:
            parts.append(at_index(weight.detach(), index, mine))
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
        Call(call.function, call.args, call.kwargs, operands, call.mesh),
        Signature(names, [batch], shapes=[parts.shape[:-2]]),
    )
    decision.targets = (decision.targets[0] or whole, *decision.targets[1:])
    return decision


def at_index(values: Tensor, index: Tensor, mine: Tensor) -> Tensor:
    """values[index] where it is mine, else 0; `values` may be empty."""
    if not values.numel():
        return values.new_zeros(index.shape)
    return values[index].masked_fill(~mine, 0)


def wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
