"""The plan of a GPT in nanoGPT's naming: merged QKV, learned positions, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import InterleavedShard

from ..plan import Boundary, Plan
from ._megatron import megatron


def gpt(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a GPT: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism over
    `data_axis`.

    Cost: see `Megatron`.
    """
    if tensor_axis not in mesh:
        return Plan(mesh=mesh, parameters={"*": {}}, data_axis=data_axis)
    columns, rows, whole, stream = megatron(tensor_axis, sequence_parallel)
    return Plan(
        mesh=mesh,
        parameters={
            "*.wte.weight": columns,
            "lm_head.weight": columns,
            "*.attn.c_attn.*": {tensor_axis: InterleavedShard(0, 3)},
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
