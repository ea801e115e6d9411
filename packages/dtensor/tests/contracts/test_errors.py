"""Bad input raises one of our own errors, with a remedy, the same text on every rank, and nobody hangs.

The texts are in snapshots/errors.txt; VESCALE_UPDATE_SNAPSHOTS=1 writes them anew. Those that
docs/errors.md quotes must be among them.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import vescale_dtensor
from vescale_dtensor import (
    CommunicationError,
    DTensor,
    GradientError,
    ImplicitCommunicationError,
    InterleavedShard,
    InternalError,
    MeshError,
    OperatorError,
    Partial,
    PlacementError,
    PlainTensorError,
    RaggedShard,
    Replicate,
    ReproducibleError,
    ShapeError,
    Shard,
    VescaleError,
    ViewError,
    distribute_tensor,
    local_map,
    reproducible,
    strict,
    to_torch,
)
from vescale_dtensor._context import mixing
from vescale_dtensor._layouts.mesh import mesh_of as engine_mesh
from vescale_testkit import RankError, mesh_of, raises_on_all, run_ranks

HERE = Path(__file__).parents[1]
SNAPSHOTS = HERE / "snapshots" / "errors.txt"
R = Replicate()


def mesh() -> DeviceMesh:
    return mesh_of(2, 2, names=("dp", "tp"))


ROWS = (Shard(0), R)


def sharded(*shape, placements=ROWS, grad=False) -> DTensor:
    numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return distribute_tensor(numbers.requires_grad_(grad), mesh(), placements)


def other_mesh_add():
    other = mesh_of(4, names=("all",))
    return sharded(4, 6) + distribute_tensor(torch.ones(4, 6), other, [Shard(0)])


def strict_view():
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh_of(4, names=("tp",)), [Shard(0)])
    with strict():
        return x.view(2, 2, 6)


def strict_relu():
    with strict():
        product = sharded(4, 6, placements=(R, Shard(1))) @ torch.ones(6, 2)
        product.relu()


def write_to_copy():
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh_of(4, names=("tp",)), [Shard(0)])
    y = x.view(2, 2, 6)
    y.add_(1)


def write_to_base():
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh_of(4, names=("tp",)), [Shard(0)])
    y = x.view(2, 2, 6)
    x.add_(1)
    return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def plain_meets():
    x = sharded(4, 6, grad=True)
    return sharded(2, 6, placements=(R, R)) + x.to_local().sin()


def torchs_own():
    from torch.distributed.tensor import distribute_tensor as torchs

    return torchs(torch.ones(4, 6), mesh(), ROWS)


def quantised():
    """A weight as quantisers make it: a tensor around others, which computes by functions of its own."""

    class Int8(torch.Tensor):
        __module__ = "quantiser"

        @staticmethod
        def __new__(cls, data):
            return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

        def __init__(self, data):
            self.data8 = data

        def __tensor_flatten__(self):
            return ["data8"], None

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    return Int8(torch.ones(3, 6, dtype=torch.int8))


def gradient_of_an_edge():
    y = sharded(4, 6, grad=True).sin()
    torch.autograd.grad(y.sum(), torch.autograd.graph.get_gradient_edge(y))


def local_of(*sizes):
    return torch.zeros(sizes[dist.get_rank()], 3)


class Reversed(torch.nn.Module):
    def forward(self, x):
        return x.flip(1)


def positions_mixed():
    """As within the forward of a model under a plan with a context axis."""
    model = torch.nn.ModuleDict({"mixer": Reversed()})
    mixing.enter(engine_mesh(mesh()), 1, model)
    try:
        model.mixer(sharded(2, 8, 4, placements=(R, Shard(1))))
    finally:
        mixing.leave(model)


# name -> (error, what raises it). Every text is the same on all ranks.
CASES = {
    "one placement for two axes": (MeshError, lambda: distribute_tensor(torch.ones(4), mesh(), [Shard(0)])),
    "an axis that the mesh has not": (MeshError, lambda: engine_mesh(mesh()).axis("pp")),
    "two meshes in one call": (MeshError, other_mesh_add),
    "ranks of the mesh out of order": (
        MeshError,
        lambda: distribute_tensor(
            torch.ones(4), DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b")), [Shard(0), R]
        ).full_tensor(),
    ),
    "a dim that the tensor has not": (PlacementError, lambda: distribute_tensor(torch.ones(4), mesh(), [R, Shard(1)])),
    "a dim of a scalar": (PlacementError, lambda: distribute_tensor(torch.tensor(1.0), mesh(), [R, Shard(0)])),
    "redistribute to a missing dim": (PlacementError, lambda: sharded(4, 6).redistribute([R, Shard(2)])),
    "positions mixed": (OperatorError, positions_mixed),
    "a mask of a wrong size": (
        ShapeError,
        lambda: F.scaled_dot_product_attention(*[sharded(2, 3, 8, 4, placements=(R, Shard(2)))] * 3, torch.ones(4, 8)),
    ),
    "groups that do not divide": (
        PlacementError, lambda: distribute_tensor(torch.ones(8, 2), mesh(), [R, InterleavedShard(0, 3)]),
    ),
    "units for another axis size": (
        PlacementError, lambda: distribute_tensor(torch.ones(8), mesh(), [R, RaggedShard((0,), (1, 2, 1))]),
    ),
    "a negative unit": (
        PlacementError, lambda: distribute_tensor(torch.ones(8), mesh(), [R, RaggedShard((0,), (3, -1))]),
    ),
    "units that do not divide": (
        PlacementError, lambda: distribute_tensor(torch.ones(8), mesh(), [R, RaggedShard((0,), (2, 1))]),
    ),
    "a flat shard with too few elements": (
        PlacementError, lambda: distribute_tensor(torch.ones(8, 2), mesh(), [R, RaggedShard((0, 1), (2, 1))]),
    ),
    "a ragged shard of some dims": (
        PlacementError, lambda: distribute_tensor(torch.ones(8, 2, 3), mesh(), [R, RaggedShard((0, 1), (8, 8))]),
    ),
    "two flat shards": (
        PlacementError, lambda: distribute_tensor(torch.ones(8, 2), mesh(), [RaggedShard((0, 1), (8, 8))] * 2),
    ),
    "not a placement": (PlacementError, lambda: distribute_tensor(torch.ones(8), mesh(), [R, "shard"])),
    "a maximum of a whole tensor": (
        PlacementError, lambda: distribute_tensor(torch.ones(8), mesh(), [R, Partial("max")]),
    ),
    "redistribute to a maximum": (PlacementError, lambda: sharded(4, 6).redistribute([R, Partial("max")])),
    "the constructor": (PlacementError, lambda: DTensor(torch.ones(4))),
    "torch has no such placement": (
        PlacementError, lambda: to_torch(sharded(4, 6, placements=(R, InterleavedShard(0, 2)))),
    ),
    "local_map without a mesh": (PlacementError, lambda: local_map(torch.sin, [R, R])(torch.ones(2))),
    "local dims differ": (
        ShapeError, lambda: DTensor.from_local(torch.zeros([2] * (1 + dist.get_rank() // 2)), mesh(), [Shard(0), R]),
    ),
    "replicas of other sizes": (ShapeError, lambda: DTensor.from_local(local_of(2, 2, 2, 3), mesh(), [Shard(0), R])),
    "a whole dim of other sizes": (ShapeError, lambda: DTensor.from_local(local_of(2, 2, 2, 3), mesh(), [R, Shard(1)])),
    "shards unlike torch.chunk's": (
        ShapeError, lambda: DTensor.from_local(local_of(1, 1, 3, 3), mesh(), [Shard(0), R]),
    ),
    "a shape that gives other shards": (
        ShapeError, lambda: DTensor.from_local(torch.zeros(2, 3), mesh(), [Shard(0), R], shape=(6, 3)),
    ),
    "contracted dims differ": (
        ShapeError, lambda: sharded(4, 6, placements=(R, Shard(1))) @ sharded(4, 6, placements=(R, Shard(0))),
    ),
    "sizes that hold another number of elements": (ShapeError, lambda: sharded(4, 6).view(5, 5)),
    "a view that moves its shards, under strict": (ImplicitCommunicationError, strict_view),
    "a partial sum that must be reduced, under strict": (ImplicitCommunicationError, strict_relu),
    "a write to a copied view": (ViewError, write_to_copy),
    "a write to the base of a copied view": (ViewError, write_to_base),
    "a plain tensor with a graph": (PlainTensorError, plain_meets),
    "torch's own DTensor": (PlainTensorError, lambda: sharded(4, 6) + torchs_own()),
    "a quantised weight": (PlainTensorError, lambda: F.linear(sharded(4, 6), quantised())),
    "a hook on a node of the graph": (
        GradientError, lambda: sharded(4, 6, grad=True).sin().grad_fn.register_hook(print),
    ),
    "an edge to a result": (GradientError, gradient_of_an_edge),
    "a method of a group": (OperatorError, lambda: dist.group.WORLD.allreduce([sharded(4, 6)])),
    "an unregistered autograd Function": (GradientError, lambda: Double.apply(sharded(4, 6, grad=True)).sin()),
    "a gradient of another shape": (GradientError, lambda: sharded(4, 6, grad=True).sin().backward(torch.ones(2, 6))),
    "an assigned gradient of another shape": (
        GradientError, lambda: setattr(sharded(4, 6, grad=True), "grad", torch.ones(3)),
    ),
    "backward of many elements": (GradientError, lambda: sharded(4, 6, grad=True).sin().backward()),
    "a maximum that needs a gradient": (
        GradientError,
        lambda: DTensor.from_local(torch.ones(2, requires_grad=True), mesh(), [R, Partial("max")], shape=(2,)),
    ),
    "pickling a tensor": (OperatorError, lambda: pickle.dumps(sharded(4, 6))),
    "pickling a layout": (PlacementError, lambda: pickle.dumps(sharded(4, 6).mesh_layout)),
    "deepcopy of a computed tensor": (OperatorError, lambda: copy.deepcopy(sharded(4, 6, grad=True).sin())),
    "a transform of torch.func": (OperatorError, lambda: torch.func.grad(torch.sum)(sharded(4, 6))),
    "splits that are no power of two": (ReproducibleError, lambda: reproducible(splits={"batch": 6})),
}  # fmt: skip


def snapshots() -> dict[str, str]:
    parts = re.split(r"^=== (.*) ===\n", SNAPSHOTS.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2])}


@pytest.fixture(scope="module")
def updated():
    """Collects the texts when they are to be written anew."""
    found: dict[str, str] = {}
    yield found
    if os.environ.get("VESCALE_UPDATE_SNAPSHOTS") and set(found) == set(CASES):
        SNAPSHOTS.parent.mkdir(exist_ok=True)
        SNAPSHOTS.write_text("".join(f"=== {name} ===\n{found[name]}\n\n" for name in CASES))


@pytest.mark.parametrize("name", CASES)
def test_the_error_and_its_text(name, updated) -> None:
    kind, function = CASES[name]
    message = raises_on_all(4, kind, function)
    updated[name] = message
    head = message.splitlines()[0]
    assert re.match(r"[\w.]+: ", head), "begins with the operation"
    assert "fix: " in message or "fix one of: " in message, "names a remedy"
    if not os.environ.get("VESCALE_UPDATE_SNAPSHOTS"):
        assert message == snapshots()[name]


def test_no_snapshot_is_left_over() -> None:
    assert list(snapshots()) == list(CASES)


# --- the classes ------------------------------------------------------------------------


def test_every_error_of_the_user_is_a_vescale_error_and_no_type_error() -> None:
    """Python's reflected operators swallow TypeError and NotImplementedError."""
    kinds = [k for k in vars(vescale_dtensor).values() if isinstance(k, type) and issubclass(k, VescaleError)]
    assert len(kinds) == 11
    for kind in kinds:
        assert not issubclass(kind, (TypeError, NotImplementedError))
        error = kind("view", "the rule", ["x  f32[2]"], [("x.clone()", "a copy"), ("y", "")])
        assert str(error) == "view: the rule\n  x  f32[2]\nfix one of: x.clone()  # a copy\n            y"
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.remedies) == (kind, str(error), error.remedies)
    assert str(VescaleError("add", "no")) == "add: no"
    assert str(VescaleError("add", "no", (), [("x", "c")])) == "add: no\nfix: x  # c"


