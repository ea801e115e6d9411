"""vescale_plans: what applying a plan, probing a model, finding a plan and its dry run cost (ratios)."""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks.cases._fake_group import fake_mesh
from benchmarks.cases._schedule_cases import seconds

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


def probed(one):
    from vescale_plans.search import sample_of, structure_of

    return structure_of(one, sample_of(one, None))


class Plans:
    """Over a training step of the same model on one device: what a user waits for before the first step."""

    params = (["parallelize", "probe", "generate_plan", "dry_run"],)
    param_names = ("what",)

    def setup_cache(self):
        import torch

        from vescale_plans import dry_run, generate_plan, parallelize

        torch.set_num_threads(1)
        tokens = torch.zeros(8, 64, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        request = {"world_size": 8, "batch": 64, "seq": 64, "hardware": "a100"}
        ratios: dict[str, list[float]] = {name: [] for name in self.params[0]}

        def over_a_step(name: str, function) -> None:
            one = model()
            floor = seconds(lambda: one(**batch).loss.backward(), times=3)
            ratios[name].append(seconds(function, times=1) / floor)

        for _ in range(4):
            fresh = model()
            with fake_mesh():
                over_a_step("parallelize", partial(parallelize, plan(), fresh))
            over_a_step("probe", partial(probed, model()))
            over_a_step("generate_plan", partial(generate_plan, model(), request))
            over_a_step("dry_run", partial(dry_run, plan(), model(), batch))
        return {name: median(values[1:]) for name, values in ratios.items()}  # the first warms up

    setup_cache.timeout = 600

    def track_over_a_step(self, cache, what):
        return cache[what]

    track_over_a_step.unit = "x"
    track_over_a_step.version = "1"
