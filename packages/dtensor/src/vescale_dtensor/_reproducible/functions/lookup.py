"""Look-ups in a table, and the loss over classes: what picks rows or entries by index.

embedding        forward a look-up; the gradient adds up rows of the table per block of tokens, in their order,
                 then over the tree of blocks
cross_entropy    the maximum, the sum of exponentials over the tree of classes, the target's logit; a sharded
                 vocabulary is never gathered: a number per sample and subtree is
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..._communication.collectives import all_gather, all_reduce
from ..._dispatch.signature import Signature
from ..._rules.reductions.loss import bound, reduction_of
from ..._rules.registry import Call, Decision
from ..._rules.solvers.owned import check_range, held_ranges, owned
from ..call import solved
from ..forms import form
from ..grid import Cut, Splits, block_count
from ..tree import Total, folded, kept_on_first, tree_sum, unseen, unseen_backward, wide
from .position import position_independent


class Rows(Function):
    """table [v, c] at ids [...] -> [..., c]; `mine` says which ids this rank holds, None for all."""

    @staticmethod
    @unseen
    def forward(ctx, table: Tensor, ids: Tensor, mine: Tensor | None, cuts: tuple[Cut, ...], vocabulary: Cut) -> Tensor:
        ctx.save_for_backward(ids, mine)
        ctx.shape, ctx.cuts = table.shape, cuts
        out = F.embedding(ids, table)
        if mine is None:
            return out
        out = out.masked_fill_(~mine.unsqueeze(-1), -0.0)
        return kept_on_first(all_reduce(out, vocabulary.mesh, vocabulary.axes), [vocabulary])

    @staticmethod
    @once_differentiable
    @unseen_backward
    def backward(ctx, saved, grad: Tensor):
        (ids, mine), cuts, (v, c) = saved, ctx.cuts, ctx.shape
        dtype, grad = grad.dtype, wide(grad)
        if mine is not None:
            ids = ids.masked_fill(~mine, v)  # a row that is thrown away
        block = torch.zeros_like(ids)
        for dim, cut in enumerate(cuts):
            blocks, size = cut.local
            number = torch.arange(blocks * size, device=ids.device).div(size, rounding_mode="floor")
            block = block * blocks + number.view(-1, *[1] * (ids.ndim - dim - 1))
        local = [len(cut.held) for cut in cuts]
        total = grad.new_zeros(prod(local) * (v + 1), c)
        add_rows(total, (block * (v + 1) + ids).reshape(-1), grad.reshape(-1, c))
        total = total.view(*local, v + 1, c).narrow(len(local), 0, v)
        for dim in reversed(range(len(cuts))):
            total = tree_sum(total, dim, cuts[dim])
        total = kept_on_first(total.to(dtype), cuts)
        return total.contiguous(), None, None, None, None


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Adds `rows` [n, c] to those of `total` [m, c] that `index` [n] names, in their order.

    On a GPU `index_add_` adds in the order in which threads come; `index_put_` sorts first.
    """
    if total.device.type == "cpu":
        return total.index_add_(0, index, rows)
    return total.index_put_((index,), rows, accumulate=True)


@form(F.embedding)
def embedding(call: Call, splits: Splits) -> Decision | None:
    ids, weight = call.get(0, "input"), call.get(1, "weight")
    options = (call.get(2, "padding_idx"), call.get(3, "max_norm"), call.get(5, "scale_grad_by_freq", False),
               call.get(6, "sparse", False))  # fmt: skip
    if weight.ndim != 2 or any(option not in (None, False) for option in options[1:]) or not ids.layout.numel:
        return None
    padding = options[0]
    places = tuple(("i", d) for d in range(ids.ndim))
    names = {id(ids): places, id(weight): ("v", "c")}
    signature = Signature(
        [names[id(operand)] for operand in call.operands], [(*places, "c")], summed={"v"},
        linear=[tuple(i for i, operand in enumerate(call.operands) if operand is weight)],
        shapes=[(*ids.shape, weight.shape[1])],
    )  # fmt: skip
    found = solved(call, signature, adds=False)
    if found is None:
        return None
    cuts = tuple(
        found.cut(label, block_count(ids.shape[d], (splits.batch, splits.seq, 1)[min(d, 2)]), ("batch", "seq")[d > 0])
        for d, label in enumerate(places)
    )
    vocabulary = found.cut("v")
    table = found.layouts[weight.index]
    ranges, rows = held_ranges(table, 0), table.shape[0]

    def run(input: Tensor, weight: Tensor, *args, **kwargs) -> Tensor:
        check_range((input >= 0) & (input < rows), "index out of range in self")
        index, mine = owned(input, ranges) if vocabulary.axes else (input, None)
        out = Rows.apply(weight, index, mine, cuts, vocabulary)
        if padding is not None:  # its row gets no gradient
            pad = (input == padding % rows).unsqueeze(-1)
            out = torch.where(pad, out.detach(), out)
        return out

    return found.running(run)