def test_our_own_mistakes_ask_for_a_report() -> None:
    assert "please report" in str(InternalError("odd", state=3)) and "state = 3" in str(InternalError("odd", state=3))
    assert not issubclass(InternalError, VescaleError)


def test_a_failing_local_function_keeps_its_own_error_and_notes_the_operands() -> None:
    def run() -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            torch.nn.functional.gelu(sharded(4, 6), approximate="nonsense")
        return getattr(caught.value, "__notes__", [])

    for notes in run_ranks(4, run):
        assert any("f32[4, 6]" in note for note in notes)


# --- no hang ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "elements"),
    [("all_reduce", 8), ("all_reduce", 40_000), ("all_gather", 8), ("reduce_scatter", 8), ("all_to_all", 8)],
)
def test_a_rank_that_dies_in_a_collective_is_an_error_on_the_others(kind, elements) -> None:
    def run() -> None:
        from vescale_dtensor._layouts.state import INVARIANT, PARTIAL, REPLICATE
        from vescale_dtensor._layouts.state import sharded as cut

        ends = {
            "all_reduce": (PARTIAL, INVARIANT), "all_gather": (cut(0), REPLICATE), "reduce_scatter": (PARTIAL, cut(0)),
            "all_to_all": (cut(0), cut(1)),
        }[kind]  # fmt: skip
        from vescale_dtensor._conversions.convert import convert
        from vescale_dtensor._layouts.layout import layout_of
        from vescale_dtensor._tensor.tensor import attach

        m = engine_mesh(mesh_of(4, names=("tp",)))
        source, target = (layout_of(m, (state,), (8, elements // 8)) for state in ends)
        x = attach(torch.ones(source.local_shape), source)
        convert(x, target, "warm-up")
        if dist.get_rank() == 2:
            time.sleep(0.1)
            os._exit(7)
        convert(x, target, "my function")

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(4, run)
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert "failed first on rank 2 of 4" in text and "exit code 7" in text
    raised = re.findall(r"rank \d raised CommunicationError[^\n]*", text)
    assert raised, text
    for line in raised:
        assert f"{kind}: the collective over axis 'tp' of (tp=4) failed, asked for by my function (forward)" in line


def test_a_communication_error_says_where_to_look() -> None:
    from vescale_dtensor._communication.flight_recorder import RankGroup, note

    noted = note("all_gather", RankGroup(("tp",), (0, 1, 2, 3), mesh="(dp=2, tp=4)"), 0)
    error = noted.failed(RuntimeError("Connection closed by peer\nmore"))
    assert isinstance(error, CommunicationError)
    assert str(error).splitlines()[0].startswith("all_gather: the collective over axis 'tp' of (dp=2, tp=4) failed")
    assert "Connection closed by peer" in str(error) and "failed first" in str(error) and "more" not in str(error)


# --- docs/errors.md -----------------------------------------------------------------------


def document() -> str:
    for folder in HERE.parents:
        if (folder / "docs" / "errors.md").exists():
            return (folder / "docs" / "errors.md").read_text().partition("\n# Above the core\n")[0]
    raise AssertionError("docs/errors.md is not among the test's data")


def test_the_document_has_every_class_and_quotes_what_is_raised() -> None:
    text = document()
    raised = set(snapshots().values())
    quoted = re.findall(r"^```text\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)
    for message in quoted:
        assert message in raised, f"docs/errors.md quotes a text that is raised nowhere:\n{message}"
    sections = set(re.findall(r"^## (\w+)$", text, flags=re.MULTILINE))
    kinds = {name for name, k in vars(vescale_dtensor).items() if isinstance(k, type) and issubclass(k, RuntimeError)}
    assert kinds - {"VescaleError"} == sections
    assert len(quoted) >= len(sections) - 2  # CommunicationError and InternalError differ by their occasion
