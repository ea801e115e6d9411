"""Batches of small problems: linear algebra on the last dims, Fourier transforms of some dims, integrals along one.

    batch dims sharded      free: each rank solves its own
    core dims sharded       whole, as the batch's next free cut or everywhere; without a batch the fallback gathers
    partial                 Fourier transforms and integrals are linear in it; linear algebra reduces first

A function that raises for some values (a singular matrix: `inv`, `cholesky`, `solve`,
`svd` without convergence) has no row: its error would come to some ranks only, and the
others would wait. Its `_ex` form, which reports instead, has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._dispatch.signature import Signature
from ..elements.pointwise import broadcast, labels_for
from ..empty import guarded
from ..registry import Call, Operand, both, rule
from ..solvers.rows import nonempty
from .conv import output_shapes

# Per function, how many last dims are the problem's: of each tensor argument, and of each result.
CORES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "linalg.det": ((2,), (0,)),
    "det": ((2,), (0,)),
    "logdet": ((2,), (0,)),
    "linalg.slogdet": ((2,), (0, 0)),
    "slogdet": ((2,), (0, 0)),
    "linalg.inv_ex": ((2,), (2, 0)),
    "linalg.cholesky_ex": ((2,), (2, 0)),
    "linalg.lu_factor_ex": ((2,), (2, 1, 0)),
    "linalg.ldl_factor_ex": ((2,), (2, 1, 0)),
    "linalg.qr": ((2,), (2, 2)),
    "qr": ((2,), (2, 2)),
    "matrix_exp": ((2,), (2,)),
    "linalg.matrix_exp": ((2,), (2,)),
    "cholesky_solve": ((2, 2), (2,)),
    "linalg.solve_triangular": ((2, 2), (2,)),
    "linalg.householder_product": ((2, 1), (2,)),
    "linalg.vander": ((1,), (2,)),
}
# Per Fourier transform, the dims that it takes by default.
TRANSFORMED: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys("fft ifft rfft irfft hfft ihfft".split(), (-1,)),
    **dict.fromkeys("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2".split(), (-2, -1)),
    **dict.fromkeys("fftn ifftn rfftn irfftn hfftn ihfftn fftshift ifftshift".split(), None),
}


def function_named(name: str) -> list[Callable]:
    """`torch.name`, and the method of that name where there is one."""
    owner, _, last = name.rpartition(".")
    found = [getattr(torch.linalg if owner else torch, last, None), None if owner else getattr(Tensor, last, None)]
    return [function for function in found if function is not None]


_CORES = {function: cores for name, cores in CORES.items() for function in function_named(name)}
_TRANSFORMED = {getattr(torch.fft, name): dims for name, dims in TRANSFORMED.items()}


@rule([*_CORES])
def batched(call: Call) -> Signature | None:
    """All dims before the core ones are free; they broadcast from the right."""
    cores, outs = _CORES[call.function]
    if len(call.operands) != len(cores):
        return None
    batch = [operand.shape[: operand.ndim - core] for operand, core in zip(call.operands, cores)]
    if not any(batch):
        return None
    shapes, single = output_shapes(call)
    free = torch.broadcast_shapes(*batch)
    inputs = [_batch_labels(shape, free) + (None,) * core for shape, core in zip(batch, cores)]
    if [len(shape) for shape in shapes] != [len(free) + core for core in outs]:  # qr(mode="r")
        return None
    results = [tuple(range(-len(free), 0)) + (None,) * core for core in outs]
    run = _on_problems(call.function, cores, outs)
    return Signature(inputs, results, shapes=shapes, single=single, local=lambda _: run)


def _on_problems(function: Callable, cores: Sequence[int], outs: Sequence[int]) -> Callable:
    """`function` of a shard that may hold no problem: it is given one, of zeros, and what comes of it is cut off.

    The result still hangs on its inputs, so that the backward of every rank asks for the same collectives.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if all(one.numel() for one in given):
            return function(*args, **kwargs)
        left, missing = iter(cores), set()

        def filled(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            batch = one.ndim - next(left)
            empty = [d for d in range(batch) if not one.shape[d]]
            missing.update(d - batch for d in empty)
            return nonempty(one, empty)

        args, kwargs = tuple(map(filled, args)), {name: filled(one) for name, one in kwargs.items()}
        found = function(*args, **kwargs)
        results = [found] if isinstance(found, Tensor) else list(found)
        for label in missing:
            results = [one.narrow(one.ndim - core + label, 0, 0) for one, core in zip(results, outs)]
        return results[0] if isinstance(found, Tensor) else type(found)(results)

    return run


def _batch_labels(shape: Sequence[int], free: Sequence[int]) -> tuple:
    stretched = free[len(free) - len(shape) :]
    return tuple(d - len(shape) if size == stretched[d] else None for d, size in enumerate(shape))


@rule([*_TRANSFORMED])
def fourier(call: Call) -> Signature | None:
    """Linear; the dims that are not transformed are free."""
    x = call.operands[0]
    sizes, place = (None, 1) if "shift" in call.name else (call.get(1, "s"), 2)
    default = _TRANSFORMED[call.function]
    dims = call.get(place, "dim", default)
    if dims is None:
        dims = range(x.ndim) if sizes is None else range(-len(sizes), 0)
    return along(call, (dims,) if isinstance(dims, int) else dims)


def along(call: Call, dims: Sequence[int]) -> Signature | None:
    """A linear function of the first operand along `dims`, whole; all other dims, which stay, are free."""
    x = call.operands[0]
    taken = {dim % x.ndim for dim in dims}
    if len(taken) == x.ndim:
        return None
    labels = tuple(None if d in taken else d for d in range(x.ndim))
    shapes, _ = output_shapes(call)
    run = _on_rows(call.function, [d for d in labels if d is not None])
    return Signature([labels], [labels], linear=[(0,)], shapes=shapes, local=lambda _: run)


def _on_rows(function: Callable, free: Sequence[int]) -> Callable:
    """The same for a function of one tensor that keeps its dims."""

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        empty = [d for d in free if not input.shape[d]]
        out = function(nonempty(input, empty), *args, **kwargs)
        for d in empty:
            out = out.narrow(d, 0, 0)
        return out

    return run


@rule(torch.trapezoid, torch.trapz, torch.cumulative_trapezoid)
def integral(call: Call) -> Signature | None:
    """y, and x or dx -> the integral along `dim`, whole; linear in y."""
    y = call.operands[0]
    dim = call.kwargs.get("dim", -1) % max(y.ndim, 1)
    shapes, _ = output_shapes(call)
    if y.ndim < 2 or len(call.operands) > 2 or isinstance(call.kwargs.get("dx"), Operand):
        return None
    inputs = [tuple(None if d == dim else d - y.ndim for d in range(y.ndim))]
    if len(call.operands) == 2:
        x = call.operands[1]
        if x.ndim == 1:
            inputs.append((None,))
        elif x.shape == y.shape:
            inputs.append(inputs[0])
        else:
            return None
    cumulative = len(shapes[0]) == y.ndim
    out = tuple(label for d, label in enumerate(inputs[0]) if cumulative or d != dim)
    return Signature(inputs, [out], linear=[(0,)], shapes=shapes)


@rule(torch.cdist, exact=True)
def distances(call: Call) -> Signature | None:
    """[..., p, m], [..., r, m] -> [..., p, r]: p, r and the batch are free. Sizes decide how torch computes: global."""
    rows, columns = (operand.shape[-2] for operand in call.operands)
    batch = [operand.shape[:-2] for operand in call.operands]
    free = torch.broadcast_shapes(*batch)
    mode = call.get(3, "compute_mode", "use_mm_for_euclid_dist_if_necessary")
    if mode.endswith("if_necessary"):
        mode = "use_mm_for_euclid_dist" if max(rows, columns) > 25 else "donot_use_mm_for_euclid_dist"

    def run(x1: Tensor, x2: Tensor, p: float = 2.0, *_, **__) -> Tensor:
        return torch.cdist(x1, x2, p, mode)

    inputs = [(*_batch_labels(shape, free), label, None) for shape, label in zip(batch, "pr")]
    out = (*range(-len(free), 0), "p", "r")
    return Signature(inputs, [out], shapes=[(*free, rows, columns)], local=guarded(run))


@rule(both("cross"), torch.linalg.cross)
def cross(call: Call) -> Signature | None:
    """a x b along a dim of three, whole; linear in either. `torch.cross` takes the first dim of three by default."""
    found, first = broadcast(call.operands), call.operands[0].shape
    named = call.get(2, "dim", -1 if call.function is torch.linalg.cross else None)
    if found is None or len(first) < 2 or len({operand.ndim for operand in call.operands}) > 1:
        return None
    if named is None and 3 not in first:
        return None
    _, out, shape = found
    dim = first.index(3) if named is None else named % len(shape)
    whole = dim - len(shape)
    inputs = [
        tuple(None if label == whole else label for label in labels_for(operand, shape)) for operand in call.operands
    ]
    labels = tuple(None if label == whole else label for label in out)

    def run(input: Tensor, other: Tensor, *_, **__) -> Tensor:  # the dim by number: a shard may have 3 of others
        return torch.linalg.cross(input, other, dim=dim)

    return Signature(inputs, [labels], linear=[(0,), (1,)], shapes=[shape], local=lambda outs: run)
