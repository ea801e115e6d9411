"""Users' forward hooks that replace what enters or leaves a module, on modules that are computed again in backward: one
device's losses and parameters, whatever kind of hook, whenever it was put there or taken off."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every

from vescale_dtensor import DTensor, Replicate, Shard
from vescale_plans import Boundary, Plan, parallelize
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, scale=1.0, *, shift=None):
        out = x * x.sigmoid() + scale * self.down(torch.tanh(self.up(self.norm(x))))
        return out if shift is None else out * (1 + shift)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x, 0.5 + i, shift=x.mean())
        return self.head(x).square().mean()


SEQUENCE = Boundary(input={"tp": Shard(1)}, output={"tp": Shard(1)})
SP = {
    "parameters": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    "boundaries": {
        "*.norm": SEQUENCE, "*.up": Boundary(input={"tp": Replicate()}), "*.down": Boundary(output={"tp": Shard(1)}),
    },
}  # fmt: skip
WHOLE = {"parameters": {"*": {}}}
BLOCKS = {"blocks.*": True}
PLANS = {
    "dp": Plan(mesh={"dp": 2}, **WHOLE),
    "dp, checkpointed": Plan(mesh={"dp": 2}, checkpointing=BLOCKS, **WHOLE),
    "zero2, checkpointed": Plan(mesh={"dp": 2}, zero=2, checkpointing=BLOCKS, **WHOLE),
    "zero3, checkpointed": Plan(mesh={"dp": 2}, zero=3, checkpointing=BLOCKS, **WHOLE),
    "zero3, one of two": Plan(mesh={"dp": 2}, zero=3, checkpointing={"blocks.0": True, "*.up": True}, **WHOLE),
    "sp, checkpointed": Plan(mesh={"tp": 2}, checkpointing=BLOCKS, **SP),
    "sp, inner checkpointed": Plan(mesh={"tp": 2}, checkpointing={"*.down": True, "*.up": True}, **SP),
    "sp, regathered": Plan(mesh={"tp": 2}, regather=BLOCKS, **SP),
    "dp2 x sp2, zero3, both": Plan(
        mesh={"dp": 2, "tp": 2}, zero=3, checkpointing={"blocks.1": True}, regather=BLOCKS, **SP
    ),
}

# --- what a hook does: (before or after forward, how it is registered, the hook) --------------------------------------


def _keywords(m, args, kwargs):
    return (args[0].tanh(), 0.3), {"shift": kwargs["shift"] * 0.5}


def _by_shape(m, args):
    return (args[0] * 1.3).sin() if len(args) == 1 else ((args[0] * 1.3).sin(), *args[1:])


KINDS = {
    "arguments": ("forward_pre", {}, _by_shape),
    "arguments, first": ("forward_pre", {"prepend": True}, _by_shape),
    "keywords": ("forward_pre", {"with_kwargs": True}, _keywords),
    "keywords, first": ("forward_pre", {"with_kwargs": True, "prepend": True}, _keywords),
    "output": ("forward", {}, lambda m, args, out: (out * 1.2).sin()),
    "output, first": ("forward", {"prepend": True}, lambda m, args, out: (out * 1.2).sin() * out),
    "output and arguments": (
        "forward", {"with_kwargs": True, "prepend": True},
        lambda m, args, kwargs, out: out.sin() * args[0].cos().mean(),
    ),
    "output, always": ("forward", {"always_call": True}, lambda m, args, out: out.sin()),
    "output, always, first": ("forward", {"always_call": True, "prepend": True}, lambda m, args, out: out.sin()),
    "gradient": ("full_backward", {}, lambda m, into, out: tuple(g if g is None else g * 0.5 for g in into)),
}  # fmt: skip
TIMES = ("before", "after", "later", "taken off before backward", "put on before backward")


def on_modules(model, kind):
    where, how, hook = KINDS[kind]
    keyed = kind.startswith("keywords")
    for module in (model.blocks[0], model.blocks[1]) if keyed else (model.blocks[0], model.blocks[1].down):
        yield getattr(module, f"register_{where}_hook")(hook, **how)


def on_all(model, kind):
    """Global hooks, that answer for one module."""
    chosen = {model.blocks[1], model.blocks[2].up}
    yield every.register_module_forward_pre_hook(lambda m, args: _by_shape(m, args) if m in chosen else None)
    yield every.register_module_forward_hook(lambda m, args, out: (out * 1.2).sin() if m in chosen else None)


def trained(model, make, kind, when, plan=None):
    handles = []
    try:
        if when == "before":
            handles += make(model, kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            model, optimizer = parallelize(plan, model, lambda p: torch.optim.SGD(p, lr=0.1))
        losses = []
        for step in range(4):
            if when in ("after", "taken off before backward") and step == 0 or when == "later" and step == 2:
                handles += make(model, kind)
            loss = model(torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(step)))
            if step == 1 and when == "taken off before backward":
                for handle in handles:
                    handle.remove()
            if step == 1 and when == "put on before backward":
                handles += make(model, kind)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        for handle in handles:
            handle.remove()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def run(plan, cases):
    for kind, when in cases:
        make = on_all if kind == "of all modules" else on_modules
        torch.manual_seed(0)
        alone = Net()
        model = copy.deepcopy(alone)
        try:
            wanted, got = trained(alone, make, kind, when), trained(model, make, kind, when, plan)
        except Exception as error:
            error.add_note(f"{kind}, {when}")
            raise
        assert got[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-6), f"{kind}, {when}"
        for name, one in wanted[1].items():
            apart = (one - got[1][name].full_tensor()).norm()
            assert apart <= 1e-5 * one.norm() + 1e-6, f"{kind}, {when}: {name} is {apart:.2g} apart"


CASES = list(itertools.product((*KINDS, "of all modules"), TIMES))


@pytest.mark.parametrize("plan", slice_of(PLANS, 2))
def test_what_a_hook_replaces_counts_once(plan):
    run_ranks(PLANS[plan].world_size, run, PLANS[plan], slice_of(CASES, 6), timeout=240.0)


def _turned(plan):
    """Dropout outside of `eval()` is computed again as dropout, and batch statistics are those of the batch."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.LayerNorm(WIDTH))
    alone = nn.Sequential(block, nn.Linear(WIDTH, 1))
    model, _ = parallelize(plan, copy.deepcopy(alone))
    for each in (alone, model):
        torch.manual_seed(1)
        loss = each(torch.ones(4, WIDTH)).square().mean()
        each.eval()
        loss.backward()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)


