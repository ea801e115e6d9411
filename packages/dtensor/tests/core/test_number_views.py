"""Views of a number that is partial or another rank's, one of the two written without gradient, and both read."""

import pytest
import torch

from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

VIEWS = {
    "view": lambda x: x.view(1, 1, 1),
    "reshape": lambda x: x.reshape(-1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "twice": lambda x: x.view(1, 1).unsqueeze(-1),
    "detach": lambda x: x.detach(),
    "alias": lambda x: x[...],
}
LEAVES = {
    "distributed leaf": lambda t, spread: spread(t.requires_grad_()),
    "leaf made of it": lambda t, spread: spread(t).requires_grad_(),
    "parameter": lambda t, spread: torch.nn.Parameter(spread(t)),
    "result": lambda t, spread: spread(t.requires_grad_()),
    "without gradient": lambda t, spread: spread(t),
}
WRITES = {
    "the leaf": lambda x, y: x.mul_(2),
    "the view": lambda x, y: y.mul_(2),
    "the leaf's data": lambda x, y: x.data.mul_(2),
    "both": lambda x, y: (x.add_(1), y.mul_(3)),
}


def course(t, spread, leaf, view, write):
    trained = LEAVES[leaf](t, spread)
    x = trained * 1 if leaf == "result" else trained
    y = VIEWS[view](x)
    with torch.no_grad():
        WRITES[write](x, y)
    values = [(y * 2).sum().item(), (x * 3).sum().item()]
    loss = (y * y).sum() + (x * 5).sum()
    if loss.requires_grad:
        loss.backward()
        values.append(trained.grad.sum().item())
    return values


def program(write):
    mesh, wrong = mesh_of(2), []
    for shape in [(1,), (1, 1), ()]:
        for place in [Replicate(), Partial(), *map(Shard, range(len(shape)))]:
            for leaf in LEAVES:
                for view in VIEWS:
                    want = course(torch.full(shape, 3.0), lambda t: t, leaf, view, write)
                    try:
                        got = course(
                            torch.full(shape, 3.0),
                            lambda t, p=place: distribute_tensor(t, mesh, [p]),
                            leaf,
                            view,
                            write,
                        )
                    except Exception as error:
                        got = f"{type(error).__name__}: {error}"[:200]
                    if got != want:
                        wrong.append((shape, place, leaf, view, want, got))
    return wrong


@pytest.mark.parametrize("write", WRITES)
def test_both_are_what_they_are_on_one_device(write):
    for wrong in run_ranks(2, program, write):
        assert not wrong, (len(wrong), wrong[:4])
