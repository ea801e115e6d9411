"""Random states, saved under one plan and loaded under another: bit for bit what they were, whatever shares memory.

Ties, modules under two names, buffers (not persistent ones too), frozen parameters, copies that average (EMA), the same
module under two keys, optimizers before their first step, and only what trains (as an adapter).
"""

import random

import pytest
import torch
from torch import nn

import vescale
from vescale_dtensor import DTensor, Shard
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH = 8
TP = {"*up.weight": {"tp": Shard(0)}, "*up.bias": {"tp": Shard(0)}, "*down.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    "one": ({"dp": 1}, {"*": {}}, 0),
    "dp2": ({"dp": 2}, {"*": {}}, 0),
    "tp2": ({"tp": 2}, TP, 0),
    "zero2": ({"dp": 2}, {"*": {}}, 2),
    "zero3": ({"dp": 2}, {"*": {}}, 3),
    "zero3 on 3": ({"dp": 3}, {"*": {}}, 3),
    "dp2 tp2 zero2": ({"dp": 2, "tp": 2}, TP, 2),
    "dp2 tp2 zero3": ({"dp": 2, "tp": 2}, TP, 3),
}


class Block(nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12, bias=rng.random() < 0.7), nn.Linear(12, WIDTH)
        if rng.random() < 0.5:
            self.norm = nn.LayerNorm(WIDTH)
        if rng.random() < 0.5:
            self.register_buffer("scale", torch.rand(3, WIDTH), persistent=rng.random() < 0.7)

    def forward(self, x):
        x = x + self.down(self.up(x).relu())
        x = self.norm(x) if hasattr(self, "norm") else x
        return x * self.scale[1] if hasattr(self, "scale") else x


class Net(nn.Module):
    """Blocks, some of them one module under two names, some tied by a weight, some frozen, and a tied head."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.embed, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(Block(rng) for _ in range(rng.randint(2, 4)))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if rng.random() < 0.5:
            self.head.weight = self.embed.weight
        if rng.random() < 0.4:
            self.blocks.append(self.blocks[0])
        if rng.random() < 0.4:
            self.blocks[1].down.weight = self.blocks[0].down.weight
        if rng.random() < 0.4:
            self.blocks[1].up.weight.requires_grad_(False)
        self.alias = self.blocks[-1] if rng.random() < 0.3 else None

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def start(seed, plan, steps):
    """A state under a plan, after so many steps; `seed` decides its structure and the optimizer."""
    rng = random.Random(seed + 1000)
    mesh, parameters, zero = PLANS[plan]
    made = vescale.Plan(mesh=mesh, parameters=parameters, zero=zero)
    kind = rng.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model, optimizer = vescale.parallelize(made, Net(seed), lambda parameters: kind(parameters, lr=0.05, **options))
    tokens = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "step": steps}
    if rng.random() < 0.6:
        state["ema"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    if rng.random() < 0.4:
        state["again"] = {"first": model.blocks[0]}
    if rng.random() < 0.4:
        state["list"] = [torch.arange(5.0) + steps, {"deep": model.embed.weight.detach().clone()}]
    return state


def values(state):
    """Everything of a state, whole, by name."""
    found = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    optimizer = state["optimizer"]
    if hasattr(optimizer, "sharded_state_dict"):
        parts = optimizer.sharded_state_dict()["state"]
    else:
        names = {id(p): name for name, p in state["model"].named_parameters()}
        parts = {names[id(p)]: entries for p, entries in optimizer.state.items()}
    found |= {f"optimizer.{name}.{key}": value for name, entries in parts.items() for key, value in entries.items()}
    found |= {f"ema.{name}": value for name, value in state.get("ema", {}).items()}
    if "list" in state:
        found |= {"list.0": state["list"][0], "list.1": state["list"][1]["deep"]}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).detach().clone()
        for name, value in found.items()
    }


def saved(path, seed, plan, steps):
    state = start(seed, plan, steps)
    vescale.save(path, state)
    return values(state)


def loaded(path, seed, plan, steps):
    state = start(seed, plan, 1 if steps else 0)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(0)
    report = vescale.load(path, state)
    assert not report.missing and not report.extra and state["step"] == steps
    return values(state)


CASES = [(seed, a, b) for seed in range(6) for a in PLANS for b in PLANS if a != b]


def size_of(plan):
    return torch.Size(PLANS[plan][0].values()).numel()


@pytest.mark.parametrize("seed, a, b", slice_of(CASES, 48))
def test_any_state_under_any_plan(tmp_path, seed, a, b):
    steps = 0 if seed % 3 == 0 else 2  # before the first step an optimizer has no state
    wanted = run_ranks(size_of(a), saved, tmp_path, seed, a, steps, timeout=120)[0]
    for found in run_ranks(size_of(b), loaded, tmp_path, seed, b, steps, timeout=120):
        names = wanted.keys() if steps else wanted.keys() & found.keys()
        assert steps == 0 or found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        assert [name for name in names if not torch.equal(found[name], wanted[name])] == []


# --- only what trains --------------------------------------------------------------------


def adapted(plan, seed):
    """A frozen model with two small trained parts, as an adapter's; the state is what trains."""
    mesh, parameters, zero = PLANS[plan]
    torch.manual_seed(7)
    model = Net(3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(seed)
    model.low, model.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    model.head.register_forward_pre_hook(lambda module, args: (args[0] + model.high(model.low(args[0])),))
    optimizer_fn = lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.05)
    made = vescale.Plan(mesh=mesh, parameters=parameters, zero=zero)
    model, optimizer = vescale.parallelize(made, model, optimizer_fn)
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return model, optimizer, {"adapter": adapter, "step": 0}


