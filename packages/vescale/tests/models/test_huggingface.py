"""Unmodified HuggingFace models, one forward and backward on DP 2 x TP 2, against one device."""

import copy

import pytest
import torch

import vescale
from vescale_dtensor import InterleavedShard, Replicate, Shard
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

VOCABULARY, BATCH, POSITIONS = 61, 6, 12
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = DECODER | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(positions=POSITIONS):
    return torch.randint(3, VOCABULARY, (BATCH, positions), generator=torch.Generator().manual_seed(1))


def pixels(*shape):
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(2))


def causal(model):
    return model(input_ids=tokens(), labels=tokens()).loss


def padded(model):
    mask = torch.ones(BATCH, POSITIONS, dtype=torch.long)
    mask[1, 8:] = 0
    mask[3, 5:] = 0
    return model(input_ids=tokens(), attention_mask=mask, labels=tokens()).loss


def classified(model):
    return model(input_ids=tokens(), labels=tokens(1)[:, 0] % 3).loss


def image(model):
    return model(pixel_values=pixels(3, 16, 16), labels=tokens(1)[:, 0] % 5).loss


def translated(model):
    return model(input_ids=tokens(), labels=tokens(7)).loss


def heard(model):
    return model(input_features=pixels(16, 40), labels=tokens(7)).loss


def looked_at(model):
    """Two images of 4 x 4 patches, each four tokens in its row of text; sizes are read from tensors of numbers."""
    ids = tokens()[:2].clamp(min=7)
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 3, 5, 4
    return model(
        input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == 5).long(),
        image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]]),
        pixel_values=torch.randn(32, 96, generator=torch.Generator().manual_seed(2)),
    ).loss  # fmt: skip


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
LOOKS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
PATCHES = {"num_heads": 4, "hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

# class, its config, the loss
MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        padded,
    ),
    "llama": ("LlamaForCausalLM", GROUPED, padded),
    "llama, eager attention": ("LlamaForCausalLM", GROUPED | {"attn_implementation": "eager"}, padded),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}, causal),
    "mistral, sliding window": ("MistralForCausalLM", GROUPED | {"sliding_window": 6}, causal),
    "phi3": ("Phi3ForCausalLM", GROUPED, causal),
    "gemma": ("GemmaForCausalLM", GROUPED | {"head_dim": 8}, causal),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, causal),
    "opt": (
        "OPTForCausalLM",
        DECODER | {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 32},
        padded,
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0,
         "attention_dropout": 0.0},
        padded,
    ),
    "bert": ("BertForSequenceClassification", DECODER | NO_DROPOUT | {"num_labels": 3}, classified),
    "vit": (
        "ViTForImageClassification",
        DECODER | NO_DROPOUT | {"image_size": 16, "patch_size": 4, "num_labels": 5},
        image,
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
        image,
    ),
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
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        LOOKS
        | {"text_config": GROUPED | ROPE, "vision_config": PATCHES | {"depth": 2, "embed_dim": 32, "mlp_ratio": 2}},
        looked_at,
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        LOOKS
        | {"text_config": GROUPED | ROPE | {"head_dim": 8},
           "vision_config": PATCHES | {"depth": 3, "intermediate_size": 64, "out_hidden_size": 32,
                                       "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
        looked_at,
    ),
}  # fmt: skip
LLAMA_FAMILY = ("llama", "qwen3", "mistral, sliding window", "gemma")
SHIP_A_PLAN = ("llama", "qwen3", "mistral, sliding window", "phi3", "gemma", "mixtral", "qwen2-vl")

COLUMNS, ROWS, WHOLE = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}  # of a weight [out, in]
LANGUAGE = {
    "*.[qkv]_proj.*": COLUMNS,
    "*.o_proj.weight": ROWS,
    "*.gate_proj.*": COLUMNS,
    "*.up_proj.*": COLUMNS,
    "*.down_proj.weight": ROWS,
    "*.embed_tokens.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
}
# Tensor parallelism by hand for models that ship none: parameters, and modules whose outputs are whole.
BY_HAND = {
    "gpt2": (
        {
            "*.c_attn.weight": {"tp": InterleavedShard(1, 3)},  # a Conv1D's weight is [in, out]
            "*.c_attn.bias": {"tp": InterleavedShard(0, 3)},
            "*.c_fc.weight": ROWS,
            "*.c_fc.bias": COLUMNS,
            "*.c_proj.weight": COLUMNS,
            "*.wte.weight": COLUMNS,
            "lm_head.weight": COLUMNS,
        },
        ("*.c_proj", "*.wte"),
    ),
    "opt": (
        {
            "*.out_proj.weight": ROWS,
            "*.fc2.weight": ROWS,
            "*.[qkv]_proj.*": COLUMNS,
            "*.fc1.*": COLUMNS,
            "*.embed_tokens.weight": COLUMNS,
            "lm_head.weight": COLUMNS,
        },
        ("*.out_proj", "*.fc2", "*.embed_tokens"),
    ),
    "bert": (
        {
            "*.self.*": COLUMNS,
            "*.intermediate.*": COLUMNS,
            "*.output.dense.weight": ROWS,
            "*.word_embeddings.weight": COLUMNS,
        },
        ("*.output.dense", "*.word_embeddings"),
    ),
    "vit": (
        {"*.[qkv]_proj.*": COLUMNS, "*.fc1.*": COLUMNS, "*.o_proj.weight": ROWS, "*.fc2.weight": ROWS},
        ("*.o_proj", "*.fc2"),
    ),
    "qwen2-vl": (LANGUAGE | {"*.fc1.*": COLUMNS, "*.fc2.weight": ROWS}, ("*.o_proj", "*.down_proj", "*.embed_tokens")),
    "qwen3-vl": (
        LANGUAGE | {"*.linear_fc1.*": COLUMNS, "*.linear_fc2.weight": ROWS},
        ("*.o_proj", "*.down_proj", "*.embed_tokens"),
    ),
}


