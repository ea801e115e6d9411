"""The gradients of the other stages, as one more parameter: `clip_grad_norm_(model.parameters())` is global.

Under a pipeline `model.parameters()` ends with an `Elsewhere`, a parameter of no elements. Its gradient has no elements
either, but its norm is that of all gradients that this rank does not hold: so any code that takes the norm of every
gradient and combines them gets the global norm, and what it then multiplies by is the same on all ranks. torch's own
clipping stacks the norms of all gradients first: into that stack go the norms of the others one by one, in the order of
the whole model, so that the total is one device's to the bit wherever the norms are.
`named_parameters`, `state_dict` and the optimizer know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

Placed = tuple[dict[int, float], list[int]]
"""(norms of the gradients elsewhere by the parameters' places in the whole model, places of those that are here)."""
NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm))


class Elsewhere(nn.Parameter):
    """See the module. `norm_of(order)` gives the norms; it communicates."""

    before_dtensor = True
    norm_of: Callable[[float], Placed]

    def __new__(cls, norm_of: Callable[[float], Placed], device: torch.device) -> Elsewhere:
        made = torch.Tensor._make_subclass(cls, torch.empty(0, device=device), True)
        made.norm_of, made.exists = norm_of, False
        return made

    @property
    def grad(self) -> Tensor | None:
        return Remote(self.norm_of, self.device) if self.exists else None

    @grad.setter
    def grad(self, value: Any) -> None:
        """Nothing to keep: it is always what the other stages hold."""


class Remote(Tensor):
    """The gradient of an `Elsewhere`."""

    before_dtensor = True
    norm_of: Callable[[float], Placed]

    def __new__(cls, norm_of: Callable[[float], Placed], device: torch.device) -> Remote:
        made = torch.Tensor._make_subclass(cls, torch.empty(0, device=device))
        made.norm_of = norm_of
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in NORMS:
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            self = args[0]
            order = 2.0 if order in (None, "fro") else float(order)
            return Norms(self.norm_of(order), order, self.device)
        if function is torch._foreach_norm:
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            norms = iter(function(others, order) if others else ())
            return [cls.__torch_function__(torch.norm, types, (t, order)) if type(t) is cls else next(norms)
                    for t in args[0]]  # fmt: skip
        if getattr(function, "__name__", "") in ("mul_", "div_", "_foreach_mul_", "_foreach_div_"):
            if isinstance(args[0], Tensor):
                return args[0]
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            return function(others, *args[1:], **kwargs) if others else None
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


class Norms(Tensor):
    """The norm of all gradients elsewhere, a number; in a stack with the norms of those here, each by itself."""

    before_dtensor = True
    placed: Placed

    def __new__(cls, placed: Placed, order: float, device: torch.device) -> Norms:
        made = torch.Tensor._make_subclass(cls, torch.tensor(combined(placed[0].values(), order), device=device))
        made.placed = placed
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.to:
            return args[0]
        if function is torch.stack:
            (own,) = [tensor for tensor in args[0] if type(tensor) is cls]
            elsewhere, here = own.placed
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            if len(others) == len(here):
                norms = elsewhere | {place: float(norm) for place, norm in zip(here, others)}
                dtype = others[0].dtype if others else own.dtype
                return torch.tensor([norms[place] for place in sorted(norms)], dtype=dtype, device=own.device)
        with torch._C.DisableTorchFunctionSubclass():
            args = [[x.as_subclass(Tensor) if type(x) is cls else x for x in args[0]], *args[1:]] \
                if function is torch.stack else args
            return function(*args, **kwargs)


def combined(norms: Iterable[float], order: float) -> float:
    """The norm of several vectors' concatenation, from their norms."""
    norms = list(norms)
    if order == inf:
        return max(norms, default=0.0, key=lambda n: inf if n != n else n)
    if order == 0:
        return sum(norms)
    return sum(norm**order for norm in norms) ** (1 / order)


def norms_of_gradients(gradients: dict[int, Tensor], order: float) -> dict[int, float]:
    """As torch computes them, one by one; of distributed gradients, those of the whole. Cost: what the norms cost."""
    norms = torch._foreach_norm(list(gradients.values()), order) if gradients else ()
    return {place: float(norm) for place, norm in zip(gradients, norms)}
