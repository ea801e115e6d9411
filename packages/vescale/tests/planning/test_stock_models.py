"""Models as they come, recurrent ones and mixtures of experts: planned, and the plans run dry."""

import pytest
import torch
from torch import nn

from vescale import dry_run, generate_plan
from vescale_dtensor import FallbackWarning
from vescale_testkit import in_turns

ROWS, POSITIONS, WORDS = 8, 16, 64
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
EXPERTS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.layers = kind(32, 32, num_layers=2, batch_first=True)

    def forward(self, ids):
        return self.head(self.layers(self.table(ids))[0])


def ids():
    return torch.randint(WORDS, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(0))


def entropy(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    """torch's recurrent kernels have no rule: what they are given is gathered, and said to be."""
    model = Recurrent(kind)
    plan = generate_plan(model, world_size=2, batch=ROWS, sample=ids()[:1], hardware="cpu")
    with pytest.warns(FallbackWarning, match=kind.__name__.lower()):
        found = dry_run(plan, model, ids(), step=entropy)
    assert found.peak > found.memory["parameters"] > 0


@in_turns(3)
@pytest.mark.parametrize("pin", [{"dp": 2, "ep": 1}, {"ep": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_of_experts(name, pin):
    """In float32, whatever axis the experts lie on; the choice is verified by the same dry run."""
    import transformers

    kind, more = EXPERTS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    batch = {"input_ids": ids(), "labels": ids()}
    asked = {"world_size": 2, "batch": ROWS, "hardware": "cpu", "pin": {"pp": 1, **pin}}
    plan = generate_plan(model, **asked, verify=batch)
    found = dry_run(plan, model, batch)
    assert found.peak <= 8 * 2**30
    sent = {event.cause.function for event in found.collectives}
    assert ("expert dispatch" in sent) == (pin.get("ep", 1) > 1)
