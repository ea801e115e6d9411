"""Activation checkpoints and other saved-tensor hooks see the same tensor at saving and at recomputing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks


def region(x, mask):
    """Operands without gradient are saved too: an activation's own magnitude, a mask, ids."""
    y = x.sin() * x.detach().abs() * mask
    y = y + torch.nn.functional.linear(y, y.detach()[:4]).sum(-1, keepdim=True)
    return y.clone().mul_(mask)


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Shard(1), Shard(0))])
@pytest.mark.parametrize("reentrant", [False, True])
def test_operands_without_gradient(placements, reentrant):
    def run():
        mesh = mesh_of(2, 2)
        whole, mask = torch.randn(8, 4, requires_grad=True), (torch.rand(8, 4) > 0.5).float()
        x = distribute_tensor(whole.detach(), mesh, placements).requires_grad_()
        m = distribute_tensor(mask, mesh, placements)
        checkpoint(region, x, m, use_reentrant=reentrant).sum().backward()
        region(whole, mask).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)

    run_ranks(4, run)


def test_offloading_hooks():
    def run():
        mesh = mesh_of(4)
        whole = torch.randn(8, 4, requires_grad=True)
        x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            loss = region(x, x.detach()).sum()
        loss.backward()
        region(whole, whole.detach()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)

    run_ranks(4, run)


def named(x):
    """Operands without gradient are given by name, to functions that were decided before and that were not."""
    chosen = torch.topk(x, 2, dim=-1).indices
    most = torch.gather(x, dim=-1, index=chosen)
    table = torch.nn.functional.embedding(input=chosen, weight=x.sum(0)[:, None])
    kept = torch.where(condition=most.detach() > 0, input=most, other=most * 2)
    return kept * torch.mul(input=most, other=most.detach()) + table.squeeze(-1) + most.mul(other=chosen)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "on the host"])
@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(0), Shard(0))])
def test_operands_given_by_name(placements, how):
    def computed(x):
        if how == "on the host":
            with torch.autograd.graph.save_on_cpu():
                return named(x)
        return checkpoint(named, x, use_reentrant=how == "reentrant")

    def run():
        mesh = mesh_of(2, 2)
        whole = torch.randn(8, 4, requires_grad=True)
        x = distribute_tensor(whole.detach(), mesh, placements).requires_grad_()
        (computed(x) + computed(x + 1)).sum().backward()
        (named(whole) + named(whole + 1)).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)

    run_ranks(4, run)


def chooses(x):
    """Results without gradient are saved too: the indices of what was chosen."""
    values, indices = torch.topk(x, 2, dim=-1)
    most, at = (values * 2).max(-1, keepdim=True)
    return values.sin() + x.gather(-1, indices) * most + at


@pytest.mark.parametrize("reentrant", [False, True])
def test_results_without_gradient(reentrant):
    def run():
        mesh = mesh_of(2, 2)
        whole = torch.randn(8, 4, requires_grad=True)
        x = distribute_tensor(whole.detach(), mesh, (Shard(0), Replicate())).requires_grad_()
        checkpoint(chooses, x, use_reentrant=reentrant).sum().backward()
        chooses(whole).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)

    run_ranks(4, run)


def _slices(a, b):
    made = a.new_empty(8, 6, 4)
    made[..., :3].copy_(a)
    made[..., 3:].copy_(b.expand(-1, 6, -1))
    return made


def _turned(a, b):
    made = torch.zeros_like(a).contiguous()
    made.transpose(1, 2).narrow(1, 0, 2).copy_(a.transpose(1, 2)[:, :2])
    made += b
    return made


def _assigned(a, b):
    made = a.new_zeros(8, 6, 4)
    made[..., :3] = a
    made.view(8, 24)[:, 3:5].mul_(2).add_(b[:, 0])
    return made


def _whole(a, b):
    with torch.no_grad():
        made = torch.ones_like(a)
    made.mul_(a).sub_(b)
    return made


@pytest.mark.parametrize("fill", [_slices, _turned, _assigned, _whole])
@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Replicate())])
def test_what_is_written_into_a_tensor_without_gradient_reaches_it(fill, placements):
    """Inside a checkpoint the slice is cut from what stands for the operand, and is to be its view all the same."""

    def used(a, b):
        made = fill(a, b)
        return (made * made).sum()

    def run():
        mesh = mesh_of(2, 2)
        whole = [torch.randn(8, 6, 3), torch.randn(8, 1, 1)]
        expected = [one.clone().requires_grad_() for one in whole]
        used(*[one * 1 for one in expected]).backward()
        for around in (lambda *given: used(*given), lambda *given: checkpoint(used, *given, use_reentrant=False)):
            given = [distribute_tensor(one, mesh, placements).requires_grad_() for one in whole]
            around(*[one * 1 for one in given]).backward()
            for one, other in zip(given, expected):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad)

    run_ranks(4, run)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_regions_in_regions(outer, inner):
    """Autograd makes plain tensors of what it gets back from the outer region's hooks; the inner one's are DTensors."""

    def run():
        mesh = mesh_of(2, 2)
        torch.manual_seed(0)
        whole = [torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)]
        torch.tanh(torch.tanh(torch.tanh(whole[0] @ whole[1]) @ whole[1]) @ whole[1]).sum().backward()
        places = [(Shard(0), Replicate()), (Replicate(), Replicate())]
        x, w = (distribute_tensor(t.detach(), mesh, p).requires_grad_() for t, p in zip(whole, places))
        seen = set()

        def layer(x):
            seen.add((type(x).__name__, x.shape))
            return torch.tanh(x @ w)

        def layers(x):
            for _ in range(3):
                x = checkpoint(layer, x, use_reentrant=inner)
            return x

        checkpoint(layers, x, use_reentrant=outer).sum().backward()
        for mine, theirs in zip((x, w), whole):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        assert seen == {("DTensor", (4, 6))}

    run_ranks(4, run)
