"""What a forward reads besides its arguments, from a grammar: compiled, it computes what it computes eagerly.

Each program is trained eagerly and compiled on one rank: losses, gradients, parameters, and the Python state left
behind, are the same, and so is what raises. Nothing has moved twice.
"""

import warnings

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor
from vescale_plans import Plan, parallelize
from vescale_plans._capture.explain import compiled
from vescale_testkit import python_state_programs, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH = 4
PLAN = Plan(mesh={"dp": 1}, parameters={"*": {}})


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = middle
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.middle(self.up(self.norm(x))))


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(source, mode):
    """Of six steps, with the change before the fourth: outputs, gradients, parameters and Python state; the graphs made
    before the change, and after it."""
    torch.compiler.reset()
    made = source.module()
    torch.manual_seed(0)
    model, optimizer = parallelize(PLAN, Net(made.Middle()), lambda p: torch.optim.SGD(p, lr=0.01))
    if mode == "compile":
        compiled(model, "aot_eager")
    generator, seen, graphs = torch.Generator().manual_seed(3), [], []
    for step in range(6):
        if step in (3, 5) and mode == "compile":
            graphs.append(model._vescale.captured.graphs)
        try:
            if step == 3:
                made.change(model.middle)
            out = model(torch.randn(2, 3, WIDTH, generator=generator))
            out.square().mean().backward()
        except Exception as error:  # what raises must raise in both modes, and leaves the same behind
            seen.append(type(error).__name__)
            optimizer.zero_grad()
            continue
        seen.append(local(out))
        seen += [local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [local(p) for p in model.parameters()]
        seen.append(made.state(model.middle))
    return seen, graphs


def same(one, other):
    return len(one) == len(other) and all(map(alike, one, other))


def alike(one, other):
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.allclose(one, other, 1e-5, 1e-6, equal_nan=True) if tensors else one == other


def compared(cases):
    """Of each program: its name, whether both modes did the same, and the graphs made."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            wanted, _ = trained(case, "eager")
            got, graphs = trained(case, "compile")
            found.append((case.name, same(wanted, got), graphs))
    return found


PROGRAMS = python_state_programs()
PARTS = 24


def test_there_are_300_programs_at_least():
    assert len(PROGRAMS) >= 300 and len({each.name for each in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.parametrize("part", slice_of(range(PARTS), PARTS))
def test_what_a_forward_reads_is_seen_by_compile_mode(part):
    (found,) = run_ranks(1, compared, PROGRAMS[part::PARTS], timeout=500)
    assert [name for name, equal, _ in found if not equal] == []
    before = [graphs[0] for _, _, graphs in found]
    assert sum(graph > 0 for graph in before) >= len(before) // 3  # it is compile mode that was tried
