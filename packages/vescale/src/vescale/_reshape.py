"""reshape: another plan in a job that runs; vescale_plans applies it, vescale_checkpoint moves the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

import vescale_checkpoint
import vescale_plans
from vescale_dtensor import DTensor
from vescale_plans import Plan
from vescale_plans.search.progress import Bar


def reshape(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, new_plan: Plan
) -> int:
    """Applies `new_plan` to a model that trains under another one, in place and without a disk. Call it on every rank,
    between two steps.

        model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
        ...                                                # steps
        vescale.reshape(model, optimizer, new_plan)        # and on

    Every value is transferred bit for bit: parameters, their gradients (what `no_sync` left partial is reduced first),
    optimizers' states. Generators need no transfer, for every rank's is that of one device. The model, its parameters
    and the optimizers stay the same objects, so that groups, schedulers, scalers, hooks and names that the program has
    for them hold. Conversions, buffers and graphs of compile mode are made anew.

    Arguments:
        model: parallelized, without stages of a pipeline.
        optimizer: made or adopted by this library for the model; several as a list; None without one. The step of one
            that is left out raises from here on.
        new_plan: any without a pipeline, over as many ranks as the world has: other axes, placements, ZeRO stage,
            experts' axis, precision, checkpointing.

    Returns the bytes that this rank received. Above a second a bar on the first rank's terminal says how far it is.

    Communicates: each byte that a rank needs and does not hold, once, in all-to-alls; a few small all-gathers, of the
    plan and of what each rank lacks. Memory: old and new shards, and thrice 8 MiB.
    Raises PlanError, on all ranks alike, for a plan that does not fit, for a pipeline, and where a backward runs; the
    model then trains on under its plan. Warns by SharedMemoryWarning where somebody holds views of parameters.
    """
    return vescale_plans.reshape(model, optimizer, new_plan, move=_moved)


def _moved(source: Mapping[str, dict[str, DTensor]], target: Mapping[str, dict[str, DTensor]]) -> int:
    with Bar() as bar:
        return vescale_checkpoint.reshard(source, dict(target), over=partial(bar.over, "moving shards")).bytes_read
