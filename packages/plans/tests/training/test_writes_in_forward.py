"""Parameters that a forward writes to: an embedding with a `max_norm`, weights that are clipped, or set in the first
call. What is written while a block computes with whole parameters, or while they are gathered ahead, stays."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import GradientError
from vescale_plans import Plan, Precision, parallelize
from vescale_testkit import raises_on_all, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, WORDS, ROWS = 8, 12, 8


def without_gradient(write):
    def written(module):
        with torch.no_grad():
            write(module)

    return written


def set_once(block):
    if not hasattr(block, "is_set"):
        block.is_set = True
        block.weight.data.mul_(0.5)
        nn.init.constant_(block.bias, 0.3)


WRITES = {
    "mul_": without_gradient(lambda block: block.weight.mul_(0.9)),
    "mul_ of .data": lambda block: block.weight.data.mul_(0.9),
    "clamp_": without_gradient(lambda block: block.weight.clamp_(-0.2, 0.2)),
    "clamp_ of .data": lambda block: block.weight.data.clamp_(-0.2, 0.2),
    "clamp_ of detach": lambda block: block.weight.detach().clamp_(-0.2, 0.2),
    "copy_": without_gradient(lambda block: block.weight.copy_(F.normalize(block.weight, dim=1))),
    "a row": without_gradient(lambda block: block.weight.__setitem__(0, 0.1)),
    "out=": without_gradient(lambda block: torch.clamp(block.weight, -0.2, 0.2, out=block.weight)),
    "the bias": without_gradient(lambda block: block.bias.add_(0.1)),
    "the first call": set_once,
}


class Block(nn.Linear):
    """Writes to itself, before its product."""

    write = None

    def forward(self, x):
        if self.write is not None:
            WRITES[self.write](self)
        return x + torch.tanh(super().forward(x))


class Net(nn.Module):
    """`writes`: what the blocks do to their own weights; `above`: what the model does to those of its blocks, some of
    which are gathered ahead by then."""

    def __init__(self, writes=None, above=None, max_norm=None):
        super().__init__()
        self.embed, self.bag = (
            nn.Embedding(WORDS, WIDTH, max_norm=max_norm),
            nn.EmbeddingBag(WORDS, WIDTH, max_norm=max_norm),
        )
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(3))
        self.head, self.above = nn.Linear(WIDTH, 4), above
        for block in self.blocks[::2]:
            block.write = writes

    def forward(self, tokens):
        x = self.embed(tokens).mean(1) + self.bag(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.above is not None and i < 2:
                WRITES[self.above](self.blocks[i + 1])
        return self.head(x)


MODELS = {f"a block writes: {name}": {"writes": name} for name in WRITES}
MODELS |= {f"the model writes: {name}": {"above": name} for name in WRITES if name != "the first call"}
MODELS["an embedding's max_norm"] = {"max_norm": 1.0}
PLANS = [
    Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, prefetch=2),
    Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2),
]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (ROWS, 5), generator=generator), torch.randint(4, (ROWS,), generator=generator)


def made(options):
    torch.manual_seed(0)
    return Net(**options)


def trained(model, optimizer):
    noted = []
    for step in range(3):
        tokens, classes = batch(step)
        loss = F.cross_entropy(model(tokens), classes)
        optimizer.zero_grad()
        loss.backward()
        noted += [loss, *(p.grad for p in model.parameters())]
        optimizer.step()
    with torch.no_grad():
        noted.append(model(batch(9)[0]))
    noted += list(model.state_dict().values())
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for one in noted]


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def equals_one_device(options, plan):
    alone = made(options)
    expected = trained(alone, optimizer_of(alone.parameters()))
    found = trained(*parallelize(plan, made(options), optimizer_of))
    assert len(found) == len(expected)
    for i, (mine, theirs) in enumerate(zip(found, expected)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, i=i: f"{i}: {text}")


@pytest.mark.parametrize("plan", PLANS, ids=["zero 3", "zero 3, two ahead", "zero 2"])
@pytest.mark.parametrize("name", slice_of(list(MODELS), 6))
def test_what_a_forward_writes_to_parameters_stays(name, plan):
    run_ranks(2, equals_one_device, MODELS[name], plan)


def holds_what_was_written(zero):
    """Under a precision a block computes with a copy in another dtype: of a master, what was written, and no other
    value, is another afterwards."""
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero, precision=Precision(compute=torch.bfloat16))
    whole = made({"writes": "clamp_ of .data"})
    before = copy.deepcopy(whole)
    model, _ = parallelize(plan, whole, optimizer_of)
    model(batch(0)[0]).square().mean().backward()
    for name, old in before.named_parameters():
        new, old = model.get_parameter(name).full_tensor().detach(), old.detach()
        clipped = (old.abs() > 0.2) if name in ("blocks.0.weight", "blocks.2.weight") else torch.zeros_like(old) > 0
        assert torch.equal(new[~clipped], old[~clipped]), name
        assert (new[clipped] == old[clipped].clamp(-0.2, 0.2).bfloat16().float()).all(), name
        assert clipped.any() or "blocks" not in name or "bias" in name or name == "blocks.1.weight"


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_is_written_to_a_copy_of_another_dtype_stays(zero):
    run_ranks(2, holds_what_was_written, zero)


RECOMPUTED = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, checkpointing={"blocks.*": True})


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("write", ["clamp_", "clamp_ of .data", "the first call"])
def test_a_write_that_changes_nothing_the_second_time_may_be_recomputed(write, zero):
    run_ranks(2, equals_one_device, {"writes": write}, RECOMPUTED.override(zero=zero))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("write", ["mul_", "mul_ of .data", "the bias"])
def test_another_is_refused(write, zero):
    plan = RECOMPUTED.override(zero=zero)
    says = "is written in the forward of a checkpointed module"
    raises_on_all(2, GradientError, equals_one_device, {"writes": write}, plan, match=says)