def whole_adapter(state):
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in state["adapter"].items()}


def save_adapter(path, plan):
    model, optimizer, state = adapted(plan, 1)
    tokens = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(2))
    model(tokens).square().mean().backward()
    optimizer.step()
    vescale.save(path, state)
    return {name: value.detach().clone() for name, value in whole_adapter(state).items()}


def load_adapter(path, plan, how):
    model, _, state = adapted(plan, 9)
    before = {name: value.detach().clone() for name, value in values_of(model).items() if name not in state["adapter"]}
    if how == "adapter":
        report = vescale.load(path, state)
        assert not report.missing and not report.extra
    else:  # into the whole model: the rest keeps its values
        report = vescale.load(path, {"adapter": model}, missing="keep")
        assert set(report.missing) == {f"adapter.{name}" for name in before}
    after = values_of(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return {name: value.detach().clone() for name, value in whole_adapter(state).items()}


def values_of(model):
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


@pytest.mark.parametrize("how", ["adapter", "model"])
@pytest.mark.parametrize("a, b", [("zero3", "tp2"), ("tp2", "zero2"), ("dp2", "zero3")])
def test_only_what_trains(tmp_path, a, b, how):
    wanted = run_ranks(2, save_adapter, tmp_path, a)[0]
    assert set(wanted) == {"low.weight", "high.weight"}
    for found in run_ranks(2, load_adapter, tmp_path, b, how):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- optimizers that step on DTensors, and make their state in the first step ----------------------------------------

ON_DTENSORS = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def stepped(kind, plan, steps, begin, path=None):
    """Parameters after `steps`; from `begin` on, of a run that was saved there under another plan."""
    mesh, parameters, zero = PLANS[plan]
    made = vescale.Plan(mesh=mesh, parameters=parameters, zero=zero)
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, layer in (("up", nn.Linear(WIDTH, 12)), ("tanh", nn.Tanh()), ("down", nn.Linear(12, WIDTH))):
        model.add_module(name, layer)
    model, optimizer = vescale.parallelize(made, model, ON_DTENSORS[kind])
    state = {"model": model, "optimizer": optimizer, "step": begin}
    if begin:
        vescale.load(path, state)
    batches = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    for batch in batches[begin:steps]:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    if path is not None and not begin:
        vescale.save(path, state, step=steps)
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", list(ON_DTENSORS))
@pytest.mark.parametrize(("saved", "loaded"), [("dp2 tp2 zero3", "zero2"), ("tp2", "one"), ("one", "dp2 tp2 zero2")])
def test_a_state_that_only_a_step_makes_is_loaded_into_a_fresh_optimizer(kind, saved, loaded, tmp_path):
    ranks = [1 if plan == "one" else 4 if "tp2" in plan and "dp2" in plan else 2 for plan in (saved, loaded)]
    run_ranks(ranks[0], stepped, kind, saved, 2, 0, str(tmp_path))
    found = run_ranks(ranks[1], stepped, kind, loaded, 4, 2, str(tmp_path))[0]
    wanted = run_ranks(1, stepped, kind, "one", 4, 0)[0]
    for one, other in zip(found, wanted):
        assert (one - other).norm() <= 1e-4 * other.norm()


# --- optimizers that make their state when they are made, of frozen parameters too -----------------------------------


class Early(torch.optim.Optimizer):
    """Momentum of which the constructor makes every state: like the parameter, or plain and whole; and a count."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "m": torch.full_like(p, 0.1),
                    "whole": torch.full(p.shape, 0.2),
                    "n": torch.tensor(0.0),
                }

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["n"] += 1
                    state["m"].mul_(0.9).add_(p.grad)
                    state["whole"].mul_(0.5).add_(p.grad * p.grad)
                    p.sub_(state["m"] / (state["whole"].sqrt() + 0.1) * group["lr"])


def makes_state_at_once(kind):
    try:
        return bool(kind([nn.Parameter(torch.ones(3, 2))]).state)
    except (TypeError, ValueError):  # the base class; one for matrices alone
        return False


OF_TORCH = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
EARLY = [Early, *filter(makes_state_at_once, OF_TORCH)]
THAWED = [
    ("one", "zero3 on 3"),
    ("zero3 on 3", "one"),
    ("tp2", "zero2"),
    ("dp2 tp2 zero3", "tp2"),
    ("zero2", "dp2 tp2 zero3"),
]


def thawing(kind, plan, path, begin):
    """Two steps with a part frozen, which are saved, or, from `begin` on, two with all trained. Whole parameters and
    states."""
    torch.manual_seed(begin)
    model = nn.Sequential()
    for name, layer in (("up", nn.Linear(WIDTH, 5)), ("tanh", nn.Tanh()), ("down", nn.Linear(5, WIDTH))):
        model.add_module(name, layer)
    model.up.weight.requires_grad_(False)
    model.down.bias.requires_grad_(False)
    if plan is None:
        optimizer = kind(model.parameters(), lr=0.1)
    else:
        mesh, parameters, zero = PLANS[plan]
        vescale.register_elementwise(Early)
        made = vescale.Plan(mesh=mesh, parameters=parameters, zero=zero)
        model, optimizer = vescale.parallelize(made, model, lambda given: kind(given, lr=0.1))
    state = {"model": model, "optimizer": optimizer, "step": begin}
    if begin:
        assert not vescale.load(path, state).missing
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    for batch in torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1))[begin : begin + 2]:
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not begin:
        vescale.save(path, state, step=2)
    return values(state)


def test_adagrad_is_what_makes_its_state_at_once():
    assert torch.optim.Adagrad in EARLY


@pytest.mark.parametrize("kind", EARLY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("saved", "loaded"), THAWED)
def test_states_of_frozen_parameters_move_between_plans(kind, saved, loaded, tmp_path):
    """They are found under any plan, by the parameter's layout, and go on when the parameter is thawed."""
    wanted = [thawing(kind, None, str(tmp_path / "alone"), begin) for begin in (0, 2)]
    for begin, plan in ((0, saved), (2, loaded)):
        for found in run_ranks(size_of(plan), thawing, kind, plan, str(tmp_path / "run"), begin):
            torch.testing.assert_close(found, wanted[begin // 2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(thawing(kind, None, str(tmp_path / "run"), 2), wanted[1], rtol=1e-4, atol=1e-5)