class ClassLoss(Function):
    """x [n, c], target [n] -> losses [n], complete on every rank that holds classes; zero if it is ignored."""

    @staticmethod
    @unseen
    def forward(ctx, x: Tensor, index: Tensor, mine: Tensor, kept: Tensor, cut: Cut) -> Tensor:
        top = x.amax(-1)
        if cut.axes:
            top = all_gather(top, cut.mesh, cut.axes).amax(0)
        shifted = x - top.unsqueeze(-1)
        powers = position_independent(torch.exp, [shifted], {})
        total = tree_sum(folded(powers.unflatten(-1, cut.local), x.ndim), x.ndim - 1, cut)
        picked = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, -0.0)
        if cut.axes:
            picked = all_reduce(picked, cut.mesh, cut.axes)  # one rank's number, and zeros
        ctx.save_for_backward(powers, total, index, mine & kept, kept)
        return (position_independent(torch.log, [total], {}) - picked).masked_fill(~kept, 0)

    @staticmethod
    @once_differentiable
    @unseen_backward
    def backward(ctx, saved, grad: Tensor):
        powers, total, index, mine, kept = saved
        grad = grad.masked_fill(~kept, 0).unsqueeze(-1)
        likely = powers / total.unsqueeze(-1)
        one = torch.zeros_like(likely).scatter_(-1, index.unsqueeze(-1), mine.to(likely.dtype).unsqueeze(-1))
        return (likely - one) * grad, None, None, None, None


class OnFirst(Function):
    """Kept on the first rank of the axes that shard a cut; the gradient, whole on all of them, passes."""

    @staticmethod
    @unseen
    def forward(ctx, x: Tensor, cut: Cut) -> Tensor:
        out = kept_on_first(x, [cut])
        return x.detach() if out is x else out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


@form(F.cross_entropy)
def cross_entropy(call: Call, splits: Splits) -> Decision | None:
    """Indices as targets; class weights, smoothing and probabilities run whole."""
    given, reduction = bound(call), reduction_of(call)
    own, target = given["input"], given["target"]
    if given["weight"] is not None or given["label_smoothing"] or reduction not in ("none", "mean", "sum"):
        return None
    dim = min(own.ndim - 1, 1)
    if not own.layout.numel or target.shape != (*own.shape[:dim], *own.shape[dim + 1 :]):
        return None
    labels = tuple("c" if d == dim else ("n", d) for d in range(own.ndim))
    each = tuple(label for label in labels if label != "c")
    out = each if reduction == "none" else ()
    names = {own.index: labels, target.index: each}
    summed = {"c"} if reduction == "none" else set(labels)
    found = solved(call, Signature([names[o.index] for o in call.operands], [out], summed=summed))
    if found is None:
        return None
    classes, ignored = found.cut("c"), given["ignore_index"]
    cuts, ranges = tuple(found.cut(label) for label in each), held_ranges(found.layouts[own.index], dim)
    axes, count = tuple(sorted({axis for cut in cuts for axis in cut.axes})), own.shape[dim]

    def run(*args, **kwargs) -> Tensor:
        values = dict(zip(("input", "target"), args)) | kwargs
        x, target = values["input"], values["target"]
        kept = target != ignored
        check_range(~kept | (target >= 0) & (target < count), "Target is out of bounds.")
        index, mine = owned(target.masked_fill(~kept, 0), ranges)
        losses = ClassLoss.apply(wide(x).movedim(dim, -1), index, mine, kept, classes)
        losses = OnFirst.apply(losses, classes)
        if reduction != "none":
            losses = Total.apply(losses, tuple(range(losses.ndim)), cuts) if losses.ndim else losses
        if reduction == "mean":
            samples = kept.sum()
            samples = all_reduce(samples, call.mesh, axes) if axes else samples
            losses = losses / samples
        return losses.to(x.dtype)

    return found.running(run)
