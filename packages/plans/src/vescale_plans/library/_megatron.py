"""Megatron-LM's tensor parallelism (arXiv 1909.08053) and sequence parallelism (arXiv 2205.05198), as placements."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_dtensor import Placement, Replicate, Shard

from ..plan import Boundary, Placements, Plan

COLUMNS = Shard(0)
"""Placement of a weight [out, in] or bias [out] whose outputs are spread over the axis."""
ROWS = Shard(1)
"""Placement of a weight [out, in] whose inputs are spread over the axis."""


def megatron(
    mesh: Mapping[str, int],
    parameters: Mapping[str, Placement],
    begins: tuple[str, str],
    attention: str,
    *,
    sequence_parallel: bool,
    data_axis: str,
    tensor_axis: str,
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
