"""Converts the inputs of the root module: plain tensors become DTensors of the global batch, after a check that ranks
agree."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vescale_dtensor import (
    DTensor,
    Placement,
    PlacementError,
    PlainTensorError,
    Replicate,
    ShapeError,
    Shard,
    from_local,
)
from vescale_dtensor.engine import (
    INVARIANT,
    Mesh,
    attach,
    bits_of,
    canonical_states,
    check_entering,
    convert,
    convert_plain,
    first_apart,
    forget,
    layout_of,
    local_only,
    mesh_of,
    on_device,
    sharded,
    state_of,
)
from vescale_trace.in_step import FIRST, is_full, is_turn
from vescale_trace.values import map_tensors, tensors_in

from .._calls.chain import add_step
from .._plan.fields import PlanFields
from .._plan.parts import PlanError
from .._torch_private import (
    DisableTorchFunction,
    _current_graph_task_id,
    is_checkpoint_selective,
    is_traceable_wrapper_subclass,
)
from .balance import Balance
from .in_step import InStep, differ
from .inference import writes_counted
from .join import join, tensor_mesh

_calls_of: WeakKeyDictionary[Mesh, int] = WeakKeyDictionary()  # of `shard_batch`


class Cuts(NamedTuple):
    """The axes over which what enters the model is cut: rows of the batch, and sequences."""

    data_axes: tuple[str, ...]
    context_axis: str | None
    balance: Balance | None = None

    def placements(self, tensor: Tensor, names: Iterable[str], lengths: Collection[int]) -> list[Placement]:
        """Places a tensor, given the lengths of sequences in its batch: a mask's rows are of such a length."""
        dim = self.sequence(tensor.ndim)
        if dim == 2 and tensor.shape[2] not in lengths:
            dim = None
        rows = Shard(0) if tensor.ndim else Replicate()
        sequence = Replicate() if dim is None else self.sequence_placement(dim, tensor.shape[dim])
        return [
            rows if name in self.data_axes else sequence if name == self.context_axis else Replicate()
            for name in names
        ]  # fmt: skip

    def sequence(self, ndim: int) -> int | None:
        """Returns the dim that is a sequence: [batch, places, ...], or of a mask's four [batch, heads, places,
        places]."""
        return None if self.context_axis is None else _SEQUENCE.get(ndim)

    def sequence_placement(self, dim: int, size: int) -> Placement:
        return Shard(dim) if self.balance is None else self.balance.placement(dim, size)

    def lengths(self, batch: Any) -> set[int]:
        return {t.shape[1] for t in tensors_in(batch) if t.ndim in (2, 3)} if self.context_axis is not None else set()


_SEQUENCE = {2: 1, 3: 1, 4: 2}


def cuts_of(plan: PlanFields, balance: Balance | None = None) -> Cuts:
    return Cuts(plan.data_axes, plan.context_axis, balance)


