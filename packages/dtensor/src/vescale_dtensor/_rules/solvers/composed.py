"""Functions that are others put together, on the DTensors themselves: each step keeps what its own rule keeps.

`*_copy` is a view, copied; a Kronecker product is a product with broadcasting, reshaped;
a covariance is a matrix product of what the mean leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._conversions.convert import describe
from ..._errors import ShapeError
from ..._torch_private import _VF_meshgrid
from ..registry import Call, Decision, decomposed, rule
from ..traits import Trait

# Per `torch.name_copy`, the view that is copied.
COPIES: dict[str, Callable] = {
    "alias_copy": lambda x: x.view_as(x),
    "diagonal_copy": Tensor.diagonal,
    "expand_copy": Tensor.expand,
    "permute_copy": Tensor.permute,
    "select_copy": Tensor.select,
    "split_copy": torch.split,
    "split_with_sizes_copy": torch.split_with_sizes,
    "squeeze_copy": Tensor.squeeze,
    "t_copy": Tensor.t,
    "transpose_copy": Tensor.transpose,
    "unbind_copy": Tensor.unbind,
    "unfold_copy": Tensor.unfold,
    "unsqueeze_copy": Tensor.unsqueeze,
    "view_copy": Tensor.view,
}


def _copied(view: Callable) -> Callable:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = view(x, *args, **kwargs)
        if isinstance(found, Tensor):
            return found.clone(memory_format=torch.contiguous_format)
        return tuple(one.clone(memory_format=torch.contiguous_format) for one in found)

    return run


def kron(input: Tensor, other: Tensor) -> Tensor:
    """Each element of `input` times all of `other`: dims interleaved, and then joined in pairs."""
    ndim = max(input.ndim, other.ndim)
    ours = [1] * (ndim - input.ndim) + list(input.shape)
    theirs = [1] * (ndim - other.ndim) + list(other.shape)
    left = input.reshape([size for pair in zip(ours, [1] * ndim) for size in pair])
    right = other.reshape([size for pair in zip([1] * ndim, theirs) for size in pair])
    return (left * right).reshape([a * b for a, b in zip(ours, theirs)])


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Each tensor along its own dim, stretched over those of the others."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    swapped = indexing == "xy" and len(given) > 1
    order = [1, 0, *range(2, len(given))] if swapped else list(range(len(given)))
    sizes = [0] * len(given)
    for at, tensor in zip(order, given):
        sizes[at] = tensor.numel()
    return tuple(
        tensor.reshape([-1 if d == at else 1 for d in range(len(given))]).expand(sizes)
        for at, tensor in zip(order, given)
    )


def cartesian_prod(*tensors: Tensor) -> Tensor:
    """[n], [m], ... -> [n * m * ..., count]; one tensor as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([grid.reshape(-1) for grid in meshgrid(*tensors)], dim=-1)


def diagflat(input: Tensor, offset: int = 0) -> Tensor:
    return input.reshape(-1).diag_embed(offset)


def sum_to_size(self: Any, *sizes: Any, size: Any = ()) -> Tensor:
    """Summed over the leading dims that `size` lacks, and over those where it has 1."""
    wanted = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes or tuple(size)
    if not wanted:
        return self.sum()
    lead = self.ndim - len(wanted)
    if lead < 0 or any(want not in (1, have) for have, want in zip(self.shape[lead:], wanted)):
        raise ShapeError(
            "sum_to_size",
            f"sizes {list(wanted)} do not broadcast to the global shape {list(self.shape)}",
            [describe("self", self, self._layout)],
            [("sizes of one device: 1 for each dim that is to be summed", "")],
        )
    out = self.sum(list(range(lead))) if lead else self
    ones = [d for d, (have, want) in enumerate(zip(out.shape, wanted)) if want == 1 and have != 1]
    return out.sum(ones, keepdim=True) if ones else out


def cov(input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """[variables, observations] -> [variables, variables], dims of size 1 dropped."""
    rows = input.reshape(1, -1) if input.ndim < 2 else input
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        count: Any = rows.shape[1]
        centred = weighted = rows - rows.mean(1, keepdim=True)
        norm = count - correction
    else:
        count = weights.sum()
        centred = rows - (rows * weights).sum(1, keepdim=True) / count
        weighted = centred * weights
        lost = correction if aweights is None else correction * (weights * aweights).sum() / count
        norm = (count - lost).clamp(min=0)
    return (centred @ weighted.transpose(0, 1).conj() / norm).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """The covariance over the standard deviations of both."""
    found = cov(input)
    if not found.ndim:
        return found / found
    variance = found.diagonal()
    deviation = (variance.real if found.is_complex() else variance).sqrt()
    found = found / deviation[:, None] / deviation[None, :]
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


COMPOSED: dict[Callable, Callable] = {
    **{getattr(torch, name): _copied(view) for name, view in COPIES.items() if hasattr(torch, name)},
    torch.kron: kron,
    Tensor.kron: kron,
    torch.cartesian_prod: cartesian_prod,
    torch.diagflat: diagflat,
    Tensor.diagflat: diagflat,
    Tensor.sum_to_size: sum_to_size,
}


@rule([*COMPOSED])
def composed(call: Call) -> Decision:
    return decomposed(COMPOSED[call.function])


@rule(torch.meshgrid, _VF_meshgrid, traits=Trait.VIEW)  # the second where it was given a list
def grids(call: Call) -> Decision:
    return decomposed(meshgrid)


@rule(torch.cov, Tensor.cov, torch.corrcoef, Tensor.corrcoef)
def covariance(call: Call) -> Decision | None:
    """Covariance of at least as many observations as are taken off: of fewer torch warns, which is left to the
    fallback."""
    x = call.operands[0]
    count = x.shape[-1] if x.ndim else 1
    if x.ndim > 2 or not x.layout.numel or count <= call.kwargs.get("correction", 1):
        return None
    return decomposed(cov if call.name == "cov" else corrcoef)
