"""dry_run: a training step of a plan on meta tensors, in a world without processes.

It is the engine itself that runs: the same rules choose the same conversions, the same buffers take the same gradients,
and only nothing is computed and nobody is at the other end. So what it counts is what a real run issues.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor.debug import Event, comm_trace
from vescale_dtensor.engine import fake_store, faking, unstopped
from vescale_rng import is_deferred
from vescale_trace.values import map_tensors

from ._apply.apply import OptimizerFn, Stages, parallelize
from ._apply.generators import generators_kept
from ._apply.join import forget_meshes
from ._dry.distributions import values_unchecked
from ._dry.meta_attention import fused_attention
from ._dry.meter import HOST
from ._dry.meter import Meter as Meter
from ._plan.parts import PlanError
from ._plan.table import aligned, amount
from ._torch_private import meta_collectives
from .plan import Plan
from .timeline import Recorder, Timeline

_NUMBERS = itertools.count(1)
"""Numbers of collectives on meta tensors: no two of a process have the same."""
KINDS = ("parameters", "optimizer", "gradients", "activations", "other")


@dataclass(frozen=True)
class DryRun:
    """The cost of one warm training step (the second) on one rank.

    Arguments:
        plan: the plan that was run.
        collectives: every collective, with axes, bytes received and cause, in order.
        flops: of this rank's matrix products, convolutions and attention; forward, backward and recomputation.
        memory: bytes by kind at the peak. "parameters" includes buffers and what ZeRO gathers, "activations" is what
            the forward made, "gradients" what the backward and the gradient buffers hold.
        resting: bytes by kind between steps.
        timeline: the step's operators and collectives, to be priced on a hardware profile:
            `timeline.seconds(hardware)`.
        stages: for a plan with a pipeline, the run of each of its ranks, in order. The other fields are then those of
            the fullest rank. None includes the time in which a stage waits for others.
    """

    plan: Plan
    collectives: tuple[Event, ...]
    flops: int
    memory: dict[str, int]
    resting: dict[str, int]
    timeline: Timeline = field(repr=False, compare=False)
    stages: tuple[DryRun, ...] = field(default=(), repr=False)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())

    @property
    def received(self) -> int:
        """Bytes that the rank receives in a step."""
        return sum(event.received for event in self.collectives)

    def __str__(self) -> str:
        moved: Counter[tuple] = Counter()
        count: Counter[tuple] = Counter()
        for event in self.collectives:
            key = (event.kind, ",".join(event.axes), event.cause.direction)
            moved[key] += event.received
            count[key] += event.count
        rows = [("collective", "axes", "direction", "count", "received")]
        rows += [(*key, str(count[key]), amount(moved[key])) for key in count]
        kinds = ", ".join(f"{kind} {amount(size)}" for kind, size in self.memory.items())
        peaks = ", ".join(amount(one.peak) for one in self.stages)
        return "\n".join(
            [
                f"one step of one rank of {self.plan.world_size}: {self.flops / 1e12:.3g} TFLOP, "
                f"{amount(self.received)} received, {amount(self.peak)} at the peak",
                f"at the peak: {kinds}",
                *([f"peaks of the pipeline's ranks: {peaks}"] if peaks else []),
                *(line.rstrip() for line in aligned(rows)),
            ]
        )


@generators_kept()
@values_unchecked()
def dry_run(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    optimizer_fn: OptimizerFn | None = torch.optim.AdamW,
    *,
    loss_fn: Callable | None = None,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    backend: str = "nccl",
    rank: int = 0,
    stages: Callable[[Callable[[str], None]], Stages] | None = None,
) -> DryRun:
    """Runs two training steps of `plan` without processes or data, and reports the cost of the second one, with all
    backwards if the plan accumulates.

    Arguments:
        plan: of any world size.
        model: as for `parallelize`; it is not changed. Its values, and those of `batch`, are not read.
        batch: the global batch, as the model takes it: a tensor, a tuple of positional or a dict of keyword arguments.
            Only shapes and dtypes count; meta tensors are enough.
        optimizer_fn: as for `parallelize`; None for forward and backward alone.
        loss_fn: as for `parallelize`.
        step: (model, batch) -> the loss, if it is neither what the model returns nor its `.loss`.
        backend: the backend whose reductions are modelled. On "gloo", a sum is an all-to-all and a local sum, which
            takes a buffer as large as the summed tensor, a gather takes as much again as it gathers, and attention
            repeats keys that heads share, as on a CPU. On any other backend, an optimizer that does not say otherwise
            treats all parameters at once (`foreach`), as torch's do on a GPU, which takes memory of the size of the
            parameters.
        rank: the rank whose step is run. Ranks differ if sequences are sharded: with contiguous parts under a causal
            mask, the last rank computes and receives most.
        stages: a function that is told the kind of the memory that is made from now on, see `Stages`; `vescale.dry_run`
            supplies it.

    Integers are real. If the model's control flow depends on choices among floating point values (experts that are
    called one by one, each with its rows), it runs a second time, in which all choices are equally frequent. A model
    that reads a floating point value itself (`item()`, `if x.any()`) cannot run. Distributions of torch leave out the
    checks of values that they make by default.

    Raises PlanError if a value is read, or if the process has joined a world; also what `parallelize` and the model
    raise.
    """
    if dist.is_initialized():
        raise PlanError(
            "dry_run",
            f"this process is rank {dist.get_rank()} of a world of {dist.get_world_size()} already",
            (),
            [("call it before the world is joined", "a dry run has a world of its own")],
        )
    if not 0 <= rank < plan.world_size:
        remedies = [(f"rank={plan.world_size - 1}", "the last")]
        raise PlanError("dry_run", f"rank {rank} of a plan for {plan.world_size}", (), remedies)

    for chooses in (False, True):
        meter = Meter(backend, chooses)
        try:
            return _stepped(plan, model, batch, optimizer_fn, loss_fn, step, rank, stages, meter, backend)
        except RuntimeError as error:
            if not _asks_for_values(error):
                raise
            asked = error
    raise PlanError(
        "dry_run",
        f"the model reads a value, and a dry run has none: {str(asked).splitlines()[0]}",
        (),
        [
            ("step=lambda model, batch: ...", "a step that leaves out what reads it"),
            ("vescale.parallelize(plan, model, ...), comm_trace(model)", "a real step tells the same"),
        ],
    ) from asked


def _asks_for_values(error: RuntimeError) -> bool:
    """True if torch says that a meta tensor has no values; rows that are picked by values are such, too."""
    said = str(error).lower()  # torch says "meta tensor" and, where it has no shape function, "Meta tensors"
    is_of_torch = type(error) in (RuntimeError, NotImplementedError)
    return is_of_torch and ("meta tensor" in said or "register_meta function" in said)


def _stepped(
    plan: Plan, model: nn.Module, batch: Any, optimizer_fn: OptimizerFn | None, loss_fn: Callable | None,
    step: Callable[[nn.Module, Any], Tensor] | None, rank: int,
    stages: Callable[[Callable[[str], None]], Stages] | None, meter: Meter, backend: str,
) -> DryRun:  # fmt: skip
    running = unstopped("the dry run ran the model on tensors without values")
    with _world(plan.world_size, rank), faking(backend), fused_attention(backend == "gloo"), torch.no_grad(), running:
        model = _without_values(model)
        batch = map_tensors(batch, _blank)
        with torch.enable_grad(), comm_trace(model) as trace, meter:
            pipelined = None if stages is None else stages(partial(setattr, meter, "kind"))
            model, optimizer = parallelize(plan, model, optimizer_fn, loss_fn=loss_fn, mode="eager", stages=pipelined)
            meter.label(_state(model), "parameters")
            parallelized = vars(model)["_vescale"]
            meter.label(parallelized.sync.on_host(), HOST)
            if parallelized.host is not None:
                parallelized.host.made = lambda tensor: meter.label([tensor], HOST)
            if optimizer is not None and backend != "gloo":
                _all_at_once(optimizer)
            if plan.offload and optimizer is not None:  # states that the constructor made
                meter.label((one for kept in optimizer.state.values() for one in kept.values()), HOST)
            for _ in range(2):
                trace.events.clear()
                recorder = Recorder(trace.events)
                meter.listener = recorder.note
                meter.mark()
                for part in plan.parts(batch, model) if plan.accumulation > 1 else (batch,):
                    meter.kind = "activations"
                    loss = _loss(step or _called, model, part)
                    meter.kind = "gradients"
                    loss.backward()
                    del loss
                if optimizer is not None:
                    meter.kind = HOST if plan.offload else "optimizer"
                    optimizer.step()
                    optimizer.zero_grad()
            timeline = recorder.timeline(plan.mesh)
            return DryRun(plan, timeline.collectives, meter.flops, _kinds(meter.peak), _kinds(meter.live), timeline)


def _all_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Sets torch's optimizers to their default on a GPU; a meta tensor does not look like one."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss(step: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> Tensor:
    out = step(model, batch)
    loss = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if loss is None and isinstance(out, (tuple, list)):
        loss = out[0]
    if not isinstance(loss, Tensor) or loss.ndim:
        raise PlanError(
            "dry_run",
            f"{'the model' if step is _called else 'step'} returned {type(out).__name__}, which holds no loss: "
            "a tensor without dims",
            (),
            [("step=lambda model, batch: ...", "returns the loss"), ("loss_fn=...", "as for parallelize")],
        )
    return loss


@contextlib.contextmanager
def _world(size: int, rank: int) -> Iterator[None]:
    """A rank of a world whose collectives return at once, and draw nothing: Python's generator is the model's, and a
    pipeline looks whether a forward draws from it."""
    told = sys.excepthook  # joining a world puts "[rank0]:" before every line of a traceback, for good
    stand_ins = meta_collectives()
    drawn = stand_ins.generate_unique_id
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    stand_ins.generate_unique_id = _NUMBERS.__next__
    try:
        yield
    finally:
        stand_ins.generate_unique_id = drawn
        forget_meshes()
        dist.destroy_process_group()
        sys.excepthook = told


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors are meta; of the model's values buffers of integers alone are copied, which a
    forward may write to (steps that are counted)."""
    known: dict[int, Any] = {}
    for tensor in _state(model):
        blank = _blank(tensor)
        if isinstance(tensor, nn.Parameter):
            known[id(tensor)] = nn.Parameter(blank, tensor.requires_grad)
        elif blank is not tensor:
            known[id(tensor)] = blank
    return copy.deepcopy(model, known)


def _blank(tensor: Tensor) -> Tensor:
    """Without values, unless they are integers: those index, mask and are read, and cost nothing."""
    if is_deferred(tensor) or tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tensor


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _kinds(counted: Counter[str]) -> dict[str, int]:
    return {kind: counted[kind] for kind in KINDS if counted[kind]}
