"""The plan of `vescale train`, and what a run of it will take: time, memory, device hours, money."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vescale

from .._machine.text_file import text_of
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
        file = Path(given.file.replace("{ranks}", str(ranks)))
        remedies = [("vescale plan ... --json plan.json", "")]
        return vescale.Plan.from_json(text_of(file, ConfigError, "vescale train", remedies))
    dtype = getattr(torch, given.precision)
    precision = {} if dtype is torch.float32 else {"precision": vescale.Precision(dtype)}
    token = torch.zeros(1, config.data.length, dtype=torch.int64)
    sample = {"sample": {"input_ids": token, "labels": token}} if config.model.lora else {}  # peft's forward names none
    return vescale.generate_plan(
        model, world_size=ranks, batch=training.batch // training.accumulate, seq=config.data.length,
        hardware=given.hardware, pin=given.settings, **precision, **sample,
    )  # fmt: skip


@dataclass(frozen=True)
class Foretold:
    """Time and memory that a run takes by the planner's formulas. `seconds`: of a step. `gib`: of the fullest
    device."""

    why: Any
    seconds: float
    gib: float
    steps: int
    tokens: int
    ranks: int

    @property
    def plan(self) -> str:
        return str(self.why.chosen.candidate)

    @property
    def hours(self) -> float:
        return self.seconds * self.steps / 3600

    @property
    def device_hours(self) -> float:
        return self.hours * self.ranks

    def summary(self, price: float | None) -> str:
        """price: of a device hour, in any currency."""
        lasts = f"{self.hours / 24:.1f} days" if self.hours >= 48 else f"{self.hours:.1f} hours"
        costs = f", {self.device_hours * price:,.0f} at {price:g} an hour" if price is not None else ""
        batch, total = self.tokens, self.tokens * self.steps
        return (
            f"{self.steps:,} steps of {batch:,} tokens: {total:.3g} tokens in {lasts}, "
            f"{self.device_hours:,.0f} device hours{costs}"
        )


def foretold(config: Config, ranks: int) -> Foretold:
    """Plans the training for so many ranks of `plan.hardware`, without weights, data or devices.

    Raises ConfigError for a plan that is not generated: nothing weighs it.
    """
    if config.plan.file is not None:
        remedies = [("without plan.file", "a plan is generated and weighed"), ("vescale.predict(plan, ...)", "")]
        raise ConfigError("vescale train", "--dry-run weighs plans that it generates", (), remedies)
    training = config.training
    why = _given(config, build(config.model, runs=False), ranks).explain()
    seconds, gib = why.chosen.cost.total * training.accumulate, why.chosen.memory.total / 2**30
    return Foretold(why, seconds, gib, training.steps, training.batch * config.data.length, ranks)
