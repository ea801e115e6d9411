"""Context parallelism on unmodified models: training against one device, and what is communicated."""

from collections import Counter
from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor import comm_trace
from vescale_dtensor.testing import run_ranks, slice_of, warm_up
from vescale_plans import Pipeline, Plan, library

warm_up("torch._dynamo", "vescale", "transformers")

LOSS, PARAMETER, GRADIENT = 1e-5, 1e-4, 1e-6  # the gradient's before the first step
STEPS, VOCABULARY, BATCH, POSITIONS = 10, 61, 2, 24
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def tokens(step, positions=POSITIONS):
    return torch.randint(3, VOCABULARY, (BATCH, positions), generator=torch.Generator().manual_seed(step))


def causal(model, step):
    """Ignored labels, unevenly spread: most lie in the second half of the sequence."""
    labels = tokens(step)
    labels[0, POSITIONS // 2 + 1 :], labels[1, :5] = -100, -100
    return model(input_ids=tokens(step), labels=labels).loss


def padded(model, step):
    mask = torch.ones(BATCH, POSITIONS, dtype=torch.long)
    mask[1, 15:] = 0
    return model(input_ids=tokens(step), attention_mask=mask, labels=tokens(step)).loss


def packed(model, step):
    """Two documents in a row, told by positions that begin anew; their border lies within a rank's part."""
    places = torch.cat([torch.arange(9), torch.arange(POSITIONS - 9)]).expand(BATCH, -1)
    return model(input_ids=tokens(step), position_ids=places, labels=tokens(step), use_cache=False).loss


def masked(model, step):
    mask = torch.ones(BATCH, POSITIONS, dtype=torch.long)
    mask[0, 17:] = 0
    return model(input_ids=tokens(step), attention_mask=mask, labels=tokens(step + 100)).loss


def translated(model, step):
    return model(input_ids=tokens(step), labels=tokens(step, 9)).loss


def heard(model, step):
    features = torch.randn(BATCH, 16, 40, generator=torch.Generator().manual_seed(step))
    return model(input_features=features, labels=tokens(step, 7)).loss


# class, its config, the loss
MODELS = {
    "llama": ("LlamaForCausalLM", DECODER, causal),
    "llama, padding": ("LlamaForCausalLM", DECODER, padded),
    "llama, documents": ("LlamaForCausalLM", DECODER, packed),
    "llama, eager": ("LlamaForCausalLM", DECODER | {"attn_implementation": "eager"}, padded),
    "llama, attention dropout": ("LlamaForCausalLM", DECODER | {"attention_dropout": 0.1}, causal),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 6}, causal),
    "gemma 3": (
        "Gemma3ForCausalLM",
        DECODER | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        causal,
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        DECODER | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        padded,
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        DECODER | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        causal,
    ),
    "bert": ("BertForMaskedLM", DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, masked),
    "bert, dropout": ("BertForMaskedLM", DECODER | DROPOUT, masked),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
        translated,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 16, "dropout": 0.0,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        heard,
    ),
}  # fmt: skip

REPLICATED = {"parameters": {"*": {}}, "context_axis": "cp"}
PLANS = {
    "cp 2": lambda: Plan(mesh={"cp": 2}, **REPLICATED),
    "cp 4": lambda: Plan(mesh={"cp": 4}, **REPLICATED),
    "dp 2 x cp 2, zero 3": lambda: Plan(mesh={"dp": 2, "cp": 2}, zero=3, **REPLICATED),
    "cp 2 x tp 2 + sp": lambda: library.llama({"cp": 2, "tp": 2}).override(context_axis="cp"),
    "cp 2, recomputed": lambda: Plan(mesh={"cp": 2}, checkpointing={"model.layers.*": True}, **REPLICATED),
}


# Of a third of it, the keys', the gradient is zero but for rounding, which Adam turns into steps.
PARTLY_NOTHING = "query_key_value.bias"


def build(name):
    import transformers

    kind, sizes, loss_of = MODELS[name]
    kind = getattr(transformers, kind)
    config = kind.config_class(**{k: v for k, v in sizes.items() if k != "attn_implementation"})
    config._attn_implementation = sizes.get("attn_implementation", "sdpa")
    torch.manual_seed(0)
    return kind(config).train(), loss_of


def train(name, plan=None, steps=STEPS, mode="eager"):
    """Losses, the first step's gradients and the last parameters, whole, and the last step's collectives."""
    model, loss_of = build(name)
    optimizer_fn = partial(torch.optim.AdamW, lr=1e-3)
    optimizer = optimizer_fn(model.parameters()) if plan is None else None
    if plan is not None:
        model, optimizer = vescale.parallelize(plan, model, optimizer_fn, mode=mode)
    whole = (lambda tensor: tensor.full_tensor()) if plan is not None else (lambda tensor: tensor.clone())
    losses, gradients = [], {}
    torch.manual_seed(1)
    for step in range(steps):
        with comm_trace() as trace:
            loss = loss_of(model, step)
            loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: whole(p.grad).cpu() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {n: whole(p.detach()).cpu() for n, p in model.named_parameters()}, trace.events


