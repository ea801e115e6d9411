"""The plan of the Llama family in HuggingFace's naming (Llama, Mistral, Qwen2 and their kin)."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import Replicate, Shard

from ..plan import Boundary, Plan

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def llama(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """Tensor parallelism after Megatron-LM (arXiv 1909.08053), sequence parallelism after arXiv 2205.05198.

    Communication per block and direction over the tensor axis: two all-reduces, or
    with `sequence_parallel` two all-gathers and two reduce-scatters.
    """
    if tensor_axis not in mesh:
        return Plan(mesh=mesh, parameters={"*": {}}, data_axis=data_axis)
    columns, rows = {tensor_axis: Shard(0)}, {tensor_axis: Shard(1)}
    whole = {tensor_axis: Replicate()}
    stream = {tensor_axis: Shard(1)} if sequence_parallel else whole  # between blocks: [batch, position, channel]
    return Plan(
        mesh=mesh,
        parameters={
            "*.embed_tokens.weight": columns,
            "lm_head.weight": columns,
            **{f"*.{name}.weight": columns for name in COLUMNS},
            **{f"*.{name}.weight": rows for name in ROWS},
            "*": {},
        },
        boundaries={
            "*.embed_tokens": Boundary(output=stream),
            "*.self_attn": Boundary(input=whole, output=stream),
            "*.mlp": Boundary(input=whole, output=stream),
            "lm_head": Boundary(input=whole),
        },
        data_axis=data_axis,
    )
