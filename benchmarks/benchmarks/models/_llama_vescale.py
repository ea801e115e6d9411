"""The single-device blocks, unmodified, under veScale.

The library is imported where it is used: ASV imports every module of the suite, and the other
contenders have to run at a commit whose library does not.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models._llama_blocks import shard_dim


def parallelize_by_vescale(model: nn.Module, mesh) -> nn.Module:
    """In place. In and out: DTensors sharded on tokens."""
    from vescale_dtensor import Replicate, Shard, distribute_tensor

    tokens, whole = (Shard(1),), (Replicate(),)
    for name, parameter in list(model.named_parameters()):
        dim = shard_dim(name)
        placement = Replicate() if dim is None else Shard(dim)
        module, _, leaf = name.rpartition(".")
        sharded = distribute_tensor(parameter.detach(), mesh, (placement,))
        setattr(model.get_submodule(module), leaf, nn.Parameter(sharded))

    def gather_tokens(module, inputs):
        return (inputs[0].redistribute(whole), *inputs[1:])

    def scatter_tokens(module, inputs, output):
        return output.redistribute(tokens)

    for block in model.layers:
        for module in (block.self_attn, block.mlp):
            module.register_forward_pre_hook(gather_tokens)
            module.register_forward_hook(scatter_tokens)
    return model


def tokens_by_vescale(activations: torch.Tensor, mesh) -> torch.Tensor:
    """The input of the blocks, sharded on tokens."""
    from vescale_dtensor import Shard, distribute_tensor

    return distribute_tensor(activations, mesh, (Shard(1),))
