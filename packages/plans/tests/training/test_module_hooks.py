"""Hooks that users put on modules and parameters see global tensors, and what they return counts: every kind of hook on
every kind of plan, put there before and after `parallelize`."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every

from vescale_dtensor import Replicate, Shard
from vescale_plans import Boundary, Plan, parallelize
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, WORDS = 8, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, scale=1.0, *, shift=None):
        out = x + scale * self.down(torch.tanh(self.up(self.norm(x))))
        return (out if shift is None else out + shift), out.mean()


class Net(nn.Module):
    """Blocks of several outputs, one of them a number, and of plain, positional and keyword arguments."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, targets):
        total = 0.0
        for i, block in enumerate(self.blocks):
            x, mean = block(x, 0.5 + i, shift=x.detach().mean())
            total = total + mean
        return self.loss(self.head(x.mean(1)), targets) + 0.1 * total


SEQUENCE = Boundary(input={"tp": Shard(1)}, output={"tp": Shard(1)})
COLUMNS = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}}
TP = {
    "parameters": COLUMNS,
    "boundaries": {"*.up": Boundary(input={"tp": Replicate()}), "*.down": Boundary(output={"tp": Replicate()})},
}
SP = {
    "parameters": COLUMNS,
    "boundaries": {
        "*.norm": SEQUENCE, "*.up": Boundary(input={"tp": Replicate()}), "*.down": Boundary(output={"tp": Shard(1)}),
    },
}  # fmt: skip
WHOLE = {"parameters": {"*": {}}}
PLANS = {
    "dp": Plan(mesh={"dp": 2}, **WHOLE),
    "zero2": Plan(mesh={"dp": 2}, zero=2, **WHOLE),
    "zero3": Plan(mesh={"dp": 2}, zero=3, **WHOLE),
    "tp": Plan(mesh={"tp": 2}, **TP),
    "sp": Plan(mesh={"tp": 2}, **SP),
    "sp, regathered": Plan(mesh={"tp": 2}, regather={"blocks.*": True}, **SP),
    "dp2 x sp2, zero3": Plan(mesh={"dp": 2, "tp": 2}, zero=3, **SP),
}


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 4, WIDTH, generator=generator), torch.randint(WORDS, (8,), generator=generator)


