"""Draws by tensors that are trained: the result has a gradient, and what it was drawn by gets zeros, as in torch."""

import pytest
import torch

from vescale_dtensor import DTensor, Partial
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import placements_for, spread

DRAWS = {
    "torch.bernoulli": lambda p, q: torch.bernoulli(p),
    "bernoulli": lambda p, q: p.bernoulli(),
    "bernoulli of a number": lambda p, q: p.bernoulli(0.3),
    "bernoulli_ by a tensor": lambda p, q: torch.zeros_like(q).bernoulli_(p),
    "bernoulli_ into a history": lambda p, q: (q * 1).bernoulli_(p),
    "bernoulli_ of a number": lambda p, q: (p * 1).bernoulli_(0.3),
    "normal_": lambda p, q: (p * 1).normal_(),
    "normal by mean": lambda p, q: torch.normal(p, 1.0),
    "normal by std": lambda p, q: torch.normal(2.0, q),
    "normal by both": lambda p, q: torch.normal(p, q),
    "normal by names": lambda p, q: torch.normal(mean=p, std=q),
    "normal of permuted": lambda p, q: torch.normal(p.transpose(0, -1), 1.0),
    "normal, broadcast": lambda p, q: torch.normal(p[:1], q),
    "normal, mean without gradient": lambda p, q: torch.normal(p.detach(), q),
    "poisson": lambda p, q: torch.poisson(q * 3),
    "binomial": lambda p, q: torch.binomial(torch.full_like(q, 4.0), p),
    "rand_like": lambda p, q: torch.rand_like(p),
    "randn_like": lambda p, q: torch.randn_like(q),
    "randn_like, to be trained": lambda p, q: torch.randn_like(q, requires_grad=True),
}

NO_BACKWARD = ("bernoulli of a number", "binomial")  # torch has not written it


def drawn(name, p, q, grad=True):
    torch.manual_seed(3)
    with torch.set_grad_enabled(grad):
        out = DRAWS[name](p, q)
    if out.requires_grad and name not in NO_BACKWARD:
        (out * 2).sum().backward()
    return out, [p.grad, q.grad]


def full(x):
    return x.detach().full_tensor() if isinstance(x, DTensor) else x


def on_rank(name, sizes):
    import vescale_rng  # noqa: F401  on the ranks

    mesh = mesh_of(*sizes)
    for shape in [(4, 6), (5,)]:
        p = torch.linspace(0.1, 0.9, torch.Size(shape).numel()).view(shape)
        for placements in placements_for(shape, len(sizes)):
            for needs, grad in (
                ((True, True), True),
                ((True, False), True),
                ((False, False), True),
                ((True, True), False),
            ):
                whole = [one.clone().requires_grad_(need) for one, need in zip((p, p + 0.5), needs)]
                ours = [spread(one, mesh, placements, seed=i) for i, one in enumerate(whole)]
                (wanted, wanted_grads), (found, grads) = drawn(name, *whole, grad), drawn(name, *ours, grad)
                context = shape, placements, needs, grad
                assert found.requires_grad == wanted.requires_grad, context
                assert found.is_leaf == wanted.is_leaf, context
                if not any(isinstance(one, Partial) for one in placements):
                    assert torch.equal(full(found), wanted.detach()), context
                for one, other in zip(grads, wanted_grads):
                    assert (one is None) == (other is None), context
                    assert one is None or torch.equal(full(one), other), context


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", list(DRAWS))
def test_gradient_of_a_draw(name, sizes):
    run_ranks(torch.Size(sizes).numel(), on_rank, name, sizes)
