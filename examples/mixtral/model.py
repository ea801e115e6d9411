"""An unmodified HuggingFace Mixtral, small enough to train on a laptop.

The class is transformers' own ``MixtralForCausalLM``; only its sizes are chosen here.
Random weights, nothing is downloaded.
"""

from __future__ import annotations

from transformers import MixtralConfig, MixtralForCausalLM


def build(**sizes: object) -> MixtralForCausalLM:
    """A randomly initialised Mixtral of 4 experts, 2 for each token, in training mode; `sizes` override the config.

    torch's global seed decides the weights.
    """
    defaults: dict[str, object] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    return MixtralForCausalLM(MixtralConfig(**(defaults | sizes))).train()
