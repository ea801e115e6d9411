"""Products that contract a dim: linear, matmul and its relatives, einsum.

contracted dim sharded on both      -> P (a bias then enters on the first rank only)
batch, row or column dim sharded    stays sharded; the other operand whole
one operand partial                 -> P, the other whole
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._errors import ShapeError
from ..registry import Call, Operand, both, decomposed, rule
from ..traits import Trait
from .scaled import lowered


def _check(call: Call, left: Operand, right: Operand, a: int, b: int) -> None:
    if a != b:
        raise ShapeError(
            call.name,
            f"the contracted dims differ: {a} and {b}",
            [f"lhs  {left.layout!r}", f"rhs  {right.layout!r}"],
            [("the product contracts the last dim of lhs with the matching dim of rhs", "")],
        )


def _batch(*shapes) -> tuple[list[tuple], tuple, tuple]:
    """Batch dims under broadcasting: labels per operand, labels and sizes of the result."""
    ndim = max(map(len, shapes))
    sizes = [1] * ndim
    for shape in shapes:
        for d, size in enumerate(shape, ndim - len(shape)):
            sizes[d] = size if size != 1 else sizes[d]
    labels = [
        tuple(("b", d) if size == sizes[d] else None for d, size in enumerate(shape, ndim - len(shape)))
        for shape in shapes
    ]
    return labels, tuple(("b", d) for d in range(ndim)), tuple(sizes)


@rule(F.linear)
def linear(call: Call):
    """x [..., k], weight [n, k], bias [n] -> [..., n]."""
    x, weight = call.operands[:2]
    if weight.ndim != 2:
        return None
    _check(call, x, weight, x.shape[-1], weight.shape[1])
    if weight.products is not None and x.ndim == 1:
        return decomposed(lambda input, weight, bias=None: F.linear(input[None], weight, bias)[0])
    batch = tuple(("b", d) for d in range(x.ndim - 1))
    inputs = [(*batch, "k"), ("n", "k")]
    addends = ()
    if len(call.operands) == 3:
        inputs.append(("n",))
        addends = (2,)
    signature = Signature(
        inputs, [(*batch, "n")], summed={"k"}, linear=[(0,), (1,)], addends=addends,
        shapes=[(*x.shape[:-1], weight.shape[0])],
    )  # fmt: skip
    return signature if weight.products is None else lowered(signature, weight.products)


@rule(
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm,
    torch.mv, Tensor.mv, torch.dot, Tensor.dot, torch.linalg.matmul, traits=Trait.LINEAR,
)  # fmt: skip
def matmul(call: Call):
    left, right = call.operands
    if call.name == "__rmatmul__":
        left, right = right, left
    if not left.ndim or not right.ndim:
        return None
    _check(call, left, right, left.shape[-1], right.shape[-2] if right.ndim > 1 else right.shape[0])
    (lb, rb), batch, sizes = _batch(left.shape[:-2], right.shape[:-2])
    rows = ("m",) if left.ndim > 1 else ()
    columns = ("n",) if right.ndim > 1 else ()
    labels = {left: (*lb, *rows, "k"), right: (*rb, "k", *columns)}
    shape = (*sizes, *left.shape[-2:-1], *(right.shape[-1:] if columns else ()))
    return Signature(
        [labels[operand] for operand in call.operands], [(*batch, *rows, *columns)],
        summed={"k"}, linear=[(0,), (1,)], shapes=[shape],
    )  # fmt: skip


@rule(both("addmm", "baddbmm", "addbmm", "addmv"))
def add_product(call: Call):
    """beta * input + alpha * (a @ b); addbmm also sums over the batch."""
    if len(call.operands) != 3:
        return None
    added, left, right = call.operands
    _check(call, left, right, left.shape[-1], right.shape[-2] if right.ndim > 1 else right.shape[0])
    batch = (("b", 0),) if left.ndim == 3 else ()
    summed = {"k"}
    columns = ("n",) if right.ndim > 1 else ()
    output = (*batch, "m", *columns)
    shape = (*left.shape[:-1], *(right.shape[-1:] if columns else ()))
    if call.name.startswith("addbmm"):
        summed.add(("b", 0))
        output, shape = output[1:], shape[1:]
    offset = len(shape) - added.ndim
    labels = tuple(output[offset + d] if size == shape[offset + d] else None for d, size in enumerate(added.shape))
    return Signature(
        [labels, (*batch, "m", "k"), (*batch, "k", *columns)], [output],
        summed=summed, linear=[(1,), (2,)], addends=(0,), shapes=[shape],
    )  # fmt: skip


@rule(torch.outer, Tensor.outer, torch.ger, Tensor.ger, traits=Trait.LINEAR)
def outer(call: Call):
    return Signature([("m",), ("n",)], [("m", "n")], linear=[(0,), (1,)])


@rule(both("addr"))
def add_outer(call: Call):
    """beta * input + alpha * outer(a, b)."""
    if len(call.operands) != 3:
        return None
    added, left, right = call.operands
    shape = (left.shape[0], right.shape[0])
    offset = 2 - added.ndim
    labels = tuple("mn"[offset + d] if size == shape[offset + d] else None for d, size in enumerate(added.shape))
    return Signature([labels, ("m",), ("n",)], [("m", "n")], linear=[(0, 1), (0, 2)], shapes=[shape])


@rule(torch.inner, Tensor.inner, traits=Trait.LINEAR)
def inner(call: Call):
    """a [..., k], b [..., k] -> [*a's, *b's]; a 0-dim operand only scales."""
    left, right = call.operands
    if not left.ndim or not right.ndim:
        return decomposed(lambda a, b: a * b)
    _check(call, left, right, left.shape[-1], right.shape[-1])
    rows = tuple(("a", d) for d in range(left.ndim - 1))
    columns = tuple(("b", d) for d in range(right.ndim - 1))
    return Signature(
        [(*rows, "k"), (*columns, "k")], [(*rows, *columns)], summed={"k"}, linear=[(0,), (1,)],
        shapes=[(*left.shape[:-1], *right.shape[:-1])],
    )  # fmt: skip


@rule(torch.vdot, Tensor.vdot, torch.linalg.vecdot)
def vecdot(call: Call):
    """The sum of conj(a) * b along `dim` (-1), batch dims broadcast."""
    left, right = call.operands
    dim = call.kwargs.get("dim", -1)
    if not isinstance(dim, int) or not left.ndim or not right.ndim:
        return None
    return decomposed(lambda a, b, dim=-1: (a.conj() * b).sum(dim))


@rule(torch.tensordot)
def tensordot(call: Call):
    """The dims that `dims` pairs are contracted; what is left of a comes before what is left of b."""
    left, right = call.operands[:2]
    dims = call.get(2, "dims", 2)
    if len(call.operands) != 2:
        return None
    if isinstance(dims, int):
        dims = (tuple(range(left.ndim - dims, left.ndim)), tuple(range(dims)))
    of_left, of_right = ((d,) if isinstance(d, int) else tuple(d) for d in dims)
    a: list = [("a", d) for d in range(left.ndim)]
    b: list = [("b", d) for d in range(right.ndim)]
    for k, (i, j) in enumerate(zip(of_left, of_right)):
        if left.shape[i] != right.shape[j]:
            return None  # a size of 1 is summed over the other's: rare
        a[i % left.ndim] = b[j % right.ndim] = ("k", k)
    kept = [label for label in (*a, *b) if label[0] != "k"]
    extents = {**dict(zip(a, left.shape)), **dict(zip(b, right.shape))}
    return Signature(
        [a, b], [tuple(kept)], summed={label for label in a if label[0] == "k"}, linear=[(0,), (1,)],
        shapes=[tuple(extents[label] for label in kept)],
    )  # fmt: skip


@rule(torch.chain_matmul, torch.linalg.multi_dot)
def chain(call: Call):
    """Products of pairs, by torch's own order of least work."""
    return decomposed(lambda *matrices: _chain(matrices[0] if len(matrices) == 1 else matrices))


