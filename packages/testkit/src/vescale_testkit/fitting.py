"""Many models alike: one plan for all, without the patterns that match nothing of a model, and structures compared."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any, TypeVar

from torch import nn

PlanType = TypeVar("PlanType")


def fitting(plan: PlanType, model: nn.Module) -> PlanType:
    """The plan without the globs that match no parameter, or no module, of `model`, which it would refuse.

    Arguments:
        plan: a `vescale.Plan`; of it `parameters`, `boundaries` and `checkpointing`, mappings from globs, are read.
    """
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names = {"parameters": parameters, "boundaries": modules, "checkpointing": modules}
    kept = {
        field: {glob: said for glob, said in getattr(plan, field).items() if fnmatch.filter(known, glob)}
        for field, known in names.items()
    }
    return dataclasses.replace(plan, **kept)  # type: ignore[type-var]


def unnamed(found: Any) -> tuple:
    """A planner's `Structure` with a parameter's number in place of its name."""
    numbers = {name: at for at, name in enumerate(found.shapes)}
    groups = [
        (numbers[one.sink], one.dim, one.features, [(numbers[s.parameter], s.dim, s.spans) for s in one.sources])
        for one in found.groups
    ]
    return [*found.shapes.values()], groups, [numbers[one.parameter] for one in (*found.lookups, *found.heads)]
