"""Ranges of a dim cut out of local tensors, and put together from several."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .._layouts.layout import Layout
from .._layouts.region import Ranges, cut, local_offset


def my_ranges(layout: Layout, axis: int) -> tuple[Ranges, int]:
    state, mesh = layout.states[axis], layout.mesh
    return cut(state, layout.size_at(axis, state.dim), mesh.sizes[axis])[mesh.coordinate[axis]], state.dim


def length(ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def is_outermost(shape: tuple[int, ...], dim: int, groups: int) -> bool:
    """True if the shards of a dim lie in memory one after the other, so that the order of ranks is that of the dim."""
    return groups == 1 and prod(shape[:dim]) == 1


def with_size(shape, dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def take(tensor: Tensor, dim: int, ranges) -> Tensor:
    """The given ranges of a dim, joined; a view when there is one range."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor.narrow(dim, start, stop - start)
    if not ranges:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def take_local(local: Tensor, dim: int, held: Ranges, wanted) -> Tensor:
    """The global ranges `wanted` out of a local tensor that holds `held`."""
    spans = []
    for start, stop in wanted:
        at = local_offset(held, start)
        spans.append((at, at + stop - start))
    return take(local, dim, tuple(spans))


def assemble(parts, dim: int, cuts: tuple[Ranges, ...]) -> Tensor:
    """The whole dim from every rank's part."""
    spans = []
    for rank, ranges in enumerate(cuts):
        at = 0
        for start, stop in ranges:
            if stop > start:
                spans.append((start, rank, at, stop - start))
            at += stop - start
    spans.sort()
    if not spans:
        return parts[0].contiguous()
    return torch.cat([parts[rank].narrow(dim, at, length) for _, rank, at, length in spans], dim)


def grown(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Zero-padded at the end of `dim`: what a backend that wants equal shapes is given."""
    grown = tensor.new_zeros(with_size(tensor.shape, dim, size))
    grown.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return grown