class RootBoundary:
    """A step of the root module's calls.

    Attributes:
        calls: how many there were; those without gradients are counted among the first alone.
    """

    def __init__(self, root: nn.Module, mesh: Mesh, cuts: Cuts) -> None:
        self._mesh = mesh
        self._cuts = cuts
        self.calls, self._in_step = 0, InStep(root, mesh)
        # What a plain tensor entered as: a forward that goes by the identity of a batch sees one object, as long as the
        # caller holds the batch. They share memory and the count of writes.
        self._entered: WeakIdKeyDictionary = WeakIdKeyDictionary()
        add_step(root, "inputs", self._enter, self._leave)

    def is_due(self, calls: int) -> bool:
        """True if one of so many next calls is one in which ranks are compared."""
        return any(is_turn(self.calls + at, self._mesh.device_type) for at in range(calls))

    def _enter(self, root: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        number, self._in_step.entered = self.calls, ()
        counts = number < FIRST or torch.is_grad_enabled()
        if _current_graph_task_id() != -1 or is_checkpoint_selective():
            counts = False  # a checkpoint's first pass and its second must call the same functions
        self.calls += counts
        checks = counts and is_turn(number, self._mesh.device_type)
        check_entering("model", lambda: tensors_in((args, kwargs)))
        balance = self._cuts.balance
        if balance is None and not checks and not kwargs and all(type(each) is DTensor for each in args):
            return None
        with DisableTorchFunction():  # nothing here is the forward's: a pipeline's dry run must not see it
            is_apart = checks and self._in_step.enter((args, kwargs), number + 1)
            if is_apart or checks and is_full(number):
                check_agreement((args, kwargs), self._mesh)
            if is_apart:
                self._in_step.check_replicas(number + 1)
            if balance is not None:
                balance.look_at(kwargs)
            with writes_counted():
                lengths = self._cuts.lengths((args, kwargs))
                args, kwargs = map_tensors((args, kwargs), lambda one: self._spread(one, lengths))
            if balance is not None:
                args, kwargs = map_tensors((args, kwargs), self._balanced)
        return args, kwargs

    def _spread(self, tensor: Tensor, lengths: Collection[int]) -> Tensor:
        is_sparse = tensor.layout is not torch.strided
        if type(tensor) is DTensor or is_sparse or tensor.requires_grad or tensor.is_inference():
            return distributed(tensor, self._mesh, self._cuts, lengths)
        made = distributed(tensor.detach(), self._mesh, self._cuts, lengths)  # no view, which would hold the tensor
        before = self._entered.get(tensor)
        with local_only():
            if before is not None and before._layout is made._layout and _place(before) == _place(made):
                forget(before)
                return before
            if made.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                self._entered[tensor] = made
        return made

    def _balanced(self, tensor: Tensor) -> Tensor:
        """A sequence that was cut in one piece per rank, by `Plan.local_batch` for one, cut as it is here."""
        axis, dim = self._mesh.axis(self._cuts.context_axis), self._cuts.sequence(tensor.ndim)
        if type(tensor) is not DTensor or dim is None or tensor._layout.states[axis] is not sharded(dim):
            return tensor
        layout = tensor._layout
        dealt = state_of(self._cuts.sequence_placement(dim, layout.shape[dim]))
        states = [dealt if at == axis else state for at, state in enumerate(layout.states)]
        return convert(tensor, layout.with_states(states), "batch (zigzag)")

    def _leave(self, root: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """A partial number (a loss) is reduced here, so that `loss.item()` never communicates."""
        with DisableTorchFunction():
            self._in_step.leave()
        if type(output) is DTensor and output._layout.shape:
            return None
        return map_tensors(output, _reduced_number)


def _place(tensor: Tensor) -> tuple:
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def spread(batch: Any, mesh: Mesh, cuts: Cuts) -> Any:
    """The tensors of a batch that all ranks hold alike, cut."""
    lengths = cuts.lengths(batch)
    return map_tensors(batch, lambda tensor: distributed(tensor, mesh, cuts, lengths))


def distributed(tensor: Tensor, mesh: Mesh, cuts: Cuts, lengths: Collection[int]) -> Tensor:
    """A plain tensor that all ranks hold alike, cut; a DTensor as it is.

    On the mesh's device: what lies elsewhere, a loader's batch, is cut first, then moved.
    """
    if type(tensor) is DTensor:
        return tensor
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        tensor = tensor.clone()  # whose writes are counted
    if tensor.layout is not torch.strided:
        return on_device(tensor, mesh)  # whole: what is sparse has no parts
    shape = tuple(tensor.shape)
    placements = cuts.placements(tensor, mesh.names, lengths)
    states = canonical_states("batch", placements, mesh, shape, replicated=INVARIANT)
    layout = layout_of(mesh, states, shape)
    made = convert_plain(tensor, mesh, layout, "batch")
    with local_only():
        local = on_device(made, mesh)
        return made if local is made else attach(local, layout)


def _reduced_number(tensor: Tensor) -> Tensor:
    if type(tensor) is not DTensor or tensor.ndim or not tensor.mesh_layout.is_partial:
        return tensor
    return convert(tensor, tensor.mesh_layout.reduced, "loss (root boundary)")


def shard_batch(plan: PlanFields, batch: Any) -> Any:
    """See `Plan.shard_batch`."""
    join()
    mesh = mesh_of(tensor_mesh(plan))
    calls = _calls_of.get(mesh, 0)
    _calls_of[mesh] = calls + 1
    if is_turn(calls, mesh.device_type) and (is_full(calls) or differ(batch, mesh)):
        check_agreement(batch, mesh, "Plan.shard_batch", "a batch to be cut is")
    return spread(batch, mesh, cuts_of(plan))


_PART_REMEDIES = [
    ("DataLoader(..., drop_last=True)", "the last batch of a stream, of which a rank has fewer rows, or none"),
    ("plan.shard_batch(batch)", "of the global batch, the same on every rank, of any size"),
    ("model(batch)", "of what is a DTensor already, or the global batch"),
]


def local_batch(plan: PlanFields, batch: Any, whole_sequences: bool = True) -> Any:
    """See `Plan.local_batch`."""
    join()
    device_mesh = tensor_mesh(plan)
    mesh = mesh_of(device_mesh)
    cuts = cuts_of(plan)
    lengths = cuts.lengths(batch)

    def part(tensor: Tensor) -> Tensor:
        placements = cuts.placements(tensor, mesh.names, lengths)
        given = placements
        if whole_sequences:
            given = [Replicate() if name == plan.context_axis else p for name, p in zip(mesh.names, placements)]
        try:
            made = from_local(tensor, device_mesh, given)
        except (ShapeError, PlacementError) as error:
            raise type(error)("Plan.local_batch", error.rule, error.operands, _PART_REMEDIES) from None
        return made if given == placements else made.redistribute(placements)

    return map_tensors(batch, part)


def local_sequence(plan: PlanFields, length: int) -> range:
    """See `Plan.local_sequence`."""
    join()
    mesh = mesh_of(tensor_mesh(plan))
    state = sharded(0) if plan.context_axis is not None else INVARIANT
    states = [state if name == plan.context_axis else INVARIANT for name in mesh.names]
    layout = layout_of(mesh, states, (length,))
    ((start, stop),) = layout.region_at(mesh.coordinate)[0] or ((0, 0),)
    return range(start, stop)


def parts(plan: PlanFields, batch: Any, model: nn.Module | None) -> Iterator[Any]:
    """See `Plan.parts`."""
    count = plan.accumulation
    parallel = getattr(model, "_vescale", None)
    pauses = parallel is not None and plan.zero < 2  # from ZeRO-2 on a rank cannot hold full gradients
    for tensor in tensors_in(batch):
        rows = tensor.shape[0] if tensor.ndim else 0
        if rows % count or not rows:
            raise PlanError(
                "Plan.parts",
                f"a tensor of {rows} rows has no {count} equal parts",
                [f"shape  {list(tensor.shape)}", f"plan   accumulation={count}"],
                [(f"a batch of {-(-max(1, rows) // count) * count} rows", f"divides by {count}")],
            )

    for at in range(count):
        part = map_tensors(batch, lambda tensor, at=at: tensor.tensor_split(count)[at])
        with parallel.sync.paused() if pauses and at < count - 1 else contextlib.nullcontext():
            yield part


def check_agreement(
    inputs: Any, mesh: Mesh, operation: str = "model", what: str = "plain tensors that enter the model are"
) -> None:
    """Raises PlainTensorError, on all ranks alike, when plain inputs differ between ranks.

    Cost: one small all-gather per mesh axis, which does not grow with the other axes.
    """
    digests: list[tuple] = []

    def digest(tensor: Tensor) -> Tensor:
        if type(tensor) is not DTensor:
            digests.append((tuple(tensor.shape), str(tensor.dtype), checksum(tensor)))
        return tensor

    map_tensors(inputs, digest)
    apart = first_apart(tuple(digests), mesh)
    if apart is None:
        return
    which = next((i for i, (a, b) in enumerate(zip(apart.first, apart.value)) if a != b), 0)
    shown = [(0, apart.first), (apart.rank, apart.value)]
    raise PlainTensorError(
        operation,
        f"plain input tensor {which} differs between ranks 0 and {apart.rank} of {mesh}: {what} the global batch, "
        "the same on every rank",
        [f"rank {rank}  {list(said[which][0]) if which < len(said) else 'absent'}" for rank, said in shown],
        [
            ("model(plan.local_batch(batch))", "when every rank loads its own part of the batch"),
            ("seed the loader alike on all ranks", "when every rank loads the global batch"),
        ],
    )


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bytes; 0 for a meta tensor, which has none."""
    if tensor.is_meta:
        return 0
    if is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__module__.split('.')[0]}'s {type(tensor).__name__}"
        raise PlainTensorError(
            "model",
            f"{kind} entered the model: it takes plain tensors, the global batch, and veScale's DTensors",
            [f"shape  {list(tensor.shape)}"],
            [("tensor.full_tensor()", "plain"), ("vescale_dtensor.from_torch(tensor)", "of torch's DTensor, no copy")],
        )
    parts = [tensor]
    if tensor.layout is not torch.strided:
        sparse = tensor.detach().to_sparse_coo().coalesce()
        parts = [sparse.indices(), sparse.values()]
    total = 0
    for part in parts:
        total = zlib.crc32(bits_of(part).cpu().numpy(), total)
    return total
