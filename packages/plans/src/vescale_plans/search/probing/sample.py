"""What a model is called with while it is probed: one row of a batch, as often as needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..._apply.containers import map_tensors
from ...plan import PlanError

POSITIONS = 5
"""Of the sample that is made where the user gives none: few, and no size that models have."""
INTEGER_INPUTS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class Sample:
    """One row of the model's inputs: every tensor [1, ...]."""

    args: tuple
    kwargs: Mapping[str, Any]

    def repeat(self, batch: int, *, follow: bool = False, moved: int | None = None) -> tuple[tuple, dict[str, Any]]:
        """The row `batch` times: arguments and keyword arguments.

        With `follow`, row 1 differs: its numbers are NaN, its integers are turned by one position; and of the tensors
        of integers that this leaves alike, those at number `moved` are one less, or 1 for 0.
        """
        alike = count()

        def grow(tensor: Tensor) -> Tensor:
            if not tensor.ndim:
                return tensor
            grown = tensor.repeat(batch, *[1] * (tensor.ndim - 1))
            if follow and tensor.is_floating_point():
                grown[1] = float("nan")
            elif follow and _stays(tensor):
                if next(alike) == moved:
                    grown[1] = torch.where(grown[1] == 0, 1, grown[1] - 1)
            elif follow and tensor.ndim > 1:
                grown[1] = grown[1].roll(1, -1)
            return grown

        return map_tensors((self.args, dict(self.kwargs)), grow)

    def longer(self, times: int) -> Sample:
        """The row with its positions so many times over."""
        positions = self.positions

        def grow(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != positions:
                return tensor
            return tensor.repeat(1, times, *[1] * (tensor.ndim - 2))

        return Sample(*map_tensors((self.args, dict(self.kwargs)), grow))

    @property
    def alike(self) -> int:
        """Tensors of integers that are the same when they are turned by one position."""
        found: list[bool] = []

        def look(tensor: Tensor) -> Tensor:
            found.append(_stays(tensor))
            return tensor

        map_tensors((self.args, dict(self.kwargs)), look)
        return sum(found)

    @property
    def positions(self) -> int | None:
        """Of the first integer tensor [batch, positions], or the first numbers [batch, positions, features]."""
        found: list[int] = []

        def look(tensor: Tensor) -> Tensor:
            if tensor.ndim == (3 if tensor.is_floating_point() else 2):
                found.append(tensor.shape[1])
            return tensor

        map_tensors((self.args, dict(self.kwargs)), look)
        return found[0] if found else None


def _stays(tensor: Tensor) -> bool:
    """Whether it is integers, [1, ...], that turned by one position are what they were."""
    if tensor.ndim < 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    return torch.equal(tensor, tensor.roll(1, -1))


def sample_of(model: nn.Module, batch: Any = None, positions: int = POSITIONS) -> Sample:
    """The first row of `batch`: what the model is called with, a tensor, a tuple of arguments or a dict of keywords.

    Without `batch`, a model whose forward takes `input_ids`, or a HuggingFace model that says what its inputs are,
    gets small inputs made up for it. Raises PlanError where that is not known.
    """
    if batch is None:
        batch = _made_up(model, positions)
    args, kwargs = (), {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, Tensor):
        args = tuple(batch)
    else:
        args = (batch,)
    args, kwargs = map_tensors(
        (args, kwargs), lambda tensor: (tensor[:1] if tensor.ndim else tensor).detach().cpu().clone()
    )
    return Sample(args, kwargs)


def _made_up(model: nn.Module, positions: int) -> dict[str, Any]:
    accepted = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {}
    for name in INTEGER_INPUTS:
        if name in accepted and (
            name == "input_ids" or getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        ):
            made[name] = torch.arange(5, 5 + positions)[None]
    if made and getattr(model, "main_input_name", "input_ids") == "input_ids":
        return made | ({"use_cache": False} if "use_cache" in accepted else {})
    named = getattr(model, "dummy_inputs", None)
    if isinstance(named, Mapping) and set(named) <= set(accepted):
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}
    raise PlanError(
        "generate_plan",
        f"{type(model).__name__}.forward takes {', '.join(accepted)}, and nothing says what they look like",
        (),
        [("sample={...}", "what the model is called with: one row of a batch is enough")],
    )
