"""A parameter's object becomes its shard: whoever holds it trains on as on one device, and what only shares its memory
is an error or a warning."""

import copy
import functools
import gc
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import DTensor, Shard
from vescale_plans import Plan, PlanError, SharedMemoryWarning, parallelize
from vescale_rng import deferred_init
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("vescale_plans")

STEPS, CLOSE = 4, 2e-6
TP = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    **{f"zero {zero}": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": zero} for zero in range(4)},
    "tp": {"mesh": {"tp": 2}, "parameters": TP},
}
ALONE = {"mesh": {"dp": 1}, "parameters": {"*": {}}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


# --- who holds the object -----------------------------------------------------------------


class InAList(Net):
    def __init__(self):
        super().__init__()
        self.regular = [self.up.weight, self.down.weight]

    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for p in self.regular) * 0.01


class InADict(Net):
    def __init__(self):
        super().__init__()
        self.named = {"w": self.up.weight}

    def forward(self, x):
        return self.down(F.relu(F.linear(x, self.named["w"], self.up.bias)))


class InAnObject(Net):
    class Helper:
        def __init__(self, weight):
            self.weight = weight

    def __init__(self):
        super().__init__()
        self.helper = self.Helper(self.up.weight)

    def forward(self, x):
        return super().forward(x) + self.helper.weight.square().sum() * 0.01


class InAClosure(Net):
    def __init__(self):
        super().__init__()
        weight = self.up.weight
        self.project = lambda x: F.linear(x, weight)

    def forward(self, x):
        return self.down(F.relu(self.project(x) + self.up.bias))


class InAPartial(Net):
    def __init__(self):
        super().__init__()
        self.project = functools.partial(F.linear, weight=self.up.weight)

    def forward(self, x):
        return self.down(F.relu(self.project(x)))


def of_the_output(model):
    return lambda out: out.square().mean()


def of_a_parameter(model):
    weight = model.up.weight
    return lambda out: out.square().mean() + 0.1 * weight.square().sum()


def of_all(model):
    parameters = list(model.parameters())
    return lambda out: out.square().mean() + 0.1 * sum(p.abs().sum() for p in parameters)


def of_names(model):
    named = dict(model.named_parameters())
    return lambda out: out.square().mean() + 0.1 * named["down.weight"].square().sum()


def of_the_start(model):
    start = [p.detach().clone() for p in model.parameters()]
    return lambda out: out.square().mean() + sum((p - s).square().sum() for p, s in zip(model.parameters(), start))


HOLDERS = {kind.__name__: (kind, of_the_output) for kind in (InAList, InADict, InAnObject, InAClosure, InAPartial)}
HOLDERS |= {loss.__name__: (Net, loss) for loss in (of_a_parameter, of_all, of_names, of_the_start)}


def trained(name, plan):
    build, make_loss = HOLDERS[name]
    torch.manual_seed(0)
    model = build()
    loss_of, ids = make_loss(model), [id(p) for p in model.parameters()]
    if plan:
        model, optimizer = parallelize(Plan(**PLANS[plan]), model, lambda p: torch.optim.SGD(p, lr=0.1))
        assert ids == [id(p) for p in model.parameters()]
        assert all(type(p) is DTensor for p in model.parameters())
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [*losses_of(model, optimizer, loss_of), *values_of(model)]


