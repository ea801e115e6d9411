"""Compile mode: a whole decoder layer is one graph, its collectives inside, and training is eager's to 1e-5.

Compiled by `aot_eager`, which traces and differentiates as inductor does and generates no code: what is shown is that
modules and conversions are traceable. The other backends take the same graphs.
"""

import os
from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor.testing import run_ranks, slice_of, warm_up
from vescale_plans import library

warm_up("torch._dynamo", "vescale", "transformers")

POSITIONS, STEPS, BATCH, VOCABULARY, LOSS, GRADIENT = 24, 10, 4, 64, 1e-5, 1e-4
BACKEND = os.environ.get("VESCALE_COMPILER", "aot_eager")


def build_gpt(dropout):
    from nanogpt.model import GPT, GPTConfig

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, dropout=dropout, **sizes))


def build_llama(dropout):
    from llama.model import build

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    return build(vocab_size=VOCABULARY, attention_dropout=dropout, **sizes)


def build_mixtral(dropout):
    from mixtral.model import build

    return build(vocab_size=VOCABULARY, attention_dropout=dropout)


def huggingface_loss(model, x, y):
    return model(input_ids=x, labels=y).loss


# per model: how it is built, its plan, its loss, and what is compiled as one graph each, without and with dropout
MODELS = {
    "gpt": (
        build_gpt, library.gpt, lambda model, x, y: model(x, y),
        {"transformer.h.0.ln_1", "transformer.h.1.attn.c_attn", "lm_head"}, {"transformer.h.0.ln_1", "lm_head"},
    ),
    "llama": (
        build_llama, library.llama, huggingface_loss,
        {"model.layers.0", "model.layers.1", "model.norm", "lm_head"}, {"model.layers.0.mlp", "lm_head"},
    ),
    "mixtral": (
        build_mixtral, library.mixtral, huggingface_loss,
        {"model.layers.0.self_attn", "model.layers.1.self_attn", "lm_head"}, {"model.layers.0.input_layernorm"},
    ),
}  # fmt: skip


def train(name, dropout, mesh, more, compiled):
    build, plan_of, loss_of = MODELS[name][:3]
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(
        plan_of(mesh=mesh).override(**more), build(dropout), partial(torch.optim.AdamW, lr=5e-4)
    )
    if compiled:
        vescale.static(model, compiler=BACKEND)
    data, losses, gradients = torch.Generator().manual_seed(5), [], {}
    for _ in range(STEPS):
        x, y = torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data)
        loss = loss_of(model, x, y)
        loss.backward()
        gradients = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, model


def compared(name, *case):
    wanted, gradients, _ = train(name, *case, compiled=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, found, model = train(name, *case, compiled=True)
    compiled = {
        site.name
        for site in model._vescale.static.sites.values()
        for regions in site.regions.values()
        if any(getattr(region, "is_compiled", False) for region in regions)
    }
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    norms = {n: ((found[n] - g).norm() / g.norm().clamp_min(1e-30)).item() for n, g in gradients.items()}
    return errors, norms, compiled, dict(torch._dynamo.utils.counters["graph_break"])


MESHES = {  # mesh, more of the plan
    "tp2": ({"tp": 2}, {}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, {}),
    "dp2 tp2, zero 3": ({"dp": 2, "tp": 2}, {"zero": 3}),
}
GRID = [(name, dropout, mesh) for mesh in MESHES for name in MODELS for dropout in (0.0, 0.1)]


@pytest.mark.parametrize("name, dropout, mesh", slice_of(GRID, fraction=9))
def test_static_modules_compile_whole_and_train_as_in_eager_mode(name, dropout, mesh):
    sizes, more = MESHES[mesh]
    wanted = MODELS[name][4 if dropout else 3]
    for errors, norms, compiled, breaks in run_ranks(
        sizes.get("dp", 1) * 2, compared, name, dropout, sizes, more, timeout=300
    ):
        assert max(errors) <= LOSS
        assert {n: e for n, e in norms.items() if not e <= GRADIENT} == {}
        assert wanted <= compiled, compiled
        assert breaks == {}
