"""Deferred initialisation: what is made later, whole or sharded, is bitwise what would have been made at once."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import vescale_rng
from vescale_dtensor import InterleavedShard, OperatorError, PlacementError, RaggedShard, Replicate, Shard
from vescale_rng._deferred import materialize
from vescale_testkit import fake_world, mesh_of, run_ranks
from vescale_testkit.oracle import shard_of

R, S = Replicate(), Shard


class Zoo(nn.Module):
    """Layers, and ways in which models make their tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 20)
        self.embedding = nn.Embedding(24, 8, padding_idx=3)
        self.lstm = nn.LSTM(4, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # copies
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv2d(4, 8, 3)
        self.scaled = nn.Parameter(torch.randn(8, 12) * 0.02 + torch.tensor(1.5))
        self.wide = nn.Parameter(torch.rand(8, 4, dtype=torch.float64))
        self.from_values = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * torch.ones(2, 2))
        self.integers = nn.Buffer(torch.randint(3, 9, (8, 4)))
        self.mask = nn.Buffer(torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)
        self.angles = nn.Buffer(1 / 10000 ** (torch.arange(0, 16, 2) / 16))
        self.order = torch.randperm(7)
        self.lists = [torch.ones(3), {"two": torch.full((2,), 2)}]
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]  # stochastic depth
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 8)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(8, 4), 0.3))
        self.cut_off = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 8), 0, 1, -1, 1))
        self.rarely_inside = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 8), 0, 1, 1.5, 1.6))
        self.merged = nn.Parameter(torch.empty(12, 4))
        for part in self.merged.chunk(3):
            nn.init.xavier_uniform_(part)
        self.copied = copy.deepcopy(self.linear)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(4).normal_(), requires_grad=False)
        self.frozen.note = "kept"
        with torch.no_grad():
            self.linear.weight[2] = 1
            self.linear.weight[:, 1:3].zero_()
            self.linear.bias[-1] = 7
            self.linear.weight.data.mul_(2)
            self.conv.weight.data = torch.empty(8, 4, 3, 3).normal_(0, 0.1, generator=torch.Generator().manual_seed(9))
        self.to(torch.bfloat16)
        self.conv.double()


def built(deferred):
    torch.manual_seed(1)
    torch.empty(3).normal_()  # one waits in the generator
    if deferred:
        with vescale_rng.deferred_init():
            model = Zoo()
    else:
        model = Zoo()
    return model, torch.get_rng_state()


def named(model):
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return found | {"order": model.order, "lists": model.lists[0], "two": model.lists[1]["two"]}


def test_whole():
    plain, state = built(False)
    model, after = built(True)
    assert torch.equal(after, state) and model.rates == plain.rates
    assert all(vescale_rng.is_deferred(parameter) for parameter in model.parameters())
    assert model.frozen.shape == (4,) and model.frozen.device.type == "cpu" and "deferred" in repr(model.frozen)
    assert vescale_rng.materialize(model) is model
    assert torch.equal(torch.get_rng_state(), state)
    for name, wanted in named(plain).items():
        found = named(model)[name]
        assert type(found) is type(wanted) and found.requires_grad == wanted.requires_grad, name
        assert found.dtype == wanted.dtype and found.stride() == wanted.stride() and torch.equal(found, wanted), name
    assert model.head.weight is model.embedding.weight and model.frozen.note == "kept"


LAYOUTS = [(S(0), R), (R, S(0)), (S(0), S(0)), (R, R), (S(0), S(1)), (S(1), S(0)), (R, S(1))]
LAYOUTS += [(InterleavedShard(0, 2), R)]


def compare_shards():
    mesh = mesh_of(2, 2)
    plain, state = built(False)
    model, _ = built(True)
    for name, wanted in named(plain).items():
        for placements in LAYOUTS:
            try:
                found = vescale_rng.distribute(named(model)[name], mesh, placements)
            except PlacementError:  # a dim that it does not have, or that does not divide
                continue
            layout = found.mesh_layout
            assert found.requires_grad == wanted.requires_grad and torch.equal(torch.get_rng_state(), state)
            mine = shard_of(wanted.detach(), layout, layout.mesh.coordinate)
            assert found.dtype == wanted.dtype and torch.equal(found.detach().to_local(), mine), (name, placements)


def test_sharded():
    run_ranks(4, compare_shards)


