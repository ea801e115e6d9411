"""Parameters whose values are made, or come from elsewhere, where they will lie: in this rank's part of a flat buffer.

Until the buffers are made such a parameter is a promise: it has its layout, and no memory. So of a deferred parameter
under ZeRO-3 no rank ever holds what the data axis shards; what nobody has written to (`torch.empty`) is not copied; and
a copy of a model takes the copy's memory alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Layout, Placement, distribute_tensor
from vescale_dtensor.engine import attach, convert, local_only
from vescale_rng import is_deferred, is_unwritten, materialize_shard

_SOURCE = "_promised"


def promise(deferred: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """A parameter laid out as `distribute_tensor` would lay it out, without memory."""
    blank = torch.empty(deferred.shape, dtype=deferred.dtype, device="meta")
    layout = distribute_tensor(blank, device_mesh, placements)._layout.base
    return _blank(deferred.detach(), layout, deferred.requires_grad)


def promise_copy(held: DTensor, layout: Layout, requires_grad: bool) -> nn.Parameter:
    """A parameter of `layout` that will have the values of `held`, which lies so, or as a part of it."""
    return _blank(held, layout, requires_grad)


def promise_later(held: DTensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """A parameter laid out anew, to whose place in a buffer the values of `held` are brought later."""
    blank = torch.empty(held.shape, dtype=held.dtype, device="meta")
    return _blank(blank, distribute_tensor(blank, device_mesh, placements)._layout.base, held.requires_grad)


def _blank(source: Tensor, layout: Layout, requires_grad: bool) -> nn.Parameter:
    local = torch.empty(layout.local_shape, dtype=source.dtype, device=layout.mesh.device_type)
    local.untyped_storage().resize_(0)
    found = nn.Parameter(attach(local, layout), requires_grad=requires_grad)
    setattr(found, _SOURCE, source)
    return found


def fulfil(parameter: DTensor, layout: Layout) -> tuple[Tensor | None, bool] | None:
    """Fulfils a promise: returns the local values, plain, and whether they are this rank's part under `layout` alone;
    no values for those that come later, or may be any; None for a parameter that has its own. Cost: nothing, but where
    what is copied lies in parts that were cut otherwise."""
    source = parameter.__dict__.pop(_SOURCE, None)
    if source is None:
        return None
    if type(source) is Tensor and source.is_meta:
        return None, False
    if is_deferred(source):
        if is_unwritten(source):
            return None, False
        return materialize_shard(source, layout), True
    is_part = source._layout.base is not parameter._layout.base
    if is_part:
        source = convert(source, layout, "deepcopy")
    with local_only():
        return source.detach(), is_part
