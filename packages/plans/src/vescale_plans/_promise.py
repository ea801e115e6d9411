"""Deferred parameters under ZeRO-3: their values are made where they will lie, in this rank's part of a flat buffer.

Until the buffers are made such a parameter is a promise: it has its layout, and no memory. So no rank ever holds what
the data axis shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Layout, Placement, distribute_tensor
from vescale_dtensor.engine import stamp
from vescale_rng import materialize_shard

_SOURCE = "_deferred"


def promise(deferred: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """A parameter laid out as `distribute_tensor` would lay it out, without memory."""
    blank = torch.empty(deferred.shape, dtype=deferred.dtype, device="meta")
    layout = distribute_tensor(blank, device_mesh, placements)._layout.base
    local = torch.empty(layout.local_shape, dtype=deferred.dtype, device=layout.mesh.device_type)
    local.untyped_storage().resize_(0)
    found = nn.Parameter(stamp(local, layout), requires_grad=deferred.requires_grad)
    setattr(found, _SOURCE, deferred.detach())
    return found


def fulfil(parameter: DTensor, layout: Layout) -> Tensor | None:
    """Of a promise, this rank's part under `layout`, plain; None of a parameter that has its values."""
    source = parameter.__dict__.pop(_SOURCE, None)
    return None if source is None else materialize_shard(source, layout)
