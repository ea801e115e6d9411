"""record: what a run computed, step by step, as digests that do not depend on the mesh; `compare` reads them.

Hooks on every module note its outputs and the gradients of its outputs; the optimizer's
step notes gradients, its state and the parameters. A rank measures the elements that it
holds (`_digest`); once per step rank 0 collects the numbers, adds up the parts, and holds
replicas against each other. Values that are still partial sums are reduced first.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import CommunicationError, DTensor, VescaleError
from vescale_dtensor.engine import convert, requires_grad, world_objects
from vescale_trace.values import named

from ._machine._torch_private import _current_graph_task_id
from ._recorded.digest import Summary, flat_indices, measure, unpack

FORMAT = 1
Place = tuple[str, str, int, str]
"""Direction (forward, backward, update), module path, which call of the step, tensor."""


def place_name(step: int, place: Place) -> str:
    """Names a place as `keep` takes it."""
    direction, module, call, tensor = place
    return f"{step}/{direction}/{module}/{call}/{tensor}"


@contextlib.contextmanager
def record(
    model: nn.Module,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    keep: str | Iterable[str] = (),
) -> Iterator[Recorder]:
    """Records the training steps inside the context, for `vescale.compare`.

    Arguments:
        model: on one device, or parallelized under any plan; one in compile mode is eager meanwhile.
        path: a folder that does not exist yet; rank 0 writes `steps.jsonl` there, with one line per step.
        optimizer: its `step()` ends a step of the record. Without it, call `.step()` of the returned recorder.
        keep: globs of places whose values are stored whole, such as "3/forward/layers.0*" or a name that a comparison
            printed.

    It records numbers instead of values: a digest of every bit, a sketch, the norm and the largest absolute value.
    Calls that a checkpoint repeats in the backward are not recorded, nor modules inside an experts module.
    Communication: per step a gather to rank 0 and a broadcast over the world, and an all-reduce for each value that is
    a partial sum. Recording does not change any value of the run. Without `record`, no hook is installed.

    Raises VescaleError if the path cannot be written.

    Example:
        >>> with vescale.record(model, "runs/tp4", optimizer=optimizer):
        ...     train()
    """
    recorder = Recorder(model, Path(path), (keep,) if isinstance(keep, str) else tuple(keep))
    recorder.open(optimizer)
    try:
        yield recorder
        recorder.finish()
    finally:
        recorder.close()


@dataclass(frozen=True)
class Row:
    """One rank's part of the tensor at a place: its position, its summary, and, where kept, its values."""

    part: tuple
    dtype: str
    shape: tuple[int, ...]
    summary: Summary
    kept: tuple[Tensor, Tensor] | None  # global flat indices, values


