"""Copies of parallelized models (`copy.deepcopy`, averages of `torch.optim.swa_utils`): one device's numbers, memory of
their own, on every kind of plan."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

from vescale_dtensor import OperatorError, Replicate, Shard
from vescale_plans import Boundary, Plan, Precision, parallelize
from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, WORDS = 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tied weights, a module under two names, statistics, a frozen parameter, a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks.append(self.blocks[0])
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, targets=None):
        self.calls += 1
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.statistics((x * self.scale).mean(1)))
        return scores if targets is None else F.cross_entropy(scores, targets)


class Stack(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.how_many_experts = count
        self.into, self.out = (nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 3) for _ in range(2))

    def forward(self, rows, shares, picked):
        total = torch.zeros_like(rows)
        for expert in range(self.how_many_experts):
            row, slot = torch.where(picked == expert)
            one = torch.tanh(rows[row] @ self.into[expert]) @ self.out[expert]
            total = total.index_add(0, row, one * shares[row, slot, None])
        return total


class Listed(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, rows):
        shares, picked = self.gate(rows).softmax(-1).topk(2, dim=-1)
        total = torch.zeros_like(rows)
        for expert in range(len(self.experts)):
            row, slot = torch.where(picked == expert)
            total = total.index_add(0, row, self.experts[expert](rows[row]) * shares[row, slot, None])
        return total


class Mixture(nn.Module):
    """Stacked experts, and experts in a list."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.router, self.stack, self.listed = nn.Linear(WIDTH, 4), Stack(), Listed()
        self.head = nn.Linear(WIDTH, WORDS)
        self.blocks = [self.listed]

    def forward(self, x, targets=None):
        rows = self.words(x).reshape(-1, WIDTH)
        shares, picked = self.router(rows).softmax(-1).topk(2, dim=-1)
        rows = rows + self.stack(rows, shares, picked)
        scores = self.head(self.listed(rows).view(*x.shape, WIDTH).mean(1))
        return scores if targets is None else F.cross_entropy(scores, targets)


