"""Prints, per model, the share of its module calls that run static; status 1 when the Llama family has less than 95%.

    python benchmarks/static_share.py

One process stands for rank 0 of two; tiny random models of HuggingFace, tensor and sequence parallel. The last line is
one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings

import torch
import transformers

import vescale
from vescale_dtensor.testing import fake_world
from vescale_plans import Plan

LEAST = 0.95
LLAMA_FAMILY = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
OTHERS = ("GPTNeoX", "Olmo2", "Phi3", "StableLm", "Cohere")
LAYERS = 8
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


def share(family: str) -> float:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    plan = vescale.Plan.from_huggingface(model, mesh={"tp": 2}) if config.base_model_tp_plan else _replicated()
    model, _ = vescale.parallelize(plan, model, mode="static")
    tokens = torch.randint(64, (2, 8))
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
        return vescale.explain_static(model).share


def _replicated() -> Plan:
    return Plan(mesh={"dp": 2}, parameters={"*": {}})


def main() -> int:
    shares: dict[str, float | str] = {}
    for family in (*LLAMA_FAMILY, *OTHERS):
        with fake_world(2), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                shares[family] = round(share(family), 4)
            except Exception as error:  # a model that does not run is a finding, not the end
                shares[family] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"{family:<10} {shares[family]}", flush=True)
    print(json.dumps(shares))
    family_met = all(isinstance(shares[f], float) and shares[f] >= LEAST for f in LLAMA_FAMILY)
    return int(not family_met)


if __name__ == "__main__":
    sys.exit(main())