def by_hand(name, mesh, **fields):
    parameters, whole = BY_HAND[name]
    boundaries = {module: vescale.Boundary(output=WHOLE) for module in whole}
    return vescale.Plan(mesh, {**parameters, "*": {}}, boundaries, **fields)


DP2_TP2 = {"dp": 2, "tp": 2}
PLANS = {
    "replicated": lambda name, model: vescale.Plan(mesh=DP2_TP2, parameters={"*": {}}),
    "tp": lambda name, model: library.llama(DP2_TP2, sequence_parallel=False),
    "tp + sp": lambda name, model: library.llama(DP2_TP2),
    "mixtral, tp + sp": lambda name, model: library.mixtral(DP2_TP2),
    "shipped, tp 2": lambda name, model: vescale.Plan.from_huggingface(model, mesh={"tp": 2}),
    "shipped, dp 2 x tp 2, zero 3": lambda name, model: vescale.Plan.from_huggingface(model, mesh=DP2_TP2, zero=3),
    "by hand, tp 2": lambda name, model: by_hand(name, {"tp": 2}),
    "by hand, dp 2 x tp 2, zero 3": lambda name, model: by_hand(name, DP2_TP2, zero=3),
    "phi3, cut inside": lambda name, model: vescale.Plan.from_huggingface(model, mesh=DP2_TP2).override(
        parameters={"*.gate_up_proj.weight": {"tp": InterleavedShard(0, 2)}},
        boundaries={"*.gate_up_proj": vescale.Boundary(input=WHOLE)},
    ),
}


def compared(name, plan):
    """The loss's relative error, and per parameter the gradient's error relative to the largest gradient norm."""
    import transformers

    kind, config, loss_of = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    model = kind(kind.config_class(**config)).train()
    plan = PLANS[plan](name, model)
    parallel, _ = vescale.parallelize(plan, copy.deepcopy(model))
    losses = []
    for one in (model, parallel):
        loss = loss_of(one)
        loss.backward()
        losses.append(loss.item())
    gradients = {n: p.grad for n, p in model.named_parameters()}
    found = {n: p.grad for n, p in parallel.named_parameters()}
    assert {n for n, g in found.items() if g is None} == {n for n, g in gradients.items() if g is None}
    # A key bias before softmax has a zero gradient: its own norm is rounding, so errors are measured by the largest.
    scale = max(g.norm().item() for g in gradients.values() if g is not None)
    errors = {n: (found[n].full_tensor() - g).norm().item() / scale for n, g in gradients.items() if g is not None}
    weights = {  # and by their own norm wherever that is not rounding
        n: (found[n].full_tensor() - g).norm().item() / g.norm().item()
        for n, g in gradients.items()
        if g is not None and g.norm().item() > 1e-5 * scale
    }
    return abs(losses[1] - losses[0]) / abs(losses[0]), max(errors.values()), max(weights.values())


CASES = [
    *[(name, "replicated") for name in MODELS],
    *[(name, plan) for name in LLAMA_FAMILY for plan in ("tp", "tp + sp")],
    ("mixtral", "mixtral, tp + sp"),
    *[(name, f"shipped, {mesh}") for name in SHIP_A_PLAN for mesh in ("tp 2", "dp 2 x tp 2, zero 3")],
    *[(name, f"by hand, {mesh}") for name in BY_HAND for mesh in ("tp 2", "dp 2 x tp 2, zero 3")],
    ("phi3", "phi3, cut inside"),
]


@in_turns(3)
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_loss_and_gradients_equal_one_device(name, plan):
    for loss, by_scale, by_norm in run_ranks(2 if plan.endswith(", tp 2") else 4, compared, name, plan, timeout=180):
        assert loss <= 1e-6
        assert by_scale <= 1e-6
        assert by_norm <= 1e-4


DEEPSEEK = GROUPED | {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("kind, config", [("LlamaForCausalLM", GROUPED), ("DeepseekV3ForCausalLM", DEEPSEEK)])
def test_a_checkpointed_block_fills_no_cache(kind, config):
    """A recomputation that appends to the keys of the first would attend to both."""

    def train(checkpointing):
        import transformers

        torch.manual_seed(0)
        built = getattr(transformers, kind)
        model = built(built.config_class(**config))
        assert model.config.use_cache
        plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, data_axis="dp", checkpointing=checkpointing)
        model, _ = vescale.parallelize(plan, model, torch.optim.AdamW)
        out = model(input_ids=tokens(), labels=tokens(), use_cache=True)
        out.loss.backward()
        cached = out.past_key_values.get_seq_length()
        with torch.no_grad():
            assert model(input_ids=tokens()).past_key_values.get_seq_length() == POSITIONS
        return out.loss.item(), [p.grad.full_tensor() for p in model.parameters() if p.grad is not None], cached

    def run():
        with pytest.warns(UserWarning, match="fills no cache"):
            loss, gradients, cached = train({"model.layers.*": True})
        other, others, _ = train({})
        assert loss == other and all(map(torch.equal, gradients, others)) and cached == 0

    run_ranks(2, run)
