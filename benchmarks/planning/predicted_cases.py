"""Cases to predict and to measure: three families of models at two shapes, and every mesh of two and of four ranks."""

from __future__ import annotations

import torch

WORDS = 1024
SHAPES = {"short": (512, 4, 256), "wide": (640, 4, 256)}
"""Hidden size, rows of the batch, positions. There are as many layers as ranks, so that each may be a stage."""


def gpt(hidden: int, layers: int, positions: int):
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=WORDS, block_size=positions, n_layer=layers, n_head=8, n_embd=hidden))


def llama(hidden: int, layers: int, positions: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=positions,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def neox(hidden: int, layers: int, positions: int):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=positions,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


MODELS = {"gpt": gpt, "llama": llama, "neox": neox}
CASES = [f"{model} {shape}" for model in MODELS for shape in SHAPES]
# Degrees of each mesh, as `Candidate` has them. ZeRO-3 is fsdp.
MESHES = {
    2: {
        "tp2": {"tp": 2}, "tp2 sp": {"tp": 2, "sp": True}, "fsdp2": {"dp": 2, "zero": 3}, "dp2": {"dp": 2},
        "pp2": {"pp": 2, "microbatches": 4},
    },
    4: {
        "tp4": {"tp": 4}, "tp4 sp": {"tp": 4, "sp": True}, "fsdp4": {"dp": 4, "zero": 3}, "dp4": {"dp": 4},
        "pp4": {"pp": 4, "microbatches": 4}, "dp2 tp2": {"dp": 2, "tp": 2},
        "dp2 tp2 sp": {"dp": 2, "tp": 2, "sp": True}, "fsdp2 tp2": {"dp": 2, "tp": 2, "zero": 3},
        "fsdp2 tp2 sp": {"dp": 2, "tp": 2, "zero": 3, "sp": True}, "pp2 tp2": {"pp": 2, "tp": 2, "microbatches": 4},
        "pp2 tp2 sp": {"pp": 2, "tp": 2, "sp": True, "microbatches": 4},
        "pp2 dp2": {"pp": 2, "dp": 2, "microbatches": 2},
    },
}  # fmt: skip


def case_of(name: str, ranks: int):
    """(model, batch) of a case, the same on every rank: "llama wide" by its shape and with a layer for every rank;
    "llama 96 8 32" by hidden size, rows and positions, with two layers."""
    kind, *sizes = name.split()
    hidden, rows, positions = shape_of(name)
    torch.manual_seed(0)
    model = MODELS[kind](hidden, ranks if sizes[0] in SHAPES else 2, positions)
    ids = torch.randint(WORDS, (rows, positions), generator=torch.Generator().manual_seed(1))
    return model, (ids, ids) if kind == "gpt" else {"input_ids": ids, "labels": ids}


def shape_of(name: str) -> tuple[int, int, int]:
    """Hidden size, rows and positions of a case."""
    _, *sizes = name.split()
    return SHAPES[sizes[0]] if sizes[0] in SHAPES else tuple(map(int, sizes))


def structure_for(model, batch):
    from vescale_plans.search import sample_of, structure_of

    return structure_of(model, sample_of(model, batch))


def plans_for(model, batch, meshes: dict[str, dict]) -> dict[str, str]:
    """The JSON of each mesh's plan."""
    from vescale_plans.search import Candidate, plan_of

    structure = structure_for(model, batch)
    return {mesh: plan_of(structure, Candidate(**degrees)).to_json() for mesh, degrees in meshes.items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def loss_of(model, batch) -> torch.Tensor:
    """Alone: what else the model returns does not outlive the call."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, torch.Tensor) else out.loss
