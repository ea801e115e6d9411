"""Whatever changes between two steps of a compiled model has to be seen.

The oracle is eager mode under the same changes, for losses and for every gradient.
"""

import contextlib
import enum
import math
import sys
import types

import pytest
import torch

import vescale
from vescale_plans._capture.explain import compiled
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

STEPS, CHANGED, BACK = 8, 4, 6
SHIFTS = {"all": 0.25}


class Kind(enum.IntEnum):
    FIRST = 1


class Other(enum.IntEnum):
    ONLY = 1


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)
        self.register_buffer("shift", torch.full((16,), 0.5))
        self.scale, self.table = 1.0, [torch.full((8,), 0.5)]

    def forward(self, x, way=None):
        if isinstance(way, slice):
            x = x * 2
        elif isinstance(way, tuple):
            x = x * way[1]
        elif type(way) is Other:
            x = x * 4
        elif isinstance(way, float):
            x = x * math.copysign(1.0, way)
        elif isinstance(way, dict):
            x = x * (3 if type(next(iter(way))) is bool else 1)
        h = self.up(self.norm(x + self.table[0].to(x.dtype))) * self.scale + self.shift + SHIFTS["all"]
        h = (h * torch.ones(h.shape[-1])).to(x.dtype)
        return x + self.down(h.tanh() if self.training else h.relu())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x, way=None):
        for block in self.blocks:
            x = block(x, way)
        return x.square().mean()


@contextlib.contextmanager
def put(holder, key, value):
    before, holder[key] = holder[key], value
    yield
    holder[key] = before


@contextlib.contextmanager
def told(change, value, usual):
    change(value)
    yield
    change(usual)


@contextlib.contextmanager
def hooked(module):
    handle = module.register_forward_hook(lambda module, args, out: out * 2)
    yield
    handle.remove()


@contextlib.contextmanager
def written(tensor):
    with torch.no_grad():
        tensor.add_(0.5)
    yield
    with torch.no_grad():
        tensor.sub_(0.5)


@contextlib.contextmanager
def given(tensor, values):
    before, tensor.data = tensor.data.clone(), values(tensor.data)
    yield
    tensor.data = before


@contextlib.contextmanager
def replaced(module, name):
    """Another buffer in a buffer's place."""
    before = getattr(module, name)
    setattr(module, name, before * 3)
    yield
    setattr(module, name, before)


@contextlib.contextmanager
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CHANGES = {
    "an attribute": lambda m: put(m.blocks[1].__dict__, "scale", 3.0),
    "a global": lambda m: put(SHIFTS, "all", 1.5),
    "evaluation": lambda m: told(m.train, False, True),
    "one block's evaluation": lambda m: told(m.blocks[0].train, False, True),
    "a frozen weight": lambda m: told(m.blocks[1].up.weight.requires_grad_, False, True),
    "a written weight": lambda m: written(m.blocks[0].down.weight),
    "a written buffer": lambda m: written(m.blocks[0].shift),
    "a weight's data": lambda m: given(m.blocks[0].up.weight, lambda w: w * 2),
    "a weight in another order": lambda m: given(m.blocks[0].up.weight, lambda w: w.t().contiguous().t() * 2),
    "a replaced buffer": lambda m: replaced(m.blocks[1], "shift"),
    "a hook": lambda m: hooked(m.blocks[0].up),
    "autocast": lambda m: torch.autocast("cpu", torch.bfloat16),
    "no gradients": lambda m: torch.no_grad(),
    "inference": lambda m: torch.inference_mode(),
    "saved-tensor hooks": lambda m: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
    "a default dtype": lambda m: told(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda m: told(torch.use_deterministic_algorithms, True, False),
    "a table in another dtype": lambda m: given(m.blocks[0].table[0], torch.Tensor.double),
    "a buffer that is trained": lambda m: told(m.blocks[1].shift.requires_grad_, True, False),
    "a table that is trained": lambda m: told(m.blocks[0].table[0].requires_grad_, True, False),
    "a compiler asked for eager": lambda m: torch.compiler.set_stance("force_eager"),
    "a compiler that forgot": lambda m: forgotten(),
}
INPUTS = {
    "another length": lambda x: x[:2],
    "another order": lambda x: x.t().contiguous().t(),
    "every other": lambda x: torch.stack([x, x], 1)[:, 0],
    "one that is trained": lambda x: x.clone().requires_grad_(),
}


WAYS = {  # that are equal, or alike, to a careless look: before, and while it is changed
    "a slice for its numbers": ((0, 4, 2), slice(0, 4, 2)),
    "another kind of number": (Kind.FIRST, Other.ONLY),
    "another kind of key": ({1: 0}, {True: 0}),
}


def named():
    """A compiler imports the module of a forward's globals; a rank has these by value, and the module perhaps not."""
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).__dict__.update(globals())