def _chain(matrices):
    shapes = [(1, *m.shape) if i == 0 and m.ndim == 1 else tuple(m.shape) for i, m in enumerate(matrices)]
    sizes = [shapes[0][0], *[shape[0] for shape in shapes[1:]], shapes[-1][1] if len(shapes[-1]) > 1 else 1]

    @cache
    def best(i: int, j: int) -> tuple[int, int]:
        """Least multiplications for matrices i..j, and after which one to split."""
        if i == j:
            return 0, i
        return min((best(i, k)[0] + best(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))

    def product(i: int, j: int):
        if i == j:
            return matrices[i]
        split = best(i, j)[1]
        return product(i, split) @ product(split + 1, j)

    return product(0, len(matrices) - 1)


@rule(torch.einsum)
def einsum(call: Call):
    """Any equation in letters; the sum of a sharded letter is partial."""
    equation = call.args[0]
    if not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(call.operands):
        return None
    inputs = [_expanded(term, operand) for term, operand in zip(terms, call.operands)]
    if any(labels is None for labels in inputs):
        return None
    if arrow:
        dots = max((labels for labels in inputs), key=lambda ls: sum(isinstance(x, tuple) for x in ls))
        ellipsis = tuple(label for label in dots if isinstance(label, tuple))
        output = tuple(_replace_dots(right, ellipsis))
    else:
        letters = sorted(x for x in set(left) if x.isalpha() and left.count(x) == 1)
        dots = max(inputs, key=lambda ls: sum(isinstance(x, tuple) for x in ls))
        output = (*[x for x in dots if isinstance(x, tuple)], *letters)
    extents: dict = {}
    for labels, operand in zip(inputs, call.operands):
        for label, size in zip(labels, operand.shape):
            if extents.setdefault(label, size) == 1:  # a dim of 1 broadcasts, to none as well
                extents[label] = size
    inputs = [
        tuple(label if extents[label] == size else None for label, size in zip(labels, operand.shape))
        for labels, operand in zip(inputs, call.operands)
    ]
    if any(len(set(labels)) != len(labels) for labels in [*inputs, output]):
        return None  # a diagonal: the fallback runs it whole
    summed = set(extents) - set(output)
    return Signature(
        inputs, [output], summed=summed, linear=[(i,) for i in range(len(inputs))],
        shapes=[tuple(extents[label] for label in output)],
    )  # fmt: skip


def _expanded(term: str, operand: Operand) -> tuple | None:
    letters = term.replace("...", "")
    dots = operand.ndim - len(letters)
    if dots < 0 or (dots and "..." not in term):
        return None
    return tuple(_replace_dots(term, tuple((".", d - dots) for d in range(dots))))


def _replace_dots(term: str, ellipsis: tuple):
    before, dots, after = term.partition("...")
    return [*before, *(ellipsis if dots else ()), *after]
