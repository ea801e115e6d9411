"""Torch's checkpoints of a model's state dict alone: its names get the key that the model has in a state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..manifest import Manifest
from ._choice import Choice


def with_model_key(
    manifest: Manifest, state: Mapping[str, Any], choice: Choice, gathered: Callable[[str, bytes], Sequence[bytes]]
) -> Manifest:
    """The manifest as that of a state, where its names are those that the one model of `state` has by itself.

    A directory that torch's DCP wrote of `model.state_dict()` has names without a key. It is known by its names: some
    are the model's, and none is with the model's key in front, on any rank (a pipeline's stage has a part of them).
    `gathered`: a session's `gather`.
    """
    models = [key for key, value in state.items() if isinstance(value, nn.Module)]
    if len(models) != 1:
        return manifest
    prefix = f"{models[0]}."
    own = {name for name, value in state[models[0]].state_dict().items() if isinstance(value, Tensor)}
    is_under = any(
        name.startswith(prefix) and choice.would_rename(name[len(prefix) :]) in own for name in manifest.tensors
    )
    is_bare = any(choice.would_rename(name) in own for name in manifest.tensors)
    said = [json.loads(text) for text in gathered("names", json.dumps([is_under, is_bare]).encode())]
    if any(under for under, _ in said) or not any(bare for _, bare in said):
        return manifest
    others = [key for key in state if key != models[0]]
    tensors = {
        name if any(name == key or name.startswith(f"{key}.") for key in others) else prefix + name: kept
        for name, kept in manifest.tensors.items()
    }
    return replace(manifest, tensors=tensors)
