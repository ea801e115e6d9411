"""The gradients of the other stages, as one more parameter: `clip_grad_norm_(model.parameters())` is global.

Under a pipeline `model.parameters()` ends with an `Elsewhere`, a parameter of no elements. Its gradient has no elements
either, but its norm is that of all gradients that this rank does not hold: so any code that takes the norm of every
gradient and combines them gets the global norm, and what it then multiplies by is the same on all ranks.
`named_parameters`, `state_dict` and the optimizer know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm))


class Elsewhere(nn.Parameter):
    """See the module. `norm_of(order)` gives the norm; it communicates."""

    before_dtensor = True
    norm_of: Callable[[float], float]

    def __new__(cls, norm_of: Callable[[float], float], device: torch.device) -> Elsewhere:
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
    norm_of: Callable[[float], float]

    def __new__(cls, norm_of: Callable[[float], float], device: torch.device) -> Remote:
        made = torch.Tensor._make_subclass(cls, torch.empty(0, device=device))
        made.norm_of = norm_of
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in NORMS:
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            self = args[0]
            return torch.tensor(self.norm_of(2.0 if order in (None, "fro") else float(order)), device=self.device)
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


def combined(norms: Iterable[float], order: float) -> float:
    """The norm of several vectors' concatenation, from their norms."""
    norms = list(norms)
    if order == inf:
        return max(norms, default=0.0, key=lambda n: inf if n != n else n)
    if order == 0:
        return sum(norms)
    return sum(norm**order for norm in norms) ** (1 / order)


def norm_of_gradients(gradients: list[Tensor], order: float) -> float:
    """As torch computes it; of distributed gradients, that of the whole. Cost: what their norms cost."""
    if not gradients:
        return 0.0
    return float(torch.nn.utils.get_total_norm(gradients, order))
