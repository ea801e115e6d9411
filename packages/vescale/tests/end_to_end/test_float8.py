"""Trainings whose linear layers multiply float8 numbers: one device's on every mesh."""

import contextlib
import sys
import types
from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale import Boundary, Pipeline, Plan, PlanError, Policy, Precision, Replicate, Shard
from vescale_plans._capture.explain import compiled
from vescale_testkit import run_ranks, warm_up
from vescale_testkit.scaled import operands_seen

warm_up("torch._dynamo", "vescale")

RECIPES = ("fp8_tensorwise", "fp8_rowwise")
STEPS, TOKENS = 2, 61
EVEN, UNEVEN = (32, 64, 8), (36, 51, 9)  # features, those inside of a block, rows


class Block(nn.Module):
    def __init__(self, features, inside):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(features, features, i == 3) for i in range(4))
        self.up, self.down = nn.Linear(features, inside), nn.Linear(inside, features)

    def forward(self, x):
        normed = self.norms[0](x)
        heads = (each(normed).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, features, inside, rows):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(TOKENS, features), nn.ModuleList(Block(features, inside) for _ in (0, 1))
        self.head = nn.Linear(features, TOKENS)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


OUT, IN = {"tp": Shard(0)}, {"tp": Shard(1)}
TP = dict.fromkeys(("*.query.*", "*.key.*", "*.value.*", "*.up.*"), OUT)
TP = {**TP, "*.out.weight": IN, "*.down.weight": IN, "*": {}}
WHOLE = Boundary(output={"tp": Replicate()})
ALONE = {"mesh": {"dp": 1}}
MESHES = {
    "dp2, zero 3": {"mesh": {"dp": 2}, "zero": 3},
    "tp2": {"mesh": {"tp": 2}, "parameters": TP},
    "dp2 tp2, zero 3": {"mesh": {"dp": 2, "tp": 2}, "parameters": TP, "zero": 3, "boundaries": {"*.down": WHOLE}},
    "dp2 tp2, vocabulary, recomputed": {
        "mesh": {"dp": 2, "tp": 2}, "parameters": {"head.*": OUT, **TP}, "zero": 1, "checkpointing": {"blocks.*": True},
    },
    "tp2, sequences": {
        "mesh": {"dp": 2, "tp": 2}, "parameters": TP, "boundaries": {
            "embed": Boundary(output=IN), "*.norms.*": Boundary(input=IN, output={"tp": Replicate()}),
            "*.out": Boundary(output=IN), "*.down": Boundary(output=IN),
        },
    },
    "dp2 pp2, zero 1": {
        "mesh": {"dp": 2, "pp": 2}, "zero": 1, "pipeline": Pipeline("pp", ("blocks.1",), microbatches=3),
    },
}  # fmt: skip


def trained(sizes, products, case, *, steps=STEPS, backend=None, watch=False, splits=None, lr=0.1):
    """Returns losses, whole parameters at the end, what was quantised, if it is watched, and graphs, if compiled."""
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).__dict__.update(globals())  # for a compiler
    torch.manual_seed(0)
    plan = Plan(**{"parameters": {"*": {}}, "precision": Precision(torch.bfloat16, products=products), **case})
    model, optimizer = vescale.parallelize(plan, GPT(*sizes), lambda all: torch.optim.SGD(all, lr=lr, momentum=0.9))
    if backend is not None:
        compiled(model, backend)
    losses, seen = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens, labels = (torch.randint(TOKENS, (sizes[2], 7), generator=generator) for _ in range(2))
        with contextlib.ExitStack() as during:
            seen = during.enter_context(operands_seen()) if watch else seen
            if splits is not None:
                during.enter_context(vescale.reproducible(splits=splits))
            loss = model(tokens, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(each.dtype is torch.float32 for each in model.parameters())
    parameters = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    return losses, parameters, seen, model._vescale.captured and model._vescale.captured.graphs


def ranks_of(case):
    return prod(case["mesh"].values())


def are_equal(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1].values(), other[1].values()))


@pytest.mark.parametrize("products", RECIPES)
def test_losses_of_six_meshes_are_one_devices_within_a_bfloat16s_rounding(products):
    (alone,) = run_ranks(1, trained, UNEVEN, products, ALONE)
    for name, case in MESHES.items():
        losses = run_ranks(ranks_of(case), trained, UNEVEN, products, case)[0][0]
        assert all(abs(one - other) <= 2**-9 * other for one, other in zip(losses, alone[0], strict=True)), name