def test_a_model_may_be_turned_to_evaluation_before_backward():
    run_ranks(2, _turned, Plan(mesh={"dp": 2}, zero=3, checkpointing={"0": True}, **WHOLE))


def _counted(plan):
    model, _ = parallelize(plan, Net())
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: calls.append("before"), prepend=True)
    model.blocks[0].register_forward_hook(lambda m, args, out: calls.append("after"))
    model(torch.ones(4, 4, WIDTH)).backward()
    assert calls == ["before", "after"]


def test_a_hook_outside_of_a_checkpoint_runs_once():
    run_ranks(2, _counted, PLANS["zero3, checkpointed"])


class Averaged(nn.Module):
    """Buffers that are written, replaced and written by C++ while they are read."""

    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(x.abs().mean(0), 0.3)
        self.seen = self.seen + x.detach().abs().max()
        return x + torch.tanh(self.norm(self.line(x / self.average.clone()))) / self.seen


def _buffered(plan):
    torch.manual_seed(0)
    alone = nn.Sequential(Averaged(), Averaged(), nn.Linear(WIDTH, 1))
    alone.add_module("3", alone[0])  # called twice
    alone = nn.Sequential(*(alone[i] for i in (0, 1, 3, 2)))
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    models = [(alone, make(alone.parameters())), parallelize(plan, copy.deepcopy(alone), make)]
    for step in range(4):
        for model, optimizer in models:
            model.train(step != 2)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    states = [model.state_dict() for model, _ in models]
    for name, one in states[0].items():
        other = states[1][name]
        other = other.full_tensor() if type(other) is DTensor else other
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("zero", [0, 3])
def test_buffers_that_a_checkpointed_module_writes_are_written_once(zero):
    plan = Plan(mesh={"dp": 2}, zero=zero, checkpointing={"0": True, "1": True}, **WHOLE)
    run_ranks(2, _buffered, plan, timeout=120.0)
