"""Canonical forms of functions: how each is computed in the reproducible mode.

    linear, matmul, mm, bmm, einsum ...   `Product`; a bias is spread over the rows
    elementwise functions                 operands that broadcast are spread; see `position` for the rest
    sum, mean                             `Total`
    expand, broadcast_to, repeat          `Spread`
    lists of tensors                      their ordinary rule; see `position`

A form is a rule: it takes a `Call` and gives a `Decision`, or None if it has no opinion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch.signature import Signature
from .._rules.products import matmul as contractions
from .._rules.products.scaled import OF_INPUT, OF_WEIGHT, OUTPUT, Dims, Float8, ScaledLinear, scaling_of, unscaled
from .._rules.reductions import reduce
from .._rules.registry import Call, Decision
from .._rules.solvers.parts import dims_and_keepdim
from .call import Solved, expanded, solved
from .functions.position import independent_form, independent_run, is_position_dependent_list, padded
from .functions.product import Labels, Product, contract
from .grid import Splits, block_count
from .tree import Total

Form = Callable[[Call, Splits], Decision | None]
FORMS: dict[Callable, Form] = {}


def form(*functions) -> Callable[[Form], Form]:
    """Registers the decorated form for `functions`."""

    def register(decide: Form) -> Form:
        for function in functions:
            FORMS[function] = decide
        return decide

    return register


# --- contractions ------------------------------------------------------------------------


@form(F.linear)
def linear(call: Call, splits: Splits) -> Decision | None:
    found = solved(call, contractions.linear(call))
    if found is None:
        return None
    x, weight = call.operands[:2]
    names = found.inputs[0]
    counts = {"k": block_count(x.shape[-1], splits.hidden), "n": _outputs(weight.shape[0], weight.shape[1], splits)}
    for d, label in enumerate(names[:-1]):
        counts[label] = block_count(x.shape[d], _rows(d, x.ndim, splits))
    cuts = {label: found.cut(label, count, _split_of(label)) for label, count in counts.items()}
    labels = Labels(names, ("n", "k"), (*names[:-1], "n"))
    scaling = None if weight.products is None else scaling_of(weight.products, found.out)
    multiply = partial(_of_float8, labels, cuts)
    bias = len(call.operands) == 3
    dims, spread = (), ()
    if bias:
        dims = tuple(range(x.ndim - 1))
        spread = tuple(found.cut(label) for label in names[:-1])

    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if scaling is not None:
            out = ScaledLinear.apply(input, weight, scaling, multiply)
        else:
            out = Product.apply(input, weight, labels, cuts)
        return out if bias is None else out + expanded(bias, (0,), tuple(out.shape), dims, spread)

    return found.running(run)


def _of_float8(labels: Labels, cuts: Mapping, left: Float8, right: Float8, dims: Dims, dtype: torch.dtype) -> Tensor:
    """A product of a linear layer's, of float8 numbers, which float32 holds exactly."""
    of_left, of_right, out = labels
    which = {OUTPUT: labels, OF_INPUT: Labels(out, of_right, of_left), OF_WEIGHT: Labels(out, of_left, of_right)}
    product = contract(left.numbers.float(), right.numbers.float(), which[dims], cuts)
    return unscaled(product, left, right, dims).to(dtype)


def _outputs(n: int, k: int, splits: Splits) -> int:
    """Blocks of a weight's outputs; three merged projections of one size are cut each by itself."""
    ratio = n // k if k and n % k == 0 else 1
    return 3 * block_count(k, splits.hidden) if ratio == 3 else block_count(n, splits.hidden)


def _rows(dim: int, ndim: int, splits: Splits) -> int:
    """Into how many blocks a leading dim of activations is split: batch, sequence, then heads and the like."""
    if dim == 0:
        return splits.batch
    return splits.seq if ndim == 3 else max(splits.seq, splits.hidden)


def _split_of(label) -> str:
    return ("batch", "seq", "hidden")[min(label[1], 2)] if isinstance(label, tuple) else "hidden"


@form(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.linalg.matmul)
def matmul(call: Call, splits: Splits) -> Decision | None:
    left, right = call.operands
    if min(left.ndim, right.ndim) < 2 or call.kwargs:
        return None
    return _pair(call, splits, contractions.matmul(call))


@form(torch.einsum)
def einsum(call: Call, splits: Splits) -> Decision | None:
    if len(call.operands) != 2:
        return None
    return _pair(call, splits, contractions.einsum(call))


