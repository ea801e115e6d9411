"""Optimizers of one stage of a pipeline: each rank makes one of the whole model, and keeps its part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..._plan.parts import PlanError
from .absent import Absent
from .adopt import leave_gone_out


def made_over(model: nn.Module, factory: Callable[[Iterator[nn.Parameter]], Any], absent: Absent) -> Any:
    """Returns what the factory makes of all parameters of the model, in the order of one device: a choice by place,
    count or name is the same on all ranks. What it chose of other stages is then left out; groups stay, be they empty.
    """
    with absent.shown():
        optimizer = factory(model.parameters())
    if hasattr(optimizer, "param_groups"):
        leave_gone_out(optimizer)
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