class Recorder:
    """Result of `record`."""

    def __init__(self, model: nn.Module, path: Path, keep: tuple[str, ...]) -> None:
        self._model, self._path, self._keep = model, path, keep
        state = getattr(model, "_vescale", None)
        self._local_names = tuple(f"{boundary.name}." for boundary in getattr(state, "experts", ()))
        self._is_shared = state is not None or any(type(p) is DTensor for p in model.parameters())
        self._rank = dist.get_rank() if self._is_shared else 0
        self._undo: list[Callable[[], None]] = []
        self._step, self._is_open = 0, False
        self._noted: dict[Place, tuple] = {}
        self._calls: Counter[str] = Counter()
        self._optimizer: Any = None

    def step(self) -> None:
        """Ends a step: notes gradients, optimizer state and parameters, and writes. Called by `optimizer.step()`."""
        if self._optimizer is None:
            self._note_gradients()
        self._note_state()
        self._write()

    # --- what `record` calls ----------------------------------------------------------

    def open(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._together(self._begin)
        self._is_open, self._optimizer = True, optimizer
        for name, module in self._model.named_modules():
            if not name.startswith(self._local_names):
                handle = module.register_forward_hook(self._hook_of(name))
                self._undo.append(handle.remove)
        held = getattr(self._model, "_vescale", None)
        if held is None or held.runtime is None:  # a pipeline's root gets what is no microbatch
            self._undo.append(self._model.register_forward_pre_hook(self._note_inputs, with_kwargs=True).remove)
        if optimizer is not None:
            self._watch(optimizer)
        self._note_state()
        self._write()

    def finish(self) -> None:
        """Writes what was computed after the last step."""
        if any(self._everywhere(bool(self._noted), "the record was finished")):
            self._write()

    def close(self) -> None:
        self._is_open = False
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._noted.clear()

    # --- hooks ------------------------------------------------------------------------

    def _note_inputs(self, root: nn.Module, args: tuple, kwargs: dict) -> None:
        for label, tensor in (*_tensors(list(args), "input"), *_tensors(kwargs, "input")):
            self._note(("forward", "", self._calls[""], label), tensor)

    def _hook_of(self, name: str) -> Callable:
        def after_forward(module: nn.Module, args: tuple, output: Any) -> None:
            if _current_graph_task_id() != -1:  # a checkpoint computes this again
                return
            call = self._calls[name]
            self._calls[name] += 1
            for label, tensor in _tensors(output, "output"):
                self._note(("forward", name, call, label), tensor)
                if requires_grad(tensor):
                    place = ("backward", name, call, f"gradient of {label}")
                    tensor.register_hook(lambda gradient, place=place: self._note(place, gradient))

        return after_forward

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Stands around `optimizer.step`, outermost: what parallelize added to it has then ended."""
        inner, own = optimizer.step, optimizer.__dict__.get("step")

        def step(closure: Any = None, **options: Any) -> Any:
            if closure is not None:
                options["closure"] = closure
            else:
                self._note_gradients()
            answer = inner(**options)
            if closure is not None:
                self._note_gradients()
            self.step()
            return answer

        def undo() -> None:
            if own is not None:
                vars(optimizer)["step"] = own
            else:
                del optimizer.step

        vars(optimizer)["step"] = step
        self._undo.append(undo)

    def _note_gradients(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                module, _, leaf = name.rpartition(".")
                self._note(("backward", module, 0, f"gradient of {leaf}"), parameter.grad)

    def _note_state(self) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for name, values in _state_of(self._optimizer, names).items():
            module, _, leaf = name.rpartition(".")
            for key, value in values.items():
                if isinstance(value, Tensor):
                    self._note(("update", module, 0, f"{key} of {leaf}"), value)
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            module, _, leaf = name.rpartition(".")
            self._note(("update", module, 0, leaf), tensor)

    def _note(self, place: Place, tensor: Tensor) -> None:
        """Measures this rank's part. Cost: an all-reduce where the value is a partial sum."""
        if not self._is_open or tensor.is_meta:
            return
        while place in self._noted:  # a second backward through the same graph
            place = (*place[:3], f"{place[3]}, again")
        with torch.no_grad():
            tensor = tensor.detach()
            shape = tuple(tensor.shape)
            part: tuple[int, ...] = ()
            boxes = [(tuple((0, size) for size in shape), 0)] if tensor.numel() else []
            if type(tensor) is DTensor:
                layout = tensor.mesh_layout
                if layout.is_partial:
                    layout = layout.reduced
                    tensor = convert(tensor, layout, "record")
                tensor, coordinate = tensor.to_local(), layout.mesh.coordinate
                boxes = layout.boxes_at(coordinate)
                part = tuple(at for at, state in zip(coordinate, layout.states) if not state.is_replicated)
            kept = None
            if any(fnmatchcase(place_name(self._step, place), glob) for glob in self._keep):
                indices = [index.cpu() for _, index in flat_indices(boxes, shape, 1, tensor.device)]
                at = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64)
                kept = at, tensor.cpu().reshape(-1).clone()
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._noted[place] = (part, dtype, shape, measure(tensor, boxes, shape), kept)

    # --- between ranks ----------------------------------------------------------------

    def _write(self) -> None:
        summaries = unpack([noted[3] for noted in self._noted.values()])
        rows = {
            place: Row(part, dtype, shape, summary, kept)
            for (place, (part, dtype, shape, _, kept)), summary in zip(self._noted.items(), summaries)
        }
        everyones = self._to_first(rows)
        self._together(lambda: _append(self._path, self._step, everyones))
        self._noted.clear()
        self._calls.clear()
        self._step += 1

    def _begin(self) -> None:
        self._path.mkdir(parents=True)
        header = {
            "format": FORMAT, "world": dist.get_world_size() if self._is_shared else 1,
            "model": type(self._model).__name__, "torch": torch.__version__,
        }  # fmt: skip
        (self._path / "steps.jsonl").write_text(json.dumps(header) + "\n")

    def _together(self, work: Callable[[], None]) -> None:
        """Rank 0 does it; what fails there fails on all ranks."""
        problem: str | None = None
        if self._rank == 0:
            try:
                work()
            except OSError as error:
                problem = str(error)
        problem = self._everywhere(problem, "the record was written")[0]
        if problem is not None:
            rule = f"the record cannot be written: {problem}"
            raise VescaleError("record", rule, (), [("vescale.record(model, another_folder, ...)", "a new one")])

    def _to_first(self, rows: dict[Place, Row]) -> list[dict[Place, Row]]:
        if not self._is_shared:
            return [rows]
        everyones: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        try:
            dist.gather_object(rows, everyones, dst=0)
        except RuntimeError as error:
            rule = f"step {self._step} cannot be collected from all ranks: {error}"
            raise CommunicationError("record", rule) from error
        return everyones or []

    def _everywhere(self, value: Any, what: str) -> list[Any]:
        """`value` of every rank that records."""
        return world_objects(value, "record", what) if self._is_shared else [value]


