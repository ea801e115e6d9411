"""Values come back bit for bit, under any mesh: tensors, optimizer states, plain values."""

import random
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from vescale_checkpoint import load, reshard, save
from vescale_checkpoint.io._write import Pack
from vescale_dtensor import DTensor, InterleavedShard, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks, slice_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def whole_of(shape, dtype, seed):
    """Random bits of any dtype: NaN payloads and subnormal numbers included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = prod(shape) * dtype.itemsize
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


# Name -> (shape, dtype, placements for a mesh of one, two axes); uneven, nested, interleaved, flat, empty, scalar.
def tensors(mesh, how):
    rng = random.Random(how)
    shapes = [(7, 5), (12,), (3, 4, 6), (6, 8), (1,), (), (0, 3), (64, 33), (2, 3)]
    found = {}
    for i, shape in enumerate(shapes):
        placements = [placement(rng, shape, groups=not axis) for axis in range(mesh.ndim)]
        if mesh.ndim > 1 and len(shape) > 1 and i % 3 == how % 3:
            placements = [Replicate()] * (mesh.ndim - 1) + [flat(rng, shape, mesh.mesh.shape[-1])]
        dtype = DTYPES[i % len(DTYPES)]
        found[f"t{i}"] = distribute_tensor(whole_of(shape, dtype, i), mesh, placements)
    return found


def placement(rng, shape, groups):
    choices = [Replicate()]
    for dim, length in enumerate(shape):
        choices.append(Shard(dim))
        if groups and length % 3 == 0 and length:
            choices.append(InterleavedShard(dim, 3))
    return rng.choice(choices)


def flat(rng, shape, size):
    """Contiguous uneven parts of the flattened tensor, some of them empty."""
    count, parts = prod(shape), []
    for _ in range(size - 1):
        parts.append(rng.randint(0, count - sum(parts)))
    return RaggedShard(tuple(range(len(shape))), (*parts, count - sum(parts)))


class Elsewhere(torch.Tensor):
    device = torch.device("cuda", 0)


def test_packed_tensors_of_two_devices_in_turn():
    values = [torch.randn(2, 3), torch.tensor(1.0), torch.randn(4), torch.tensor(2.0)]
    tensors = [value.as_subclass(Elsewhere) if value.dim() else value for value in values]
    assert torch.equal(Pack(tensors, [24, 4, 16, 4]).joined(), torch.cat([value.view(-1) for value in values]))


def test_small_tensors_of_several_kinds(tmp_path):
    """Packed into one copy: strided ones, lazily conjugated ones, ones that need a gradient."""
    made = {
        "step": torch.tensor(3.0),
        "weight": torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "negated": torch.view_as_complex(torch.randn(5, 2)).conj().imag,
        "conjugated": torch.view_as_complex(torch.randn(5, 2)).conj(),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }
    assert made["negated"].is_neg() and made["conjugated"].is_conj()
    for asynchronous in (False, True):
        path = save(tmp_path / str(asynchronous), {"model": made}, asynchronous=asynchronous).wait()
        there = {name: torch.zeros_like(tensor.detach().resolve_conj()) for name, tensor in made.items()}
        there["strided"] = torch.zeros(8, 3)[::2]
        there["weight"] = torch.nn.Parameter(torch.zeros(2, 3))
        load(path, {"model": there})
        assert all(torch.equal(there[name], made[name].detach()) for name in made), there
        with safe_open(next(Path(path).glob("*.safetensors")), "pt") as file:
            assert torch.equal(file.get_tensor("model.strided"), made["strided"])


class Copying:
    """Copies what it is given, at once."""

    def __init__(self, local):
        self.tensor = DTensor.from_local(local, mesh_of(2), [Shard(0)], shape=(16, 5))
        self.given = None

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.given = state["tensor"].to_local().clone()


def test_objects_are_handed_strided_tensors_when_they_are_filled(tmp_path):
    def run():
        made = Copying(torch.arange(40.0).view(5, 8).t() + dist.get_rank())
        save(tmp_path, {"object": made})
        there = Copying(torch.zeros(5, 8).t())
        load(tmp_path, {"object": there})
        assert torch.equal(there.given, made.tensor.to_local())

    run_ranks(2, run)


def test_what_is_kept_from_save_to_save(tmp_path):
    """Another step, other values, other names, then the first structure again: each checkpoint says what it holds."""

    def run(step, names):
        mesh = mesh_of(2)
        value = torch.arange(40.0).view(4, 10) + step
        model = {name: distribute_tensor(value + i, mesh, [Shard(i % 2)]) for i, name in enumerate(names)}
        path = save(tmp_path, {"model": model, "noise": torch.full((3,), step), "step": step}).path
        return path

    def check(step, names):
        state = {"model": {name: torch.zeros(4, 10) for name in names}, "noise": torch.zeros(3, dtype=torch.int64)}
        report = load(tmp_path, state, step=step, extra="ignore")
        assert not report.missing and torch.equal(state["noise"], torch.full((3,), step))
        for i, name in enumerate(names):
            assert torch.equal(state["model"][name], torch.arange(40.0).view(4, 10) + step + i), name

    for step, names in [(1, "ab"), (9, "ab"), (10, "ba"), (10**9, "ab"), (11, "abc"), (12, "d"), (13, "ab")]:
        run_ranks(2, run, step, names)
        check(step, names)


def save_under(path, sizes, how):
    state = {"model": tensors(mesh_of(*sizes), how), "step": 3}
    return save(path, state).path


def load_under(path, sizes, how):
    there = tensors(mesh_of(*sizes), how)
    for tensor in there.values():
        local = tensor.to_local()
        if local.numel():
            local.view(-1).view(torch.uint8).fill_(1)
    state = {"model": there, "step": 0}
    report = load(path, state)
    assert state["step"] == 3 and not report.missing and not report.extra
    wrong = []
    for i, (name, tensor) in enumerate(there.items()):
        wanted = distribute_tensor(
            whole_of(tuple(tensor.shape), tensor.dtype, i), tensor.device_mesh, tensor.placements
        )
        if not torch.equal(bits(tensor.to_local()), bits(wanted.to_local())):
            wrong.append((name, tensor.mesh_layout, tensor.to_local(), wanted.to_local()))
    return wrong


PAIRS = [
    (saved, loaded, how)
    for saved in [(1,), (2,), (2, 2), (4,), (2, 4)]
    for loaded in [(1,), (2,), (3,), (4,), (2, 2), (8,), (2, 4)]
    for how in range(3)
]


@pytest.mark.parametrize("saved, loaded, how", slice_of(PAIRS, 7))
def test_every_mesh_change(tmp_path, saved, loaded, how):
    run_ranks(prod(saved), save_under, tmp_path, saved, how)
    for wrong in run_ranks(prod(loaded), load_under, tmp_path, loaded, how + 1):
        assert not wrong


def test_plain_values(tmp_path):
    values = {
        "a": [1, 2.5, None, True, "text"],
        "b": {"c": (1, (2, 3)), 4: "int key", (5, "x"): {"deep": float("inf")}},
        "nan": float("nan"),
        "counter": Counter({3: 1, 7: 2}),
        "bytes": b"\0\xff",
        "dtype": torch.bfloat16,
        "big": 1 << 70,
        "empty": {},
        "$odd": {"$tensor": "not one"},
    }
    save(tmp_path, {"v": values, "step": 1})
    state = {"v": None, "step": None}
    load(tmp_path, state)
    assert repr(state["v"]) == repr(values)
    assert type(state["v"]["counter"]) is Counter


class Loader:
    """An object with a state, tensors in it."""

    def __init__(self):
        self.state = {"position": 0, "order": torch.arange(3)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_objects_with_a_state(tmp_path):
    loader, generator = Loader(), torch.Generator().manual_seed(5)
    loader.state = {"position": 17, "order": torch.randperm(10), "seen": (1, 2)}
    save(tmp_path, {"loader": loader, "rng": generator.get_state(), "nested": [{"loader": loader}, 2]})
    other, rng = Loader(), torch.zeros_like(generator.get_state())
    state = {"loader": other, "rng": rng, "nested": [{"loader": Loader()}, 0]}
    load(tmp_path, state)
    assert torch.equal(other.state.pop("order"), loader.state["order"])
    assert other.state == {"position": 17, "seen": (1, 2)}
    assert torch.equal(rng, generator.get_state()) and state["nested"][1] == 2
    assert state["nested"][0]["loader"].state["position"] == 17


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def test_tied_parameters_are_stored_once(tmp_path):
    model, other = Tied(), Tied()
    path = save(tmp_path, {"model": model}).path
    report = load(tmp_path, {"model": other})
    assert torch.equal(model.head.weight, other.head.weight) and other.head.weight is other.embed.weight
    assert report.extra == report.missing == ()
    (file,) = Path(path).glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        names = set(opened.keys())
        assert "model.embed.weight" in names and "model.head.weight" not in names
        assert torch.equal(opened.get_tensor("model.embed.weight"), model.embed.weight)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers(tmp_path, make):
    def run(model, optimizer, seed):
        torch.manual_seed(seed)
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def build(lr):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        groups = [
            {"params": [model[0].weight, model[1].weight]},
            {"params": [model[0].bias, model[1].bias], "lr": 7 * lr},
        ]
        return model, make(groups, lr=lr)

    model, optimizer = build(0.01)
    run(model, optimizer, 0)
    save(tmp_path, {"model": model, "optimizer": optimizer})
    other, other_optimizer = build(0.5)
    load(tmp_path, {"model": other, "optimizer": other_optimizer})
    for m, o in ((model, optimizer), (other, other_optimizer)):
        run(m, o, 1)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
    assert [g["lr"] for g in other_optimizer.param_groups] == [0.01, 7 * 0.01]


def test_non_contiguous_and_transposed_memory(tmp_path):
    value = torch.randn(6, 4)
    save(tmp_path, {"x": value.t(), "y": value[:, 1]})
    x, y = torch.zeros(6, 4).t(), torch.zeros(6, 8)[:, 3]
    load(tmp_path, {"x": x, "y": y})
    assert torch.equal(x, value.t()) and torch.equal(y, value[:, 1])


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_before_the_first_step(tmp_path, make):
    """An optimizer without state is loaded as one: into a fresh one, and into one that has taken steps since."""

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        return {"model": model, "optimizer": make(model.parameters(), lr=0.1, **options)}

    def run(state):
        torch.manual_seed(7)
        for _ in range(3):
            state["model"](torch.randn(3, 4)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return [p.detach().clone() for p in state["model"].parameters()]

    first = build(0)
    save(tmp_path, {**first, "step": 0})
    wanted = run(first)
    fresh, used = build(1), build(2)
    run(used)
    for state in (fresh, used):
        report = load(tmp_path, {**state, "step": 1})
        assert not report.missing and not report.extra
        if make is not torch.optim.Adagrad:  # which makes its state at once
            assert not state["optimizer"].state
        assert all(torch.equal(a, b) for a, b in zip(run(state), wanted))


# --- tensors of one element, of any stride ---------------------------------------------------------------------------

LONE = {
    "column": lambda kind: torch.arange(6).to(kind).view(3, 2)[:1, 0],
    "row of a column": lambda kind: torch.arange(6).to(kind).view(3, 2)[1:2, 1:],
    "transposed": lambda kind: torch.ones(6, 1).to(kind).t()[:, 2:3],
    "expanded": lambda kind: torch.ones(1).to(kind).expand(1, 1),
    "scalar": lambda kind: torch.arange(4).to(kind)[3],
    "none": lambda kind: torch.ones(4, 3).to(kind)[:0, ::2],
    "strided": lambda kind: torch.empty(9, dtype=kind).fill_(1).as_strided((1, 1), (5, 7), 2),
    "part of a complex one": lambda kind: torch.tensor([1 + 2j]).imag,
    "negated": lambda kind: torch.tensor([1 + 2j]).conj().imag,
    "conjugated": lambda kind: torch.tensor([[3 + 4j]]).conj().t(),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_of_one_element_lie_as_they_like(tmp_path, kind, asynchronous):
    state = {name: make(kind) for name, make in LONE.items()}
    save(tmp_path, state, asynchronous=asynchronous).wait()
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(tmp_path, other)
    alike = {name: make(kind) for name, make in LONE.items()}
    for tensor in alike.values():
        tensor.zero_()
    load(tmp_path, alike)  # into memory that lies so, too
    for name, tensor in state.items():
        assert torch.equal(other[name], tensor) and torch.equal(alike[name], tensor), name
    reshard(state, other)
