"""Checkpointing and regathering by plan: the same gradients to the bit, less memory, nothing visible."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import GradientError, Replicate, Shard, comm_trace
from vescale_plans import Boundary, Plan, parallelize
from vescale_testkit import LiveBytes, in_turns, raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, BATCH, POSITIONS = 16, 4, 8
MESH = {"dp": 2, "tp": 2}


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x, *, scale=1.0):
        q, k, v = (layer(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(x.shape)) * scale


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x), scale=0.5)
        return x + self.dropout(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x):
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SHARDED, WHOLE = {"tp": Shard(1)}, {"tp": Replicate()}
PLAN = Plan(
    mesh=MESH,
    parameters={
        **{f"*.attention.{name}.*": {"tp": Shard(0)} for name in "qkv"},
        "*.attention.o.weight": {"tp": Shard(1)},
        "*.mlp.0.*": {"tp": Shard(0)},
        "*.mlp.2.weight": {"tp": Shard(1)},
        "*": {},
    },
    boundaries={
        "inward": Boundary(output=SHARDED),
        "*.attention": Boundary(input=WHOLE, output=SHARDED),
        "*.mlp": Boundary(input=WHOLE, output=SHARDED),
    },
)


def ran(plan, dropout=0.0, steps=2):
    """Losses, gradients of this rank, bytes alive after the forward, and the last step's trace."""
    torch.manual_seed(0)
    model, _ = parallelize(plan, Model(dropout))
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        model.zero_grad()
        x = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(step))
        with LiveBytes(model.parameters()) as live, comm_trace(model) as trace:
            loss = model(x)
            alive = live.total
            loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad.to_local() for n, p in model.named_parameters()}, alive, trace


WAYS = {
    "checkpoint": {"checkpointing": {"layers.*": True}},
    "checkpoint some": {"checkpointing": {"layers.1": False, "layers.*": True}},
    "checkpoint inner": {"checkpointing": {"*.mlp": True, "*.attention": True}},
    "regather": {"regather": {"layers": True}},
    "regather some": {"regather": {"*.attention": False, "layers.*": True}},
    "both": {"checkpointing": {"layers.0": True, "layers.1.mlp": True}, "regather": {"layers": True}},
}


@in_turns(3)
@pytest.mark.parametrize(("dropout", "zero"), [(0.0, 0), (0.3, 3)])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same_to_the_bit(way, dropout, zero):
    def run():
        plan = PLAN.override(zero=zero)
        losses, gradients, alive, _ = ran(plan, dropout)
        less = ran(plan.override(**WAYS[way]), dropout)
        assert less[0] == losses
        for name, gradient in gradients.items():
            assert torch.equal(less[1][name], gradient), name
        return alive, less[2]

    for alive, less in run_ranks(4, run):
        assert less < alive


SHARD = BATCH // MESH["dp"] * POSITIONS // MESH["tp"] * WIDTH * 4  # bytes of the stream's part on a rank


def test_regathering_keeps_a_shard_in_place_of_the_whole():
    def run():
        return ran(PLAN)[2:], ran(PLAN.override(regather={"layers": True}))[2:]

    for (alive, trace), (less, again) in run_ranks(4, run):
        # Of each layer's two gathers a shard is kept in place of the whole.
        assert abs(alive - less - 3 * 2 * (MESH["tp"] - 1) * SHARD) < 64  # numbers that autograd saves as tensors
        assert again.count(function="regather") == 6  # q, k and v share one
        assert again.count() == trace.count() + 6


def test_a_checkpoint_keeps_its_input_alone():
    def run():
        return ran(PLAN)[2], ran(PLAN.override(checkpointing={"layers": True}))[2]

    for _, less in run_ranks(4, run):
        assert less <= 8 * SHARD + 64  # the batch, what `inward` gave, and the stream between layers; 60 without


def test_nothing_is_visible():
    def run():
        one = Model()
        plan = PLAN.override(checkpointing={"layers.0": True}, regather={"layers": True})
        many, _ = parallelize(plan, copy.deepcopy(one))
        assert str(many) == str(one)
        assert list(many.state_dict()) == list(one.state_dict())
        assert [n for n, _ in many.named_modules()] == [n for n, _ in one.named_modules()]
        assert all("forward" not in module.__dict__ for module in many.modules())
        assert type(many.layers[0]) is Block
        with torch.no_grad():
            assert many(torch.zeros(2, 2, WIDTH)).ndim == 0

    run_ranks(4, run)


def test_an_error_inside_leaves_nothing_behind():
    def run():
        plan = PLAN.override(checkpointing={"layers.0": True}, regather={"layers": True})
        torch.manual_seed(0)
        many, _ = parallelize(plan, Model())
        for layer, failing in ((0, True), (1, True), (0, False)):
            hook = many.layers[layer].mlp[1].register_forward_pre_hook(functools.partial(_fail, failing))
            try:
                loss = many(torch.ones(4, POSITIONS, WIDTH))
                assert not failing
            except KeyError:
                assert failing
            hook.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        loss.backward()

    run_ranks(4, run)


def _fail(failing, *_):
    if failing:
        raise KeyError("on purpose")


def test_a_shard_that_was_written_to():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.norm(x) + 0
            z = self.up(y).sum()
            return z + y.mul_(2).sum()

    def run():
        plan = Plan(
            {"tp": 4},
            {"up.*": {"tp": Shard(0)}, "*": {}},
            {"norm": Boundary(input=SHARDED), "up": Boundary(input=WHOLE)},
            regather={"up": True},
        )
        model, _ = parallelize(plan, Writes())
        model(torch.ones(2, 8, WIDTH)).backward()

    assert raises_on_all(4, GradientError, run) == (
        "backward: a shard that is to be gathered again was written in place after it was gathered\n"
        "  local shape  [2, 2, 16]\n"
        "fix: x = x + y  # in place of x += y"
    )