def _append(path: Path, step: int, everyones: Sequence[Mapping[Place, Row]]) -> None:
    """Writes a step: the rows of all ranks, added up."""
    entries = [
        {"place": place, **_entry(path, place_name(step, place), {r: rows[place] for r, rows in held})}
        for place, held in (
            (place, [(rank, rows) for rank, rows in enumerate(everyones) if place in rows])
            for place in _in_order(everyones)
        )
    ]
    with (path / "steps.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "entries": entries}) + "\n")


def _in_order(everyones: Sequence[Mapping[Place, Row]]) -> Iterable[Place]:
    """Orders places as computed: forwards by rank, which is by stage if ranks hold different modules; the rest from the
    last."""
    forwards = (place for rows in everyones for place in rows if place[0] == "forward")
    others = (place for rows in reversed(everyones) for place in rows if place[0] != "forward")
    return dict.fromkeys((*forwards, *others))


def _entry(path: Path, name: str, rows: Mapping[int, Row]) -> dict[str, Any]:
    """JSON of the whole tensor; `odd` are ranks whose replica is not that of the first rank with the same part."""
    firsts: dict[tuple, Row] = {}
    odd: dict[int, float] = {}
    for rank, row in rows.items():
        first = firsts.setdefault(row.part, row)
        if first.summary.digest != row.summary.digest:
            odd[rank] = first.summary.distance(row.summary)
    whole = Summary.of_parts([row.summary for row in firsts.values()])
    one = next(iter(rows.values()))
    entry = {
        "dtype": one.dtype, "shape": one.shape, "digest": f"{whole.digest:016x}",
        "norm": whole.norm, "largest": whole.largest, "sketch": whole.sketch,
    }  # fmt: skip
    if odd:
        entry["odd"] = odd
    if one.kept is not None:
        # Odd replicas last, so that they are what is seen.
        entry["values"] = _store(path, name, one, sorted(rows.items(), key=lambda item: item[0] in odd))
    return entry


def _store(path: Path, name: str, one: Row, rows: Iterable[tuple[int, Row]]) -> str:
    """Puts a kept tensor together and writes its bytes, row-major; the name of the file."""
    assert one.kept is not None
    whole = torch.empty(torch.Size(one.shape).numel(), dtype=one.kept[1].dtype)
    for _, row in rows:
        assert row.kept is not None
        index, values = row.kept
        whole[index] = values
    file = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name) + ".bin"
    (path / file).write_bytes(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return file


def _state_of(optimizer: Any, names: Mapping[int, str]) -> Mapping[str, Mapping[str, Any]]:
    if optimizer is None:
        return {}
    if hasattr(optimizer, "sharded_state_dict"):
        return optimizer.sharded_state_dict()["state"]
    return {names[id(p)]: values for p, values in optimizer.state.items() if id(p) in names}


def _tensors(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, with their places."""
    kinds = (Tensor, DTensor, nn.Parameter)
    return ((place, one) for place, one in named(value, label) if type(one) in kinds)
