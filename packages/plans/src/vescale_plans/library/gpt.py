"""The plan of a GPT in nanoGPT's naming: merged QKV, learned positions, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import InterleavedShard, Replicate, Shard

from ..plan import Boundary, Plan


def gpt(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """Tensor parallelism after Megatron-LM (arXiv 1909.08053), sequence parallelism after arXiv 2205.05198.

    Communication per block and direction over the tensor axis: two all-reduces, or
    with `sequence_parallel` two all-gathers and two reduce-scatters.
    """
    if tensor_axis not in mesh:
        return Plan(mesh=mesh, parameters={"*": {}}, data_axis=data_axis)
    columns, rows = {tensor_axis: Shard(0)}, {tensor_axis: Shard(1)}
    merged = {tensor_axis: InterleavedShard(0, 3)}
    whole = {tensor_axis: Replicate()}
    stream = {tensor_axis: Shard(1)} if sequence_parallel else whole  # between blocks: [batch, position, channel]
    return Plan(
        mesh=mesh,
        parameters={
            "*.wte.weight": columns,
            "lm_head.weight": columns,
            "*.attn.c_attn.*": merged,
            "*.mlp.c_fc.*": columns,
            "*.c_proj.weight": rows,
            "*": {},
        },
        boundaries={
            "*.drop": Boundary(input=stream),
            "*.attn": Boundary(input=whole, output=stream),
            "*.mlp": Boundary(input=whole, output=stream),
            "lm_head": Boundary(input=whole),
        },
        data_axis=data_axis,
    )
