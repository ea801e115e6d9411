"""The plan of the Mixtral family in HuggingFace's naming, whose experts are stacked in 3-D parameters."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import InterleavedShard, Shard

from ..plan import Plan
from ._megatron import COLUMNS, ROWS, megatron

PARAMETERS = {
    "*.embed_tokens.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v")},
    "*.o_proj.weight": ROWS,
    "*.experts.gate_up_proj": InterleavedShard(1, 2),
    "*.experts.down_proj": Shard(2),
}


def mixtral(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a Mixtral: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism
    over `data_axis`.

    Every expert is sharded over its inner dim, like a dense MLP: `gate_up_proj` [experts, gate and up, in] by outputs,
    `down_proj` [experts, out, inner] by inputs. The router is replicated. Cost: see `megatron`.
    """
    return megatron(
        mesh, PARAMETERS, ("*.embed_tokens", "output"), "*.self_attn",
        sequence_parallel=sequence_parallel, data_axis=data_axis, tensor_axis=tensor_axis,
    )  # fmt: skip