TP = {
    "parameters": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    "boundaries": {"*.up": Boundary(input={"tp": Replicate()}), "*.down": Boundary(output={"tp": Replicate()})},
}
DP = partial(Plan, mesh={"dp": 2}, parameters={"*": {}})
PLANS = {
    "dp": DP(),
    "zero1": DP(zero=1),
    "zero2": DP(zero=2),
    "zero3": DP(zero=3),
    "zero2 offload": DP(zero=2, offload=True),
    "tp": Plan(mesh={"tp": 2}, **TP),
    "tp, recomputed": Plan(mesh={"tp": 2}, **TP, checkpointing={"blocks.*": True}),
    "tp, regathered": Plan(mesh={"tp": 2}, **TP, regather={"blocks.*": True}),
    "zero3, recomputed": DP(zero=3, checkpointing={"blocks.*": True}),
    "dp2 x tp2, zero3": Plan(mesh={"dp": 2, "tp": 2}, zero=3, **TP),
    "ep": DP(data_axis="dp", expert_axis="dp"),
    "ep, zero3": Plan(mesh={"ep": 2, "dp": 2}, parameters={"*": {}}, data_axis=("ep", "dp"), expert_axis="ep", zero=3),
}


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(WORDS, (8, 3), generator=generator), torch.randint(WORDS, (8,), generator=generator)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def trained(model, optimizer, steps, each=lambda: None):
    """Losses."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        each()
    return losses


def state(model):
    return dict(model.state_dict())


def evaluated(model):
    model.eval()
    with torch.no_grad():
        found = model(batch(50)[0])
    model.train()
    return found


# --- what users do with copies: each gives values that one device gives alike ---------------------------------------


def two_models(model, optimizer):
    """Both train on; each has its own parameters, statistics and states of optimizers."""
    yield trained(model, optimizer, range(2))
    twin = copy.deepcopy(model)
    assert all(parameter.grad is None for parameter in twin.parameters())
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    mine = adamw(twin)
    yield trained(twin, mine, range(2, 4)), state(model), evaluated(model)
    yield trained(model, optimizer, range(4, 6)), state(twin), evaluated(twin)
    yield trained(twin, mine, range(6, 7)), state(twin), state(model)


def amid_a_step(model, optimizer):
    """A copy between forward and backward, and between backward and step."""
    for step in range(3):
        torch.manual_seed(step)
        loss = model(*batch(step))
        first = copy.deepcopy(model)
        loss.backward()
        second = copy.deepcopy(model)
        yield evaluated(first), evaluated(second), {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        yield evaluated(first), evaluated(second), state(model)


def copy_of_a_copy(model, optimizer):
    yield trained(model, optimizer, range(1))
    twin = copy.deepcopy(model)
    yield trained(twin, adamw(twin), range(1, 2))
    third = copy.deepcopy(twin)
    del twin
    yield trained(third, adamw(third), range(2, 4)), state(third), state(model)


def frozen_teacher(model, optimizer):
    """Of a copy without gradients the outputs are targets, and a copy of that one trains."""
    yield trained(model, optimizer, range(1))
    teacher = copy.deepcopy(model).requires_grad_(False)
    for step in range(1, 3):
        torch.manual_seed(step)
        loss = (model(batch(step)[0]) - evaluated(teacher)).square().mean()
        loss.backward()
        yield loss.detach(), {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    yield state(teacher), state(model)


def of_a_part(model, optimizer):
    """One block, trained by itself, and set into the model in place of another."""
    yield trained(model, optimizer, range(1))
    block = copy.deepcopy(model.blocks[0])
    mine = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        loss = block(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        mine.step()
        mine.zero_grad()
        yield loss.detach(), state(block)
    yield trained(model, optimizer, range(1, 2)), state(model), state(block)


def within_containers(model, optimizer):
    yield trained(model, optimizer, range(1))
    one, two, (three,) = copy.deepcopy([model, model, nn.ModuleList([model])])
    assert one is two is three and one is not model
    yield trained(one, adamw(one), range(1, 2)), state(one), state(model)


def hand_average(write, model, optimizer):
    average = copy.deepcopy(model)

    def update():
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                write(mine, theirs)

    for step in range(3):
        yield trained(model, optimizer, [step], update), evaluated(average)
    yield state(average), state(model)


def average_of_state(model, optimizer):
    """By `load_state_dict` of averaged values."""
    average = copy.deepcopy(model)
    for step in range(3):
        yield trained(model, optimizer, [step])
        mine, theirs = average.state_dict(), model.state_dict()
        average.load_state_dict({n: mine[n] * 0.75 + theirs[n] * 0.25 for n in mine})
        yield evaluated(average), state(average)
    average.load_state_dict(model.state_dict())
    yield evaluated(average), state(average)


def averaged(model, optimizer, **options):
    average = swa_utils.AveragedModel(model, **options)
    for step in range(4):
        yield trained(model, optimizer, [step], lambda: average.update_parameters(model)), evaluated(average)
    yield state(average), state(model)
    swa_utils.update_bn([batch(7)[0], batch(8)[0]], average)
    yield state(average), evaluated(average)


USES = {
    "two models": two_models,
    "amid a step": amid_a_step,
    "a copy of a copy": copy_of_a_copy,
    "a frozen teacher": frozen_teacher,
    "a part": of_a_part,
    "in containers": within_containers,
    "lerp_": partial(hand_average, lambda mine, theirs: mine.lerp_(theirs, 0.25)),
    "mul_ and add_ of data": partial(hand_average, lambda a, b: a.data.mul_(0.75).add_(b.data, alpha=0.25)),
    "data =": partial(hand_average, lambda a, b: setattr(a, "data", a.data * 0.75 + b.data * 0.25)),
    "copy_": partial(hand_average, lambda mine, theirs: mine.copy_(0.75 * mine + 0.25 * theirs)),
    "load_state_dict": average_of_state,
    "SWA": averaged,
    "EMA": partial(averaged, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75)),
    "EMA of buffers": partial(averaged, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.75), use_buffers=True),
    "avg_fn": partial(averaged, avg_fn=lambda a, b, n: 0.5 * a + 0.5 * b, use_buffers=True),
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()
    elif value is not None:
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def equal(mine, theirs):
    mine, theirs = list(tensors_in(mine)), list(tensors_in(theirs))
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs):
        assert one.dtype == other.dtype
        assert (one - other).double().norm() <= 1e-4 * other.double().norm() + 1e-6


def run(plan, uses):
    for use in uses:
        torch.manual_seed(0)
        alone = Mixture() if plan.expert_axis else Net()
        model = copy.deepcopy(alone)
        wanted, at = [], 0
        for found in USES[use](alone, adamw(alone)):
            wanted.append([one.clone() for one in tensors_in(found)])
        torch.manual_seed(0)
        model, optimizer = parallelize(plan, model, lambda _, model=model: adamw(model))
        try:
            for at, found in enumerate(USES[use](model, optimizer), 1):
                equal(found, wanted[at - 1])
        except Exception as error:
            error.add_note(f"{use}, at its result {at}")
            raise
        assert at == len(wanted)


@pytest.mark.parametrize("kind", slice_of(PLANS, 6))
def test_copies_give_one_device_results(kind):
    plan = PLANS[kind]
    run_ranks(plan.world_size, run, plan, list(USES))


HALF = {
    f"zero{zero}, {compute}": DP(zero=zero, precision=Precision(compute=compute))
    for zero in range(4)
    for compute in (torch.bfloat16, torch.float64)
}


@pytest.mark.parametrize("kind", HALF)
def test_copies_in_another_precision(kind):
    """As the original from there on, bitwise; and averages: a write to a full-precision shard was not seen below
    ZeRO-3, where the copies in the other dtype stay."""

    def net():
        torch.manual_seed(0)
        model = Net()
        model.statistics = nn.LayerNorm(WIDTH)  # kernels of batch normalization take buffers of one dtype
        return model

    def work():
        model, optimizer = parallelize(HALF[kind], net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        trained(model, optimizer, range(2))
        twin = copy.deepcopy(model)
        mine = torch.optim.SGD(twin.parameters(), lr=0.1)  # none of ours: its writes must be seen
        for step in range(2, 5):
            (one,), (other,) = trained(model, optimizer, [step]), trained(twin, mine, [step])
            assert torch.equal(one.full_tensor(), other.full_tensor())
        average = swa_utils.AveragedModel(model)
        outputs = [evaluated(average).full_tensor()]
        for write in (lambda p: p.mul_(1.5), lambda p: p.data.mul_(1.5), lambda p: setattr(p, "data", p.data * 1.5)):
            with torch.no_grad():
                for parameter in average.parameters():
                    write(parameter)
            plain = net()
            plain.load_state_dict({n: next(tensors_in([t])) for n, t in average.module.state_dict().items()})
            outputs.append(evaluated(average).full_tensor())
            wanted = evaluated(plain.to(HALF[kind].precision.compute))
            assert (outputs[-1] - wanted).norm() <= 0.01 * wanted.norm()
            assert not torch.equal(outputs[-1], outputs[-2])

    run_ranks(2, work)


@pytest.mark.parametrize("kind", ["dp", "zero1", "zero2", "zero3", "tp"])
def test_a_copy_has_memory_of_its_own(kind):
    """No byte is shared, and under ZeRO-3 a copy holds shards alone, as its original does."""

    def work():
        def storages(one):
            found = {}
            for unit in one._vescale.sync.units:
                for buffer in unit.buckets:
                    for tensor in (buffer.full, buffer.shard):
                        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            for tensor in (*one.parameters(), *one.buffers()):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                found[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
            return found

        model, optimizer = parallelize(PLANS[kind], Net(), torch.optim.AdamW)
        trained(model, optimizer, range(1))
        twin = copy.deepcopy(model)
        mine, theirs = storages(twin), storages(model)
        assert not mine.keys() & theirs.keys()
        assert sorted(mine.values()) == sorted(theirs.values())
        return sum(mine.values())

    held = sum(tensor.nbytes for tensor in (*Net().parameters(), *Net().buffers()))
    for size in run_ranks(2, work):
        assert size < (0.75 if kind == "zero3" else 1.5) * held


@pytest.mark.parametrize("kind", ["dp", "zero2", "zero3", "tp"])
def test_one_rank_alone_may_copy(kind):
    def work():
        import torch.distributed as dist

        model, optimizer = parallelize(PLANS[kind], Net(), torch.optim.AdamW)
        trained(model, optimizer, range(1))
        if dist.get_rank() == 1:
            twin = copy.deepcopy(model)
            assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
        return trained(model, optimizer, range(1))[0].item()

    assert len({*run_ranks(2, work)}) == 1


def test_what_a_model_has_of_its_own_is_copied():
    """Hooks of the user's, forwards put on the object, attributes; and nothing that refers to the original."""

    def work():
        model = Net()
        seen = []
        model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(module))
        model, _ = parallelize(PLANS["zero3"], model)
        model.blocks[2].register_forward_pre_hook(lambda module, args: seen.append(module))
        model.note = {"head": model.head}
        twin = copy.deepcopy(model)
        twin(batch(0)[0])
        assert seen == [twin.blocks[1], twin.blocks[2]]
        assert twin.note["head"] is twin.head is not model.head
        assert twin.blocks[3] is twin.blocks[0] and twin.head.weight is twin.words.weight
        assert str(twin) == str(model)
        assert list(twin.state_dict()) == list(model.state_dict())
        originals = {*model.modules()}
        assert not any(unit_module in originals for unit in twin._vescale.sync.units for unit_module in unit.modules)

    run_ranks(2, work)


