"""Pipelines with checkpointed stages, whose modules have users' hooks, are one device's. Copies of one are refused."""

import copy

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS = 8, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


HOOKS = {
    "none": lambda m: None,
    "arguments": lambda m: m.register_forward_pre_hook(lambda m, args: ((args[0] * 1.2).sin(),)),
    "arguments, first": lambda m: m.register_forward_pre_hook(lambda m, args: ((args[0] * 1.2).sin(),), prepend=True),
    "output": lambda m: m.register_forward_hook(lambda m, args, out: out.tanh() * args[0].cos()),
    "inside": lambda m: m.down.register_forward_hook(lambda m, args, out: out.tanh()),
    "gradient": lambda m: m.register_full_backward_hook(lambda m, into, out: tuple(g * 0.5 for g in into)),
}
MESHES = {"pp": {"pp": 2}, "dp x pp": {"dp": 2, "pp": 2}}


def plan_of(mesh, schedule, zero=0):
    return vescale.Plan(
        mesh=MESHES[mesh],
        parameters={"*": {}},
        data_axis="dp" if "dp" in MESHES[mesh] else None,
        zero=zero,
        checkpointing={"blocks.*": True},
        pipeline=vescale.Pipeline(cuts=("blocks.2",), schedule=schedule, microbatches=2),
    )


def step(model, number, optimizer):
    loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def same(model, alone, where):
    """Of the parameters that this rank's stage holds."""
    wanted, held = dict(alone.named_parameters()), [(n, p) for n, p in model.named_parameters() if not p.is_meta]
    assert held
    for name, mine in held:
        torch.testing.assert_close(
            mine.detach().full_tensor(), wanted[name].detach(), rtol=1e-4, atol=1e-6, msg=_said(f"{where} {name}")
        )


def _said(where):
    return lambda text: f"{where}: {text}"


def hooked(plan):
    for name, hook in HOOKS.items():
        for early in (True, False):
            torch.manual_seed(0)
            alone = Net()
            model = copy.deepcopy(alone)
            make = lambda p: torch.optim.SGD(p, lr=0.1)
            for one in (alone, model) if early else (alone,):
                hook(one.blocks[1]), hook(one.blocks[3])
            model, optimizer = vescale.parallelize(plan, model, make)
            alone_optimizer = make(alone.parameters())
            if not early:
                hook(model.blocks[1]), hook(model.blocks[3])
            for number in range(2):
                expected = step(alone, number, alone_optimizer)
                assert step(model, number, optimizer) == pytest.approx(expected, rel=1e-4), (name, early)
            same(model, alone, f"{name}, {early}")


CASES = [("pp", "1f1b", 0), ("pp", "gpipe", 0), ("dp x pp", "1f1b", 0), ("dp x pp", "1f1b", 2)]
CASES += [("pp", "zb-h1", 0), ("dp x pp", "zb-h1", 3)]


@pytest.mark.parametrize(("mesh", "schedule", "zero"), slice_of(CASES, 3))
def test_hooks_on_checkpointed_blocks_of_stages(mesh, schedule, zero):
    plan = plan_of(mesh, schedule, zero)
    run_ranks(plan.world_size, hooked, plan, timeout=180.0)


def _copied(plan):
    model, _ = vescale.parallelize(plan, Net())
    for copier in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(vescale.OperatorError, match="the model is a pipeline"):
            copier(model)


def test_copies_of_a_pipeline_are_refused():
    run_ranks(2, _copied, plan_of("pp", "1f1b"))
