"""Deferred models under ZeRO-3: bitwise a plain build's parameters, and nobody makes more than their part."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_rng
from vescale_dtensor import Shard
from vescale_plans import Plan, Precision, parallelize
from vescale_testkit import run_ranks


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(width + 3, 64, padding_idx=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width)) for _ in range(2))
        self.head = nn.Linear(64, width + 3, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = nn.Parameter(nn.init.orthogonal_(torch.empty(9, 5)))
        nn.init.trunc_normal_(self.blocks[0][0].weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.blocks[1](x).mean(-1, keepdim=True))


class Written(TorchDispatchMode):
    """The most elements that any operator, but for one that only allocates, has written to."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        writes = any(word in str(function) for word in ("uniform_", "normal_", "copy_", "zeros", "cat", "clone"))
        if isinstance(out, torch.Tensor) and writes and not out.is_meta:
            self.most = max(self.most, out.numel())
        return out


MESHES = {
    "dp4": ({"dp": 4}, "dp", {"*": {}}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, "dp", {"*.0.weight": {"tp": Shard(0)}, "*.0.bias": {"tp": Shard(0)}, "*": {}}),
    "hybrid": ({"dpr": 2, "dp": 2}, ("dpr", "dp"), {"*": {}}),
}


def build(width, seed):
    vescale_rng.manual_seed(seed)
    model = Model(width)
    model.embedding.weight.requires_grad_(False)  # frozen, and tied
    return model


@pytest.mark.parametrize("stream", ["torch", "philox"])
@pytest.mark.parametrize("mesh", MESHES)
def test_values_are_those_of_a_plain_build(mesh, stream):
    def compare():
        sizes, axis, parameters = MESHES[mesh]
        for precision in (None, Precision(compute=torch.bfloat16)):
            plan = Plan(mesh=sizes, data_axis=axis, zero=3, parameters=parameters, precision=precision)
            with vescale_rng.use_stream(stream):
                with vescale_rng.deferred_init():
                    whole = build(37, 3)
                vescale_rng.materialize(whole)
                state = torch.get_rng_state()
                with vescale_rng.deferred_init():
                    model = build(37, 3)
            assert torch.equal(torch.get_rng_state(), state)
            model, optimizer = parallelize(plan, model, lambda p: torch.optim.SGD(p, lr=0.1))
            wanted = dict(whole.named_parameters())
            assert model.head.weight is model.embedding.weight
            for name, parameter in model.named_parameters():
                assert not parameter.__dict__.get("_deferred"), name
                assert torch.equal(parameter.detach().full_tensor(), wanted[name]), (name, mesh, stream)
            model(torch.arange(8).view(4, 2)).float().sum().backward()
            optimizer.step()
            if stream == "torch":
                torch.manual_seed(3)
                plain = Model(37)
                assert all(torch.equal(one, wanted[name]) for name, one in plain.named_parameters())

    run_ranks(4, compare)


@pytest.mark.parametrize("stream", ["torch", "philox"])
def test_nobody_makes_more_than_their_part(stream):
    """Of a parameter of two million elements: 2^18 of the torch stream at a time, else what the rank keeps."""

    def bounded():
        with vescale_rng.use_stream(stream), vescale_rng.deferred_init():
            vescale_rng.manual_seed(3)
            model = nn.Sequential(nn.Embedding(1 << 15, 64), nn.Linear(64, 1 << 15))
        with Written() as seen:
            parallelize(Plan(mesh={"dp": 4}, data_axis="dp", zero=3, parameters={"*": {}}), model)
        assert 1 << 18 <= seen.most < 1 << 20, seen.most

    run_ranks(4, bounded)
