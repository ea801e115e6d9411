"""What a training loop does to gradients, parameters and optimizer states between steps: one device's results, or a
ViewError where a view that is written would have to be a copy."""

import copy
import math
from collections import defaultdict

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, Shard, ViewError
from vescale_plans import Plan, parallelize
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("vescale_plans")

STEPS, CLOSE = 4, 2e-5
TP = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    "zero 0": {"mesh": {"dp": 2}, "parameters": {"*": {}}},
    "zero 1": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 1},
    "zero 3": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
    "tp": {"mesh": {"tp": 2}, "parameters": TP},
    "tp, zero 3": {"mesh": {"dp": 2, "tp": 2}, "parameters": TP, "zero": 3},
}
ROWS = torch.tensor([1, 5])


def grid(w):
    return torch.arange(float(w.numel())).view(tuple(w.shape))


def each(tensor, indices):
    """Writes in which Python takes a part, writes to it, and puts it back."""
    for index in indices:
        tensor[index] *= 0.9
        tensor[index] += 0.01


def kept_rows(m, o, w):
    """An index of numbers, or a mask, copies on one device, too."""
    mask = torch.arange(len(w)) % 3 == 0
    old, masked, column = w.data[ROWS], w[mask], w.data[:, ROWS]
    w.data.mul_(0.5)
    w.data[ROWS], w[mask] = old, masked * 2
    w.data[:, ROWS] = column


def seeded(function):
    def run(m, o, w):
        torch.manual_seed(3)
        function(w)

    return run


