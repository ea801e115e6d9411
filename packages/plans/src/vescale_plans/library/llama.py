"""The plan of the Llama family in HuggingFace's naming (Llama, Mistral, Qwen3, Gemma and their kin)."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import Boundary, Plan
from ._megatron import megatron

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def llama(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a Llama: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism over
    `data_axis`.

    Cost: see `Megatron`.
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
