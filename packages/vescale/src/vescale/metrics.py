"""metrics: what one watches of a training, by step: global values, counted once.

with vescale.metrics(model, optimizer, writers=[vescale.JSONLines("run.jsonl")]) as meter:
    for batch in loader:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(meter.step(loss))
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import VescaleError
from vescale_dtensor.engine import watched
from vescale_pipeline.engine import Runtime
from vescale_plans.search import hardware_of

from ._machine._torch_private import _current_graph_task_id

FLOPS_PER_PARAMETER = 6
"""Operations of a token, forward and backward: a multiplication and an addition each, three times (Kaplan et al.,
2020)."""


@dataclass(frozen=True)
class Step:
    """One step, or the mean of those since the last one that was told.

    loss: as given.
    gradient_norm: of the whole gradient that the optimizer stepped with.
    tokens_per_second: of all ranks together.
    mfu: share of the data sheet's peak of all devices; None if it is not known.
    memory: bytes of this rank's device at the highest since the last; on a host, of the process.
    communication: share of the time that this rank's host waited in collectives.
    """

    step: int
    loss: float | None
    gradient_norm: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory: int
    communication: float

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        norm = "" if self.gradient_norm is None else f"  norm {self.gradient_norm:.3g}"
        mfu = "" if self.mfu is None else f"  MFU {100 * self.mfu:.1f}%"
        return (
            f"step {self.step}{loss}{norm}  {self.tokens_per_second:,.0f} tokens/s{mfu}"
            f"  {self.memory / 2**30:.2f} GiB  communication {100 * self.communication:.0f}%"
        )


class Writer(Protocol):
    """Receives steps, on the first rank: `JSONLines`, `ProgressLine`, `TensorBoard`, `WandB`, `Values` for all else."""

    def write(self, step: Step) -> None: ...

    def close(self) -> None: ...


class JSONLines:
    """Appends one line of JSON per step to a file. Steps that the file has already, from a run that goes on from an
    earlier one, are replaced."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: Any = None

    def last(self) -> int | None:
        """Returns the last step in the file; None without one."""
        steps = [_step_of(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return max((int(step) for step in steps if step < math.inf), default=None)

    def write(self, step: Step) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
            self.path.write_text("".join(line for line in kept if _step_of(line) < step.step))
            self._file = self.path.open("a")
        values = {name: one if one is not None and math.isfinite(one) else None for name, one in step.as_dict().items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step_of(line: str) -> float:
    """Returns the step of a line; infinity for one that a killed run has written in part."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return json.loads(line)["step"]
    return math.inf


class ProgressLine:
    """Prints a line per step on the terminal, using rich."""

    def __init__(self, console: Any = None) -> None:
        self._console = console

    def write(self, step: Step) -> None:
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True)
        self._console.print(str(step), highlight=True, soft_wrap=True)

    def close(self) -> None:
        pass


class Values:
    """Calls `function(values, step)`, for example a tracker's own `log`. Unknown values are left out."""

    def __init__(self, function: Callable[[Mapping[str, float], int], Any]) -> None:
        self._function = function

    def write(self, step: Step) -> None:
        self._function(_known(step), step.step)

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes scalars to event files in `folder` with torch's SummaryWriter, which needs the tensorboard package. The
    file is opened at the first step, so ranks that do not write create none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._board: Any = None

    def write(self, step: Step) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder))
        for name, value in _known(step).items():
            self._board.add_scalar(name, value, step.step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


class WandB:
    """A wandb run, started by `wandb.init(**options)` at the first step: one run, not one per rank."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def write(self, step: Step) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
        self._run.log(_known(step), step=step.step, commit=True)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


@contextlib.contextmanager
def metrics(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    writers: Sequence[Writer] = (),
    every: int = 1,
    start: int = 0,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
) -> Iterator[Meter]:
    """Reports metrics of a training run, on one device or under any plan.

    Arguments:
        model: its calls count tokens: the elements of the first integer tensor among its arguments, or else the rows of
            the first tensor.
        optimizer: the norm of its gradients is reported, at every reported step.
        writers: receive the reported steps, on the first rank only (see `Writer`).
        every: how many steps are reported as one.
        start: steps that were done before, of a run that goes on.
        flops_per_token: by default 6 per parameter; for experts, the share that a token meets if the model's config
            says it. Embeddings that only look up, and attention over the sequence, are not counted.
        peak_flops: of one device, in the training's dtype; by default from the data sheet of this device.

    Cost: a norm of the gradients (one small all-reduce) and two waits of the host for each reported step; two hooks on
    others. A loss that the model returned is global, so nothing is averaged over ranks.

    Raises VescaleError if `every` is not a positive number.
    """
    if every < 1:
        raise VescaleError("metrics", f"every={every} is not a number of steps", (), [("every=1", "tells each step")])
    meter = Meter(model, tuple(writers), every, start, flops_per_token, peak_flops)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watched(meter._begins, meter._ends))
        stack.callback(meter._watch_calls())
        if optimizer is not None:
            stack.callback(optimizer.register_step_pre_hook(meter._stepping).remove)
        for writer in meter.writers:
            stack.callback(writer.close)
        yield meter


class Meter:
    """Result of `metrics`."""

    def __init__(
        self, model: nn.Module, writers: tuple[Writer, ...], every: int, start: int, flops: float | None,
        peak: float | None,
    ) -> None:  # fmt: skip
        self.writers = writers if is_first() else ()
        self._model, self._every, self._steps = model, every, start
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._flops = _flops_per_token(model) if flops is None else flops
        self._peak = _peak(self._device, model) if peak is None else peak
        self._begun: dict[int, float] = {}
        self._norm: Tensor | None
        self._start: float
        self._tokens: int
        self._told: int
        self._waited: float
        self._reset()

    def step(self, loss: Tensor | float | None = None, tokens: int | None = None) -> Step | None:
        """Ends a step. What was measured, where this one is told; on every rank, alike but for memory and waiting.

        Arguments: loss: as the model returned it. tokens: of this step, where the calls of the model do not tell.
        """
        self._steps += 1
        if tokens is not None:
            self._tokens = self._told + tokens
        self._told = self._tokens
        if self._steps % self._every:
            return None
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - self._start
        speed, ranks = self._tokens / seconds, dist.get_world_size() if dist.is_initialized() else 1
        found = Step(
            self._steps, None if loss is None else float(loss), None if self._norm is None else float(self._norm),
            self._tokens, seconds, speed, self._peak and speed * self._flops / (self._peak * ranks),
            _memory(self._device), min(self._waited / seconds, 1.0),
        )  # fmt: skip
        for writer in self.writers:
            writer.write(found)
        self._reset()
        return found

    def _reset(self) -> None:
        self._start, self._tokens, self._told, self._waited, self._norm = time.perf_counter(), 0, 0, 0.0, None

    def _watch_calls(self) -> Callable[[], Any]:
        """Installs the hook on calls; returns what removes it again. Of a pipeline hooks see each microbatch, so that
        its call itself is watched."""
        run = self._model.__dict__.get("_call_impl")
        if not isinstance(run, Runtime):
            return self._model.register_forward_pre_hook(self._entered, prepend=True, with_kwargs=True).remove

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._entered(self._model, args, kwargs)
            return run(*args, **kwargs)

        self._model.__dict__["_call_impl"] = counted
        return partial(self._model.__dict__.__setitem__, "_call_impl", run)

    def _entered(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if _current_graph_task_id() != -1:
            return  # a checkpoint computes again
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        whole = [one for one in tensors if not one.is_floating_point() and one.ndim > 1]
        if whole:
            self._tokens += whole[0].numel()
        elif tensors and tensors[0].ndim:
            self._tokens += tensors[0].shape[0]

    def _stepping(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if (self._steps + 1) % self._every == 0:
            found = [p.grad for p in self._model.parameters() if p.grad is not None]
            self._norm = nn.utils.get_total_norm(found) if found else None

    def _begins(self, event: Any) -> None:
        self._begun[id(event)] = time.perf_counter()

    def _ends(self, event: Any) -> None:
        start = self._begun.pop(id(event), None)
        if start is not None:
            self._waited += time.perf_counter() - start


def _flops_per_token(model: nn.Module) -> float:
    """See `FLOPS_PER_PARAMETER`. A table that is also the head multiplies; one that only looks up does not."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    heads = {id(one.weight) for one in model.modules() if isinstance(one, nn.Linear)}
    config = getattr(model, "config", None)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    share = getattr(config, "num_experts_per_tok", count) / count if count else 1.0
    found, seen = 0.0, tables - heads
    for name, parameter in _weights(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found += parameter.numel() * (share if ".experts." in name else 1.0)
    return FLOPS_PER_PARAMETER * found


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters; those that another stage of a pipeline holds by what stands for them."""
    for name, module in model.named_modules():
        elsewhere = [(leaf, one) for leaf, one in module.__dict__.items() if getattr(one, "is_weight", False)]
        for leaf, parameter in (*module._parameters.items(), *elsewhere):
            if parameter is not None:
                yield f"{name}.{leaf}", parameter


def _peak(device: torch.device, model: nn.Module) -> float | None:
    if device.type == "cpu":
        return None
    known = hardware_of("auto")
    itemsize = min((p.element_size() for p in model.parameters()), default=2)
    precision = getattr(getattr(getattr(model, "_vescale", None), "plan", None), "precision", None)
    if precision is not None and precision.compute is not None:
        itemsize = precision.compute.itemsize
    return known.computing(itemsize).peak


def _memory(device: torch.device) -> int:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    highest = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    return highest


def _known(step: Step) -> dict[str, float]:
    return {name: one for name, one in step.as_dict().items() if one is not None and name != "step"}


def is_first() -> bool:
    """True on the rank that writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0