def trained(backend, change):
    named()
    torch.compiler.reset()
    torch.manual_seed(0)
    plan = vescale.Plan(mesh={"dp": 1}, parameters={"*": {}})
    model, optimizer = vescale.parallelize(plan, Model().train(), lambda p: torch.optim.SGD(p, lr=0.1), mode="eager")
    if backend:
        compiled(model, backend)
    found = []
    with contextlib.ExitStack() as stack:
        for step in range(STEPS):
            if step == CHANGED and change in CHANGES:
                stack.enter_context(CHANGES[change](model))
            if step == BACK:
                stack.close()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
            if CHANGED <= step < BACK and change in INPUTS:
                x = INPUTS[change](x)
            loss = model(x, WAYS[change][CHANGED <= step < BACK] if change in WAYS else None)
            if loss.requires_grad:
                loss.backward()
                found += [
                    (f"{step} {n}", p.grad.to_local().clone())
                    for n, p in model.named_parameters()
                    if p.grad is not None
                ]
                optimizer.step()
                optimizer.zero_grad()
            found.append((f"{step} loss", torch.tensor(loss.item())))
            for name, one in (("table", model.blocks[0].table[0]), ("shift", model.blocks[1].shift)):
                if one.grad is not None:
                    found.append((f"{step} {name}", one.grad.clone()))
                    one.grad = None
    return dict(found), model._vescale.captured.graphs if backend else 0


def compared(changes):
    """By change: how far a compiled model is from an eager one, by what is off, and how many graphs were made."""
    apart = {}
    for change in changes:
        wanted, _ = trained("", change)
        found, graphs = trained("aot_eager", change)
        assert sorted(found.keys() - wanted.keys()) == sorted(wanted.keys() - found.keys()) == []
        off = {name: (found[name] - value).abs().max().item() for name, value in wanted.items()}
        apart[change] = {name: error for name, error in off.items() if not error <= 1e-5}, graphs
    return apart


@pytest.mark.parametrize("part", slice_of(range(4), fraction=2))
def test_what_changes_between_steps_is_seen(part):
    (found,) = run_ranks(1, compared, [*CHANGES, *INPUTS, *WAYS][part::4], timeout=500)
    assert {change: off for change, (off, _) in found.items() if off} == {}
    assert all(graphs for _, graphs in found.values())


def with_steps_inside(fields):
    named()
    found = []
    for mode in ("eager", "compile"):
        torch.manual_seed(0)
        plan = vescale.Plan(mesh={"dp": 1}, parameters={"*": {}}, **fields)
        model, _ = vescale.parallelize(plan, Model(), lambda p: torch.optim.SGD(p, lr=0.1))
        if mode == "compile":
            compiled(model, "aot_eager")
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
        loss.backward()
        found.append((loss.item(), *(p.grad.to_local().clone() for p in model.parameters() if p.grad is not None)))
    same = all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*found, strict=True))
    found = vescale.explain_compile(model)
    return same, found.eager, found.graphs


def test_a_model_with_steps_of_a_plan_inside_is_eager_and_says_which():
    ((same, (why,), _),) = run_ranks(1, with_steps_inside, {"precision": vescale.Precision(torch.bfloat16)})
    assert same and why.startswith("in each call of blocks.0, ")


def test_checkpointed_blocks_are_graphs():
    ((same, reasons, graphs),) = run_ranks(1, with_steps_inside, {"checkpointing": {"blocks.*": True}})
    assert same and not reasons and graphs
