"""Constructors of torch that take a tensor as data, in C++, and ask nobody: `torch.tensor(d)`, `plain.data = d`.

They copy, or hand on, whatever memory the tensor has: of a DTensor this rank's shard, under its local shape. So each
is replaced by a function that looks at the type of its data first; everything else goes on to torch's own, and so does
a DTensor while dispatch is disabled, when its shard is meant.

Whether a constructor copies, casts, moves or keeps the graph is torch's to say: it is asked by a plain tensor of one
element, and the DTensor gets what that got, under its own layout, without communication. What has no layout in the end
(sparse tensors, capsules, the memory of a plain tensor) is given the whole tensor: a gather where it is not replicated.
`torch.FloatTensor` and its like are types of C, into which nothing can be put: classes of their names stand before
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._conversions.convert import alias
from .._errors import OperatorError
from .._torch_private import (
    _device_constructors,
    _find_builtin,
    _is_torch_function_enabled,
    _register_builtin,
    _set_default_tensor_type,
    replace_set_default_tensor_type,
)
from .tensor import DTensor, attach, local_only

Answer = Callable[[Callable, tuple, dict], Any]


def place_all() -> None:
    """Puts the functions in place, once for the process."""
    # Before `torch.tensor` is another one: by this table a mode for a device knows what makes tensors.
    _device_constructors()
    for owner, names in _LAID_OUT.items():
        for name in names.split():
            _replace(owner, name, _laid_out)
    for owner, names in _OF_FULL_TENSORS.items():
        for name in names.split():
            _replace(owner, name, _of_full_tensor)
    Tensor.data, Tensor.grad = _TakesFullTensor(Tensor.data), _TakesFullTensor(Tensor.grad)
    for name in _KINDS.split():
        setattr(torch, name, _Kind(f"torch.{name}", (), {"_of_c": getattr(torch, name), "__module__": "torch"}))
    replace_set_default_tensor_type(_set_default_kind)


def _replace(owner: Any, name: str, answer: Answer) -> None:
    original = getattr(owner, name, None)
    if original is None:  # not in this version
        return

    @wraps(original)
    def constructor(*args: Any, **kwargs: Any) -> Any:
        for argument in args:
            if type(argument) is DTensor and _is_torch_function_enabled():
                return answer(original, args, kwargs)
        for argument in kwargs.values():
            if type(argument) is DTensor and _is_torch_function_enabled():
                return answer(original, args, kwargs)
        return original(*args, **kwargs)

    operator = _find_builtin(original)
    if operator is not None:  # TorchScript knows functions by identity
        _register_builtin(constructor, operator)
    is_method = isinstance(owner, type) and name not in ("__new__", "_make_subclass")
    setattr(owner, name, staticmethod(constructor) if isinstance(owner, type) and not is_method else constructor)


_LAID_OUT = {
    torch: "tensor as_tensor asarray",
    Tensor: "new_tensor new __new__ _make_subclass",
    torch.autograd.Variable: "__new__",
}
_OF_FULL_TENSORS = {
    torch: """
        sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor
        sparse_compressed_tensor _sparse_coo_tensor_unsafe _sparse_csr_tensor_unsafe _sparse_compressed_tensor_unsafe
        to_dlpack""",
    torch.utils.dlpack: "to_dlpack",
    Tensor: "set_",
}


def _laid_out(original: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a constructor on its data, for a DTensor of the same layout."""
    first = args[0] if args else None
    if type(first) is DTensor and original.__name__ in ("new_tensor", "new"):
        return original(*args, **kwargs)  # its own method, which has a rule
    if isinstance(first, type) and first not in (Tensor, torch.nn.Parameter, torch.autograd.Variable):
        _refuse(first.__name__, args, kwargs)
    data = next(value for value in (*args, *kwargs.values()) if type(value) is DTensor)
    with local_only():
        asked = torch.empty(1, dtype=data.dtype, device=data.device, requires_grad=data.requires_grad)
        asked = asked if data.is_leaf else asked.clone()
        graph = asked.requires_grad

        def instead(value: Any) -> Any:
            return asked if value is data else value

        got = original(*map(instead, args), **{name: instead(value) for name, value in kwargs.items()})
        copied = got.data_ptr() != asked.data_ptr()
        given = got.requires_grad and not got.grad_fn
    if got is asked:  # itself: `torch.asarray` of 2.11 takes a leaf's gradient away
        return data if got.requires_grad == graph else data.requires_grad_(got.requires_grad)
    source = data if got.grad_fn is not None else data.detach()
    if copied:
        out = source.to(device=got.device, dtype=got.dtype, copy=True)
    else:
        out = attach(alias(source), source._layout)
    return out.requires_grad_() if given else out


def _of_full_tensor(original: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a constructor on the whole tensor."""
    if args and type(args[0]) is DTensor and original.__name__ == "set_":
        return original(*args, **kwargs)
    if original.__name__.endswith("to_dlpack"):
        return args[0].__dlpack__(**kwargs)

    def full(value: Any) -> Any:
        return value.full_tensor() if type(value) is DTensor else value

    return original(*map(full, args), **{name: full(value) for name, value in kwargs.items()})


class _TakesFullTensor:
    """`Tensor.data` and `Tensor.grad`: a plain tensor is given the whole of a DTensor."""

    def __init__(self, of_c: Any) -> None:
        self._of_c = of_c

    def __get__(self, tensor: Tensor | None, owner: type | None = None) -> Any:
        return self._of_c if tensor is None else self._of_c.__get__(tensor)

    def __set__(self, tensor: Tensor, value: Tensor | None) -> None:
        if type(value) is DTensor and type(tensor) is not DTensor and _is_torch_function_enabled():
            value = value.full_tensor().detach()
        self._of_c.__set__(tensor, value)

    def __delete__(self, tensor: Tensor) -> None:
        self._of_c.__delete__(tensor)


_KINDS = """
    FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor CharTensor ByteTensor BoolTensor
"""


class _Kind(type):
    """The class of a class that stands before an old constructor by type: all but its calls is that one's."""

    _of_c: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(type(one) is DTensor for one in args) and _is_torch_function_enabled():
            return _laid_out(cls._of_c, args, kwargs)
        return cls._of_c(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._of_c)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "_of_c"), name)

    def __repr__(cls) -> str:
        return repr(cls._of_c)

    def __reduce__(cls) -> str:
        return cls._of_c.__name__


def _set_default_kind(kind: Any) -> None:
    _set_default_tensor_type(kind._of_c if isinstance(kind, _Kind) else kind)


def _as_subclass(tensor: DTensor, kind: type) -> Tensor:
    """`Tensor.as_subclass`, which torch does not hand to `__torch_function__`: a shard is not the whole tensor."""
    if _is_torch_function_enabled() and kind is not DTensor and not tensor._layout.base.is_replicated:
        _refuse("as_subclass", (tensor,), {})
    return Tensor.as_subclass(tensor, kind)


DTensor.as_subclass = _as_subclass


def _refuse(name: str, args: tuple, kwargs: dict) -> None:
    found = [value for value in (*args, *kwargs.values()) if type(value) is DTensor]
    raise OperatorError(
        name,
        "makes a tensor of another class from the memory of a DTensor, which holds only this rank's part",
        [f"tensor  {tensor._layout.base!r}" for tensor in found],
        [
            ("tensor.full_tensor()", "the whole tensor, plain: an all-gather or all-reduce, on every rank"),
            ("tensor.to_local()", "this rank's part, plain: no communication"),
        ],
    )


place_all()
