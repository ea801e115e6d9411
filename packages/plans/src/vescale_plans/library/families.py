"""Plans of model families by hand: Megatron-LM's tensor parallelism (arXiv 1909.08053) and sequence parallelism (arXiv
2205.05198), as placements."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import InterleavedShard, Placement, Replicate, Shard

from ..plan import Boundary, Placements, Plan

COLUMNS = Shard(0)
"""Placement of a weight [out, in] or bias [out] whose outputs are spread over the axis."""
ROWS = Shard(1)
"""Placement of a weight [out, in] whose inputs are spread over the axis."""
GPT = {
    "*.wte.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
    "*.attn.c_attn.*": InterleavedShard(0, 3),
    "*.mlp.c_fc.*": COLUMNS,
    "*.c_proj.weight": ROWS,
}
"""In nanoGPT's naming: merged QKV, learned positions, tied embeddings."""
LLAMA = {
    "*.embed_tokens.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": ROWS for name in ("o", "down")},
}
"""In HuggingFace's naming (Llama, Mistral, Qwen3, Gemma and their kin)."""
MIXTRAL = {
    "*.embed_tokens.weight": COLUMNS,
    "lm_head.weight": COLUMNS,
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v")},
    "*.o_proj.weight": ROWS,
    "*.experts.gate_up_proj": InterleavedShard(1, 2),
    "*.experts.down_proj": Shard(2),
}
"""In HuggingFace's naming, with experts stacked in 3-D parameters."""


def megatron(
    mesh: Mapping[str, int],
    sequence_parallel: bool,
    data_axis: str,
    tensor_axis: str,
    parameters: Mapping[str, Placement],
    begins: tuple[str, str],
    attention: str,
) -> Plan:
    """The plan of a decoder; of data parallelism alone if the mesh has no tensor axis.

    Communication per block and direction over the tensor axis: two all-reduces, or
    with sequence parallelism two all-gathers and two reduce-scatters.

    Arguments:
        parameters: placements on the tensor axis.
        begins: the module at which the residual stream [batch, position, channel] begins, and whether it is its "input"
            or its "output".
        attention: the modules of attention.
    """
    if tensor_axis not in mesh:
        return Plan(mesh=mesh, parameters={"*": {}}, data_axis=data_axis)
    whole: Placements = {tensor_axis: Replicate()}
    stream: Placements = {tensor_axis: Shard(1)} if sequence_parallel else whole
    module, side = begins
    block = Boundary(input=whole, output=stream)
    return Plan(
        mesh=mesh,
        parameters={**{glob: {tensor_axis: placement} for glob, placement in parameters.items()}, "*": {}},
        boundaries={
            module: Boundary(**{side: stream}),
            attention: block,
            "*.mlp": block,
            "lm_head": Boundary(input=whole),
        },
        data_axis=data_axis,
    )


def gpt(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a GPT: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism over
    `data_axis`.

    Cost: see `megatron`.
    """
    return megatron(mesh, sequence_parallel, data_axis, tensor_axis, GPT, ("*.drop", "input"), "*.attn")


def llama(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a Llama: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism over
    `data_axis`.

    Cost: see `megatron`.
    """
    begins = ("*.embed_tokens", "output")
    return megatron(mesh, sequence_parallel, data_axis, tensor_axis, LLAMA, begins, "*.self_attn")


def mixtral(
    mesh: Mapping[str, int], *, sequence_parallel: bool = True, data_axis: str = "dp", tensor_axis: str = "tp"
) -> Plan:
    """A plan for a Mixtral: tensor and sequence parallelism over `tensor_axis`, if the mesh has it; data parallelism
    over `data_axis`.

    Every expert is sharded over its inner dim, like a dense MLP: `gate_up_proj` [experts, gate and up, in] by outputs,
    `down_proj` [experts, out, inner] by inputs. The router is replicated. Cost: see `megatron`.
    """
    begins = ("*.embed_tokens", "output")
    return megatron(mesh, sequence_parallel, data_axis, tensor_axis, MIXTRAL, begins, "*.self_attn")
