"""What users do to their models, one thing at a time, on DP, ZeRO 2 and 3 and TP: one device's results."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Replicate, Shard
from vescale_dtensor.testing import run_ranks, warm_up
from vescale_plans import Boundary, Plan, PlanError, parallelize

warm_up("torch._dynamo", "vescale_plans")

WIDTH, WORDS, STEPS = 8, 3, 3
TP = {
    "parameters": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    "boundaries": {"*.up": Boundary(input={"tp": Replicate()}), "*.down": Boundary(output={"tp": Replicate()})},
}
PLANS = {
    "dp": partial(Plan, parameters={"*": {}}),
    "zero2": partial(Plan, parameters={"*": {}}, zero=2),
    "zero3": partial(Plan, parameters={"*": {}}, zero=3),
    "tp": partial(Plan, **TP),
}


def plan_of(kind: str, ranks: int) -> Plan:
    if kind == "tp2 x zero3":
        return Plan(mesh={"dp": ranks // 2, "tp": 2}, zero=3, **TP)
    return PLANS[kind](mesh={"tp" if kind == "tp" else "dp": ranks})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks and a head. checkpoints: of the blocks together, and of each: reentrant, not, or (None) none."""

    def __init__(self, checkpoints=(None, None)):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.checkpoints = checkpoints

    def body(self, x):
        for block in self.blocks:
            x = maybe_checkpoint(self.checkpoints[1], block, x)
        return x

    def forward(self, x, targets):
        return F.cross_entropy(self.head(maybe_checkpoint(self.checkpoints[0], self.body, x)), targets)


def maybe_checkpoint(reentrant, function, x):
    return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)


def batch(step: int):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, WIDTH, generator=generator).requires_grad_()  # a reentrant checkpoint needs one that does
    return x, torch.randint(WORDS, (8,), generator=generator)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model, optimizer, during=None) -> tuple[list, list, dict]:
    """Losses, gradients per step, and parameters at the end. during(model, optimizer, step) comes before each step."""
    losses, gradients = [], []
    for step in range(STEPS):
        if during is not None:
            during(model, optimizer, step)
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def check(got, wanted) -> None:
    losses, gradients, parameters = got
    torch.testing.assert_close(losses, wanted[0], rtol=1e-5, atol=0)
    for mine, theirs in zip(gradients, wanted[1], strict=True):
        assert mine.keys() == theirs.keys()
        close(mine, theirs)
    close(parameters, wanted[2])


def close(mine: dict, theirs: dict) -> None:
    for name, one in theirs.items():
        assert mine[name].dtype == one.dtype
        assert (mine[name] - one).norm() <= 1e-4 * one.norm() + 1e-7, name


def equals_one_device(kind: str, ranks: int, build, during=None, prepare=None) -> None:
    """`prepare(model, optimizer)` is called once the model is parallelized."""
    torch.manual_seed(0)
    alone = build()
    model = copy.deepcopy(alone)
    optimizer = adamw(alone.parameters())
    if prepare is not None:
        prepare(alone, optimizer)
    wanted = trained(alone, optimizer, during)
    model, optimizer = parallelize(plan_of(kind, ranks), model, adamw)
    if prepare is not None:
        prepare(model, optimizer)
    check(trained(model, optimizer, during), wanted)


# --- checkpoints in checkpoints ------------------------------------------------------------


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in PLANS), ("zero3", 4), ("tp2 x zero3", 4)])
def test_nested_checkpoints(kind, ranks):
    """An outer one that is not reentrant handed plain local shards to the recomputed code; reentrant ones under
    ZeRO-3 met flat parameters."""

    def work():
        for reentrant in itertools.product((False, True), repeat=2):
            equals_one_device(kind, ranks, partial(Net, reentrant))

    run_ranks(ranks, work)


def test_user_code_in_a_recomputation_never_sees_a_shard():
    def work():
        shapes = []

        class Seen(Block):
            def forward(self, x):
                shapes.append((type(x).__name__, tuple(x.shape)))
                return super().forward(x)

        for reentrant in itertools.product((False, True), repeat=2):
            torch.manual_seed(0)
            alone = Net(reentrant)
            alone.blocks = nn.ModuleList(Seen() for _ in range(3))
            model, _ = parallelize(plan_of("dp", 2), alone)
            model(*batch(0)).backward()
        assert len(shapes) >= 24
        assert set(shapes) == {("DTensor", (8, WIDTH))}

    run_ranks(2, work)


# --- sharing -------------------------------------------------------------------------------


def shared():
    model = Net()
    model.blocks[1] = model.blocks[0]
    return model


def shared_and_tied():
    model = shared()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[2].down.bias = model.head_bias = nn.Parameter(torch.ones(WIDTH))
    return model


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("build", [shared, shared_and_tied])
def test_a_module_under_two_names_and_ties(kind, build):
    """Objects were known by the `id` of others that had been freed: ties were lost, and shards sharded once more."""

    def work():
        equals_one_device(kind, 2, build)
        model, _ = parallelize(plan_of(kind, 2), build())
        assert model.blocks[0] is model.blocks[1]
        if build is shared_and_tied:
            assert model.blocks[2].up.weight is model.blocks[0].up.weight
            assert model.blocks[2].down.bias is model.head_bias

    run_ranks(2, work)


def test_one_module_has_one_boundary():
    model, plan = shared(), plan_of("tp", 2)
    plan.validate(model)
    only_second = Boundary(input={"tp": Replicate()})
    plan.override(boundaries={"blocks.1.up": only_second}).validate(model)  # known by any of its names
    other = plan.override(boundaries={"blocks.1.up": Boundary(input={"tp": Shard(0)})})
    with pytest.raises(PlanError, match="one module, and the plan gives them different boundaries"):
        other.validate(model)
