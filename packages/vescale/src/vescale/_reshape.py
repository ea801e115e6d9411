"""reshape: another plan in a job that runs; vescale_plans applies it, vescale_checkpoint moves the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import vescale_checkpoint
import vescale_plans
from vescale_plans import Plan
from vescale_plans.search.progress import Bar

from ._stages import check_stages, pipelined


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
    for them hold. Conversions, buffers, stages and graphs of compile mode are made anew.

    A plan for fewer ranks than the world has is one of the first. The others hold nothing from then on; a call of the
    model there, or a step, raises PlanError, and they wait in the next `reshape`, however long that takes:

        if torch.distributed.get_rank() < new_plan.world_size:
            ...                                            # a step

    Under a plan that is for them again they take parameters and states, buffers, the states of torch's generators and
    the options of the optimizers' groups.

    Arguments:
        model: parallelized.
        optimizer: made or adopted by this library for the model; several as a list; None without one. The step of one
            that is left out raises from here on.
        new_plan: any over as many ranks as the world has, or without a pipeline over fewer: other axes, placements,
            stages, ZeRO stage, experts' axis, precision, checkpointing.

    Returns the bytes that this rank received. Above a second a bar on the first rank's terminal says how far it is.

    Communicates: each byte that a rank needs and does not hold, once, in all-to-alls; a few small all-gathers, of the
    plan and of what each rank holds and lacks. Memory: old and new shards, and thrice 8 MiB.
    Raises PlanError, on all ranks alike, for a plan that does not fit and where a backward runs, as PipelineError and
    ScheduleError for one whose stages do not; the model then trains on under its plan. Warns by SharedMemoryWarning
    where somebody holds views of parameters.
    """
    more = {"stages": pipelined, "check_stages": check_stages}
    return vescale_plans.reshape(model, optimizer, new_plan, move=_moved, **more)


def _moved(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> int:
    with Bar() as bar:
        return vescale_checkpoint.reshard(source, dict(target), over=partial(bar.over, "moving shards")).bytes_read