GRADIENTS = {
    "a row, by a view": lambda m, o, w: w.grad[0].zero_(),
    "rows": lambda m, o, w: w.grad.__setitem__(ROWS, 0),
    "augmented": lambda m, o, w: each(w.grad, (0, -1, (slice(None), 1), (2, 3), slice(1, 9, 3), ROWS, w.grad > 0)),
    "a column, halved": lambda m, o, w: w.grad[:, 3].mul_(0.5),
    "a slice": lambda m, o, w: w.grad.__setitem__(slice(3, None), 0),
    "mul_": lambda m, o, w: w.grad.mul_(0.5),
    "decay by hand": lambda m, o, w: w.grad.add_(w.detach(), alpha=0.1),
    "masked": lambda m, o, w: setattr(w, "grad", w.grad * (grid(w) % 3 > 0)),
    "clamp_": lambda m, o, w: w.grad.clamp_(-0.1, 0.1),
    "sign": lambda m, o, w: setattr(w, "grad", w.grad.sign()),
    "norm": lambda m, o, w: w.grad.div_(w.grad.norm()),
    "norm of rows": lambda m, o, w: w.grad.div_(w.grad.norm(dim=1, keepdim=True)),
    "norm of columns": lambda m, o, w: w.grad.div_(w.grad.norm(dim=0, keepdim=True)),
    "copy_": lambda m, o, w: w.grad.copy_(torch.ones(tuple(w.shape))),
    "centred": lambda m, o, w: w.grad.sub_(w.grad.mean(dim=1, keepdim=True)),
    "data": lambda m, o, w: w.grad.data.mul_(0.3),
    "masked_fill_": lambda m, o, w: w.grad.masked_fill_(w.grad.abs() < 1, 0),
    "where": lambda m, o, w: setattr(w, "grad", torch.where(w.grad.isfinite(), w.grad, 0.0)),
    "a plain tensor added": lambda m, o, w: w.grad.add_(grid(w) * 0.01),
    "transposed": lambda m, o, w: w.grad.t()[0].zero_(),
    "flattened": lambda m, o, w: w.grad.view(-1)[:7].zero_(),
    "foreach": lambda m, o, w: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5),
    "flip": lambda m, o, w: setattr(w, "grad", w.grad.flip(0)),
    "projected": lambda m, o, w: w.grad.sub_((w.grad * w.detach()).sum() / w.detach().square().sum() * w.detach()),
}
PARAMETERS = {
    "a row, by a view": lambda m, o, w: w[3].fill_(0.1),
    "a row of data": lambda m, o, w: w.data.__setitem__(3, 0.0),
    "rows": lambda m, o, w: w.__setitem__(ROWS, 0.5),
    "augmented": lambda m, o, w: each(w, (0, -1, (slice(None), 1), (2, 3), slice(1, 9, 3), ROWS, w > 0)),
    "augmented data": lambda m, o, w: each(w.data, (0, -1, (slice(None), 1), (2, 3), slice(1, 9, 3), ROWS)),
    "kept rows": kept_rows,
    "a column": lambda m, o, w: w.__setitem__((slice(None), 0), 0.0),
    "masked": lambda m, o, w: w.mul_(grid(w) % 2),
    "clamp_": lambda m, o, w: w.clamp_(-0.05, 0.05),
    "copy_": lambda m, o, w: w.copy_(grid(w) * 0.001),
    "of itself": lambda m, o, w: w.copy_(w * 2),
    "norm of rows": lambda m, o, w: w.div_(w.norm(dim=1, keepdim=True)),
    "renorm": lambda m, o, w: w.copy_(torch.renorm(w, 2, 0, 0.5)),
    "index_copy_": lambda m, o, w: w.index_copy_(0, ROWS, torch.ones(2, w.shape[1])),
    "index_fill_": lambda m, o, w: w.index_fill_(0, ROWS, 0.0),
    "masked_fill_": lambda m, o, w: w.masked_fill_(w.abs() < 0.1, 0.0),
    "lerp_": lambda m, o, w: w.lerp_(torch.zeros(tuple(w.shape)), 0.3),
    "zeros_": lambda m, o, w: nn.init.zeros_(w),
    "eye_": lambda m, o, w: nn.init.eye_(w),
    "xavier": seeded(nn.init.xavier_uniform_),
    "kaiming": seeded(nn.init.kaiming_normal_),
    "trunc_normal": seeded(lambda w: nn.init.trunc_normal_(w, std=0.02)),
    "orthogonal": seeded(nn.init.orthogonal_),
    "sparse": seeded(lambda w: nn.init.sparse_(w, 0.3)),
    "normal_ of data": seeded(lambda w: w.data.normal_(0, 0.1)),
    "noise": seeded(lambda w: w.add_(torch.randn_like(w) * 0.01)),
    "reset_parameters": lambda m, o, w: (torch.manual_seed(3), m[0].reset_parameters()),
    "data =": lambda m, o, w: setattr(w, "data", w.data * 0.5),
    "vector": lambda m, o, w: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 0.9, m.parameters()
    ),
    "rows exchanged": lambda m, o, w: w.__setitem__(slice(0, 2), w[[1, 0]].clone()),
    "transposed": lambda m, o, w: w.t().mul_(0.5),
    "flattened": lambda m, o, w: w.view(-1)[:5].zero_(),
    "chunks": lambda m, o, w: [chunk.mul_(0.5) for chunk in w.chunk(3)],
    "row by row": lambda m, o, w: [row.div_(row.norm()) for row in w],
    "fill_diagonal_": lambda m, o, w: w.fill_diagonal_(0.0),
    "spectral": lambda m, o, w: w.div_(torch.linalg.matrix_norm(w, 2)),
    "tril_": lambda m, o, w: w.tril_(),
}


def moment(o, w, key="exp_avg"):
    return o.state[w][key]


def replaced(o, w, state):
    o.state[w] = state


def is_a_dict_of_dicts(m, o, w):
    assert isinstance(o.state, dict) and isinstance(o.state[w], dict)
    assert len(o.state) == len(dict(o.state)) == 4 and w in o.state and bool(o.state)
    assert {**o.state[w]}.keys() == o.state[w].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert o.state[w].get("none", 3) == 3 and "none" not in o.state[w]
    assert tuple(moment(o, w).shape) == tuple(w.shape)


