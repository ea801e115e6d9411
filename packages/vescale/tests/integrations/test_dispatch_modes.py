"""Modes that are told of every operator, in forwards and backwards: what they ask of what they are handed, and torch's
FLOP counter over whole models."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "transformers.models.llama.modeling_llama")

QUESTIONS = {
    "shape": lambda t: tuple(t.shape),
    "size()": lambda t: tuple(t.size()),
    "size(-1)": lambda t: t.size(-1) if t.dim() else None,
    "ndim": lambda t: t.ndim,
    "dim()": lambda t: t.dim(),
    "numel()": lambda t: t.numel(),
    "nelement()": lambda t: t.nelement(),
    "len": lambda t: len(t) if t.dim() else None,
    "stride()": lambda t: t.stride(),
    "is_contiguous()": lambda t: t.is_contiguous(),
    "storage_offset()": lambda t: t.storage_offset(),
    "element_size()": lambda t: t.element_size(),
    "nbytes": lambda t: t.nbytes,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device.type,
    "layout": lambda t: t.layout,
    "is_floating_point()": lambda t: t.is_floating_point(),
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "untyped_storage": lambda t: t.untyped_storage().nbytes() >= 0,
    "data_ptr": lambda t: t.data_ptr() >= 0,
    "is_meta": lambda t: t.is_meta,
    "hash": lambda t: hash(t) == hash(t),
}


class Asks(TorchDispatchMode):
    """Asks everything of every tensor, beside what the operator gave; notes what cannot be asked, or is not so."""

    def __init__(self):
        super().__init__()
        self.wrong, self.asked = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor):
                self.asked += 1
                found = {name: self.answer(name, ask, tensor, function) for name, ask in QUESTIONS.items()}
                own = torch._C._TensorBase.size(tensor.detach()) if type(tensor) is torch.Tensor else None
                if own is not None and found["shape"] != tuple(own):
                    self.wrong.append(f"{function}: shape {found['shape']} of {tuple(own)}")
        return out

    def answer(self, name, ask, tensor, function):
        try:
            return ask(tensor)
        except Exception as error:
            self.wrong.append(f"{function}: {name} of a {type(tensor).__name__}: {type(error).__name__}: {error}"[:300])


def feed_forward():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)), (4, 8)


def convolution():
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8)
    return nn.Sequential(*layers), (4, 2, 6, 6)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))

    def forward(self, x):
        words = (x.abs() * 100).long() % 64
        return self.inner(input_ids=words).logits


MODELS = {"feed-forward": feed_forward, "convolution": convolution, "llama": lambda: (Words(), (4, 12))}


def counted(name, ranks, mode, cut=""):
    """FLOPs by module and in all, gradients, and what could not be asked."""
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    make = partial(torch.optim.SGD, lr=0.1)
    if mode == "plain":
        optimizer = make(model.parameters())
    else:
        places = {"0.weight": {"tp": vescale.Shard(0)}, "0.bias": {"tp": vescale.Shard(0)}} if cut else {}
        plan = vescale.Plan(mesh={cut or "dp": ranks}, data_axis=None if cut else "dp", parameters={**places, "*": {}})
        model, optimizer = vescale.parallelize(plan, model, make)
    wrong, flops = [], []
    for step in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        with FlopCounterMode(display=False) as counter:
            model(x).square().mean().backward()
        flops.append(counter.get_total_flops())
        with Asks() as asks:
            model(x).square().mean().backward()
        assert asks.asked
        wrong += asks.wrong
        gradients = {n: p.grad for n, p in model.named_parameters()}
        gradients = {n: (g.full_tensor() if mode != "plain" else g).clone() for n, g in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    return flops, gradients, sorted(set(wrong))


CASES = [(name, ranks) for name in MODELS for ranks in (1, 2)]


@pytest.mark.parametrize("name, ranks", CASES)
def test_a_mode_may_ask_and_count(name, ranks):
    """FLOPs of a model with a Linear layer were a RecursionError in the backward."""
    wanted, gradients, _ = run_ranks(1, counted, name, 1, "plain")[0]
    for flops, found, wrong in run_ranks(ranks, counted, name, ranks, "mesh", timeout=300):
        assert wrong == []
        assert flops == [one // ranks for one in wanted]
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)


def test_a_cut_weight_counts_as_a_part():
    _, gradients, _ = run_ranks(1, counted, "feed-forward", 1, "plain")[0]
    for flops, found, wrong in run_ranks(2, counted, "feed-forward", 2, "mesh", "tp", timeout=300):
        assert wrong == [] and len({*flops}) == 1
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)
