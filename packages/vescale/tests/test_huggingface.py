"""Unmodified HuggingFace models, one forward and backward on DP 2 x TP 2, against one device."""

import copy

import pytest
import torch

import vescale
from vescale_dtensor.testing import run_ranks, warm_up
from vescale_plans import library

warm_up("torch._dynamo", "vescale", "transformers")

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
}  # fmt: skip
LLAMA_FAMILY = ("llama", "qwen3", "mistral, sliding window", "gemma")
PLANS = {
    "replicated": lambda: vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters={"*": {}}),
    "tp": lambda: library.llama({"dp": 2, "tp": 2}, sequence_parallel=False),
    "tp + sp": lambda: library.llama({"dp": 2, "tp": 2}),
}


def compared(name, plan):
    """The loss's relative error, and per parameter the gradient's error relative to the largest gradient norm."""
    import transformers

    kind, config, loss_of = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    model = kind(kind.config_class(**config)).train()
    parallel, _ = vescale.parallelize(PLANS[plan](), copy.deepcopy(model))
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


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, "replicated") for name in MODELS] + [(name, plan) for name in LLAMA_FAMILY for plan in ("tp", "tp + sp")],
)
def test_loss_and_gradients_equal_one_device(name, plan):
    for loss, by_scale, by_norm in run_ranks(4, compared, name, plan, timeout=180):
        assert loss <= 1e-6
        assert by_scale <= 1e-6
        assert by_norm <= 1e-4


def built(name, deferred):
    """The model from its config, initialised by its own code, and the generator's state after that."""
    import transformers

    kind, config, _ = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    if not deferred:
        return kind(kind.config_class(**config)), torch.get_rng_state()
    with vescale.deferred_init():
        return kind(kind.config_class(**config)), torch.get_rng_state()


@pytest.mark.parametrize("name", MODELS)
def test_deferred_initialisation_is_its_own(name):
    (plain, state), (model, after) = built(name, False), built(name, True)
    assert torch.equal(after, state) and all(map(vescale.is_deferred, model.parameters()))
    vescale.materialize(model)
    for kind in ("named_parameters", "named_buffers"):
        found = dict(getattr(model, kind)(remove_duplicate=False))
        wanted = dict(getattr(plain, kind)(remove_duplicate=False))
        assert list(found) == list(wanted)
        assert [n for n in found if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])] == []
    assert len(list(model.parameters())) == len(list(plain.parameters()))  # tied as before


def trained(name, plan, deferred):
    """Losses of three steps, and the shards after them."""
    model, _ = built(name, deferred)
    model, optimizer = vescale.parallelize(PLANS[plan](), model, lambda p: torch.optim.AdamW(p, lr=1e-3))
    losses = []
    for _ in range(3):
        loss = MODELS[name][2](model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach().to_local() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "plan"), [("llama", "tp + sp"), ("gemma", "tp"), ("t5", "replicated")])
def test_deferred_and_parallelized_trains_alike(name, plan):
    def both():
        (losses, shards), (wanted, wanted_shards) = trained(name, plan, True), trained(name, plan, False)
        return losses == wanted and all(torch.equal(shards[n], wanted_shards[n]) for n in wanted_shards)

    assert run_ranks(4, both, timeout=180) == [True] * 4
