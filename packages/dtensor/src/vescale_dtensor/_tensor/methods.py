"""Methods of DTensor: those that need the engine, and those that skip torch's C++ on the way to `__torch_function__`.

`x.transpose(1, 2)` on a subclass parses its arguments in C++, collects the types that
override, looks up the Python function and calls `__torch_function__`: about 1 us
before dispatch begins. For the methods below a Python method stands on the class and
calls `dispatch` at once. While dispatch is disabled (the local run of a function) or a
TorchFunctionMode is active, they are torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from .._communication.objects import gather_objects
from .._conversions.convert import convert, to_plain
from .._dispatch.dispatch import dispatch
from .._torch_private import _is_torch_function_enabled, _len_torch_function_stack
from .backward import start_backward, told_of_plain
from .construct import from_local, redistribute
from .gradient import grad_of, set_grad
from .loans import outliving
from .tensor import DTensor

# Not `__getitem__`: a class that defines it is a sequence to C, and `torch.tensor([x.max(), x.min()])` would ask a
# 0-dim DTensor for its length. Not `__rtruediv__`: Python asks a subclass that defines it before the left operand, and
# torch's takes the reciprocal, which rounds once more than the division of two tensors (and in float32, when the
# divisor is an integer).
_BINARY = """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __matmul__
""".split()
_NAMES = """
    __neg__ add sub mul div matmul neg pow square sqrt rsqrt exp log cos sin tanh sigmoid clamp masked_fill
    view reshape flatten unflatten transpose permute squeeze unsqueeze expand repeat contiguous split chunk unbind
    sum mean amax softmax clone detach to float type_as
""".split()


def _direct(function: Callable) -> Callable:
    def method(*args, **kwargs):
        if _is_torch_function_enabled() and not _len_torch_function_stack():
            out = dispatch(DTensor, function, (), args, kwargs)
            if out is not NotImplemented:
                return out
        return function(*args, **kwargs)

    return method


def _direct_binary(function: Callable) -> Callable:
    def method(self, other):
        if _is_torch_function_enabled() and not _len_torch_function_stack():
            return dispatch(DTensor, function, (), (self, other))
        return function(self, other)

    return method


def _install(names: list[str], make: Callable) -> None:
    for name in names:
        function = getattr(Tensor, name)
        method = make(function)
        method.__name__ = method.__qualname__ = name
        method.__doc__ = function.__doc__
        setattr(DTensor, name, method)


_install(_NAMES, _direct)
_install(_BINARY, _direct_binary)


def to_local(tensor: DTensor) -> Tensor:
    """This rank's shard as a plain tensor; no communication, differentiable, and no copy but of a parameter that ZeRO-3
    frees after use, while it is in use.

    The gradient that arrives must be the shard of this tensor's gradient:
    whole for a Partial tensor, this rank's contribution for a replicated one.
    """
    return outliving(told_of_plain(to_plain(tensor)), tensor)


def full_tensor(tensor: DTensor) -> Tensor:
    """The whole tensor, plain, the same on every rank. Differentiable. Cost: an all-gather or all-reduce."""
    whole = convert(tensor, tensor._layout.base.invariant, "full_tensor", own=True)
    return outliving(told_of_plain(to_plain(whole)), tensor)


def shards(tensor: DTensor) -> dict[tuple[int, ...], Tensor]:
    """Returns every rank's shard, by its coordinate: plain tensors, to look at. Cost: an all-gather of everything,
    pickled; call it on all ranks."""
    found = gather_objects(to_plain(tensor).detach(), tensor._layout.mesh)
    return dict(zip(itertools.product(*map(range, tensor._layout.mesh.sizes)), found))


DTensor.from_local = staticmethod(from_local)
DTensor.redistribute = redistribute
DTensor.to_local = to_local
DTensor.full_tensor = full_tensor
DTensor.shards = property(shards)
DTensor.backward = start_backward
DTensor.grad = property(grad_of, set_grad, lambda tensor: set_grad(tensor, None))
