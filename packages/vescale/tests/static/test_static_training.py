"""Training under static mode: losses, gradients and parameters are bitwise those of eager mode."""

import itertools
import math

import pytest
import torch

import vescale
from vescale_dtensor.testing import run_ranks, slice_of, warm_up
from vescale_plans import library

warm_up("torch._dynamo", "vescale", "transformers")

POSITIONS, STEPS, BATCH, VOCABULARY = 24, 10, 8, 64


def build_gpt():
    from nanogpt.model import GPT, GPTConfig

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, dropout=0.1, **sizes))


def build_llama():
    from llama.model import build

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    return build(vocab_size=VOCABULARY, attention_dropout=0.1, **sizes)


def build_mixtral():
    from mixtral.model import build

    return build(vocab_size=VOCABULARY, attention_dropout=0.1)


def build_llama_without_dropout():
    model = build_llama()
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return model


MODELS = {
    "gpt": (build_gpt, library.gpt, lambda model, x, y: model(x, y)),
    "llama": (build_llama, library.llama, lambda model, x, y: model(input_ids=x, labels=y).loss),
    "mixtral": (build_mixtral, library.mixtral, lambda model, x, y: model(input_ids=x, labels=y).loss),
    "llama without dropout": (
        build_llama_without_dropout, library.llama, lambda model, x, y: model(input_ids=x, labels=y).loss,
    ),
}  # fmt: skip

PARTS = {  # what runs static in spite of dropout
    "gpt": "transformer.h.0.mlp",
    "llama": "model.layers.0.mlp",
    "mixtral": "model.layers.0.input_layernorm",
    "llama without dropout": "model.layers.0.mlp",
}


def _of_blocks(name, more):
    """Checkpointing and regathering by block."""
    block = "transformer.h.?" if name == "gpt" else "model.layers.?"
    return {field: {block: True} if value is True else value for field, value in more.items()}


def train(name, mode, mesh, sequence_parallel, batch, more):
    """Losses, gradients of every step and parameters at the end, as this rank's shards; and the model."""
    build, plan_of, loss_of = MODELS[name]
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(
        plan_of(mesh=mesh, sequence_parallel=sequence_parallel).override(**_of_blocks(name, more)),
        build(),
        lambda parameters: torch.optim.AdamW(parameters, lr=5e-4),
        mode=mode,
    )
    data = torch.Generator().manual_seed(5)
    losses, gradients = [], []
    for _ in range(STEPS):
        x, y = torch.randint(VOCABULARY, (2, batch, POSITIONS), generator=data)
        loss = loss_of(model, x, y)
        loss.backward()
        gradients.append({n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach().to_local() for n, p in model.named_parameters()}, model


def compared(name, mode, mesh, sequence_parallel, batch, more):
    """Whether losses are equal, the tensors that are not, and how many modules run static."""
    losses, gradients, parameters, _ = train(name, "eager", mesh, sequence_parallel, batch, more)
    state = torch.get_rng_state()
    other_losses, other_gradients, other_parameters, model = train(name, mode, mesh, sequence_parallel, batch, more)
    differ = [
        f"{n}.grad in step {step}"
        for step, (one, other) in enumerate(zip(gradients, other_gradients, strict=True))
        for n in one
        if not torch.equal(one[n], other[n])
    ]
    differ += [n for n in parameters if not torch.equal(parameters[n], other_parameters[n])]
    differ += [] if torch.equal(state, torch.get_rng_state()) else ["the random state"]
    recorded = max(site.recordings for site in model._vescale.static.sites.values())
    return losses == other_losses, differ, recorded, vescale.explain_static(model).calls


CASES = {  # mesh, sequence parallel, batch, more of the plan
    "dp2 tp2 sp": ({"dp": 2, "tp": 2}, True, BATCH, {}),
    "dp2 tp2 sp, zero 3": ({"dp": 2, "tp": 2}, True, BATCH, {"zero": 3}),
    "dp2 tp2 sp, zero 3, checkpoints": ({"dp": 2, "tp": 2}, True, BATCH, {"zero": 3, "checkpointing": True}),
    "dp2 tp2 sp, regather": ({"dp": 2, "tp": 2}, True, BATCH, {"regather": True}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, False, BATCH, {}),
    "dp4, uneven, zero 1": ({"dp": 4}, False, 6, {"zero": 1}),
}


@pytest.mark.parametrize("name, case, mode", slice_of(itertools.product(MODELS, CASES, ("static", "auto")), 14))
def test_static_training_is_bitwise_eager_training(name, case, mode):
    for same_losses, differ, recorded, calls in run_ranks(4, compared, name, mode, *CASES[case], timeout=300):
        assert same_losses and differ == []
        assert recorded == 1  # the first call; none missed after it
        assert calls[PARTS[name]][0] == "static", calls[PARTS[name]]
        # A batch of one is contiguous where the whole is not: on such ranks attention copies in eager mode only.
        if name == "llama without dropout" and "uneven" not in case:
            assert calls["model.layers.0"][0] == "static", calls["model.layers.0"]


# name of a plan -> cuts of two stages, and of four
CUTS = {
    "gpt": (["transformer.h.1"], ["transformer.h.0", "transformer.h.1", "transformer.ln_f"]),
    "llama": (["model.layers.1"], ["model.layers.0", "model.layers.1", "model.norm"]),
}


def pipelined(name, mode, mesh, kind, more):
    """As `compared`, under a pipeline with two stages, or with four on two ranks."""
    virtual = 2 if kind in ("zbv", "interleaved") else 1
    pipeline = vescale.Pipeline(cuts=CUTS[name.split()[0]][virtual - 1], schedule=kind, microbatches=4, virtual=virtual)
    data_axis = "dp" if "dp" in mesh else None
    whole = {"dp": 1, "tp": 1, **mesh}
    more = {**more, "mesh": {"tp": 1, **mesh}, "data_axis": data_axis, "pipeline": pipeline}
    return compared(name, mode, whole, "tp" in mesh, 2 * BATCH, more)


PIPELINES = [  # mesh, schedule, more of the plan
    ({"pp": 2, "tp": 2}, "1f1b", {}),
    ({"pp": 2, "dp": 2}, "1f1b", {"zero": 1}),
    ({"pp": 2, "dp": 2}, "1f1b", {"zero": 3, "checkpointing": True}),
    ({"pp": 2, "dp": 2}, "zb-h1", {"zero": 3}),
    ({"pp": 2, "tp": 2}, "zbv", {}),
    ({"pp": 2, "dp": 2}, "interleaved", {"zero": 2}),
    ({"pp": 2, "dp": 2, "tp": 2}, "1f1b", {"zero": 1}),
]
PIPELINED = ("gpt", "llama", "llama without dropout")


@pytest.mark.parametrize("name, case, mode", slice_of(itertools.product(PIPELINED, PIPELINES, ("static", "auto")), 22))
def test_static_stages_of_a_pipeline_are_bitwise_the_eager_ones(name, case, mode):
    ranks, static = math.prod(case[0].values()), set()
    for same_losses, differ, recorded, calls in run_ranks(ranks, pipelined, name, mode, *case, timeout=300):
        assert same_losses and differ == []
        assert recorded == 1  # every unit with its first microbatch; none missed after it
        assert "spans stages of the pipeline" in calls[""][1].what
        static |= {module for module, (verdict, _) in calls.items() if verdict == "static"}
    last = PARTS[name].replace(".0.", ".1.")
    assert {PARTS[name], last} <= static, static
    if name == "llama without dropout":
        assert {"model.layers.0", "model.layers.1", "model.norm"} <= static, static