def numbers(value):
    """Shapes and norms of the tensors in `value`, in order."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        return [tuple(value.shape), full.double().norm().item(), full.double().sum().item()]
    if isinstance(value, (tuple, list, dict)):
        return [one for each in (value.values() if isinstance(value, dict) else value) for one in numbers(each)]
    return [type(value).__name__]


def doubled(value):
    return tuple(one if one is None else 2 * one for one in value)


# --- kinds of hooks: each puts itself on a model, notes what it sees, and gives what takes it away --------------------


def forward_hooks(model, seen):
    for name, module in model.named_modules():
        yield module.register_forward_hook(lambda m, args, out, name=name: seen.append((name, numbers((args, out)))))


def forward_pre_hooks(model, seen):
    for name, module in model.named_modules():
        yield module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, numbers(args))))


def with_kwargs(model, seen):
    for block in model.blocks:
        yield block.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(numbers((args, kwargs))) or ((args[0] * 1.1, *args[1:]), kwargs),
            with_kwargs=True, prepend=True,
        )  # fmt: skip
        yield block.register_forward_hook(
            lambda m, args, kwargs, out: seen.append(numbers((args, kwargs, out))) or (out[0] * 0.9, out[1]),
            with_kwargs=True, always_call=True,
        )  # fmt: skip


def replaced_outputs(model, seen):
    yield model.blocks[0].down.register_forward_hook(lambda m, args, out: out * 1.5)
    yield model.head.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,), prepend=True)


def full_backward_hooks(model, seen):
    for name, module in model.named_modules():
        if name:
            yield module.register_full_backward_hook(
                lambda m, into, out, name=name: seen.append((name, numbers((into, out))))
            )


def full_backward_pre_hooks(model, seen):
    for name, module in model.named_modules():
        yield module.register_full_backward_pre_hook(lambda m, out, name=name: seen.append((name, numbers(out))))


def replaced_gradients(model, seen):
    for block in model.blocks[1:]:
        yield block.register_full_backward_hook(lambda m, into, out: doubled(into))
        yield block.up.register_full_backward_pre_hook(lambda m, out: doubled(out), prepend=True)
        yield block.norm.register_full_backward_hook(lambda m, into, out: tuple(one.clamp(-0.01, 0.01) for one in into))
    yield model.loss.register_full_backward_pre_hook(lambda m, out: doubled(out))


def plain_replacements(model, seen):
    """Whole tensors, as a user makes them."""
    yield model.head.register_full_backward_hook(lambda m, into, out: (torch.ones(into[0].shape) / 100,))
    yield model.blocks[1].down.register_full_backward_pre_hook(
        lambda m, out: (torch.linspace(0, 1, out[0].numel()).view(out[0].shape),)
    )


def global_hooks(model, seen):
    """Of all modules; what is no part of this model is left alone."""
    names = {module: name for name, module in model.named_modules()}

    def note(*given):
        if names.get(given[0]):
            seen.append((names[given[0]], numbers(given[1:])))

    yield every.register_module_forward_pre_hook(note)
    yield every.register_module_forward_hook(note)
    yield every.register_module_full_backward_pre_hook(note)
    yield every.register_module_full_backward_hook(note)


def hooks_of_parameters(model, seen):
    for name, parameter in model.named_parameters():
        yield parameter.register_hook(lambda g, name=name: seen.append((name, numbers(g))) or 2 * g)
        yield parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, numbers((p, p.grad))))
        )


def gradients_scaled_when_accumulated(model, seen):
    for parameter in model.parameters():
        yield parameter.register_post_accumulate_grad_hook(lambda p: seen.append(("", p.grad.mul_(0.5).dim() * 0)))


KINDS = {
    function.__name__: function
    for function in (
        forward_hooks, forward_pre_hooks, with_kwargs, replaced_outputs, full_backward_hooks, full_backward_pre_hooks,
        replaced_gradients, plain_replacements, global_hooks, hooks_of_parameters, gradients_scaled_when_accumulated,
    )
}  # fmt: skip
# What is added up at a leaf comes when it comes.
IN_ANY_ORDER = ("hooks_of_parameters", "full_backward_hooks", "gradients_scaled_when_accumulated")


def trained(model, hook, when, plan=None):
    """Losses, what hooks saw, and parameters; the hooks are there before `parallelize`, after it, or after a step."""
    seen: list = []
    handles = []
    try:
        if when == "before":
            handles += hook(model, seen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plan is not None:
            make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
            model, optimizer = parallelize(plan, model, make)
        losses = []
        for step in range(4):
            if when == "after" and step == 0 or when == "later" and step == 2:
                handles += hook(model, seen)
            loss = model(*batch(step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                for handle in handles:
                    handle.remove()
    finally:
        for handle in handles:
            handle.remove()
    return losses, seen, {n: p.detach() for n, p in model.named_parameters()}


def by_name(losses, seen, parameters):
    return losses, sorted(seen, key=lambda one: one[0]), parameters


def flat(value):
    return [one for each in value for one in flat(each)] if isinstance(value, (tuple, list)) else [value]


def alike(mine, theirs, where):
    mine, theirs = flat(mine), flat(theirs)
    assert len(mine) == len(theirs), where
    for one, other in zip(mine, theirs):
        if isinstance(other, float):
            assert abs(one - other) <= 1e-4 * abs(other) + 2e-4, where
        elif isinstance(other, str):
            assert one == other or {one, other} <= {"Tensor", "DTensor"}, where
        else:
            assert one == other, where


def run(plan):
    for (kind, hook), when in itertools.product(KINDS.items(), ("before", "after", "later")):
        where = f"{kind}, {when}"
        torch.manual_seed(0)
        alone = Net()
        model = copy.deepcopy(alone)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            wanted = trained(alone, hook, when)
            try:
                got = trained(model, hook, when, plan)
            except Exception as error:
                error.add_note(where)
                raise
        alike(got[0], wanted[0], f"{where}: losses")
        if kind in IN_ANY_ORDER:
            got, wanted = (by_name(*got), by_name(*wanted))
        alike(got[1], wanted[1], f"{where}: what it saw")
        for name, one in wanted[2].items():
            other = got[2][name].full_tensor()
            assert (one - other).norm() <= 1e-4 * one.norm() + 1e-6, f"{where}: {name}"


@pytest.mark.parametrize("kind", slice_of(PLANS, 4))
def test_hooks_see_what_one_device_shows_them(kind):
    run_ranks(PLANS[kind].world_size, run, PLANS[kind])
