"""Prints, per model, the share of its module calls that run static; status 1 when the Llama family has less than 95%.

    python benchmarks/runtime/static_share.py
    python benchmarks/runtime/static_share.py --mode auto

One process stands for rank 0 of two; tiny random models of HuggingFace under the plans that they bring, then the
example models as they are under the library's plans, tensor and sequence parallel. What reads values (masks), and the
vocabulary-parallel embedding and loss, are three modules of any model: the more layers, the larger the share. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import transformers

import vescale
from vescale_dtensor.testing import fake_world
from vescale_plans import Plan, library

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples"))

LEAST = 0.95
Mode = Literal["static", "auto"]
LLAMA_FAMILY = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
OTHERS = ("GPTNeoX", "Olmo2", "Phi3", "StableLm", "Cohere")
EXAMPLES = ("gpt", "llama", "mixtral")
LAYERS = 8
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


def of_example(name: str, mode: Mode) -> float:
    torch.manual_seed(0)
    if name == "gpt":
        from nanogpt.model import GPT, GPTConfig

        model = GPT(GPTConfig(vocab_size=64, block_size=8, n_layer=LAYERS, n_head=4, n_embd=32))
    else:
        model = importlib.import_module(f"{name}.model").build(vocab_size=64, num_hidden_layers=LAYERS)
    model, _ = vescale.parallelize(getattr(library, name)(mesh={"tp": 2}), model, mode=mode)
    x, y = torch.randint(64, (2, 2, 8))
    if name == "gpt":
        return _after_two_steps(model, lambda: model(x, y))
    return _after_two_steps(model, lambda: model(input_ids=x, labels=y).loss)


def _after_two_steps(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            loss().backward()
        return vescale.explain_static(model).share


def of_family(family: str, mode: Mode) -> float:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    plan = vescale.Plan.from_huggingface(model, mesh={"tp": 2}) if config.base_model_tp_plan else _replicated()
    model, _ = vescale.parallelize(plan, model, mode=mode)
    tokens = torch.randint(64, (2, 8))
    return _after_two_steps(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def _replicated() -> Plan:
    return Plan(mesh={"dp": 2}, parameters={"*": {}})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("static", "auto"), default="static")
    mode = parser.parse_args().mode
    shares: dict[str, float | str] = {}
    cases = [(family, of_family) for family in (*LLAMA_FAMILY, *OTHERS)] + [(name, of_example) for name in EXAMPLES]
    for name, share in cases:
        with fake_world(2), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                shares[name] = round(share(name, mode), 4)
            except Exception as error:  # a model that does not run is a finding, not the end
                shares[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(f"{name:<10} {shares[name]}", flush=True)
    print(json.dumps(shares))
    family_met = all(isinstance(shares[f], float) and shares[f] >= LEAST for f in (*LLAMA_FAMILY, "llama"))
    return int(not family_met)


if __name__ == "__main__":
    sys.exit(main())
