"""A factory of an optimizer that chooses parameters by place, by count or by size, under a pipeline: it sees all of the
model, in the order of one device, and each rank keeps its stages' part of what it chose."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS = 6, 8


class Net(nn.Module):
    """Six modules of unlike sizes, one frozen, and a table that is the head, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))
        self.scale = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 9)
        self.head.weight = self.table.weight
        for block in self.blocks[1:]:
            block.weight._no_decay = True

    def forward(self, x, y):
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return F.cross_entropy(self.head(self.scale(x)), y)


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.3, momentum=0.5)


def halves(model, given):
    every = list(given)
    return sgd([{"params": every[:4], "lr": 0.01}, {"params": every[4:]}])


def decay(model, given):
    every = list(given)
    return sgd([{"params": [p], "lr": 0.5 * 0.7 ** (len(every) - i)} for i, p in enumerate(every)])


def last_two(model, given):
    *body, weight, bias = given
    return sgd([{"params": body, "lr": 0.01}, {"params": [weight, bias]}])


def by_size(model, given):
    every = list(given)
    return sgd([{"params": every, "lr": 10 / sum(p.numel() for p in every)}])


def largest(model, given):
    every = sorted(given, key=lambda p: -p.numel())
    return sgd([{"params": every[:2], "lr": 0.01}, {"params": every[2:]}])


def trained(model, given):
    every = [p for p in given if p.requires_grad]
    return sgd([{"params": every[:-1], "lr": 0.01}, {"params": every[-1:]}])


def of_the_model(model, given):
    names = [name for name, p in model.named_parameters() if isinstance(p, nn.Parameter)]
    every = dict(model.named_parameters())
    return sgd([{"params": [every[name]], "lr": 0.05 * i} for i, name in enumerate(names)])


def by_attribute(model, given):
    every = list(given)
    marked = [p for p in every if getattr(p, "_no_decay", False)]
    return sgd([{"params": [p for p in every if p not in set(marked)]}, {"params": marked[:2], "lr": 0.9}])


def of_a_module(model, given):
    return sgd([*model.blocks[3].parameters()])


def freezing(model, given):
    for parameter in list(given)[:3]:
        parameter.requires_grad_(False)
    return sgd([p for p in model.parameters() if p.requires_grad])


def with_states(model, given):
    every = list(given)
    return torch.optim.Adagrad([{"params": every[:5], "lr": 0.01}, {"params": every[5:], "lr": 0.1}])


FACTORIES = (halves, decay, last_two, by_size, largest, trained, of_the_model, by_attribute, of_a_module, freezing,
             with_states)  # fmt: skip


def trainings(chosen):
    """Of each factory the groups' sizes, the losses of three steps and the parameters that are here after them."""
    found = {}
    for factory in FACTORIES:
        torch.manual_seed(0)
        model = Net()
        if chosen is None:
            optimizer = factory(model, model.parameters())
        else:
            model, optimizer = vescale.parallelize(chosen, model, partial(factory, model))
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randint(9, (2, ROWS), generator=generator).unbind()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
        found[factory.__name__] = len(optimizer.param_groups), torch.tensor(losses), whole
    return found


def plan(mesh, cuts, **more):
    return vescale.Plan(
        mesh=mesh, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=cuts, microbatches=2), **more
    )


PLANS = {
    "pp2": plan({"pp": 2}, ("blocks.2",)),
    "pp4": plan({"pp": 4}, ("blocks.1", "blocks.3", "head")),
    "pp2 dp2 zero3": plan({"pp": 2, "dp": 2}, ("blocks.2",), zero=3),
}


@pytest.mark.parametrize("chosen", PLANS.values(), ids=PLANS)
def test_groups_are_those_of_one_device(chosen):
    wanted = trainings(None)
    ranks = run_ranks(chosen.world_size, trainings, chosen, timeout=120)
    for factory, (groups, losses, whole) in wanted.items():
        held = set()
        for found in ranks:
            count, seen, here = found[factory]
            assert count == groups, factory
            torch.testing.assert_close(seen, losses, rtol=2e-6, atol=1e-7)
            for name, value in here.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=2e-6)
            held |= here.keys()
        assert held == whole.keys()


def refused(chosen):
    torch.manual_seed(0)
    model = Net()
    with pytest.raises(RuntimeError, match=r"norm reads '.*', a parameter of another stage") as caught:
        vescale.parallelize(chosen, model, lambda given: sgd([p for p in given if p.norm() > 1]))
    return str(caught.value)


def test_a_choice_by_values_is_refused():
    first, *others = run_ranks(2, refused, plan({"pp": 2}, ("blocks.2",)), timeout=90)
    assert others == [first]
