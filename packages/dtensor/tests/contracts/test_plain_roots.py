"""A DTensor as the gradient of a plain tensor: the whole of it, on every rank, whatever function the gradient is given
to."""

import pytest
import torch
from torch.autograd import functional

from vescale_dtensor import Partial, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

SHAPES = {"[4, 6]": (4, 6), "[1, 2]": (1, 2), "[2, 1]": (2, 1), "[4]": (4,), "[1]": (1,), "[]": ()}
PLACES = {
    "replicated": Replicate(), "rows": Shard(0), "columns": Shard(1), "uneven": RaggedShard((0,), (1, 3)),
    "partial": Partial(),
}  # fmt: skip


def leaf(shape):
    return torch.ones(shape).requires_grad_()


def method(p, g):
    (p * 3).backward(g)
    return p.grad


def function(p, g):
    torch.autograd.backward([(p * 3).sum(), p * 2], [None, g])
    return p.grad


def older_name(p, g):
    (p * 3).backward(gradient=g, retain_graph=True)
    return p.grad


def of_grad(p, g):
    return torch.autograd.grad(p * 3, p, grad_outputs=g)


def of_several(p, g):
    return torch.autograd.grad([p * 3, p.exp()], [p], [g, torch.ones_like(p)])


def of_a_batch(p, g):
    return torch.autograd.grad(p * 3, p, torch.stack([g, g * 2]), is_grads_batched=True)


def twice(p, g):
    (first,) = torch.autograd.grad(p.exp(), p, g, create_graph=True)
    return torch.autograd.grad(first.sum(), p)


def beside_a_dtensor(p, g):
    torch.autograd.backward([p * 3, leaf(tuple(g.shape)).mul(g).sum()], [g, None])
    return p.grad


def through_the_gradient(p, g):
    """Differentiable in the gradient that was given, as well."""
    g = g.detach().requires_grad_()
    (first,) = torch.autograd.grad(p.exp(), p, g, create_graph=True)
    return torch.autograd.grad((first * first).sum(), g)


GIVEN_TO = {
    "Tensor.backward": method,
    "Tensor.backward by name": older_name,
    "autograd.backward": function,
    "autograd.backward beside a DTensor": beside_a_dtensor,
    "autograd.grad": of_grad,
    "autograd.grad of several": of_several,
    "autograd.grad of a batch": of_a_batch,
    "autograd.grad twice": twice,
    "autograd.grad in the gradient": through_the_gradient,
    "functional.vjp": lambda p, g: functional.vjp(lambda x: x * 3, p.detach(), g)[1],
    "functional.jvp": lambda p, g: functional.jvp(lambda x: x * x, p.detach(), g)[1],
    "functional.vhp": lambda p, g: functional.vhp(lambda x: (x * x).sum(), p.detach(), g)[1],
}


def full(value):
    if isinstance(value, (list, tuple)):
        return [full(one) for one in value]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach()


def program():
    mesh, found = mesh_of(2), {}
    for shape_name, shape in SHAPES.items():
        given = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for place_name, place in PLACES.items():
            if shape_name in ("[4]", "[1]") and place_name == "columns" or not shape and place_name != "partial":
                continue
            if place_name == "uneven" and shape_name != "[4, 6]":
                continue
            for name, give in GIVEN_TO.items():
                try:
                    want = full(give(leaf(shape), given))
                    got = full(give(leaf(shape), distribute_tensor(given, mesh, [place])))
                    torch.testing.assert_close(got, want)
                    found[shape_name, place_name, name] = "as on one device"
                except Exception as error:
                    found[shape_name, place_name, name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def answers():
    return run_ranks(2, program)


@pytest.mark.parametrize("name", GIVEN_TO)
def test_every_rank_gets_the_whole_gradient(answers, name):
    for found in answers:
        wrong = {key: answer for key, answer in found.items() if key[2] == name and answer != "as on one device"}
        assert not wrong
