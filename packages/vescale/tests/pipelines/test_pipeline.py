"""Training under a pipeline against gradient accumulation over the same microbatches on one device."""

import copy
from functools import partial

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

POSITIONS, STEPS, ROWS, VOCABULARY = 16, 10, 2, 64  # rows of a microbatch
LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11
OPTIMIZER = partial(torch.optim.AdamW, lr=5e-4)


def build_gpt(layers, dropout):
    from nanogpt.model import GPT, GPTConfig

    sizes = {"n_layer": layers, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, dropout=dropout, **sizes))


def build_llama(layers, dropout):
    from llama.model import build

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    return build(vocab_size=VOCABULARY, attention_dropout=dropout, **sizes)


MODELS = {
    "gpt": (build_gpt, lambda model, x, y: model(x, y), "transformer.h.{}"),
    "llama": (build_llama, lambda model, x, y: model(input_ids=x, labels=y).loss, "model.layers.{}"),
}
TWO_STAGES_A_RANK = ["interleaved", "looped-bfs", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipe-v"]
CASES = [
    *((kind, {"pp": 4}, 1) for kind in ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "interleaved-zb")),
    *((kind, {"pp": 2}, 2) for kind in TWO_STAGES_A_RANK),
    ("zbv", {"pp": 4}, 2),
]
GRID = [(name, *case, count) for case in CASES for count in (8, 7, 3) for name in MODELS]


def plan_of(name, kind, mesh, virtual, count, layers):
    cut, stages = MODELS[name][2], mesh["pp"] * virtual
    cuts = tuple(cut.format(layers * stage // stages) for stage in range(1, stages))
    plan = getattr(library, name)(mesh={"dp": 1, "tp": 1, **mesh}, sequence_parallel="tp" in mesh)
    return plan.override(
        mesh=mesh if "tp" in mesh else {**mesh, "tp": 1},
        pipeline=vescale.Pipeline(cuts=cuts, schedule=kind, microbatches=count, virtual=virtual),
    )


def batches(count):
    """Inputs and labels; every microbatch ignores another number of labels."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        inputs, labels = torch.randint(VOCABULARY, (2, count * ROWS, POSITIONS), generator=generator)
        ignored = torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.5, len(labels))[:, None]
        yield inputs, labels.masked_fill(ignored, -100)


def pipelined(name, kind, mesh, virtual, count, layers, dropout):
    """Losses, own parameters (whole), and the generator's state at the end."""
    build, loss_of, _ = MODELS[name]
    torch.manual_seed(0)
    model = build(layers, dropout)
    model, optimizer = vescale.parallelize(plan_of(name, kind, mesh, virtual, count, layers), model, OPTIMIZER)
    torch.manual_seed(1)
    losses = []
    for inputs, labels in batches(count):
        loss = loss_of(model, inputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    return torch.stack(losses), whole, torch.get_rng_state()


def accumulated(name, count, layers, dropout):
    """The same on one device; a tied weight's two uses are added up apart, and then once."""
    build, loss_of, _ = MODELS[name]
    torch.manual_seed(0)
    model = build(layers, dropout)
    tied = name == "gpt"
    if tied:
        model.lm_head.weight = copy.deepcopy(model.transformer.wte.weight)
    trained = [p for n, p in model.named_parameters() if n != "lm_head.weight" or not tied]
    optimizer = OPTIMIZER(trained)
    torch.manual_seed(1)
    losses = []
    for inputs, labels in batches(count):
        shifted = labels if name == "gpt" else labels[:, 1:]
        total = (shifted != -100).sum()
        whole = 0
        for i in range(count):
            rows = slice(i * ROWS, (i + 1) * ROWS)
            weight = share(shifted[rows], total)
            loss = loss_of(model, inputs[rows], labels[rows]) * weight
            loss.backward()
            whole = whole + loss.detach()
        if tied:
            model.transformer.wte.weight.grad += model.lm_head.weight.grad
        optimizer.step()
        model.zero_grad()
        if tied:
            model.lm_head.weight.data.copy_(model.transformer.wte.weight)
        losses.append(whole)
    return torch.stack(losses), {n: p.detach() for n, p in model.named_parameters()}, torch.get_rng_state()


def share(labels, total):
    return int((labels != -100).sum()) / int(total)


def differences(name, kind, mesh, virtual, count, dropout):
    """Per rank: whether losses and generator are equal, and the parameters that are not."""
    layers = max(4, mesh["pp"] * virtual)
    losses, whole, state = pipelined(name, kind, mesh, virtual, count, layers, dropout)
    wanted, parameters, wanted_state = accumulated(name, count, layers, dropout)
    different = [n for n in whole if not torch.equal(whole[n], parameters[n])]
    return torch.equal(losses, wanted), torch.equal(state, wanted_state), different, sorted(whole)


@pytest.mark.parametrize("name, kind, mesh, virtual, count", slice_of(GRID, fraction=28))
def test_every_schedule_is_bitwise_accumulation_on_one_device(name, kind, mesh, virtual, count):
    held = set()
    for losses, state, different, names in run_ranks(
        mesh["pp"], differences, name, kind, mesh, virtual, count, 0.1, timeout=300
    ):
        assert losses and state and different == []
        held.update(names)
    build, _, _ = MODELS[name]
    assert held >= {n for n, _ in build(max(4, mesh["pp"] * virtual), 0.0).named_parameters()}