INITS = {
    "normal": lambda x: nn.init.normal_(x, 0, 0.02),
    "kaiming, then normal": lambda x: nn.init.kaiming_uniform_(x).normal_(0, 0.02),
    "uniform in bf16": lambda x: x.to(torch.bfloat16).uniform_(-1, 1),
    "scaled": lambda x: torch.randn_like(x) * 0.02 + 1,
    "padding row": lambda x: (x.normal_(), x[-1].zero_(), x)[2],
    "rows": lambda x: (x.normal_(), x[5:300].fill_(2), x)[2],
    "cast and chained": lambda x: x.exponential_().clamp_(0, 1).double().sub(0.5).abs_(),
    "ones": lambda x: torch.ones_like(x),
}


def compare_without_whole(name, placements):
    """A shard is all that is made: nobody may make the whole."""
    mesh = mesh_of(2, 2)
    init = INITS[name]
    torch.manual_seed(2)
    wanted = init(torch.empty(643, 1000))
    torch.manual_seed(2)
    with vescale_rng.deferred_init():
        x = init(torch.empty(643, 1000))
    materialize.value_of = None
    try:
        found = vescale_rng.distribute(x, mesh, placements)
    finally:
        materialize.value_of = vescale_rng._deferred.deferred.value_of
    layout = found.mesh_layout
    assert torch.equal(found.to_local(), shard_of(wanted, layout, layout.mesh.coordinate))


@pytest.mark.parametrize("name", INITS)
def test_only_the_shard_is_made(name):
    for placements in ((S(0), S(1)), (S(0), S(0)), (R, S(1)), (RaggedShard((1,), (1, 4)), S(0))):
        run_ranks(4, compare_without_whole, name, placements)


def test_a_model_larger_than_memory():
    """2^42 elements are 16 TiB; one rank of 2^20 has 16 MiB of them."""
    with fake_world(1 << 20):
        mesh = mesh_of(1 << 20)
        with vescale_rng.deferred_init():
            weight = nn.Parameter(torch.empty(1 << 22, 1 << 20))
            state = torch.get_rng_state()
            nn.init.normal_(weight)
        assert not torch.equal(torch.get_rng_state(), state)
        shard = vescale_rng.distribute(weight, mesh, (S(0),))
        torch.set_rng_state(state)
        assert torch.equal(shard.detach().to_local(), torch.empty(4, 1 << 20).normal_())


OPS = {
    "mul": lambda x, y: x * y,
    "mul_": lambda x, y: x.mul_(0.5),
    "normal_": lambda x, y: x.normal_(),
    "zero a view": lambda x, y: (x[1].zero_(), x)[1],
    "draw into a view": lambda x, y: (x.view(-1)[3:17].uniform_(), x)[1],
    "copy": lambda x, y: x.copy_(y),
    "copy a row": lambda x, y: (x[0].copy_(y[1]), x)[1],
    "clone": lambda x, y: x.clone(),
    "transposed": lambda x, y: x.t().contiguous().view(4, 5),
    "swapped in place": lambda x, y: x.t_().reshape(4, 5),
    "read": lambda x, y: x + y.sum().item(),
    "random choice": lambda x, y: x.add_(torch.bernoulli(torch.sigmoid(y))),
    "fresh": lambda x, y: torch.rand(4, 5),
    "uncontiguous": lambda x, y: (x[:, ::2].normal_(), x)[1],
}


@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.booleans()), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_program(steps):
    """Values are those of the time at which they were read, whatever was written later."""

    def run():
        x, y = torch.zeros(4, 5), torch.randn(4, 5)
        seen = []
        for name, swap in steps:
            x = OPS[name](x, y)
            seen.append(x.clone())
            if swap:
                x, y = y, x
        return [*seen, x, y]

    torch.manual_seed(3)
    wanted = run()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with vescale_rng.deferred_init():
        found = run()
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(found, wanted):
        assert torch.equal(vescale_rng.materialize(one), other)


def test_what_was_recorded_tells_ranks_apart():
    def number(seed, scale):
        torch.manual_seed(seed)
        with vescale_rng.deferred_init():
            return vescale_rng.recorded(torch.randn(4, 5) * scale + torch.tensor(scale))

    assert number(1, 2) == number(1, 2)
    assert len({number(1, 2), number(2, 2), number(1, 3)}) == 3


def test_what_cannot_be():
    with vescale_rng.deferred_init():
        x = torch.zeros(3)
        with pytest.raises(OperatorError, match="resize_: the storage of a deferred tensor"):
            x.resize_(5)
        assert torch.empty(2, device="meta").is_meta
    with pytest.raises(OperatorError, match="pickle: a deferred tensor has no values"):
        pickle.dumps(x)
    with pytest.raises(RuntimeError, match="size"):
        x + torch.ones(2)  # torch's own complaint
    assert x.tolist() == [0, 0, 0] and x.numpy().sum() == 0 and x.sum().item() == 0
