"""What is tried: the types and classes, how each is built, and the batch it trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .others import OTHERS
from .shrink import VOCABULARY, shrunk

TYPES = Path(__file__).with_name("types.json")
ROWS, POSITIONS, LARGEST = 4, 16, 8_000_000
"""A batch; parameters of the largest that counts as small."""
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Causal language models whose fields' names alone do not say enough."""


def candidates() -> dict[str, str]:
    """Every name tried to the class it stands for; those of `OTHERS` that are causal types too under another name."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | {f"other: {name}": kind for name, (kind, _, _) in OTHERS.items()}


def listed() -> list[str]:
    """The names of types.json: what counts."""
    return list(json.loads(TYPES.read_text())["types"])


def build(name: str) -> nn.Module:
    """The model, its weights by seed, in training mode."""
    kind = getattr(transformers, candidates()[name])
    if name.startswith("other: "):
        given = OTHERS[name.removeprefix("other: ")][2]
    else:
        given = GIVEN.get(name, {})
    default = kind.config_class()
    decoder = {"is_decoder": True} if hasattr(default, "is_decoder") and not name.startswith("other: ") else {}
    config = shrunk(default, **decoder, **given)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters after all fields are small")
    torch.manual_seed(0)
    return kind(config).train()


def _tokens(generator: torch.Generator, positions: int = POSITIONS) -> torch.Tensor:
    return torch.randint(6, VOCABULARY - 24, (ROWS, positions), generator=generator)


def _pictures(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ROWS, 3, 16, 16, generator=generator)


def _captions(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.cat([torch.full((ROWS, POSITIONS), 5), _tokens(generator, 8)], 1)  # an image is 16 patches
    return {"input_ids": ids, "labels": ids, "pixel_values": _pictures(generator)}


def _decisions(generator: torch.Generator) -> dict[str, torch.Tensor]:
    def some(width: int) -> torch.Tensor:
        return torch.randn(ROWS, 5, width, generator=generator)

    return {
        "states": some(6), "actions": some(3), "rewards": some(1), "returns_to_go": some(1),
        "timesteps": torch.arange(5).expand(ROWS, 5), "attention_mask": torch.ones(ROWS, 5, dtype=torch.long),
    }  # fmt: skip


def _language(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


KINDS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "text": _language,
    "classes": lambda g: {"input_ids": _tokens(g), "labels": torch.arange(ROWS) % 3},
    "image": lambda g: {"pixel_values": _pictures(g), "labels": torch.arange(ROWS) % 5},
    "image features": lambda g: {"pixel_values": _pictures(g)},
    "pixels": lambda g: {"pixel_values": _pictures(g), "noise": torch.rand(ROWS, 16, generator=g)},
    "sound": lambda g: {"input_features": torch.randn(ROWS, 64, 40, generator=g), "labels": _tokens(g, 7)},
    "spectrogram": lambda g: {"input_values": torch.randn(ROWS, 24, 64, generator=g), "labels": torch.arange(ROWS) % 5},
    "translation": lambda g: {"input_ids": _tokens(g), "labels": _tokens(g, 7)},
    "pairs": lambda g: {"input_ids": _tokens(g), "pixel_values": _pictures(g), "return_loss": True},
    "captions": _captions,
    "series": lambda g: {"past_values": torch.randn(ROWS, 32, 3, generator=g), "future_values": torch.ones(ROWS, 4, 3)},
    "decisions": _decisions,
}


def inputs_of(name: str, seed: int = 1) -> dict[str, Any]:
    """The global batch that it is called with."""
    kind = OTHERS[name.removeprefix("other: ")][1] if name.startswith("other: ") else "text"
    return KINDS[kind](torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The loss it returns; of one that returns none, the mean square of its first output."""
    out = model(**inputs)
    loss = out.get("loss")
    return loss if loss is not None else out[0].square().mean()


def survey() -> dict[str, Any]:
    """What types.json holds: by name the parameters, and why the others are left out. No plan is looked at."""
    types: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for name in candidates():
        try:
            model = build(name)
            loss = loss_of(model, inputs_of(name))
            loss.backward()
            if not torch.isfinite(loss):
                raise ValueError("the loss is not finite")
        except Exception as error:  # whatever a model does that the small configuration does not suit
            said = " ".join(str(error).split())
            left_out[name] = f"{type(error).__name__}: {said[:100]}"
        else:
            types[name] = sum(p.numel() for p in model.parameters())
    return {"transformers": transformers.__version__, "types": types, "left_out": left_out}
