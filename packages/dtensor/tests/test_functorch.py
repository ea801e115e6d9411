"""torch.vmap and torch.func on DTensors: an error wherever it can be told, and not where nothing is wrong."""

import pytest
import torch
import torch.nn as nn

from vescale_dtensor import OperatorError, Shard, distribute_tensor
from vescale_dtensor.testing import mesh_of, raises_on_all, run_ranks


def operands():
    weight = torch.arange(32.0).view(8, 4) + 1
    return distribute_tensor(weight, mesh_of(2), [Shard(0)]), weight


CALLS = {
    "vmap": lambda d, w: torch.vmap(torch.neg)(d),
    "vmap over the last dim": lambda d, w: torch.vmap(torch.neg, in_dims=-1)(d),
    "vmap of one of two": lambda d, w: torch.vmap(torch.mul, in_dims=(0, None))(w, d),
    "vmap of a closure": lambda d, w: torch.vmap(lambda x: x * d.sum(0))(w),
    "vmap of a linear": lambda d, w: torch.vmap(lambda x: torch.nn.functional.linear(x, d))(w),
    "vmap of a keyword": lambda d, w: torch.vmap(lambda x: torch.add(d[0], other=x))(w),
    "vmap of a list": lambda d, w: torch.vmap(lambda x: torch.stack([x, d[0]]))(w),
    "grad of a closure": lambda d, w: torch.func.grad(lambda x: (x * d).sum())(w),
    "jvp": lambda d, w: torch.func.jvp(torch.neg, (d,), (d,)),
    "jacfwd": lambda d, w: torch.func.jacfwd(torch.sum)(d),
    "hessian": lambda d, w: torch.func.hessian(torch.sum)(d),
    "linearize": lambda d, w: torch.func.linearize(torch.neg, d),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error(name):
    text = raises_on_all(2, OperatorError, lambda: CALLS[name](*operands()), match="DTensor")
    assert "local_map(torch.vmap(function), ...)" in text


def test_after_the_same_call_without_a_transform():
    """Decisions are cached by the arguments: a wrapped one is another."""

    def run():
        d, w = operands()
        torch.add(d[0], w[0])
        torch.vmap(lambda x: torch.add(d[0], x))(w)

    raises_on_all(2, OperatorError, run)


def test_what_stays_right():
    def run():
        d, w = operands()
        x = torch.vmap(torch.sin)(w)  # plain tensors beside DTensors
        assert torch.equal((d * x).full_tensor(), w * w.sin()) and d.dim() == 2
        inside = torch.vmap(lambda row: row * d.sum().item())(w)  # a DTensor by itself, within the function
        assert torch.equal(inside, w * w.sum())
        module = nn.Linear(4, 3)
        out = torch.func.functional_call(module, {n: p.detach() for n, p in module.named_parameters()}, (d,))
        torch.testing.assert_close(out.full_tensor(), module(w).detach())

    run_ranks(2, run)
