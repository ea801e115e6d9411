"""An unmodified HuggingFace Llama, small enough to train on a laptop.

The class is transformers' own ``LlamaForCausalLM``; only its sizes are chosen here.
Random weights, nothing is downloaded.
"""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


def tiny_config(**sizes: object) -> LlamaConfig:
    """A LlamaConfig of about 0.7 million parameters over bytes; `sizes` override it.

    Eight query heads share four key-value heads (grouped-query attention), so that
    the model can be split by heads over 2 or 4 ranks.
    """
    defaults: dict[str, object] = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        # A key-value cache serves generation; in training it only keeps memory.
        "use_cache": False,
    }
    return LlamaConfig(**(defaults | sizes))


def build(**sizes: object) -> LlamaForCausalLM:
    """A randomly initialised Llama in training mode; torch's global seed decides it.

    Example:
        >>> import torch
        >>> model = build(num_hidden_layers=2)
        >>> tokens = torch.randint(256, (2, 8))
        >>> model(input_ids=tokens, labels=tokens).loss.shape    # transformers shifts labels itself
        torch.Size([])
    """
    return LlamaForCausalLM(tiny_config(**sizes)).train()
