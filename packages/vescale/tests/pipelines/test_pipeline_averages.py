"""Two models that are parallelized with one plan under a pipeline: one follows the other, as on one device."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS, STEPS = 8, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


# --- how an average follows: of pairs of parameters --------------------------------------


def lerped(average, one):
    average.lerp_(one, 0.1)


def multiplied(average, one):
    average.mul_(0.9).add_(one, alpha=0.1)


def detached(average, one):
    average.detach().mul_(0.9).add_(one.detach() * 0.1)


def copied(average, one):
    average.copy_(0.9 * average + 0.1 * one)


def by_data(average, one):
    average.data = 0.9 * average.data + 0.1 * one.data


def parameter_by_parameter(follow, average, model):
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters()):
            follow(one, other)


def by_name(follow, average, model):
    with torch.no_grad():
        followed = dict(average.named_parameters())
        for name, one in model.named_parameters():
            follow(followed[name], one)


def all_at_once(average, model):
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


def all_in_two(average, model):
    with torch.no_grad():
        torch._foreach_mul_(list(average.parameters()), 0.9)
        torch._foreach_add_(list(average.parameters()), list(model.parameters()), alpha=0.1)


FOLLOWS = {
    **{
        f"{over.__name__}, {follow.__name__}": partial(over, follow)
        for over in (parameter_by_parameter, by_name)
        for follow in (lerped, multiplied, detached, copied, by_data)
    },
    **{of_all.__name__: of_all for of_all in (all_at_once, all_in_two)},
}
ALL = ("all_at_once", "all_in_two")


AVERAGES = {
    "mean": lambda model: AveragedModel(model),
    "mean with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "moving": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
}
# mesh, ZeRO stage, schedule, virtual stages
MESHES = [
    ({"pp": 2}, 0, "1f1b", 1),
    ({"pp": 2}, 0, "zbv", 2),
    ({"pp": 2, "dp": 2}, 0, "1f1b", 1),
    ({"dp": 2, "pp": 2}, 2, "zb-h1", 1),
    ({"pp": 2, "dp": 2}, 3, "1f1b", 1),
    ({"pp": 2, "tp": 2}, 0, "1f1b", 1),
]


def plan_of(mesh, zero, schedule, virtual):
    columns, rows = ({"tp": vescale.Shard(dim)} if "tp" in mesh else {} for dim in (0, 1))
    return vescale.Plan(
        mesh=mesh,
        parameters={"blocks.*.up.*": columns, "blocks.*.down.weight": rows, "*": {}},
        data_axis="dp" if "dp" in mesh else None,
        zero=zero,
        pipeline=vescale.Pipeline(
            cuts=("blocks.1", "blocks.2", "blocks.3") if virtual == 2 else ("blocks.2",),
            schedule=schedule,
            microbatches=4,
            virtual=virtual,
        ),
    )


def ranks_of(mesh):
    return torch.Size(mesh.values()).numel()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(number):
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).unbind()


def trained(model, optimizer, average, follow):
    losses = []
    for number in range(STEPS):
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        follow(average, model)
        with torch.no_grad():
            losses += [loss.item(), float(average(*batch(100 + number)))]
    return losses


def same(model, alone):
    held, wanted = dict(model.named_parameters()), dict(alone.named_parameters())
    assert held
    for name, one in held.items():
        torch.testing.assert_close(one.detach().full_tensor(), wanted[name].detach(), rtol=1e-4, atol=1e-6)


def compared(make, follow, is_frozen, *case):
    torch.manual_seed(0)
    alone, model = Net(), Net()
    model.load_state_dict(alone.state_dict())
    average_alone, average = make(alone), make(model)
    if is_frozen:
        average_alone.requires_grad_(False)
        average.requires_grad_(False)
    wanted = trained(alone, sgd(alone.parameters()), average_alone, follow)
    model, optimizer = vescale.parallelize(plan_of(*case), model, sgd)
    if isinstance(average, AveragedModel):
        average.module, _ = vescale.parallelize(plan_of(*case), average.module)
    else:
        average, _ = vescale.parallelize(plan_of(*case), average)
    losses = trained(model, optimizer, average, follow)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-6)
    same(model, alone)
    same(average, average_alone)


def _followed(name, is_frozen, *case):
    compared(copy.deepcopy, FOLLOWS[name], is_frozen, *case)


def _averaged(name, is_frozen, *case):
    compared(AVERAGES[name], lambda average, model: average.update_parameters(model), is_frozen, *case)


@pytest.mark.parametrize("case", slice_of(MESHES, 4), ids=str)
@pytest.mark.parametrize("name", FOLLOWS)
def test_a_copy_from_before_follows(name, case):
    run_ranks(ranks_of(case[0]), _followed, name, False, *case)


@pytest.mark.parametrize("case", slice_of(MESHES, 3), ids=str)
@pytest.mark.parametrize("name", ["parameter_by_parameter, lerped", "by_name, multiplied", *ALL])
def test_a_frozen_copy_follows(name, case):
    run_ranks(ranks_of(case[0]), _followed, name, True, *case)


@pytest.mark.parametrize("case", slice_of(MESHES, 2), ids=str)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_torch_follow(name, is_frozen, case):
    run_ranks(ranks_of(case[0]), _averaged, name, is_frozen, *case)
