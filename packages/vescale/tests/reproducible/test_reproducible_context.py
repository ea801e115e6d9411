"""The reproducible mode over a context axis: equal to the bit on 1, 2 and 4 parts of a sequence."""

from functools import cache, partial

import pytest
import torch

import vescale
from vescale_dtensor import reproducible
from vescale_plans import Plan, library
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

VOCABULARY, BATCH, POSITIONS, STEPS = 64, 2, 24, 3
SPLITS = {"batch": 2, "seq": 8, "hidden": 4}
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
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, padding": ("LlamaForCausalLM", {}),
    "llama, documents": ("LlamaForCausalLM", {}),
    "llama, dropout": ("LlamaForCausalLM", {"attention_dropout": 0.1}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 6}),
    "gemma 3": (
        "Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "bert, dropout": ("BertForMaskedLM", DROPOUT),
}
PLANS = {
    "cp 2": ({"cp": 2}, {}),
    "cp 4": ({"cp": 4}, {}),
    "cp 2, zigzag": ({"cp": 2}, {"context_layout": "zigzag"}),
    "cp 4, zigzag": ({"cp": 4}, {"context_layout": "zigzag"}),
    "cp 2, recomputed": ({"cp": 2}, {"checkpointing": {"model.layers.*": True}}),
    "dp 2 x cp 2, zero 3": ({"dp": 2, "cp": 2}, {"zero": 3}),
    "cp 2 x tp 2": ({"cp": 2, "tp": 2}, {}),
}


def build(name):
    import transformers

    kind, sizes = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    return kind(kind.config_class(**DECODER, **sizes)).train()


def tokens(step):
    return torch.randint(3, VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(step))


def inputs(name, step):
    """Ignored labels, unevenly spread."""
    labels = tokens(step)
    labels[0, POSITIONS // 2 + 1 :], labels[1, :5] = -100, -100
    batch = {"input_ids": tokens(step), "labels": labels}
    if "padding" in name or "bert" in name:
        batch["attention_mask"] = torch.ones(BATCH, POSITIONS, dtype=torch.long)
        batch["attention_mask"][1, 15:] = 0
    if "documents" in name:
        batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(POSITIONS - 9)]).expand(BATCH, -1)
        batch["use_cache"] = False
    return batch


def plan_of(name):
    mesh, fields = PLANS[name]
    if "tp" in mesh:
        return library.llama(mesh).override(context_axis="cp", **fields)
    return Plan(mesh=mesh, parameters={"*": {}}, context_axis="cp", **fields)


def train(name, plan):
    """The bits of losses and parameters after some steps."""
    with reproducible(SPLITS):
        made = plan_of(plan) if plan else Plan(mesh={"cp": 1}, parameters={"*": {}})
        model, optimizer = vescale.parallelize(made, build(name), partial(torch.optim.AdamW, lr=1e-3))
        torch.manual_seed(1)
        losses = []
        for step in range(STEPS):
            loss = model(**inputs(name, step)).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: p.detach().full_tensor().view(torch.int32) for name, p in model.named_parameters()}
    return losses, {name: bits.clone() for name, bits in whole.items()}


@cache
def one_device(name):
    return run_ranks(1, train, name, None)[0]


CASES = [
    (name, plan)
    for name in MODELS
    for plan in PLANS
    if ("tp" not in PLANS[plan][0] and "recomputed" not in plan) or name.startswith("llama")
]


@pytest.mark.parametrize(("name", "plan"), slice_of(CASES, 12))
def test_the_same_bits(name, plan):
    expected = one_device(name)
    for losses, parameters in run_ranks(plan_of(plan).world_size, train, name, plan, timeout=240):
        assert losses == expected[0]
        different = [name for name, bits in parameters.items() if not torch.equal(bits, expected[1][name])]
        assert not different, different
