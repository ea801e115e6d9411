"""Turns a tensor into Python values and through Python's protocols: item, bool, numpy, deepcopy, pickle, data.

The value is the global tensor's, so on a sharded or partial tensor these communicate
and must be called on every rank; on a replicated one they do not.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import Tensor

from ..._conversions.convert import alias, convert, convert_plain
from ..._conversions.memo import forget
from ..._conversions.reading import convert_to_read
from ..._dispatch.copies import copied_side
from ..._errors import OperatorError
from ..._tensor.gradient import grad_of, leave_graphs, move_grad
from ..._tensor.loans import borrow
from ..._tensor.tensor import DTensor, attach, attributes_beside, local_only
from ..._torch_private import _is_torch_function_enabled, _TensorBase_int
from ..registry import handler
from ..traits import VIEWS, Trait
from .communication import leave_nobody_waiting
from .memory import refuse


def full_value(tensor: DTensor, cause: object) -> Tensor:
    """The whole tensor, plain; the shard itself where it is replicated already."""
    if tensor._layout.base.is_replicated:
        return alias(tensor)
    return alias(convert_to_read(tensor, cause))


@handler(
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, Tensor.is_nonzero, torch.is_nonzero, Tensor.__dlpack__,
    Tensor.__dlpack_device__, _TensorBase_int, traits=Trait.READS,
)  # fmt: skip
def value(function, args, kwargs):
    """The global value: a collective on every rank unless the tensor is replicated. Where others see its memory (a
    parameter, a gradient), what was gathered cannot be written: the write would not reach them."""
    with torch.no_grad() if function not in (Tensor.numpy, Tensor.__array__) else nullcontext():
        gathered = full_value(args[0], function)
    is_apart = _is_copied(args[0])
    if is_apart and function is Tensor.__dlpack__ and not kwargs.get("copy"):
        refuse(function, args[0], "others see its memory, which is not whole on this rank: a write would be lost")
    found = function(gathered, *args[1:], **kwargs)
    if is_apart and function in (Tensor.numpy, Tensor.__array__):
        found.flags.writeable = False
    return found


def _is_copied(tensor: DTensor) -> bool:
    """True if a read of the tensor gives a copy of memory that others see: a parameter's, or a gradient's."""
    if tensor._layout.base.is_replicated:
        return copied_side(tensor) == "copy"
    return tensor.requires_grad or not tensor.__dict__.keys().isdisjoint(("_owner", "_loan", "_gradient_of"))


@handler(Tensor.__contains__, traits=Trait.READS)
def contains(function, args, kwargs):
    return function(*[full_value(a, function) if type(a) is DTensor else a for a in args])


@handler(Tensor.__iter__)
def iterate(function, args, kwargs):
    if not args[0].ndim:
        raise TypeError("iteration over a 0-d tensor")
    return iter(args[0].unbind(0))


@handler(Tensor.__reversed__)
def reverse(function, args, kwargs):
    return args[0].flip(0) if args[0].ndim else args[0]


@handler(Tensor.__hash__)
def identity_hash(function, args, kwargs):
    return id(args[0])


@handler(Tensor.__deepcopy__)
def deep_copy(function, args, kwargs):
    """A leaf with its own storage, the same layout, attributes and gradient; of a parameter, as torch's, the values
    alone."""
    tensor, memo = args
    if id(tensor) in memo:
        return memo[id(tensor)]
    layout = tensor._layout
    with local_only():
        if not tensor.is_leaf:
            raise OperatorError(
                "deepcopy", "only leaf tensors can be copied", [repr(layout)], [("tensor.detach()", "")]
            )
        needs_grad = tensor.requires_grad
        fresh = tensor.detach().clone(memory_format=torch.preserve_format)
    fresh = attach(fresh, layout.base).requires_grad_(needs_grad)
    memo[id(tensor)] = fresh
    if getattr(tensor, "_is_param", False):
        fresh._is_param, fresh._kind = True, tensor._kind
        return fresh
    for name, item in attributes_beside(tensor).items():
        setattr(fresh, name, copy.deepcopy(item, memo))
    if tensor.grad is not None:
        fresh.grad = tensor.grad.detach().clone()
    return fresh


@handler(Tensor.__reduce_ex__, Tensor.__reduce__)
def reduce_ex(function, args, kwargs):
    """A DTensor belongs to a mesh of live processes: it does not travel."""
    leave_nobody_waiting()
    raise OperatorError(
        "pickle",
        "a DTensor names process groups of this process and cannot travel to another",
        [repr(args[0]._layout)],
        [
            ("tensor.full_tensor()", "the whole tensor: an all-gather"),
            ("tensor.to_local()", "this rank's shard: no communication"),
            ("vescale_checkpoint.whole_state_dict(model)", "all of a model's, plain, on the first rank"),
            ('vescale_checkpoint.save(path, {"model": model})', "a checkpoint: any plan and number of ranks loads it"),
        ],
    )


@handler(Tensor.data.__set__)
def set_data(function, args, kwargs):
    """`x.data = y`: y's values and layout, to which a gradient that x holds is converted; a plain y is a whole tensor,
    alike on all ranks.

    Where somebody else owns x's memory (a flat buffer: `x._owner`), it says what becomes of it."""
    tensor, value = args
    owner = tensor.__dict__.get("_owner") if type(tensor) is DTensor else None
    if owner is not None:
        return owner.replace(tensor, value)
    if type(value) is not DTensor:
        layout = tensor._layout.base
        if tuple(value.shape) != layout.shape:
            layout = layout.with_shape(tuple(value.shape)).invariant
        value = convert_plain(value, layout.mesh, layout, "Tensor.data")
    layout, held = tensor._layout.base, None
    with local_only():
        is_leaf = tensor.is_leaf
    if not is_leaf and value._layout.shape == layout.shape:  # autograd goes by the layout that it was computed in
        value = convert(value.detach(), layout, "Tensor.data")
    forget(tensor)
    if is_leaf and layout.gradient is not value._layout.base.gradient:
        held = grad_of(tensor)
        leave_graphs(tensor)
    with local_only():
        Tensor.data.__set__(tensor, value.detach())
    tensor._layout = value._layout.base
    if held is not None and held.shape == tensor.shape:
        move_grad(tensor, held)


@handler(Tensor.data.__get__, traits=Trait.ELEMENTWISE | VIEWS)
def get_data(function, args, kwargs):
    """`x.data`: the same memory under another count of versions, of which the owner of that memory hears."""
    tensor = args[0]
    owner = tensor.__dict__.get("_owner")
    if owner is not None:
        owner.is_lent = True
    with local_only():
        data = function(tensor)
    data = attach(data, tensor._layout.base)
    borrow(data, [tensor])
    return data


def set_memory(tensor: Tensor, *source, **options) -> Tensor:
    """`Tensor.set_`, which torch does not hand to `__torch_function__`: with a tensor, as `x.data = y`. The memory of a
    shard says nothing of the whole: no storages, sizes and strides."""
    if not _is_torch_function_enabled():
        return Tensor.set_(tensor, *source, **options)
    if options or len(source) != 1 or not isinstance(source[0], Tensor):
        raise OperatorError(
            "set_",
            "memory, sizes and strides of a DTensor are a shard's, and are not set one by one",
            [repr(tensor._layout)],
            [("x.data = y", "the values of a tensor of the global shape"), ("x.copy_(y)", "in place")],
        )
    set_data(Tensor.data.__set__, (tensor, *source), {})
    return tensor


DTensor.set_ = set_memory
