"""Optimizers of one stage of a pipeline, of which each rank makes its own over its part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..._plan.parts import PlanError
from .adopt import leave_out


def made_over(model: nn.Module, factory: Callable[[Iterator[nn.Parameter]], Any]) -> Any:
    """What the factory makes of this stage's parameters. A stage that trains none, as of a model whose first layers are
    frozen, gets an optimizer without parameters: torch makes none of an empty list, so it is given one for the time
    being."""
    own = list(model.parameters())
    if any(parameter.requires_grad for parameter in own):
        return factory(iter(own))
    stand_in = nn.Parameter(torch.empty(0))
    optimizer = factory(iter([*own, stand_in]))
    if hasattr(optimizer, "param_groups"):
        leave_out(optimizer, lambda one: one is stand_in)
    return optimizer


def check_of_stage(optimizer: Any) -> None:
    """Raises PlanError for an optimizer whose step multiplies all of the model's gradients with each other."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PlanError(
            "parallelize",
            f"{type(optimizer).__name__} computes with all parameters of the model at once, and a rank of a pipeline "
            "holds those of its stages",
            (),
            [
                ("torch.optim.AdamW, or another that steps each parameter by itself", ""),
                ('Plan(mesh={"dp": ..., "tp": ...}, pipeline=None)', "every rank holds a part of each parameter"),
            ],
        )
