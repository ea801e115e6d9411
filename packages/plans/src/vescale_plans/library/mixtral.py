"""The plan of the Mixtral family in HuggingFace's naming, whose experts are stacked in 3-D parameters."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import InterleavedShard, Shard

from ..plan import Boundary, Plan
from ._megatron import megatron

COLUMNS = ("q_proj", "k_proj", "v_proj")


def mixtral(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a Mixtral: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism
    over `data_axis`.

    Every expert is sharded over its inner dim, like a dense MLP: `gate_up_proj` [experts, gate and up, in] by outputs,
    `down_proj` [experts, out, inner] by inputs. The router is replicated. Cost: see `Megatron`.
    """
    if tensor_axis not in mesh:
        return Plan(mesh=mesh, parameters={"*": {}}, data_axis=data_axis)
    columns, rows, whole, stream = megatron(tensor_axis, sequence_parallel)
    return Plan(
        mesh=mesh,
        parameters={
            "*.embed_tokens.weight": columns,
            "lm_head.weight": columns,
            **{f"*.{name}.weight": columns for name in COLUMNS},
            "*.o_proj.weight": rows,
            "*.experts.gate_up_proj": {tensor_axis: InterleavedShard(1, 2)},
            "*.experts.down_proj": {tensor_axis: Shard(2)},
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
