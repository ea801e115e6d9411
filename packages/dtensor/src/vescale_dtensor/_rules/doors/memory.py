"""Memory: addresses, storages, strides and offsets of a DTensor, as the global tensor has them, or not at all.

A DTensor's memory holds this rank's part. Whoever reads it under the global shape (a file format, a kernel from
elsewhere) gets garbage, so an address is given away only where the part is the whole; else an `OperatorError` names
`full_tensor()` and `to_local()`. A storage answers what is asked to tell storages apart (identity, the number of bytes
that one device has) and nothing else. Strides follow from the shard's and the sizes that the cuts took.

With dispatch disabled (rules, `local_map`, the engine) all of these are the shard's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._communication.events import function_name
from ..._conversions.convert import describe
from ..._errors import OperatorError
from ..._layouts.strides import global_stride
from ..._tensor import tensor as tensor_module
from ..._tensor.tensor import DTensor, local_only
from ..._torch_private import _typed_storage as _plain_typed_storage
from ..._torch_private import is_non_overlapping_and_dense_or_false
from ..registry import handler

_REMEDIES = [
    ("tensor.full_tensor()", "the whole tensor, plain: an all-gather or all-reduce, on every rank"),
    ("tensor.to_local()", "this rank's part, plain: no communication"),
]


def _accessors(*names: str) -> list[Callable]:
    found = []
    for name in names:
        member = getattr(Tensor, name, None)
        found.append(getattr(member, "__get__", None) if not callable(member) else member)
    return [function for function in found if function is not None]


def refuse(function: Any, tensor: DTensor, rule: str) -> None:
    raise OperatorError(function_name(function), rule, [describe("tensor", tensor, tensor._layout.base)], _REMEDIES)


@handler(_accessors("data_ptr", "const_data_ptr", "__cuda_array_interface__"))
def address(function: Callable, args: tuple, kwargs: dict) -> Any:
    """The shard's, where it is the whole tensor."""
    tensor = args[0]
    if not tensor._layout.base.is_replicated and tensor._layout.numel:
        refuse(function, tensor, "at a DTensor's address lies this rank's part, which is not of the global shape")
    if (stage := tensor.__dict__.get("_stage")) is not None:  # a file of it would lack what the others hold
        raise OperatorError(function_name(function), *stage)
    with local_only():
        return function(*args, **kwargs)


# --- storages ----------------------------------------------------------------------------


class GlobalStorage:
    """Answers `untyped_storage()` and `storage()` of a sharded or partial tensor: identity and the global size.

    `data_ptr()` is a number of this storage alone, the same for all tensors in it, and no address; of a tensor in a
    part of a larger buffer (parameters under ZeRO) it is the part's. Its bytes cannot be read.
    """

    def __init__(self, tensor: DTensor, item: int) -> None:
        with local_only():
            local = tensor.untyped_storage()
            part = local.nbytes() > tensor.numel() * tensor.element_size()
            self._identity = local._cdata if not part else tensor.data_ptr() or local._cdata
            self._nbytes = tensor._layout.numel * tensor.element_size()
            self.device, self.dtype = local.device, tensor.dtype
        self._item, self._layout, self._local = item, tensor._layout.base, local

    def data_ptr(self) -> int:
        return self._identity

    @property
    def _cdata(self) -> int:
        return self._local._cdata

    def nbytes(self) -> int:
        return self._nbytes

    def size(self) -> int:
        """Size in bytes, or in elements for `Tensor.storage()`."""
        return self._nbytes // self._item

    __len__ = size

    def element_size(self) -> int:
        return self._item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GlobalStorage) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # torch looks with `hasattr` for what a storage has of its own
            raise AttributeError(name)
        return self._raise(name)

    def __getitem__(self, index: object) -> Any:
        return self._raise("__getitem__")

    def __iter__(self) -> Any:
        return self._raise("__iter__")

    def __reduce_ex__(self, protocol: object) -> Any:
        return self._raise("pickle")

    def __repr__(self) -> str:
        return f"GlobalStorage({self._nbytes} bytes on all ranks, {self._layout})"

    def _raise(self, name: str) -> Any:
        rule = "a DTensor's storage holds this rank's part: it answers nbytes(), and data_ptr() as an identity, alone"
        raise OperatorError(f"UntypedStorage.{name.strip('_')}", rule, [f"tensor  {self._layout}"], _REMEDIES)


