"""timeline: what every rank did when, in a step: modules, collectives with their cause, pipeline actions.

    with vescale.timeline("trace", model):
        loss = model(batch)
        loss.backward()
        optimizer.step()

Each rank writes one file of its own; nothing is communicated. `merge_timeline` (`vescale timeline trace` from a shell)
makes one trace of them for Chrome and Perfetto: a process per rank, with a lane each for compute (forward and backward
of every module, nested, and the optimizer's step), collectives, and the actions of a pipeline.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale_dtensor import VescaleError, comm_trace
from vescale_dtensor.engine import watched
from vescale_pipeline import record_events
from vescale_trace.environment import count
from vescale_trace.values import tensors_in

from ._machine._torch_private import DisableTorchFunctionSubclass, queue_callback
from ._recorded.spans import waits

LANES = ("compute", "collectives", "pipeline")


@contextlib.contextmanager
def timeline(folder: str | Path, model: nn.Module | None = None) -> Iterator[None]:
    """Records what this rank does inside the block, and writes it to `folder/rank-N.json`.

    Arguments:
        folder: created if it does not exist; the same for all ranks, on a shared file system, or collected later.
        model: whose modules are shown, by their paths; without it, only collectives and pipeline actions are.

    Times are those of the host: on an accelerator, which runs behind, those of its commands. It costs some Python per
    module and collective while open, and nothing otherwise. The clocks of several machines may differ (see `vescale
    doctor`).
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else count("RANK", 0)
    notes = _Notes()
    with contextlib.ExitStack() as stack:
        stack.enter_context(comm_trace(model))  # which names the modules in the causes
        stack.enter_context(watched(notes.collective_begins, notes.collective_ends))
        actions = stack.enter_context(record_events())
        if model is not None:
            stack.enter_context(_modules(model, notes))
        yield
    for event in actions:
        action = event.action
        about = {"stage": action.stage, "microbatch": action.microbatch, "kind": action.kind, "peer": action.peer}
        notes.add("pipeline", str(action), event.start, event.end, about)
    for span in notes.spans:
        if span["lane"] == "collectives":
            span["about"]["ranks"] = _ranks_along(model, span["about"]["axes"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "spans": notes.spans}))


def merge_timeline(folder: str | Path, path: str | Path | None = None) -> Path:
    """Merges the files that all ranks wrote to a folder into one Chrome trace, by default `folder/trace.json`. Returns
    its path.

    Raises VescaleError if the folder holds no timeline.
    """
    ranks = read_timeline(folder)
    for one in waits(ranks):
        if one.seconds:
            one.span["about"]["waited for"] = f"rank {one.latest}, {1e3 * one.seconds:.2f} ms"
    begin = min((span["start"] for spans in ranks.values() for span in spans), default=0.0)
    rows: list[dict[str, Any]] = []
    for rank, spans in sorted(ranks.items()):
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, name in enumerate(LANES):
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}})
        for span in spans:
            rows.append({
                "ph": "X", "name": span["name"], "cat": span["lane"], "pid": rank, "tid": LANES.index(span["lane"]),
                "ts": 1e6 * (span["start"] - begin), "dur": 1e6 * (span["end"] - span["start"]), "args": span["about"],
            })  # fmt: skip
    written = Path(folder) / "trace.json" if path is None else Path(path)
    written.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
    return written


def _ranks_along(model: nn.Module | None, axes: Sequence[str]) -> list[int] | None:
    """The ranks that take part in a collective over these axes of a parallelized model's mesh."""
    mesh: Any = getattr(getattr(model, "_vescale", None), "device_mesh", None)
    if mesh is None or not set(axes) <= set(mesh.mesh_dim_names):
        return None
    along = (slice(None) if name in axes else at for name, at in zip(mesh.mesh_dim_names, mesh.get_coordinate()))
    return mesh.mesh[tuple(along)].flatten().tolist()


