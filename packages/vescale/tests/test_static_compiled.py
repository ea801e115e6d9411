"""Compile mode: a whole decoder layer is one graph, its collectives inside, and training is eager's to 1e-5.

Compiled by `aot_eager`, which traces and differentiates as inductor does and generates no code: what is shown is that
modules and conversions are traceable. The other backends take the same graphs.
"""

import torch

import vescale
from vescale_dtensor.testing import run_ranks, warm_up
from vescale_plans import library

warm_up("torch._dynamo", "vescale", "transformers")

POSITIONS, STEPS, BATCH, VOCABULARY, LOSS = 24, 4, 4, 64, 1e-5


def train(compiled):
    from llama.model import build

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    model, optimizer = vescale.parallelize(
        library.llama(mesh={"tp": 2}), build(vocab_size=VOCABULARY, **sizes), lambda p: torch.optim.AdamW(p, lr=5e-4)
    )
    if compiled:
        vescale.static(model, compiler="aot_eager")
    data, losses, gradients = torch.Generator().manual_seed(5), [], {}
    for _ in range(STEPS):
        x, y = torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data)
        loss = model(input_ids=x, labels=y).loss
        loss.backward()
        gradients = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, model


def compared():
    wanted, gradients, _ = train(compiled=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, found, model = train(compiled=True)
    compiled = {
        site.name
        for site in model._vescale.static.sites.values()
        for regions in site.regions.values()
        if any(getattr(region, "is_compiled", False) for region in regions)
    }
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    norms = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in gradients.items()}
    return errors, norms, compiled, dict(torch._dynamo.utils.counters["graph_break"])


def test_llama_layers_compile_whole_and_train_as_in_eager_mode():
    for errors, norms, compiled, breaks in run_ranks(2, compared, timeout=200):
        assert max(errors) <= LOSS
        assert {n: e for n, e in norms.items() if not e <= 1e-4} == {}
        assert {"model.layers.0", "model.layers.1", "model.norm", "lm_head"} <= compiled
        assert breaks == {}
