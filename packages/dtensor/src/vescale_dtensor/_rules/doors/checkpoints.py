"""torch.distributed.checkpoint: what it asks of any tensor that lies in parts (`torch.distributed._checkpointable`).

Every rank writes the boxes that it holds, into files that any layout, torch's DTensor and one device read; of boxes
that several ranks hold torch's planner keeps one. A load fills the local memory in place. No collective of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._conversions.convert import describe
from ..._errors import OperatorError
from ..._layouts.layout import Box
from ..._tensor.tensor import DTensor, local_only


def _boxes(tensor: DTensor) -> Sequence[Box]:
    layout = tensor._layout.base
    if layout.is_partial:
        raise OperatorError(
            "torch.distributed.checkpoint",
            "no rank holds a sum that is not reduced yet, only its terms",
            [describe("tensor", tensor, layout)],
            [("tensor.full_tensor()", "the sum, plain: an all-reduce, on every rank")],
        )
    return layout.boxes_at(layout.mesh.coordinate)


def _view(tensor: DTensor, box: Box) -> Tensor:
    """The plain memory of one of its boxes."""
    ranges, offset = box
    sizes = [stop - start for start, stop in ranges]
    with local_only():
        local = tensor.detach()
        if not local.is_contiguous():
            return local.as_subclass(Tensor).view(sizes)  # of one box: the whole shard, under its own strides
        count = torch.Size(sizes).numel()
        return local.as_subclass(Tensor).view(-1)[offset : offset + count].view(sizes)


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    ranges, _ = box
    starts, sizes = [start for start, _ in ranges], [stop - start for start, stop in ranges]
    return ChunkStorageMetadata(offsets=torch.Size(starts), sizes=torch.Size(sizes))


def _write_items(tensor: DTensor, name: str, itself: object) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    with local_only():
        properties = TensorProperties.create_from_tensor(tensor.as_subclass(Tensor))
    items = []
    for box in _boxes(tensor):
        chunk = _chunk(box)
        data = TensorWriteData(chunk=chunk, properties=properties, size=tensor._layout.shape)
        items.append(WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
    return items


def _chunk_list(tensor: DTensor) -> list[Any]:
    return [_chunk(box) for box in _boxes(tensor)]


def _tensor_shard(tensor: DTensor, index: Any) -> Tensor:
    for box in _boxes(tensor):
        if index.offset is None or [start for start, _ in box[0]] == list(index.offset):
            return _view(tensor, box)
    raise ValueError(f"{index.fqn}: this rank holds nothing that begins at {index.offset}")


DTensor.__create_write_items__ = _write_items
DTensor.__create_chunk_list__ = _chunk_list
DTensor.__get_tensor_shard__ = _tensor_shard
