"""The plan of the Llama family in HuggingFace's naming (Llama, Mistral, Qwen3, Gemma and their kin)."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import Plan
from ._megatron import COLUMNS, ROWS, megatron

PARAMETERS = {
    "*.embed_tokens.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": ROWS for name in ("o", "down")},
}


def llama(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a Llama: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism over
    `data_axis`.

    Cost: see `megatron`.
    """
    return megatron(
        mesh, PARAMETERS, ("*.embed_tokens", "output"), "*.self_attn",
        sequence_parallel=sequence_parallel, data_axis=data_axis, tensor_axis=tensor_axis,
    )  # fmt: skip
