"""vescale_plans: what applying a plan, finding one, and a dry run of it cost (ratios, lower is better)."""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks._fake_group import fake_mesh
from benchmarks._schedule_cases import seconds

LAYERS, HIDDEN = 16, 64


def model():
    """A small HuggingFace Llama of many layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": 256, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, use_cache=False))


def plan():
    from vescale_plans import library

    return library.llama(mesh={"dp": 2, "tp": 4})


class Plans:
    """Over a training step of the same model on one device: what a user waits for before the first step."""

    params = (["parallelize", "generate_plan"],)
    param_names = ("what",)

    def setup_cache(self):
        import torch

        from vescale_plans import generate_plan, parallelize

        torch.set_num_threads(1)
        tokens = torch.zeros(8, 64, dtype=torch.int64)
        ratios: dict[str, list[float]] = {"parallelize": [], "generate_plan": []}
        with fake_mesh():
            for turn in range(4):
                one = model()

                def step(one=one):
                    one(input_ids=tokens, labels=tokens).loss.backward()

                floor = seconds(step, times=3)
                fresh = model()
                applied = seconds(partial(parallelize, plan(), fresh), times=1)
                request = {"world_size": 8, "batch": 64, "seq": 64, "hardware": "a100"}
                found = seconds(partial(generate_plan, model(), request), times=1)
                if turn:  # the first warms up
                    ratios["parallelize"].append(applied / floor)
                    ratios["generate_plan"].append(found / floor)
        return {name: median(values) for name, values in ratios.items()}

    setup_cache.timeout = 600

    def track_over_a_step(self, cache, what):
        return cache[what]

    track_over_a_step.unit = "x"
    track_over_a_step.version = "1"