@pytest.mark.parametrize("products", RECIPES)
def test_the_reproducible_mode_gives_one_devices_bits(products):
    """Losses, parameters, and all that is quantised, in three steps."""
    splits = {"batch": 4, "seq": 1, "hidden": 4}
    (alone,) = run_ranks(1, trained, EVEN, products, ALONE, watch=True, splits=splits)
    assert alone[2]
    found = run_ranks(4, trained, EVEN, products, MESHES["dp2 tp2, zero 3"], watch=True, splits=splits)[0]
    assert are_equal(found, alone) and len(found[2]) == len(alone[2])
    assert all(map(torch.equal, found[2], alone[2]))


def test_graphs_of_shards_multiply_so_too():
    run = partial(run_ranks, 2, trained, UNEVEN, "fp8_rowwise", MESHES["tp2"])
    eager, graph = run()[0], run(backend="aot_eager")[0]  # the first step is watched, and eager
    assert are_equal(eager, graph) and graph[3] > 0


class Pair(nn.Module):
    """Without blocks: on one rank it is one graph."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(20, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.down(self.up(x).relu())


def one_rank():
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).__dict__.update(globals())
    for products in RECIPES:
        losses = []
        for backend in (None, "aot_eager"):
            torch.manual_seed(0)
            plan = Plan(mesh={"dp": 1}, parameters={"*": {}}, precision=Precision(torch.float32, products=products))
            model, _ = vescale.parallelize(plan, Pair())
            if backend is not None:
                compiled(model, backend)
            loss = model(torch.randn(5, 20)).square().sum()
            loss.backward()
            losses.append([loss.item(), *(each.grad.full_tensor() for each in model.parameters())])
            assert backend is None or model._vescale.captured.graphs == 1
        assert all(map(torch.equal, *([torch.as_tensor(one) for one in each] for each in losses)))


def test_a_graph_of_one_rank_multiplies_so_too():
    run_ranks(1, one_rank)


def test_patterns_choose_layers_and_plans_are_written():
    low = Precision(torch.bfloat16, products="fp8_rowwise")
    plan = Plan(mesh={"dp": 1}, parameters={"*": {}}, precision=low, policies={"head": Policy(precision=Precision())})
    assert Plan.from_json(plan.to_json()) == plan and "fp8_rowwise" in str(plan)
    assert "products" not in Plan(mesh={"dp": 1}, parameters={"*": {}}, precision=Precision()).to_json()
    every, some, none = (
        run_ranks(1, trained, UNEVEN, "fp8_rowwise", {**ALONE, "policies": policies}, steps=1, watch=True)[0][2]
        for policies in ({}, plan.policies, {"*": Policy(precision=Precision())})
    )
    # A layer has six operands; each is numbers and scales.
    assert (len(every), len(some), len(none)) == (12 * 13, 12 * 12, 0)
    stages = {**MESHES["dp2 pp2, zero 1"], "policies": plan.policies}
    run_ranks(4, trained, UNEVEN, "fp8_rowwise", stages, steps=1)
    with pytest.raises(PlanError, match="stages pass on one dtype"):
        Plan(parameters={"*": {}}, **{**stages, "policies": {"head": Policy(precision=Precision(torch.float16))}})
    with pytest.raises(PlanError, match="products is 'fp8', not one of 'fp8_tensorwise', 'fp8_rowwise' or None"):
        Precision(products="fp8")
    with pytest.raises(PlanError, match=r"compute is torch.float64"):
        Precision(torch.float64, products="fp8_rowwise")


def test_a_loss_falls_as_in_bfloat16():
    """The same batch again and again, which both come to know by heart."""

    def learnt(products):
        torch.manual_seed(0)
        plan = Plan(mesh={"dp": 1}, parameters={"*": {}}, precision=Precision(torch.bfloat16, products=products))
        model, optimizer = vescale.parallelize(plan, GPT(*EVEN), lambda all: torch.optim.AdamW(all, lr=3e-3))
        tokens = torch.randint(TOKENS, (8, 16))
        losses = []
        for _ in range(40):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    wide, *low = (run_ranks(1, learnt, products)[0] for products in (None, *RECIPES))
    assert wide[-1] < 0.5 * wide[0]
    for losses in low:
        assert all(abs(one - other) < 0.01 * wide[0] for one, other in zip(losses, wide, strict=True))