@handler(Tensor.untyped_storage, Tensor.storage)
def storage(function: Callable, args: tuple, kwargs: dict) -> Any:
    tensor = args[0]
    if tensor._layout.base.is_replicated:
        with local_only():
            return function(*args, **kwargs)
    return GlobalStorage(tensor, 1 if function is Tensor.untyped_storage else tensor.element_size())


def _typed_storage(tensor: DTensor) -> Any:
    """torch's own is Python that puts a class around the untyped one."""
    with local_only():
        local = _plain_typed_storage(tensor)
    whole = not tensor_module.is_global() or tensor._layout.base.is_replicated
    return local if whole else GlobalStorage(tensor, tensor.element_size())


DTensor._typed_storage = _typed_storage


@handler(Tensor.is_set_to)
def is_set_to(function: Callable, args: tuple, kwargs: dict) -> bool:
    """True if both are the same elements of the same memory, under one layout."""
    one, other = args
    if type(one) is not DTensor or type(other) is not DTensor or one._layout.base is not other._layout.base:
        return False
    with local_only():
        return function(one, other)


# --- strides -----------------------------------------------------------------------------


def _strides(function: Callable, tensor: DTensor) -> tuple[int, ...]:
    layout = tensor._layout.base
    with local_only():
        strides, sizes = tensor.stride(), tensor.shape
        base = _origin(tensor)
    if base is _CUT_OUT:
        refuse(function, tensor, "it had to be copied out of a tensor, of which one device has a view")
    if layout.is_replicated or layout.local_shape == layout.shape:
        return strides
    found = global_stride(strides, sizes, layout)
    if found is not None and base is not None:
        found = _with_gaps(found, strides, tensor, base)
    if found is None:
        refuse(function, tensor, f"one device's strides do not follow from the shard's, {strides} of {list(sizes)}")
    return found


_CUT_OUT = object()


def _origin(tensor: DTensor) -> Any:
    """Returns the DTensor that a view with gaps is a view of; `_CUT_OUT` for a part that had to be copied. Call it with
    dispatch disabled."""
    base = tensor._base if tensor._is_view() else None
    if "_is_cut_out" in tensor.__dict__ or base is not None and "_is_cut_out" in base.__dict__:
        return _CUT_OUT
    if type(base) is not DTensor or base._layout.flat_axis is not None:
        return None
    return None if is_non_overlapping_and_dense_or_false(tensor) else base


def _with_gaps(
    found: tuple[int, ...], strides: Sequence[int], tensor: DTensor, base: DTensor
) -> tuple[int, ...] | None:
    """The strides of a view are multiples of its base's, of which it is known how they grew; None if a stride is a
    multiple of several, which grew unlike each other."""
    with local_only():
        below, sizes, own_sizes = base.stride(), base.shape, tensor.shape
    above = global_stride(below, sizes, base._layout.base)
    if above is None:
        return None
    grown = []
    for own, stride, size in zip(found, strides, own_sizes):
        ways = {up * (stride // down) for up, down in zip(above, below) if down and not stride % down}
        if len(ways) > 1 and size > 1:  # no step is longer than its dim
            steps = zip(above, below, sizes)
            ways = {up * (stride // down) for up, down, n in steps if down and not stride % down and stride < down * n}
        if len(ways) > 1 and (size > 1 or own not in ways):
            return None
        # A dim of one index has no step: what its place in memory tells is as good as any.
        grown.append(own if size <= 1 or not ways else ways.pop())
    return tuple(grown)


@handler(Tensor.stride)
def stride(function: Callable, args: tuple, kwargs: dict) -> Any:
    found = _strides(function, args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return found if dim is None else found[dim]


@handler(Tensor.is_contiguous, Tensor.dim_order)
def order(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Asked of a tensor without data that has the global sizes and strides."""
    tensor = args[0]
    if function is Tensor.dim_order and tensor.ndim < 2:
        return tuple(range(tensor.ndim))
    like = torch.empty_strided(tensor._layout.shape, _strides(function, tensor), dtype=tensor.dtype, device="meta")
    return function(like, *args[1:], **kwargs)


@handler(Tensor.storage_offset)
def storage_offset(function: Callable, args: tuple, kwargs: dict) -> int:
    """Returns where one device's tensor begins in its storage: 0 for what is no view."""
    tensor = args[0]
    with local_only():
        if tensor._layout.base.is_replicated:
            return tensor.storage_offset()
        base = tensor._base if tensor._is_view() else None
        cut_out = _origin(tensor) is _CUT_OUT
        if not cut_out and (base is None or tensor.storage_offset() == base.storage_offset()):
            return 0
    refuse(function, tensor, "where one device's view begins does not follow from the shard's offset")
