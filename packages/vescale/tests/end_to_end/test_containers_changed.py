"""Lists, dicts and dataclasses that a forward is given and changes: their caller sees it, as on one device."""

import dataclasses
from collections import OrderedDict, UserDict, deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("vescale")

WIDTH, ROWS = 8, 4


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    labels: Any
    more: Any


def output_of(**fields):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=fields["x"], hidden_states=fields["labels"], attentions=fields["more"])


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "labels": torch.randn(ROWS, WIDTH, generator=generator),
        "more": [torch.ones(ROWS, 1), {"inside": torch.full((ROWS, 1), 2.0)}],
    }


MAKES = {
    "dict": lambda: dict(tensors()),
    "OrderedDict": lambda: OrderedDict(tensors()),
    "list": lambda: list(tensors().values()),
    "UserDict": lambda: UserDict(tensors()),
    "deque": lambda: deque(tensors().values()),
    "dataclass": lambda: Batch(**tensors()),
    "ModelOutput": lambda: output_of(**tensors()),
    "in a tuple": lambda: (dict(tensors()), 3),
    "in a list of dicts": lambda: [dict(tensors()), {"n": 1}],
}


def first(given):
    """The innermost container of what was made, by which it is read and written."""
    holds = isinstance(given, tuple) or (given and isinstance(given, list) and isinstance(given[0], dict))
    return given[0] if holds else given


def read(held, at):
    if isinstance(held, (list, deque)):
        return held[at]
    if dataclasses.is_dataclass(held) and not isinstance(held, (dict, UserDict)):
        return getattr(held, ("x", "labels", "more")[at])
    return list(held.values())[at]


def write(held, at, value):
    if isinstance(held, (list, deque)):
        held[at] = value
    elif dataclasses.is_dataclass(held) and not isinstance(held, (dict, UserDict)):
        setattr(held, ("x", "labels", "more")[at], value)
    else:
        held[list(held)[at]] = value


def put(held, h):
    """A result in the place of an input."""
    write(held, 1, h)


def put_inside(held, h):
    read(held, 2)[1]["inside"] = h
    read(held, 2).append(h * 2)


def swap(held, h):
    a, b = read(held, 0), read(held, 1)
    write(held, 0, b)
    write(held, 1, a)


def put_a_number(held, h):
    write(held, 2, {"rows": h.shape[0]})


def nothing(held, h):
    pass


def take_out(held, h):
    held.pop("labels") if isinstance(held, (dict, UserDict)) else held.pop()


def add(held, h):
    if isinstance(held, (list, deque)):
        held.append(h)
        held.insert(0, held[1])
    else:
        held["h"] = h
        held["again"] = held["x"]


def take_out_and_add(held, h):
    take_out(held, h)
    add(held, h)


def to_the_end(held, h):
    if isinstance(held, (list, deque)):
        held.reverse()
    else:
        held["x"] = held.pop("x")


def clear(held, h):
    held.clear()


EVERYWHERE = (put, put_inside, swap, put_a_number, nothing)
RESIZED = (take_out, add, take_out_and_add, to_the_end, clear)
CASES = [
    (kind, change)
    for kind in MAKES
    for change in EVERYWHERE + (() if kind in ("dataclass", "ModelOutput") else RESIZED)
]


class Block(nn.Module):
    """Puts what it computes into a list, and reads from it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        memory.append(self.linear(x + memory[-1]))
        return memory[-1]


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, given, also=None):
        held = first(given)
        x, labels = read(held, 0), read(held, 1)
        memory = [torch.tanh(self.linear(x))]
        for block in self.blocks:
            x = block(x, memory)
        self.change(held, memory[-1])
        if also is not None:
            self.change(first(also), memory[-1])
        return sum((kept - labels).square().mean() for kept in memory)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def said(value, own):
    """What a container holds: which of the caller's tensors, or which numbers."""
    if isinstance(value, torch.Tensor):
        return own[id(value)][0] if id(value) in own else full(value).detach().tolist()
    if isinstance(value, (dict, UserDict)):
        return {key: said(each, own) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [said(each, own) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: said(getattr(value, field.name), own) for field in dataclasses.fields(value)}
    return value


def named(value, name, own):
    if isinstance(value, torch.Tensor):
        own[id(value)] = name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, (dict, UserDict)):
        named(vars(value), name, own)
    elif isinstance(value, (dict, UserDict, list, tuple, deque)):
        for key, each in (value.items() if isinstance(value, (dict, UserDict)) else enumerate(value)):
            named(each, f"{name}.{key}", own)
    return own


def ran(kind, change, plan, way):
    torch.manual_seed(0)
    model = Net(change)
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    if way == "beside a user's hook":
        model.register_forward_pre_hook(lambda module, args: None)
    found = []
    for _ in range(3):
        given, also = MAKES[kind](), MAKES[kind]()
        own = named(also, "also", named(given, "given", {}))
        loss = model(given, also=also)
        loss.backward()
        gradients = [full(each.grad).tolist() for each in model.parameters()]
        model.zero_grad()
        keys = [list(first(each)) if isinstance(first(each), dict) else None for each in (given, also)]
        found.append((full(loss).item(), gradients, keys, said(given, own), said(also, own)))
    return found


WHOLE = {"tp": vescale.Replicate()}
PLANS = {
    "data": {"mesh": {"dp": 2}, "parameters": {"*": {}}},
    "zero 3": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
    "tensor": {
        "mesh": {"dp": 2, "tp": 2},
        "parameters": {"blocks.*.linear.weight": {"tp": vescale.Shard(0)}, "*": {}},
        "boundaries": {"blocks.*": vescale.Boundary(input=WHOLE, output=WHOLE)},
        "zero": 2,
    },
}
WAYS = ("alone", "beside a user's hook")


def both(kind, change, plan, way):
    return ran(kind, change, None, way), ran(kind, change, plan, way)


def assert_close(found, wanted):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), (found, wanted)
        for one, other in zip(found, wanted):
            assert_close(one, other)
    else:
        assert found == (pytest.approx(wanted, rel=1e-5, abs=1e-6) if isinstance(wanted, float) else wanted)


GRID = [(*case, plan, way) for case in CASES for plan in PLANS for way in WAYS]


@pytest.mark.parametrize("plan", PLANS)
def test_what_a_forward_changes_its_caller_sees(plan):
    plan_of = vescale.Plan(**PLANS[plan])
    cases = slice_of([case for case in GRID if case[2] == plan], fraction=5)
    ranks = 4 if plan == "tensor" else 2
    for found in run_ranks(ranks, every, [(kind, change, plan_of, way) for kind, change, _, way in cases]):
        for case, (wanted, ours) in zip(cases, found):
            try:
                assert_close(ours, wanted)
            except AssertionError as error:
                raise AssertionError(f"{case[0]}, {case[1].__name__}, {case[2:]}: {error}") from None


def every(cases):
    return [both(*case) for case in cases]


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        batch["h"] = self.linear(batch.pop("x"))
        raise KeyError("later")


def raising(way):
    model, _ = vescale.parallelize(vescale.Plan(**PLANS["data"]), Fails(), partial(torch.optim.SGD, lr=0.1))
    if way == "beside a user's hook":
        model.register_forward_pre_hook(lambda module, args: None)
    batch = tensors()
    with pytest.raises(KeyError, match="later"):
        model(batch)
    return list(batch)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_changed_before_it_raised(way):
    assert run_ranks(2, raising, way) == [["labels", "more", "h"]] * 2