def read_timeline(folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Returns, by rank, its spans: lane, name, start and end (seconds since 1970), about."""
    files = sorted(Path(folder).glob("rank-*.json"))
    if not files:
        raise VescaleError("merge_timeline", f"{folder} holds no rank-*.json", (), [
            ("with vescale.timeline(folder, model): ...", "on every rank, around a step")])  # fmt: skip
    read = [json.loads(file.read_text()) for file in files]
    return {one["rank"]: one["spans"] for one in read}


def totals(spans: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Count and seconds by what a rank did: forward, backward and step of the root, collectives by kind, actions."""
    sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for span in spans:
        if span["lane"] == "compute" and span["about"].get("depth", 0):
            continue  # inside of another
        name = {"compute": span["about"].get("phase"), "collectives": span["name"], "pipeline": "pipeline actions"}
        count, seconds = sums[name[span["lane"]]]
        sums[name[span["lane"]]] = (count + 1, seconds + span["end"] - span["start"])
    return dict(sums)


@dataclass
class _Notes:
    """The spans of this rank. Times come as `perf_counter`'s and are kept as the clock's."""

    spans: list[dict[str, Any]] = field(default_factory=list)
    offset: float = field(default_factory=lambda: time.time() - time.perf_counter())
    begun: dict[int, float] = field(default_factory=dict)

    def add(self, lane: str, name: str, start: float, end: float, about: dict[str, Any]) -> None:
        span = {"lane": lane, "name": name, "start": start + self.offset, "end": end + self.offset, "about": about}
        self.spans.append(span)

    def collective_begins(self, event: Any) -> None:
        self.begun[id(event)] = time.perf_counter()

    def collective_ends(self, event: Any) -> None:
        start = self.begun.pop(id(event), None)
        if start is not None:  # begun inside of the block
            cause = event.cause
            about = {"axes": event.axes, "received": event.received, "function": cause.function,
                     "module": cause.module, "line": cause.line, "direction": cause.direction}  # fmt: skip
            self.add("collectives", event.kind, start, time.perf_counter(), about)


@contextlib.contextmanager
def _modules(model: nn.Module, notes: _Notes) -> Iterator[None]:
    """Forward and backward of each module of the model, and steps of any optimizer."""
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
    depth = {id(module): name.count(".") + 1 if name else 0 for name, module in model.named_modules()}
    entered: list[tuple[float, Node | None]] = []
    stepping: list[float] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        if id(module) in names:
            entered.append((time.perf_counter(), _node(inputs)))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) not in names or not entered:
            return
        start, before = entered.pop()
        about = {"phase": "forward", "depth": depth[id(module)]}
        notes.add("compute", names[id(module)], start, time.perf_counter(), about)
        node = _node(output)
        if node is not None:
            _Backward(names[id(module)], depth[id(module)], notes).between(node, before)

    def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
        stepping.append(time.perf_counter())

    def end(optimizer: Any, args: Any, kwargs: Any) -> None:
        start = stepping.pop()
        about = {"phase": "optimizer", "depth": len(stepping)}
        notes.add("compute", f"{type(optimizer).__name__}.step", start, time.perf_counter(), about)

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
        register_optimizer_step_pre_hook(begin),
        register_optimizer_step_post_hook(end),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Backward:
    """A module's backward: from its output's node to the node that its input came from, or the end of the backward."""

    def __init__(self, name: str, depth: int, notes: _Notes) -> None:
        self.name, self.depth, self.notes = name, depth, notes
        self.start: float | None = None

    def between(self, last: Node, before: Node | None) -> None:
        last.register_prehook(self._begins)
        if before is not None and before is not last:
            before.register_prehook(self._ends)

    def _begins(self, gradients: Any) -> None:
        if self.start is None:
            self.start = time.perf_counter()
            queue_callback(self._ends)

    def _ends(self, gradients: Any = None) -> None:
        if self.start is not None:
            about = {"phase": "backward", "depth": self.depth}
            self.notes.add("compute", f"{self.name} (backward)", self.start, time.perf_counter(), about)
            self.start = None


def _node(values: Any) -> Node | None:
    """The autograd node of the first tensor that has one."""
    with DisableTorchFunctionSubclass():
        nodes = (tensor.grad_fn for tensor in tensors_in(values))
        return next((node for node in nodes if node is not None), None)
