"""torch.vmap and torch.func on DTensors: an error wherever it can be told, and not where nothing is wrong."""

import pytest
import torch
import torch.nn as nn

from vescale_dtensor import OperatorError, Shard, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks


def operands():
    weight = torch.arange(32.0).view(8, 4) + 1
    return distribute_tensor(weight, mesh_of(2), [Shard(0)]), weight


def dual(tensor, function):
    with torch.autograd.forward_ad.dual_level():
        function(tensor)  # without a tangent: nothing is lost
        return function(torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor)))


CALLS = {
    "vmap": lambda d, w: torch.vmap(torch.neg)(d),
    "vmap over the last dim": lambda d, w: torch.vmap(torch.neg, in_dims=-1)(d),
    "vmap of one of two": lambda d, w: torch.vmap(torch.mul, in_dims=(0, None))(w, d),
    "vmap of a closure": lambda d, w: torch.vmap(lambda x: x * d.sum(0))(w),
    "vmap of a linear": lambda d, w: torch.vmap(lambda x: torch.nn.functional.linear(x, d))(w),
    "vmap of a keyword": lambda d, w: torch.vmap(lambda x: torch.add(d[0], other=x))(w),
    "vmap of a list": lambda d, w: torch.vmap(lambda x: torch.stack([x, d[0]]))(w),
    "grad of a closure": lambda d, w: torch.func.grad(lambda x: (x * d).sum())(w),
    "grad": lambda d, w: torch.func.grad(torch.sum)(d),
    "grad and value": lambda d, w: torch.func.grad_and_value(torch.sum)(d),
    "grad, a keyword": lambda d, w: torch.func.grad(lambda x, other: (x * other).sum())(w, other=d),
    "grad of a container": lambda d, w: torch.func.grad(lambda tree: tree["x"][0].sum())({"x": [d]}),
    "grad of one of two": lambda d, w: torch.func.grad(lambda x, y: (x * y).sum(), argnums=1)(d, w),
    "grad of grad": lambda d, w: torch.func.grad(lambda x: torch.func.grad(torch.sum)(d).sum())(w),
    "vjp": lambda d, w: torch.func.vjp(torch.neg, d),
    "jacrev": lambda d, w: torch.func.jacrev(torch.neg)(d),
    "functionalize": lambda d, w: torch.func.functionalize(torch.neg)(d),
    "functionalize, a keyword": lambda d, w: torch.func.functionalize(torch.add)(w, other=d),
    "a value inside of grad": lambda d, w: torch.func.grad(lambda row: (row * d.sum().item()).sum())(w),
    "jvp": lambda d, w: torch.func.jvp(torch.neg, (d,), (d,)),
    "jacfwd": lambda d, w: torch.func.jacfwd(torch.sum)(d),
    "hessian": lambda d, w: torch.func.hessian(torch.sum)(d),
    "a dual number beside a DTensor": lambda d, w: dual(w, lambda x: x * d),
    "a dual number in a linear": lambda d, w: dual(w, lambda x: torch.nn.functional.linear(x, d)),
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
        assert len(torch.utils._pytree.tree_leaves({"d": [d]})) == 1 and {type(d): 1}[type(d)] == 1
        held = torch.func.grad(lambda x: x.sum() * len(torch.utils._pytree.tree_leaves([d, d])))(w)
        assert torch.equal(held, torch.full_like(w, 2.0))
        module = nn.Linear(4, 3)
        out = torch.func.functional_call(module, {n: p.detach() for n, p in module.named_parameters()}, (d,))
        torch.testing.assert_close(out.full_tensor(), module(w).detach())

    run_ranks(2, run)


def takes_mappings(plain):
    """Whether this torch takes a mapping of inputs; 2.11 does not, on one device either."""
    try:
        return list(torch.autograd.grad(plain.sum(), {"plain": plain})) == ["plain"]
    except RuntimeError:
        return False


def test_batched_cotangents():
    """One backward per cotangent, where torch on one device runs vmap; by hand and through torch's own Jacobian."""

    def run():
        d, w = operands()
        d.requires_grad_()
        alone = w.clone().requires_grad_()
        rows = torch.arange(24.0).view(3, 8)
        (want,) = torch.autograd.grad(alone.sin().sum(1), alone, rows, is_grads_batched=True)
        (have,) = torch.autograd.grad(d.sin().sum(1), d, rows, is_grads_batched=True)
        assert torch.equal(have.full_tensor(), want) and have.placements == (Shard(1),)
        unused = d.detach().requires_grad_()
        _, nothing = torch.autograd.grad(d.sum(), [d, unused], materialize_grads=True)
        assert torch.equal(nothing.full_tensor(), torch.zeros_like(w))
        if takes_mappings(alone):
            named = torch.autograd.grad((d * unused).sum(), {"d": d, "other": unused})
            assert torch.equal(named["d"].full_tensor(), w) and list(named) == ["d", "other"]
        for vectorize in (False, True):
            jacobian = torch.autograd.functional.jacobian(lambda x: x.sin().sum(1), d.detach(), vectorize=vectorize)
            want = torch.autograd.functional.jacobian(lambda x: x.sin().sum(1), w)
            assert torch.equal(jacobian.full_tensor(), want)

    run_ranks(2, run)
