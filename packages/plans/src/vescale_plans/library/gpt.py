"""The plan of a GPT in nanoGPT's naming: merged QKV, learned positions, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import InterleavedShard

from ..plan import Plan
from ._megatron import COLUMNS, ROWS, megatron

PARAMETERS = {
    "*.wte.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
    "*.attn.c_attn.*": InterleavedShard(0, 3),
    "*.mlp.c_fc.*": COLUMNS,
    "*.c_proj.weight": ROWS,
}


def gpt(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a GPT: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism over
    `data_axis`.

    Cost: see `megatron`.
    """
    return megatron(
        mesh, PARAMETERS, ("*.drop", "input"), "*.attn",
        sequence_parallel=sequence_parallel, data_axis=data_axis, tensor_axis=tensor_axis,
    )  # fmt: skip
