"""Subsystems of torch around a DTensor, against one device: autocast, inference mode, parametrizations, copies."""

import copy
import io

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

R, S = Replicate(), Shard
LAYOUTS = [(S(0), R), (R, S(1)), (S(0), S(1))]


def sharded(tensor, placements, grad=False):
    return distribute_tensor(tensor.detach(), mesh_of(2, 2), placements).requires_grad_(grad)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


AUTOCAST = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w.t(),
    "addmm": lambda x, w: torch.addmm(x.new_ones(6), x, w.t()),
    "softmax of a product": lambda x, w: torch.softmax(x @ w.t(), -1),
    "norm of a product": lambda x, w: F.layer_norm(x @ w.t(), (6,)),
    "mixed": lambda x, w: F.gelu(F.linear(x, w)) + x[:, :6],
    "loss": lambda x, w: F.cross_entropy(F.linear(x, w), torch.arange(8) % 6),
}


def with_gradients(function, x, w, enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        out = function(x, w)
    assert enabled or out.dtype == torch.float32
    weights = torch.arange(out.numel()).view(out.shape).cos() + 1
    (out.float() * weights).sum().backward()
    return [whole(value.detach()) for value in (out, x.grad, w.grad)]


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_in_bfloat16(name):
    """The dtypes of one device, and no further from float32 than it is: sums are in another order."""

    def run():
        function = AUTOCAST[name]
        x, w = torch.randn(8, 12), torch.randn(6, 12)

        def plain():
            return x.clone().requires_grad_(), w.clone().requires_grad_()

        exact, wanted = with_gradients(function, *plain(), False), with_gradients(function, *plain(), True)
        for a in LAYOUTS:
            for b in LAYOUTS:
                found = with_gradients(function, sharded(x, a, True), sharded(w, b, True), True)
                for one, other, truth in zip(found, wanted, exact):
                    assert one.dtype == other.dtype, (a, b)
                    error, its = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
                    assert error <= 2 * its + 4e-3, (a, b, float(error), float(its))

    run_ranks(4, run)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inference(mode):
    """No graph, in-place writes and views as on one device; parameters made outside are used and not changed."""

    def run():
        model = nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        parallel = copy.deepcopy(model)
        for module in parallel.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(sharded(parameter, (S(0), R))))
        x = torch.randn(8, 12)
        outs = []
        for one, given in ((model, x), (parallel, sharded(x, (R, S(0))))):
            with mode():
                out = one(given)
                assert not out.requires_grad and out.grad_fn is None
                assert out.is_inference() == (mode is torch.inference_mode)
                out.mul_(2)
                out[1:3] = 0
                out += given.sum()
                outs.append(out.clone())
                later = one(given)
            assert not later.requires_grad
        torch.testing.assert_close(whole(outs[1]), outs[0])
        for one, given in ((model, x), (parallel, sharded(x, (R, S(0))))):  # training goes on afterwards
            one(given).sum().backward()
        for (name, one), other in zip(parallel.named_parameters(), model.parameters()):
            torch.testing.assert_close(whole(one.grad), other.grad, msg=name)

    run_ranks(4, run)


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm over all": lambda module: parametrizations.weight_norm(module, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal, householder": lambda module: parametrizations.orthogonal(module, orthogonal_map="householder"),
    "orthogonal, cayley": lambda module: parametrizations.orthogonal(module, orthogonal_map="cayley"),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_parametrizations(name):
    """Registered on one device, sharded, trained for three steps."""

    def run():
        import warnings

        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = PARAMETRIZATIONS[name](nn.Linear(6, 6))
        x = torch.randn(8, 6)
        for placements in ((S(0), R), (R, S(0))):
            plain, parallel = copy.deepcopy(model), copy.deepcopy(model)
            for module in parallel.modules():
                for key, parameter in list(module.named_parameters(recurse=False)):
                    places = placements if parameter.dim() else (R, R)
                    module._parameters[key] = nn.Parameter(sharded(parameter, places))
            for one, given in ((plain, x), (parallel, sharded(x, (S(0), R)))):
                optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
                for _ in range(3):
                    loss = one(given).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            torch.testing.assert_close(whole(parallel.weight), plain.weight, rtol=1e-4, atol=1e-6)
            for (key, found), wanted in zip(parallel.named_parameters(), plain.parameters()):
                assert isinstance(found, DTensor)
                torch.testing.assert_close(whole(found), wanted, rtol=1e-4, atol=1e-6, msg=key)

    run_ranks(4, run)


def test_saving_one_tensor():
    """A DTensor saved by torch.save and loaded is refused or is the same; its shard always travels."""

    def run():
        x = sharded(torch.arange(24.0).view(6, 4), (S(0), R))
        buffer = io.BytesIO()
        torch.save(x.to_local(), buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), x.to_local())
        twin = copy.deepcopy(x)
        twin.mul_(2)
        assert torch.equal(whole(twin), 2 * whole(x)) and twin.placements == x.placements

    run_ranks(4, run)
