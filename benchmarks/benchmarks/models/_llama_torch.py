"""The single-device blocks under torch's own DTensor, with TorchTitan's plan for Llama."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TOKENS = Shard(1)


def parallelize_by_torch(model: nn.Module, mesh) -> nn.Module:
    """In place. In and out: plain tensors with this rank's tokens.

    As in TorchTitan, column-parallel layers hand out plain local tensors, so that attention and
    the activation function run without DTensor: the cheapest form torch offers.
    """
    for block in model.layers:
        plan = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(TOKENS, None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=TOKENS),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(TOKENS,), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=TOKENS),
        }
        parallelize_module(block, mesh, plan, src_data_rank=None)
    return model
