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
    being. Raises PlanError where the factory looks elsewhere, and finds none."""
    own = list(model.parameters())
    trains = any(parameter.requires_grad for parameter in own)
    stand_in = nn.Parameter(torch.empty(0))
    try:
        optimizer = factory(iter(own if trains else [*own, stand_in]))
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise PlanError(
            "parallelize",
            "the factory of the optimizer chose no parameter: a rank of a pipeline holds those of its stages, and of "
            "another stage's module there are none",
            (),
            [
                ("parallelize(plan, model, optimizer)", "an optimizer that was made before, of any parameters"),
                (
                    "lambda given: AdamW([p for p in given if p.requires_grad])",
                    "of what the factory is given, the rest frozen before: a stage without any gets an empty one",
                ),
            ],
        ) from error
    if not trains and hasattr(optimizer, "param_groups"):
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