def losses_of(model, optimizer, loss_of, steps=STEPS):
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = loss_of(model(torch.randn(4, 8, generator=generator)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.tensor(loss.item()))
    return losses


def values_of(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def check(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=CLOSE)


@in_turns(3)
@pytest.mark.parametrize("name, plan", list(itertools.product(HOLDERS, PLANS)))
def test_who_holds_a_parameter_holds_its_shard(name, plan):
    wanted = trained(name, None)
    for found in run_ranks(2, trained, name, plan):
        check(found, wanted)


# --- optimizers and gradients of before ---------------------------------------------------


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def trained_early(kind, plan, before, gradient):
    """An optimizer, a scheduler, hooks and gradients that were there before `parallelize`, which is told of none."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    handle = model.up.weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    twice = model.down.weight.register_hook(lambda gradient: gradient * 2)
    losses_of(model, optimizer, of_the_output(model), before)
    if gradient:
        model(torch.ones(4, 8)).square().mean().backward()
    if plan:
        parallelize(Plan(**PLANS[plan]), model)
    losses = losses_of(model, optimizer, of_the_output(model), 2)
    scheduler.step()
    handle.remove()
    twice.remove()
    count = len(seen)
    losses += losses_of(model, optimizer, of_the_output(model), 2)
    assert len(seen) == count
    return [*losses, *values_of(model), torch.tensor(seen)]


EARLY = [(0, False), (0, True), (2, False), (2, True)]


@in_turns(5)
@pytest.mark.parametrize("kind, plan, early", list(itertools.product(OPTIMIZERS, PLANS, EARLY)))
def test_an_optimizer_of_before_trains_on(kind, plan, early):
    wanted = trained_early(kind, None, *early)
    for found in run_ranks(2, trained_early, kind, plan, *early):
        check(found, wanted)


def deferred():
    with deferred_init():
        torch.manual_seed(0)
        model = Net()
    held, weight = list(model.parameters()), model.up.weight
    weight.mark = "kept"
    model, optimizer = parallelize(Plan(**PLANS["zero 3"]), model, lambda p: torch.optim.SGD(p, lr=0.1))
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert weight.mark == "kept" and "_slot" not in weight.__dict__
    return [*losses_of(model, optimizer, of_a_parameter(model)), *values_of(model)]


def test_deferred_parameters_stay_the_same_objects():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = [*losses_of(model, optimizer, of_a_parameter(model)), *values_of(model)]
    for found in run_ranks(2, deferred):
        check(found, wanted)


def old_graph():
    model = Net()
    norm = model.up.weight.square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize(Plan(**PLANS["zero 0"]), model)
    with pytest.raises(PlanError, match="a graph from before the plan ends in"):
        norm.backward()


def test_a_graph_of_before_sends_no_gradient():
    run_ranks(2, old_graph)


# --- who shares its memory ----------------------------------------------------------------


def view(model):
    model.tied = model.up.weight.t()


def detached(model):
    model.start = model.up.weight.detach()


def data_in_a_list(model):
    model.held = [{"all": [p.data for p in model.parameters()]}]


def row_in_a_buffer(model):
    model.register_buffer("row", model.up.weight.data[0])


def second_parameter(model):
    model.again = nn.Parameter(model.up.weight.data)


def in_a_closure(model):
    row = model.up.weight.detach()[0]
    model.function = lambda x: x + row


def in_an_object(model):
    class Helper:
        pass

    model.helper = Helper()
    model.helper.bias = model.down.bias.data


IN_THE_MODEL = (view, detached, data_in_a_list, row_in_a_buffer, second_parameter, in_a_closure, in_an_object)


@pytest.mark.parametrize("share", IN_THE_MODEL, ids=lambda share: share.__name__)
def test_what_lies_in_a_parameters_memory_is_refused(share):
    run_ranks(1, refused, share)


def refused(share):
    model = Net()
    share(model)
    with pytest.raises(PlanError, match="shares the memory of the parameter"):
        parallelize(Plan(**ALONE), model)


def shared_module(first, second):
    second.up = first.up
    return first, second


def shared_parameter(first, second):
    second.up.weight = first.up.weight
    return first, second


def part_and_whole(first, second):
    whole = nn.Sequential(first, second)
    return first, whole


def parallelized_twice(share, plan):
    first, second = share(Net(), Net())
    plan = Plan(**PLANS[plan]).override(parameters={"*": {}})
    parallelize(plan, first)
    with pytest.raises(PlanError, match="is sharded by another parallelized model"):
        parallelize(plan, second)


@pytest.mark.parametrize("plan", ["zero 0", "zero 3", "tp"])
@pytest.mark.parametrize("share", (shared_module, shared_parameter, part_and_whole), ids=lambda s: s.__name__)
def test_a_parameter_of_two_models_is_refused(share, plan):
    run_ranks(2, parallelized_twice, share, plan)


def together(plan):
    torch.manual_seed(0)
    both = nn.ModuleDict({"a": Net(), "b": Net()})
    both["b"].up = both["a"].up
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    if plan:
        plan = {**PLANS[plan], "parameters": {"*": {}}}
        both, optimizer = parallelize(Plan(**plan), both, optimizer)
    run = lambda x: torch.stack([both["a"](x), both["b"](x).abs()])
    return losses_of(run, optimizer, lambda out: out.square().mean())


@pytest.mark.parametrize("plan", ["zero 0", "zero 3"])
def test_models_that_share_train_together(plan):
    wanted = together(None)
    for found in run_ranks(2, together, plan):
        check(found, wanted)


def copies(model):
    model.start = [p.detach().clone() for p in model.parameters()]


def halves(model):
    both = torch.randn(4, 6)
    model.left, model.right = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])


def tie(model):
    model.again = model.up.weight
    model.held = [model.up.weight]


def legacy_norm(model):
    nn.utils.spectral_norm(model.up)


def recurrent(model):
    model.lstm = nn.LSTM(4, 4)


def a_copy(model):
    model.teacher = copy.deepcopy(Net())


@pytest.mark.parametrize("share", (copies, halves, tie, legacy_norm, recurrent, a_copy), ids=lambda s: s.__name__)
def test_what_shares_nothing_is_not(share):
    run_ranks(1, taken, share)


def taken(share):
    model = Net()
    share(model)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharedMemoryWarning)
        parallelize(Plan(**ALONE), model)


def test_what_is_held_elsewhere_is_told():
    run_ranks(1, told)


def told():
    model = Net()
    kept = model.state_dict()
    before = kept["up.weight"].clone()
    with pytest.warns(SharedMemoryWarning, match="4 tensors outside of the model") as said:
        parallelize(Plan(**ALONE), model)
    assert [one.filename for one in said if one.category is SharedMemoryWarning] == [told.__code__.co_filename]
    assert torch.equal(kept["up.weight"], before)