STATES = {
    "a dict of dicts": is_a_dict_of_dicts,
    "zero_": lambda m, o, w: moment(o, w).zero_(),
    "mul_": lambda m, o, w: moment(o, w).mul_(0.5),
    "a row": lambda m, o, w: moment(o, w).__setitem__(0, 0.0),
    "units that died": lambda m, o, w: [moment(o, w, key).__setitem__(ROWS, 0.0) for key in ("exp_avg", "exp_avg_sq")],
    "masked": lambda m, o, w: moment(o, w).mul_(grid(w) % 2),
    "its norm": lambda m, o, w: w.mul_(1 + moment(o, w).norm()),
    "pruned": lambda m, o, w: [state["exp_avg"].mul_(p != 0) for p, state in o.state.items()],
    "zeros_like": lambda m, o, w: o.state[w].__setitem__("exp_avg", torch.zeros_like(w)),
    "of the weight": lambda m, o, w: o.state[w].__setitem__("exp_avg", w.detach() * 0.01),
    "plain": lambda m, o, w: o.state[w].__setitem__("exp_avg", grid(w) * 0.001),
    "update": lambda m, o, w: o.state[w].update({k: v * 0.5 for k, v in o.state[w].items() if k != "step"}),
    "another dict": lambda m, o, w: replaced(o, w, {key: value.clone() for key, value in o.state[w].items()}),
    "deepcopy": lambda m, o, w: replaced(o, w, copy.deepcopy(o.state[w])),
    "moved": lambda m, o, w: [
        state.__setitem__(key, value.to("cpu")) for state in o.state.values() for key, value in list(state.items())
    ],
    "clear": lambda m, o, w: o.state[w].clear(),
    "pop": lambda m, o, w: o.state.pop(w),
    "all clear": lambda m, o, w: o.state.clear(),
    "another state": lambda m, o, w: setattr(o, "state", defaultdict(dict)),
    "put back": lambda m, o, w: setattr(o, "state", defaultdict(dict, {p: dict(s) for p, s in o.state.items()})),
    "step": lambda m, o, w: moment(o, w, "step").zero_(),
    "state_dict": lambda m, o, w: o.load_state_dict(o.state_dict()),
}
KINDS = {"gradients": GRADIENTS, "parameters": PARAMETERS, "states": STATES}
# A view whose shard lies elsewhere is a copy: these are refused under some plan.
VIEWS = {"transposed", "flattened", "chunks", "row by row", "orthogonal"}


def trained(plan, kind, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plan is not None:
        model, optimizer = parallelize(Plan(**plan), model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        model(torch.randn(4, 16, generator=generator)).square().sum().backward()
        if kind == "gradients":
            GRADIENTS[name](model, optimizer, model[0].weight)
        optimizer.step()
        optimizer.zero_grad()
        if kind != "gradients" and step < STEPS - 1:
            with torch.no_grad():
                KINDS[kind][name](model, optimizer, model[0].weight)
    return [(p.full_tensor() if type(p) is DTensor else p).detach() for p in model.parameters()]


def outcome(plan, kind, name):
    try:
        return trained(plan, kind, name)
    except ViewError:
        return ViewError


@in_turns(3)
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, table in KINDS.items() for name in table])
def test_what_is_written_between_steps_is_one_devices(kind, name):
    expected = trained(None, kind, name)
    for plan in PLANS.values():
        for got in run_ranks(math.prod(plan["mesh"].values()), outcome, plan, kind, name):
            if name in VIEWS and got is ViewError:
                continue
            torch.testing.assert_close(got, expected, rtol=CLOSE, atol=CLOSE)


def kept():
    """A state that was put in is the memory that the optimizer updates from then on, where it lies as the weight."""
    torch.manual_seed(0)
    model, optimizer = parallelize(Plan(**PLANS["tp"]), nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 7)),
                                   torch.optim.AdamW)  # fmt: skip
    weight = model[0].weight

    def step():
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    buffer = torch.zeros_like(weight)
    optimizer.state[weight]["exp_avg"] = buffer
    seen = optimizer.state[weight]["exp_avg"]
    step()
    return [torch.equal(one.full_tensor(), moment(optimizer, weight).full_tensor()) for one in (buffer, seen)]


def test_a_state_that_is_held_follows_the_optimizer():
    assert all(all(same) for same in run_ranks(2, kept))