def _pair(call: Call, splits: Splits, signature) -> Decision | None:
    """Two operands by their labels; a dim that is stretched from size 1 is left out of its operand's."""
    found = solved(call, signature)
    if found is None:
        return None
    keeps = [tuple(d for d, label in enumerate(labels) if label is not None) for labels in found.inputs]
    left, right = (tuple(label for label in labels if label is not None) for labels in found.inputs)
    out = tuple(signature.outputs[0])
    alone = [x for x in (*left, *right) if (x in left) != (x in right) and x not in out]
    if None in out or alone:
        return None
    batch = [x for x in out if x in left and x in right]
    cuts = {}
    for names, operand in zip(found.inputs, call.operands):
        for d, label in enumerate(names):
            if label is None or label in batch or label in cuts:
                continue
            split = splits.hidden if d == operand.ndim - 1 else _rows(d, operand.ndim, splits)
            cuts[label] = found.cut(label, block_count(operand.shape[d], split), "hidden" if d else "batch")
    labels = Labels(left, right, out)
    skip = 1 if call.function is torch.einsum else 0

    def run(*args) -> Tensor:
        a, b = args[skip:] if len(args) > 1 + skip else args[-1]
        a, b = (x.reshape([x.shape[d] for d in kept]) for x, kept in zip((a, b), keeps))
        return Product.apply(a, b, labels, cuts)

    return found.running(run)


# --- elementwise ----------------------------------------------------------------------------


def elementwise(call: Call, signature: Signature, function: Callable) -> Decision | None:
    """Operands that broadcast are spread first, so that their gradients are canonical sums."""
    found = solved(call, signature, adds=False)
    if found is None:
        return None
    labels, independent = tuple(signature.outputs[0]), independent_form(call)
    stretched = [None if tuple(names) == labels else i for i, names in enumerate(found.inputs)]
    if independent is None and all(i is None for i in stretched):
        return found.decision
    if call.inplace and stretched[0] is not None:
        return None
    compute = function if independent is None else independent_run(independent, call.inplace)
    local = tuple(_local_sizes(found, labels))

    @cache
    def plan(i: int) -> tuple:
        """Spreads operand i: asked for with the first that has a gradient, for only then the grid must fit."""
        names = found.inputs[i]
        missing = tuple(d for d, label in enumerate(labels) if label not in names)
        kept = tuple(d for d, label in enumerate(names) if label is not None)
        return kept, local, missing, tuple(found.cut(labels[d]) for d in missing)

    def run(*args, **kwargs) -> Tensor:
        at = iter(stretched)

        def spread(x):
            if not isinstance(x, Tensor):
                return x
            i = next(at)
            return x if i is None or not x.requires_grad or 0 in local else expanded(x, *plan(i))

        args = [spread(a) for a in args]
        kwargs = {name: spread(a) for name, a in kwargs.items()}
        return compute(*args, **kwargs)

    return found.running(run)


def _local_sizes(found: Solved, labels: tuple) -> list[int]:
    sizes = []
    for label in labels:
        for layout, names in zip(found.layouts, found.inputs):
            if label in names:
                sizes.append(layout.local_shape[names.index(label)])
                break
        else:
            sizes.append(1)
    return sizes


def of_lists(call: Call, ordinary: Callable) -> Decision:
    """`_foreach_*` and `_fused_*` functions, under their ordinary rule: item by item on flat shards."""
    decision = ordinary(call)
    if decision.decomposition is None and is_position_dependent_list(call):
        decision.run = padded(decision.run or call.function, call.inplace)
    return decision


# --- sums -----------------------------------------------------------------------------------


def _reduction(call: Call, mean: bool) -> Decision | None:
    arguments = dims_and_keepdim(call)
    if arguments is None or not call.operands[0].layout.numel:
        return None
    dims, keepdim = arguments
    signature = (reduce.mean if mean else reduce.sum_rule)(call)
    if not isinstance(signature, Signature):
        return None
    found = solved(call, signature)
    if found is None:
        return None
    cuts = tuple(found.cut(d) for d in dims)
    count = prod(call.operands[0].shape[d] for d in dims)

    def run(input: Tensor, *args, dtype: torch.dtype | None = None, **kwargs) -> Tensor:
        if dtype is not None:
            input = input.to(dtype)
        elif not mean and not input.is_floating_point() and not input.is_complex():
            input = input.long()
        if not dims:
            return input.clone()
        out = Total.apply(input, dims, cuts)
        if mean:
            out = out / count
        if keepdim:
            for dim in dims:
                out = out.unsqueeze(dim)
        return out

    return found.running(run)


@form(torch.sum, Tensor.sum)
def total(call: Call, splits: Splits) -> Decision | None:
    return _reduction(call, mean=False)


@form(torch.mean, Tensor.mean)
def mean(call: Call, splits: Splits) -> Decision | None:
    return _reduction(call, mean=True)
