"""The reproducible mode: losses and parameters equal to the bit on every mesh, and what it refuses."""

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


MODELS = {"nanogpt": (build_gpt, library.gpt, lambda model, x, y: model(x, y))}
MESHES = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2tp2": {"dp": 2, "tp": 2},
}


def train(name, mesh=None, steps=STEPS, dtype=torch.float32, splits=None, **changes):
    """(losses, parameters): on one device without a mesh."""
    from corpus import read_corpus

    build, plan_of, loss_of = MODELS[name]
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model = build().to(dtype)
    optimizer_fn = partial(torch.optim.AdamW, lr=5e-4)
    losses = []
    with vescale.reproducible(splits or SPLITS):
        if mesh is None:
            optimizer = optimizer_fn(model.parameters())
        else:
            model, optimizer = vescale.parallelize(plan_of(mesh).override(**changes), model, optimizer_fn)
        for step in range(steps):
            loss = loss_of(model, *corpus.batch(step, BATCH, POSITIONS))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    whole = (lambda p: p.detach()) if mesh is None else (lambda p: p.detach().full_tensor())
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}


def check_equal(found, wanted):
    losses, parameters = found
    assert losses == wanted[0], next((i, a, b) for i, (a, b) in enumerate(zip(losses, wanted[0])) if a != b)
    different = [name for name in parameters if not torch.equal(parameters[name], wanted[1][name])]
    assert not different, different


CASES = {
    **{f"{name}-{mesh}": (name, torch.float32, mesh, {}) for name in MODELS for mesh in MESHES},
    **{f"{name}-dp4-zero{stage}": (name, torch.float32, "dp4", {"zero": stage}) for name in MODELS for stage in (1, 3)},
}


@pytest.mark.parametrize("case", slice_of(list(CASES), 3))
def test_equal_to_the_bit(case):
    name, dtype, mesh, changes = CASES[case]
    ranks = torch.tensor(list(MESHES[mesh].values())).prod().item()
    found = run_ranks(ranks, train, name, MESHES[mesh], dtype=dtype, timeout=300, **changes)
    (wanted,) = run_ranks(1, train, name, dtype=dtype, timeout=300)
    for one in found:
        check_equal(one, wanted)
