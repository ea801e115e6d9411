"""predict: the seconds and bytes that a step of a plan takes, from a dry run priced on a hardware profile.

A plan with a pipeline is run without it, a microbatch at a time: what its forward does is dealt out over the stages by
the modules it happens in, and a simulator of the schedule, which is given, says what the stages take together.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_trace.arguments import typed_call
from vescale_trace.values import map_tensors

from ..._apply.apply import OptimizerFn
from ..._plan.parts import Pipeline
from ...dry_run import DryRun, dry_run
from ...plan import Plan
from ...timeline import BESIDE
from ..stages import ahead
from .hardware import Hardware
from .profiles import hardware_of

Pace = Callable[[int], float]
"""How many times as long a stage takes, for its collectives too, while so many of them are at work; ranks that share
cores slow each other down."""
Simulator = Callable[[Pipeline, int, Sequence[float], Sequence[float], float, Pace], float]
"""(pipeline, ranks, forward seconds per stage, backward seconds per stage, seconds of a transfer, pace) -> seconds from
the first action to the last. `vescale` brings the one of vescale_pipeline."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step.

    Arguments:
        plan: the plan.
        seconds: of the whole step.
        spent: what on; with a pipeline its "bubble" is what stages wait.
        memory: bytes of a rank at the worst moment, by kind; with a pipeline those of the fullest rank, estimated from
            one microbatch.
        dry: the dry run behind it; of a plan with a pipeline, of one microbatch without it.
    """

    plan: Plan
    seconds: float
    spent: Mapping[str, float]
    memory: Mapping[str, int]
    dry: DryRun

    @property
    def peak(self) -> int:
        """Bytes of a rank at the worst moment."""
        return sum(self.memory.values())


def one_forward_one_backward(
    pipeline: Pipeline, ranks: int, forward: Sequence[float], backward: Sequence[float], transfer: float, pace: Pace
) -> float:
    """The closed form of 1F1B (arXiv 2104.04473, section 2.2): the fullest stage, once more for every other rank; of
    several stages per rank, interleaved, their mean over laps."""
    stages, laps = [f + b for f, b in zip(forward, backward)], pipeline.virtual
    each = sum(max(stages[first : first + ranks]) for first in range(0, len(stages), ranks)) / laps + 2 * transfer
    turns = pipeline.microbatches * laps + ranks - 1
    working = (min(turn + 1, turns - turn, ranks, pipeline.microbatches * laps) for turn in range(turns))
    return each * sum(map(pace, working))


@typed_call
def predict(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    hardware: str | Hardware = "auto",
    optimizer_fn: OptimizerFn | None = torch.optim.AdamW,
    *,
    loss_fn: Callable | None = None,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    simulator: Simulator = one_forward_one_backward,
) -> Prediction:
    """Predicts how long a training step of `plan` takes on `hardware`. Arguments as for `dry_run`."""
    hardware = hardware_of(hardware)
    if plan.pipeline is None:
        dry = dry_run(plan, model, batch, optimizer_fn, loss_fn=loss_fn, step=step, backend=hardware.backend)
        seconds = dry.timeline.seconds(hardware)
        spent = {name: value for name, value in asdict(seconds).items() if name != "hidden"}
        return Prediction(plan, seconds.total, spent, dry.memory, dry)
    return _in_stages(plan, model, batch, hardware, optimizer_fn, loss_fn, step, simulator)


def _in_stages(plan, model, batch, hardware, optimizer_fn, loss_fn, step, simulator) -> Prediction:
    pipeline, ranks = plan.pipeline, plan.mesh[plan.pipeline.axis]
    others = {name: size for name, size in plan.mesh.items() if name != pipeline.axis} or {"dp": 1}
    alone = plan.override(mesh=others, pipeline=None)
    part = map_tensors(batch, lambda tensor: tensor[: -(-tensor.shape[0] // pipeline.microbatches)])
    with _crossing(model, pipeline.cuts) as crossing:
        dry = dry_run(alone, model, part, optimizer_fn, loss_fn=loss_fn, step=step, backend=hardware.backend)
    stage_of = _Stages(model, pipeline.cuts)
    timeline = dry.timeline
    crowded = max(1.0, prod(plan.mesh.values()) / hardware.at_once) if hardware.at_once else 1.0
    forward = [0.0] * stage_of.count
    after = {"backward": 0.0, "optimizer": 0.0}
    for (phase, module, operation), count in timeline.operations.items():
        seconds = count * (operation.seconds(hardware) + (hardware.host if hardware.at_once else 0.0))
        if phase == "forward":
            forward[stage_of(module)] += seconds
        else:
            after[phase] = after.get(phase, 0.0) + seconds
    whole = sum(forward)
    work = [sum(forward[rank::ranks]) / whole for rank in range(ranks)]
    backward = [after["backward"] * one / whole for one in forward]
    per_step = 0.0
    for event, seconds, _ in timeline.communication(hardware):
        if event is None:
            continue
        at = stage_of(event.cause.module)
        if event.cause.function in BESIDE:
            per_step += seconds * (1 - hardware.hidden) / ranks
        else:  # which was measured with all ranks at work
            passing = forward if event.cause.direction == "forward" else backward
            passing[at] += seconds / crowded
    summed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / stage_of.count
    summed /= prod(size for name, size in others.items() if name not in plan.data_axes)
    adding = hardware.operator_seconds("aten.add_", 2 * summed)
    backward = [seconds + adding for seconds in backward]
    transfer = hardware.collective_seconds("send", 2, max(crossing, default=0), prod(others.values()))
    transfer += hardware.wait_seconds((sum(forward) + sum(backward)) / ranks / 2)
    busy = sum(forward) + sum(backward)
    cores = hardware.at_once / prod(others.values()) if hardware.at_once else inf

    def pace(working: int) -> float:
        return max(1.0, working / cores)

    passes = simulator(pipeline, ranks, forward, backward, transfer, pace)
    optimizer = after["optimizer"] / ranks * crowded
    spent = {
        "stages": busy / ranks * pipeline.microbatches,
        "bubble": passes - busy / ranks * pipeline.microbatches,
        "communication": per_step,
        "optimizer": optimizer,
    }
    held = stage_of.shares(model)
    memory = _fullest(dry, [sum(held[rank::ranks]) for rank in range(ranks)], work, pipeline)
    return Prediction(plan, sum(spent.values()), spent, memory, dry)


def _fullest(dry: DryRun, held: Sequence[float], work: Sequence[float], pipeline: Pipeline) -> dict[str, int]:
    """Bytes of the fullest rank under 1F1B, of what one microbatch took on all of them: a rank holds its share of the
    model, and of activations as much of the microbatches in flight as it has of the work."""

    def of(rank: int) -> dict[str, int]:
        flight = min(ahead(len(held), pipeline.virtual, rank) / pipeline.virtual, pipeline.microbatches)
        scale = {"activations": flight * work[rank], "other": 1.0}
        return {kind: int(size * scale.get(kind, held[rank])) for kind, size in dry.memory.items()}

    return max((of(stage) for stage in range(len(held))), key=lambda one: sum(one.values()))


class _Stages:
    """Stage of a module, told from the order in which modules are registered. What happens in a container that a cut
    lies in is put down to the last stage: the loss is there."""

    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        places = [names.index(cut) for cut in cuts]
        containers = {"", *(cut[:i] for cut in cuts for i, letter in enumerate(cut) if letter == ".")}
        self.count = len(cuts) + 1
        self._stages = {
            name: len(cuts) if name in containers else bisect_right(places, place) for place, name in enumerate(names)
        }

    def shares(self, model: nn.Module) -> list[float]:
        """Returns the share of the parameters in each stage."""
        held = [0] * self.count
        for name, parameter in model.named_parameters():
            held[self(name.rpartition(".")[0])] += parameter.numel()
        return [one / max(1, sum(held)) for one in held]

    def __call__(self, module: str) -> int:
        return self._stages.get(module, self.count - 1)


@contextlib.contextmanager
def _crossing(model: nn.Module, cuts: Sequence[str]) -> Iterator[list[int]]:
    """Bytes that enter the modules at the cuts, on one rank, as a copy of the model is run inside."""
    sizes: list[int] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        entering = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        if entering:
            first = entering[0].to_local() if isinstance(entering[0], DTensor) else entering[0]
            sizes.append(first.numel() * first.element_size())

    hooks = [model.get_submodule(cut).register_forward_pre_hook(note, with_kwargs=True) for cut in cuts]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()
