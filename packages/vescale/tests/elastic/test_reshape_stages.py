"""Stages of a pipeline come and go in a job that runs: values, and all that a program holds of a model."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale import Pipeline, Plan, PlanError, Shard
from vescale_testkit import full_values, run_ranks, warm_up

warm_up("vescale")

CUT = {"blocks.*.first.*": {"tp": Shard(0)}, "blocks.*.last.weight": {"tp": Shard(1)}, "*": {}}
WHOLE = {"*": {}}


def stages(*cuts, **more):
    return Pipeline(cuts=tuple(f"blocks.{i}" for i in cuts), microbatches=4, **more)


PLANS = [
    Plan(mesh={"dp": 4}, parameters=WHOLE, zero=2),
    Plan(mesh={"pp": 2, "dp": 2}, parameters=WHOLE, zero=1, pipeline=stages(1)),  # one block, and four
    Plan(mesh={"dp": 2, "tp": 2}, parameters=CUT),
    Plan(mesh={"pp": 4}, parameters=WHOLE, pipeline=stages(2, 3, 4)),
    Plan(mesh={"pp": 2, "tp": 2}, parameters=CUT, pipeline=stages(1, 2, 4, schedule="interleaved", virtual=2)),
    Plan(mesh={"dp": 3}, parameters=WHOLE, zero=3),
    Plan(mesh={"dp": 2, "pp": 2}, parameters=WHOLE, zero=3, pipeline=stages(4)),
    Plan(mesh={"dp": 4}, parameters=WHOLE),
]


class Own(nn.Parameter):
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(10, 14), nn.Linear(14, 10, bias=False), Own(torch.ones(10))
        self.register_buffer("seen", torch.zeros(()))
        self.scale.note = "kept"

    def forward(self, x):
        self.seen += x.detach().square().mean()
        return x + self.last(torch.tanh(self.first(x))) * self.scale


class Tied(nn.Module):
    """The first and the last stage share a weight; one parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(10, 12, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[3].first.bias.requires_grad_(False)

    def forward(self, x):
        y = x.flip(1)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def batch(step):
    return torch.randint(12, (12, 3), generator=torch.Generator().manual_seed(step))


def groups_of(make, parameters):
    parameters = list(parameters)
    return make([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}])


def run(plans, make):
    """(losses, [(values before a change, and after it)], values at the end)"""
    torch.manual_seed(0)
    model, losses, moved, heard = Tied(), {}, [], []
    own, written, keys = dict(model.named_parameters()), repr(model), list(model.state_dict())
    optimizer = groups_of(make, model.parameters())
    if plans is not None:
        model, optimizer = vescale.parallelize(plans[0], model, optimizer)
    grouped = [list(group["params"]) for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    handle = own["blocks.4.last.weight"].register_hook(lambda gradient: heard.append(tuple(gradient.shape)))
    for place in range(len(PLANS)):
        plan = None if plans is None else plans[place]
        was_inside = plan is None or dist.get_rank() < plans[place - bool(place)].world_size
        if place and was_inside:
            model(batch(-place)).backward()
        if place and plan is not None:
            before = full_values(model, optimizer)
            vescale.reshape(model, optimizer, plan)
            moved.append((before, full_values(model, optimizer)))
        if place == 3:  # by those who have it
            for name, one in model.named_parameters():
                if name == "blocks.1.first.bias":
                    one.requires_grad_(False)
        if plan is not None and dist.get_rank() >= plan.world_size:
            continue
        if plan is None or plan.pipeline is None:
            assert [name for name, _ in model.named_parameters()] == list(own) and repr(model) == written
            assert list(model.state_dict()) == keys and dict(model.named_parameters()) == own
            assert [list(group["params"]) for group in optimizer.param_groups] == grouped
            assert len(list(model.parameters())) == len(own) and not own["blocks.3.first.bias"].requires_grad
            assert own["blocks.1.first.bias"].requires_grad == (place < 3)
        for step in range(2):
            heard.clear()
            loss = model(batch(2 * place + step))
            loss.backward()
            holds = any(name == "blocks.4.last.weight" for name, _ in model.named_parameters())
            assert heard == ([(10, 14)] if holds and place < 7 else []), (heard, place)
            torch.nn.utils.clip_grad_norm_(own.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses[2 * place + step] = loss.item()
        scheduler.step()
        for name, one in model.named_parameters():
            if name.endswith("scale"):
                assert isinstance(one, Own) and one.note == "kept"
        if place == 6:
            handle.remove()
    assert scheduler.get_last_lr()[1] == optimizer.param_groups[1]["lr"]
    return losses, moved, full_values(model, optimizer)


MAKES = {
    "adamw, amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.parametrize("name, device", [*((name, "cpu") for name in MAKES), ("sgd", "second")])
def test_stages_come_and_go(name, device):
    ((wanted, _, values),) = run_ranks(1, run, None, MAKES[name])
    ranks = run_ranks(4, run, PLANS, MAKES[name], device=device, timeout=240)
    for losses, _, found in ranks:
        for step, loss in losses.items():
            assert loss == pytest.approx(wanted[step], rel=1e-5)
        assert found.keys() == values.keys()
        for key, value in found.items():
            if "seen" not in key:  # a mean over microbatches' own
                torch.testing.assert_close(value, values[key], rtol=1e-4, atol=1e-6)
    for moves in zip(*(moved for _, moved, _ in ranks)):
        before, after = ({key: value for rank in moves for key, value in rank[side].items()} for side in (0, 1))
        assert before.keys() == after.keys()
        for move in moves:
            assert [key for key, value in move[1].items() if not torch.equal(value, before[key])] == []


def refusals():
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(PLANS[1], Tied(), partial(torch.optim.SGD, lr=0.1))
    loss = model(batch(0))
    told = []
    for plan in (
        Plan(mesh={"pp": 2}, parameters=WHOLE, pipeline=stages(2)),
        Plan(mesh={"dp": 8}, parameters=WHOLE),
        PLANS[1].override(pipeline=stages(7)),
        PLANS[3].override(pipeline=stages(3, 1, 4)),
    ):
        with pytest.raises(vescale.VescaleError) as caught:
            vescale.reshape(model, optimizer, plan)
        told.append(str(caught.value))
    adopted = vescale.adopt(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PlanError, match="adopted under a pipeline"):
        vescale.reshape(model, adopted, PLANS[0])
    with vescale.metrics(model, optimizer), pytest.raises(PlanError, match=r"vescale\.metrics"):
        vescale.reshape(model, optimizer, PLANS[0])
    loss.backward()
    optimizer.step()
    late = model(batch(1))
    vescale.reshape(model, [optimizer], PLANS[0])
    with pytest.raises(vescale.VescaleError, match="given another plan since the call"):
        late.backward()
    return told, model(batch(1)).item() - late.item()


def test_what_is_refused_changes_nothing():
    for told, apart in run_ranks(4, refusals):
        assert "for all ranks of the world" in told[0] and "more ranks than the world has" in told[1]
        assert "blocks.7" in told[2] and "blocks.1" in told[3] and abs(apart) < 1e-6