def check(name, plan, way, steps=STEPS, mode="eager"):
    plan = PLANS[plan]().override(context=way)
    one, many = train(name, steps=steps), train(name, plan, steps, mode)
    for step, (expected, found) in enumerate(zip(one[0], many[0])):
        assert abs(found - expected) <= LOSS * abs(expected), (step, expected, found)
    largest = max(float(gradient.norm()) for gradient in one[1].values())
    nothing = set()  # gradients that are zero but for rounding: of a key's bias before softmax
    for parameter, expected in one[1].items():
        norm = float(expected.norm())
        if norm < 1e-6 * largest:
            nothing.add(parameter)
            continue
        error = float((many[1][parameter] - expected).norm()) / norm
        assert error <= GRADIENT, (parameter, error)
    assert all("key" in parameter or "k_proj" in parameter for parameter in nothing), nothing
    for parameter, expected in one[2].items():
        if parameter not in nothing and not parameter.endswith(PARTLY_NOTHING) and float(expected.norm()):
            error = float((many[2][parameter] - expected).norm() / expected.norm())
            assert error <= PARAMETER, (parameter, error)
    return Counter(event.kind for event in many[3])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", ["ring", "all-to-all", "gather"])
def test_llama(plan, way):
    ranks = PLANS[plan]().world_size
    kinds = run_ranks(ranks, check, "llama", plan, way)[-1]
    assert ("ring" in kinds) == (way == "ring") and ("heads_to_sequence" in kinds) == (way == "all-to-all"), kinds


CASES = [(name, plan) for name in MODELS for plan in ("cp 2", "cp 4", "dp 2 x cp 2, zero 3")]


@pytest.mark.parametrize(("name", "plan"), slice_of(CASES, 3))
def test_models(name, plan):
    ranks = PLANS[plan]().world_size
    run_ranks(ranks, check, name, plan, "ring", STEPS, timeout=240)


@pytest.mark.parametrize("way", ["ring", "all-to-all"])
def test_static_mode(way):
    run_ranks(2, check, "mistral", "cp 2", way, 4, mode="static")


def test_on_a_device_with_nccls_manners():
    """No tags, both directions at once, messages in the order of posting, results only after their wait."""
    run_ranks(2, check, "llama, padding", "cp 2", "ring", 4, device="second")


STAGED = [(name, "ring") for name in ("llama", "llama, documents", "mistral", "gemma 3")] + [("mistral", "all-to-all")]


def check_pipeline(name, way):
    pipeline = Pipeline(axis="pp", cuts=("model.layers.1",), microbatches=2, schedule="1f1b")
    plan = Plan(mesh={"pp": 2, "cp": 2}, pipeline=pipeline, context=way, **REPLICATED)
    one, many = train(name), train_stages(name, plan)
    for expected, found in zip(one[0], many[0]):
        assert abs(found - expected) <= LOSS * abs(expected)
    for parameter, found in many[1].items():
        assert float((found - one[2][parameter]).norm() / one[2][parameter].norm()) <= PARAMETER, parameter
    return sorted(many[1])


def train_stages(name, plan):
    """Losses and the parameters of this stage."""
    model, loss_of = build(name)
    model, optimizer = vescale.parallelize(plan, model, partial(torch.optim.AdamW, lr=1e-3))
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach().full_tensor() for n, p in model.named_parameters() if p.numel()}


@pytest.mark.parametrize(("name", "way"), slice_of(STAGED, 2))
def test_pipeline(name, way):
    stages = run_ranks(4, check_pipeline, name, way, timeout=240)
    assert len({tuple(stage) for stage in stages}) == 2 and all(stages)


def test_a_dry_run_counts_a_ring():
    model, _ = build("llama")
    plan = PLANS["cp 2"]().override(context="ring")
    found = str(vescale.dry_run(plan, model, {"input_ids": tokens(0), "labels": tokens(0)}))
    assert "ring_gradient" in found


def test_a_dry_run_of_each_rank():
    """What it counts of rings is what a rank of a real world receives, contiguous and dealt out."""

    def received(events):
        return sum(event.received for event in events if event.kind.startswith("ring"))

    def real(plan):
        return received(train("llama", plan, steps=2)[3])

    for layout in ("contiguous", "zigzag"):
        plan = PLANS["cp 2"]().override(context="ring", context_layout=layout)
        batch = {"input_ids": tokens(0), "labels": tokens(0)}
        found = [received(vescale.dry_run(plan, build("llama")[0], batch, rank=rank).collectives) for rank in (0, 1)]
        assert found == run_ranks(2, real, plan) and all(found), layout
    with pytest.raises(vescale.PlanError, match="rank 2 of a plan for 2"):
        vescale.dry_run(plan, build("llama")[0], batch, rank=2)
