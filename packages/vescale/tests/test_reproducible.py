"""The reproducible mode: losses and parameters equal to the bit on every mesh, and what it refuses."""

import math
from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor.testing import run_ranks, slice_of, warm_up
from vescale_plans import library

warm_up("torch._dynamo", "vescale", "transformers")

BATCH, POSITIONS, STEPS = 8, 16, 20
SPLITS = {"batch": 8, "seq": 2, "hidden": 8}


def build_gpt():
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(block_size=POSITIONS, n_layer=2, n_head=4, n_embd=64, dropout=0.1))


def build_llama():
    from llama.model import build

    return build(hidden_size=64, intermediate_size=192, num_hidden_layers=2)


def build_mixtral():
    from mixtral.model import build

    return build()


def loss_of(model, x, y):
    return model(input_ids=x, labels=x).loss


MODELS = {
    "nanogpt": (build_gpt, library.gpt, lambda model, x, y: model(x, y)),
    "llama": (build_llama, library.llama, loss_of),
    "mixtral": (build_mixtral, library.mixtral, loss_of),
}
MESHES = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2tp2": {"dp": 2, "tp": 2},
    "pp2": {"pp": 2, "tp": 1},
    "pp2tp2": {"pp": 2, "tp": 2},
}
MICROBATCHES = 4


def plan_of(name, mesh, changes):
    plan = MODELS[name][1](mesh)
    if "pp" in mesh:
        cut = "transformer.h.1" if name == "nanogpt" else "model.layers.1"
        pipeline = vescale.Pipeline(cuts=(cut,), microbatches=MICROBATCHES)
        plan = plan.override(data_axis=None, pipeline=pipeline)
    return plan.override(**changes)


def train(name, mesh=None, steps=STEPS, dtype=torch.float32, splits=None, microbatches=1, **changes):
    """(losses, parameters): on one device without a mesh, accumulating as many microbatches as told."""
    from corpus import read_corpus

    build, _, loss_of = MODELS[name]
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model = build().to(dtype)
    optimizer_fn = partial(torch.optim.AdamW, lr=5e-4)
    losses = []
    with vescale.reproducible(splits or SPLITS):
        if mesh is None:
            optimizer = optimizer_fn(model.parameters())
        else:
            model, optimizer = vescale.parallelize(plan_of(name, mesh, changes), model, optimizer_fn)
        for step in range(steps):
            total = None
            for batch in zip(*[part.chunk(microbatches) for part in corpus.batch(step, BATCH, POSITIONS)]):
                loss = loss_of(model, *batch) / microbatches
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    whole = (lambda p: p.detach()) if mesh is None else (lambda p: p.detach().full_tensor())
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ZERO = {"dp4zero1": 1, "dp4zero3": 3}
CASES = [(name, dtype, mesh) for mesh in (*MESHES, *ZERO) for dtype in DTYPES for name in MODELS]


@pytest.mark.parametrize("name, dtype, mesh", slice_of(CASES, 9))
def test_equal_to_the_bit(name, dtype, mesh):
    """The loss of every step and every parameter after the last; under a pipeline one device accumulates."""
    changes = {"zero": ZERO[mesh]} if mesh in ZERO else {}
    sizes = MESHES[mesh.partition("zero")[0]]
    given = {"microbatches": MICROBATCHES} if "pp" in sizes else {}
    found = run_ranks(math.prod(sizes.values()), train, name, sizes, dtype=DTYPES[dtype], timeout=500, **changes)
    (wanted,) = run_ranks(1, train, name, dtype=DTYPES[dtype], timeout=500, **given)
    held = set()
    for losses, parameters in found:
        assert losses == wanted[0]
        assert [n for n, p in parameters.items() if not torch.equal(p, wanted[1][n])] == []
        held.update(parameters)
    assert held == set(wanted[1])
