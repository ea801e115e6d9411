"""Sparse models whose experts an expert axis does not know: the refusal names plans, and these train."""

from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor import Shard
from vescale_plans import Plan, PlanError
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

RANKS, BATCH, POSITIONS, VOCABULARY, HIDDEN, EXPERTS = 2, 4, 12, 64, 32, 4
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 64, "num_local_experts": EXPERTS}
MODELS = {
    "Llama4ForCausalLM": {
        **SIZES, "hidden_size": HIDDEN, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_experts_per_tok": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "interleave_moe_layer_step": 1,
        "attention_chunk_size": 32,
    },
    "JetMoeForCausalLM": {
        **SIZES, "hidden_size": HIDDEN, "intermediate_size": 32, "num_key_value_heads": 2, "kv_channels": 8,
        "num_experts_per_tok": 2,
    },
    "SwitchTransformersForConditionalGeneration": {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_ff": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "num_experts": EXPERTS, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
    },
}  # fmt: skip
SPREAD = {  # what the refusal names for stacked weights
    "Llama4ForCausalLM": {"*.experts.*": {"tp": Shard(0)}},
    "JetMoeForCausalLM": {"*.input_linear.*": {"tp": Shard(0)}, "*.output_linear.*": {"tp": Shard(0)}},
    "SwitchTransformersForConditionalGeneration": {},
}
PLANS = {
    "zero 3": lambda name: Plan({"ep": RANKS}, {"*": {}}, data_axis="ep", zero=3),
    "whole experts": lambda name: Plan({"tp": RANKS}, {**SPREAD[name], "*": {}}),
    "declared": lambda name: Plan(
        {"ep": RANKS}, {"*": {}}, data_axis="ep", expert_axis="ep", zero=3,
        experts={"*.input_linear": "counts", "*.output_linear": "counts"},
    ),
}  # fmt: skip

NAMED = {name: ("zero 3", "whole experts") if spread else ("zero 3",) for name, spread in SPREAD.items()}
NAMED["JetMoeForCausalLM"] += ("declared",)  # its experts are told how many rows each has


def build(name):
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**MODELS[name])).train()


def train(model, optimizer):
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(3):
        tokens = torch.randint(3, VOCABULARY, (BATCH, POSITIONS), generator=generator)
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def compared(name, plan):
    """Relative errors of losses, and those of parameters. Runs on every rank."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    alone = build(name)
    expected = train(alone, adamw(alone.parameters()))
    model, optimizer = vescale.parallelize(PLANS[plan](name), build(name), adamw)
    losses = train(model, optimizer)
    whole = {key: value.detach().full_tensor() for key, value in model.named_parameters()}
    errors = [(whole[key] - value).norm() / value.norm().clamp_min(1e-12) for key, value in alone.named_parameters()]
    return [abs(a - b) / abs(b) for a, b in zip(losses, expected)], [float(error) for error in errors]


def refusal(name):
    plan = Plan({"ep": RANKS}, {"*": {}}, data_axis="ep", expert_axis="ep")
    with pytest.raises(PlanError) as refused:
        vescale.parallelize(plan, build(name))
    return str(refused.value)


@pytest.mark.parametrize("name", MODELS)
def test_the_refusal_names_plans_for_this_model(name):
    text = run_ranks(RANKS, refusal, name)[0]
    assert "expert_axis=None" in text and "with zero=3" in text
    for pattern in SPREAD[name]:
        assert f"{pattern!r}: {{'tp': Shard(0)}}" in text
    assert ("Shard(0)" in text) == ("'counts'" in text) == bool(SPREAD[name])


@pytest.mark.parametrize("name, plan", [(name, plan) for name in MODELS for plan in NAMED[name]])
def test_the_plans_train_as_one_device(name, plan):
    for losses, errors in run_ranks(RANKS, compared, name, plan):
        assert max(losses) < 1e-5 and max(errors) < 1e-4, (losses, max(errors))
