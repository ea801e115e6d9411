"""The plan of `vescale train`, and what a run of it will take: time, memory, device hours, money."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import vescale

from .config import Config, ConfigError
from .model import build


def plan_of(config: Config, model: nn.Module, ranks: int) -> vescale.Plan:
    """Returns the plan that the configuration names, or one that is generated for so many ranks.

    The optimizer's step sums as many backwards as the plan says, times `training.accumulate`.
    """
    plan, count = _given(config, model, ranks), config.training.accumulate
    return plan if count == 1 else plan.override(accumulation=plan.accumulation * count)


def _given(config: Config, model: nn.Module, ranks: int) -> vescale.Plan:
    """The plan of one of `training.accumulate` parts."""
    given, training = config.plan, config.training
    if given.file is not None:
        try:
            return vescale.Plan.from_json(Path(given.file).read_text())
        except OSError as error:
            rule = f"plan.file = {given.file!r} cannot be read: {error}"
            raise ConfigError("vescale train", rule, (), [("vescale plan ... --json plan.json", "")]) from error
    dtype = getattr(torch, given.precision)
    precision = {} if dtype is torch.float32 else {"precision": vescale.Precision(dtype)}
    rows = training.batch // training.accumulate
    return vescale.generate_plan(
        model, world_size=ranks, batch=rows, seq=config.data.length, hardware=given.hardware, pin=given.pin, **precision
    )


def foretell(config: Config, ranks: int, price: float | None, console: Console) -> None:
    """Prints the plan for so many ranks of `plan.hardware`, why it was chosen, and what the run takes.

    price: of a device hour, in any currency.
    """
    training = config.training
    plan = _given(config, build(config.model, runs=False), ranks)
    if config.plan.file is not None:
        console.print(str(plan), highlight=False, markup=False)
        return
    told = plan.explain()
    console.print(told)
    seconds, batch = told.chosen.cost.total * training.accumulate, training.batch * config.data.length
    lasts = seconds * training.steps / 3600
    time, hours = f"{lasts / 24:.1f} days" if lasts >= 48 else f"{lasts:.1f} hours", lasts * ranks
    console.print(
        f"{training.steps:,} steps of {batch:,} tokens: {batch * training.steps:.3g} tokens in "
        f"{time}, {hours:,.0f} device hours"
        + (f", {hours * price:,.0f} at {price:g} an hour" if price is not None else ""),
        highlight=False,
    )
