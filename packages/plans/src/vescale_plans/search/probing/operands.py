"""Finds the parameter that a tensor is a view or a cast of, and the feature that each index stands for.

While a model is probed its parameters lie on the meta device. Every view of one shares its storage, so a storage
leads to the parameter, and a stride to the dim and the index. A cast or a copy has a storage of its own, which is
remembered together with what it was copied from; both are held by tensors of our own, for a forward may give one of the
model's another storage (a layer that is cast in place). What a probe must really compute with (a norm's weight, a gate)
gets values, drawn once per storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Places of a strided tensor's elements in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        return Geometry(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def position(self, offsets: Tensor) -> Tensor:
        """Storage offset -> the row-major position, within this tensor, of the element that lies there."""
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        rest, position = offsets - self.offset, torch.zeros_like(offsets)
        for dim in order:
            if self.shape[dim] > 1 and self.strides[dim] > 0:
                index = torch.div(rest, self.strides[dim], rounding_mode="floor") % self.shape[dim]
                rest = rest - index * self.strides[dim]
                position = position + index * prod(self.shape[dim + 1 :])
        return position

    def offset_of(self, position: Tensor) -> Tensor:
        """The inverse: row-major position -> storage offset."""
        offset = torch.full_like(position, self.offset)
        for dim, size in enumerate(self.shape):
            index = torch.div(position, prod(self.shape[dim + 1 :]), rounding_mode="floor") % size
            offset = offset + index * self.strides[dim]
        return offset


@dataclass(frozen=True)
class _Copy:
    """A storage that holds the elements of a view of another one."""

    made: Geometry
    source: Tensor


@dataclass(frozen=True)
class Features:
    """Meaning of the indices of one dim of an operand.

    Arguments:
        dim: of the parameter, the outermost one that varies; None if none does.
        index: int64 [size of the operand's dim], an index into that dim of the parameter.
    """

    dim: int | None
    index: Tensor


class Operands:
    """Finds parameters again behind views, casts and copies.

    Attributes:
        biases: weight of a linear layer -> its bias.
        vectors: parameters of one dim that were computed with, and their sizes.
        tainted: of some of them, which entries are NaN.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], biases: Mapping[str, str]) -> None:
        self.biases = biases
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parameters: dict[int, tuple[str, Tensor]] = {}
        self._copies: dict[int, _Copy | None] = {}
        self._values: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []
        self.vectors: dict[str, int] = {}
        self.tainted: Mapping[str, Tensor] = {}
        for name, parameter in named:
            self.shapes[name] = tuple(parameter.shape)
            self._parameters.setdefault(_storage(parameter), (name, parameter.detach()))

    def name(self, tensor: Tensor) -> str | None:
        """The parameter that `tensor` is a view or copy of."""
        key = _storage(tensor)
        while key not in self._parameters:
            copy = self._copies.get(key)
            if copy is None:
                return None
            key = _storage(copy.source)
        return self._parameters[key][0]

    def features(self, tensor: Tensor, dim: int) -> Features:
        """Finds the features of the parameter that the indices of `dim` of an operand stand for."""
        offsets = tensor.storage_offset() + torch.arange(tensor.shape[dim]) * tensor.stride(dim)
        key = _storage(tensor)
        while key not in self._parameters:
            copy = self._copies[key]
            offsets = Geometry.of(copy.source).offset_of(copy.made.position(offsets))
            key = _storage(copy.source)
        parameter = self._parameters[key][1]
        if not parameter.numel():
            return Features(None, offsets)
        position = Geometry.of(parameter).position(offsets)
        for at, size in enumerate(parameter.shape):
            index = torch.div(position, prod(parameter.shape[at + 1 :]), rounding_mode="floor") % size
            if bool((index != index[0]).any()):
                return Features(at, index)
        return Features(None, torch.zeros_like(offsets))

    def derive(self, made: Tensor, sources: Iterable[Tensor]) -> None:
        """`made` was computed from parameters alone; it stands for the first source of its shape, if any."""
        if _storage(made) in self._parameters or _storage(made) in self._copies:
            return
        self._kept.append(made.detach())
        source = next((one for one in sources if one.shape == made.shape and made.ndim), None)
        self._copies[_storage(made)] = None if source is None else _Copy(Geometry.of(made), source.detach())

    def derive_rows(self, made: Tensor, source: Tensor) -> None:
        """`made` [n, ...] holds chosen entries of `source` [m, ...]; each stands for the first one."""
        self._kept.append(made.detach())
        self._copies[_storage(made)] = _Copy(Geometry.of(made), source[:1].expand_as(made))

    def value(self, tensor: Tensor) -> Tensor:
        """`tensor` with values: positive and near one, as gates and norm weights are."""
        key = _storage(tensor)
        if key not in self._values:
            self._kept.append(tensor.detach())
            self._values[key] = drawn(tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.dtype)
        flat = self._values[key]
        name = self.name(tensor)
        if name is not None and len(self.shapes[name]) == 1 and flat.numel() == self.shapes[name][0]:
            self.vectors[name] = flat.numel()
            if name in self.tainted and flat.is_floating_point():
                flat = flat.index_fill(0, self.tainted[name], float("nan"))
        if flat.dtype != tensor.dtype:
            flat = flat.view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def drawn(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers for a tensor that has no values: positive and near one, integers 0, truth values True."""
    if not dtype.is_floating_point:
        return torch.full((count,), dtype == torch.bool, dtype=dtype)
    return torch.rand(count, generator=torch.Generator().manual_seed(count)).add_(0.5).to(dtype)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
