"""Views of flat shards under other dims: of the same memory, without communication, and writes reach the base."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from vescale_dtensor import RaggedShard, Replicate, Shard, comm_trace, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

SHAPE = (4, 1, 6)
FLAT = RaggedShard((0, 1, 2), (11, 13))
RESHAPES = {
    "view": lambda x: x.view(-1),
    "view alike": lambda x: x.view(*SHAPE),
    "view_as": lambda x: x.view_as(torch.empty(6, 4)),
    "reshape": lambda x: x.reshape(2, 12),
    "reshape_as": lambda x: x.reshape_as(torch.empty(SHAPE)),
    "flatten": lambda x: x.flatten(),
    "flatten from": lambda x: torch.flatten(x, 1),
    "ravel": Tensor.ravel,
    "unflatten": lambda x: x.unflatten(2, (2, 3)),
    "squeeze": Tensor.squeeze,
    "squeeze dim": lambda x: x.squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
}


def numbers():
    return torch.arange(24.0).view(SHAPE)


def reshaped(name):
    mesh, reshape = mesh_of(2, names=("dp",)), RESHAPES[name]
    x, expected = distribute_tensor(numbers(), mesh, [FLAT]), numbers()
    with comm_trace() as trace:
        y = reshape(x)
        y.mul_(2)
    assert not len(trace)
    written = reshape(expected).mul_(2)
    assert tuple(y.shape) == tuple(written.shape)
    assert torch.equal(y.full_tensor(), written) and torch.equal(x.full_tensor(), expected)
    first = (0,) * y.ndim
    y[first], written[first] = 7.0, 7.0
    assert torch.equal(x.full_tensor(), expected)
    leaf = distribute_tensor(numbers(), mesh, [FLAT]).requires_grad_()
    plain = numbers().requires_grad_()
    (reshape(leaf) * written).sum().backward()
    (reshape(plain) * written).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("name", RESHAPES)
def test_are_of_the_same_memory(name):
    run_ranks(2, reshaped, name)


def beside_another_axis():
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [RaggedShard((0, 1), (5, 7)), Shard(0)])
    with comm_trace() as trace:
        same = x.view_as(torch.empty(4, 6))
    assert not len(trace) and same.placements == x.placements
    assert torch.equal(x.view(-1).full_tensor(), torch.arange(24.0))
    y = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [RaggedShard((0, 1), (11, 13)), Replicate()])
    with comm_trace() as trace:
        y.view(-1)
    assert not len(trace)
    bits = y.view(torch.int32)
    assert torch.equal(bits.full_tensor(), torch.arange(24.0).view(4, 6).view(torch.int32))


def test_beside_another_axis():
    run_ranks(4, beside_another_axis)


def wrong_sizes():
    x = distribute_tensor(numbers(), mesh_of(2, names=("dp",)), [FLAT])
    with pytest.raises(Exception, match=r"\[5, 5\] do not multiply to the 24 elements"):
        x.view(5, 5)


def test_sizes_that_do_not_fit_are_told_as_of_any_tensor():
    run_ranks(2, wrong_sizes)


CHANGES = {
    "orthogonal": lambda layer: nn.init.orthogonal_(layer.weight),
    "l1": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "random": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "structured": lambda layer: prune.ln_structured(layer, "weight", 0.25, n=2, dim=0),
    "sparse": lambda layer: nn.init.sparse_(layer.weight, 0.5),
}


def changed(name):
    """torch's own changes of a flat weight."""
    mesh, found = mesh_of(2, names=("dp",)), []
    for is_flat in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(6, 8)
        if is_flat:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [RaggedShard((0, 1), (23, 25))]))
        CHANGES[name](layer)
        found.append(layer.weight.full_tensor() if is_flat else layer.weight)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", CHANGES)
def test_torch_changes_a_flat_weight_as_a_plain_one(name):
    run_ranks(2, changed, name)


def itself():
    x = distribute_tensor(numbers(), mesh_of(2), [FLAT]).requires_grad_()
    for same in (x.flatten(1, 1), torch.flatten(x, -1), x.contiguous(), x.to_dense()):
        assert same is x
    assert x.ravel() is not x and x.ravel().untyped_storage()._cdata == x.untyped_storage()._cdata


def test_flatten_of_one_dim_is_the_flat_shard_itself():
    run_ranks(2, itself)
