"""Activations on the host by plan: the same gradients to the bit, and less memory of the device."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import GradientError, Replicate, Shard
from vescale_plans import Boundary, Plan, dry_run, parallelize
from vescale_testkit import LiveBytes, in_turns, raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans", "vescale_testkit.second")

WIDTH, BATCH, POSITIONS, LAYERS = 32, 4, 64, 4


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2)) * scale
        return x + self.dropout(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))

    def forward(self, x):
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


PLAN = Plan(
    mesh={"dp": 2, "tp": 2},
    parameters={
        "*.mlp.0.*": {"tp": Shard(0)},
        "*.mlp.2.weight": {"tp": Shard(1)},
        "*": {},
    },
    boundaries={
        "inward": Boundary(output={"tp": Shard(1)}),
        "*.mlp": Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)}),
    },
)
SEQUENCES = Plan(mesh={"cp": 2}, parameters={"*": {}}, context_axis="cp", context="ring")


def ran(plan, dropout=0.0, steps=3):
    """Losses, gradients of this rank, and the device's bytes alive after the last forward."""
    torch.manual_seed(0)
    model, optimizer = parallelize(plan, Model(dropout), lambda ps: torch.optim.SGD(ps, lr=0.1))
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(step))
        with LiveBytes(model.parameters(), "second") as live:
            loss = model(x)
            alive = live.total
        loss.backward()
        losses.append(loss.item())
        if step < steps - 1:
            optimizer.step()
    return losses, {n: p.grad.to_local().cpu() for n, p in model.named_parameters()}, alive


ALL = {"layers": True}
WAYS = {
    "all": {},
    "some": {"offload_activations": {"layers.1": False, "*.mlp": False, "layers.*": True}},
    "the model": {"offload_activations": {"*": True}},
    "checkpoints": {"checkpointing": {"layers.*": True}},
    "checkpoints inside": {"checkpointing": {"*.mlp": True}},
    "regathered": {"regather": {"layers": True}},
    "both": {"checkpointing": {"layers.0": True, "layers.1.mlp": True}, "regather": {"layers": True}},
}


@in_turns(3)
@pytest.mark.parametrize(("dropout", "zero"), [(0.0, 0), (0.3, 3)])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same_to_the_bit(way, dropout, zero):
    def run():
        plan = PLAN.override(zero=zero)
        kept = {name: value for name, value in WAYS[way].items() if name != "offload_activations"}
        losses, gradients, alive = ran(plan.override(**kept), dropout)
        less = ran(plan.override(**{"offload_activations": ALL, **WAYS[way]}), dropout)
        assert less[0] == losses
        for name, gradient in gradients.items():
            assert torch.equal(less[1][name], gradient), name
        return alive, less[2]

    for alive, less in run_ranks(4, run, device="second"):
        assert less < alive


def test_attention_over_a_cut_sequence():
    def run():
        losses, gradients, alive = ran(SEQUENCES, steps=4)
        less = ran(SEQUENCES.override(offload_activations=ALL), steps=4)
        assert less[0] == losses and all(torch.equal(less[1][n], gradient) for n, gradient in gradients.items())
        return alive, less[2]

    for alive, less in run_ranks(2, run, device="second"):
        assert less < alive


def test_of_many_blocks_two_are_on_the_device():
    """After a forward the activations of two calls are there, however many there were, and what is less than a page."""

    def run():
        global LAYERS
        found = []
        for count in (4, 8):
            LAYERS = count
            found.append([ran(PLAN.override(**fields))[2] for fields in ({}, {"offload_activations": ALL})])
        return found

    for (four, less), (eight, same) in run_ranks(4, run, device="second"):
        assert eight > 1.8 * four and abs(same - less) < 0.05 * less and 3 * same < eight


@in_turns(3)
def test_a_dry_run_counts_the_devices_memory():
    def activations(layers, **fields):
        global LAYERS
        LAYERS = layers
        found = dry_run(PLAN.override(**fields), Model(), torch.empty(BATCH, POSITIONS, WIDTH, device="meta"))
        return found.memory["activations"] + found.memory.get("gradients", 0)

    kept, less = activations(8), activations(8, offload_activations=ALL)
    assert less < 0.5 * kept and abs(activations(12, offload_activations=ALL) / less - 1) < 0.3


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x).exp()  # autograd keeps it
        torch.accelerator.synchronize()  # the second device sees a race: it may be on its way to the host
        y += 1
        return y.sum()


def test_what_is_written_before_it_left():
    def run():
        model, _ = parallelize(Plan({"dp": 2}, {"*": {}}, offload_activations={"*": True}), Outer())
        model(torch.ones(8, POSITIONS, WIDTH)).backward()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Writes()

        def forward(self, x):
            return self.inner(x)

    said = raises_on_all(2, GradientError, run, device="second")
    assert said.startswith("backward: a tensor that backward needs was written in place after it was used\n"), said


def test_backward_twice_and_copies():
    def run():
        torch.manual_seed(0)
        model, _ = parallelize(PLAN.override(offload_activations=ALL), Model())
        x = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(0))
        loss = model(x)
        loss.backward(retain_graph=True)
        once = [p.grad.to_local().clone() for p in model.parameters()]
        loss.backward()
        assert all(torch.equal(p.grad.to_local(), 2 * one) for p, one in zip(model.parameters(), once))
        other = copy.deepcopy(model)
        other.zero_grad()
        with LiveBytes(other.parameters(), "second") as live:
            loss = other(x)
            alive = live.total
        loss.backward()
        assert all(torch.equal(p.grad.to_local(), one) for p, one in zip(other.parameters(), once))
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(x).to_local(), loss.detach().to_local())
        return alive, ran(PLAN, steps=1)[2]

    for less, alive in run_ranks(4, run, device="second"):
        assert less < alive


def two_losses(use):
    """Of two forwards, to `use`: it has the second's backward ask for the first's activations, too."""
    torch.manual_seed(0)
    plan = Plan({"dp": 2}, {"*": {}}, offload_activations=ALL)
    model, _ = parallelize(plan, Model())
    x = torch.randn(BATCH, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(0)).to("second")
    use(model, x)
    torch.accelerator.synchronize()
    return [p.grad.to_local().cpu() for p in model.parameters()]


def on_one_stream(model, x):
    (model(x) + model(2 * x)).backward()


def on_two_streams(model, x):
    own, side = torch.accelerator.current_stream(), torch.Stream(device="second")
    side.wait_stream(own)
    with side:
        first = model(x)
    own.wait_stream(side)
    (first + model(2 * x)).backward()


def one_unread(model, x):
    unread, loss = model(x), model(2 * x)
    loss.backward()
    del unread
    model.zero_grad()
    on_one_stream(model, x)


@pytest.mark.parametrize("use", [on_two_streams, one_unread])
def test_what_is_brought_back_for_a_forward_before(use):
    """The device's streams see whether the memory is given back while a copy, or another stream, is still at it."""
    ranks, like = (run_ranks(2, two_losses, one, device="second") for one in (use, on_one_stream))
    for found, wanted in zip(ranks, like, strict=True):
        assert all(map(torch.equal, found, wanted))


def test_in_the_hosts_own_memory_nothing_moves():
    def run():
        return [ran(PLAN.override(**fields), steps=1)[:2] for fields in ({}, {"offload_activations": ALL})]

    for kept, same in run_ranks(4, run):
        assert kept[0] == same[0] and all(torch.equal(kept[1][name], same[1][name]) for name in kept[1])