def test_a_parallelized_model_does_not_travel():
    def work():
        model, _ = parallelize(PLANS["dp"], nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
        for one in (model, model[0], model[1]):
            with pytest.raises(OperatorError, match=r'save\(path, {"model": model}\)'):
                pickle.dumps(one)

    run_ranks(2, work)


@in_turns(3)
@pytest.mark.parametrize("kind", PLANS)
def test_an_optimizer_that_is_none_of_ours(kind):
    """Made after `parallelize`. Under ZeRO-3 a block that was gathered ahead, and not used, stayed as it was before
    the step."""

    def work():
        torch.manual_seed(0)
        alone = Mixture() if PLANS[kind].expert_axis else Net()
        model, _ = parallelize(PLANS[kind], copy.deepcopy(alone))
        for one in (alone, model):
            one.losses = trained(one, adamw(one), range(3))
            one.eval()
            one.losses.append(one(batch(9)[0]))  # with a graph that nobody goes back
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(0.9)
            one.losses.append(one(batch(9)[0]))
        equal(model.losses, alone.losses)

    run_ranks(PLANS[kind].world_size, work)


def test_modules_that_were_put_into_the_model_since():
    """A part that was replaced, and a copy that is held in the model itself and copied with it."""

    def work():
        torch.manual_seed(0)
        alone = Net()
        model, _ = parallelize(PLANS["zero3"], copy.deepcopy(alone))
        found = []
        for one in (alone, model):
            torch.manual_seed(1)
            one.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            one.teacher = copy.deepcopy(one)
            twin = copy.deepcopy(one)
            twin.eval()
            one.eval()
            results = [m(batch(0)[0]) for m in (one, one.teacher, twin, twin.teacher)]
            twin(*batch(1)).backward()
            found.append((*results, {n: p.grad for n, p in twin.named_parameters()}))
            assert all(p.grad is None for p in (*one.parameters(), *twin.teacher.parameters()))
        equal(found[1], found[0])

    run_ranks(2, work)
