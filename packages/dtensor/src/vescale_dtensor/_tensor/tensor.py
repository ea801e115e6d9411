"""DTensor: a torch.Tensor whose storage is this rank's shard, with a layout.

There is no wrapper. The object's sizes and storage are local, which is what C++
and third-party kernels see; Python sees the global tensor, because every function
on a DTensor comes to `__torch_function__` (`_dispatch/dispatch.py`), and the metadata that is
read all the time has properties here that skip even that. Inside the engine, with
torch-function dispatch disabled, the same properties answer for the local shard,
so that torch's own Python functions run on it unchanged.
"""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._dispatch.functorch import TensorType, check_not_mapped
from .._layouts.layout import Layout
from .._torch_private import DisableTorchFunctionSubclass as local_only
from .._torch_private import (
    DispatchKey,
    _disabled_torch_function_impl,
    _DisableTorchDispatch,
    _is_torch_function_enabled,
    _make_subclass,
)
from .._torch_private import _current_graph_task_id as _graph_task
from .._torch_private import _dispatch_tls_is_dispatch_key_excluded as _is_excluded
from .compiled import LeftToPython

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .._layouts.drawing import Picture
    from ..placement import Placement

is_global = _is_torch_function_enabled
_shape = Tensor.shape.__get__
plain_grad = Tensor.grad.__get__
set_plain_grad = Tensor.grad.__set__
plain_data = Tensor.data.__get__
set_plain_data = Tensor.data.__set__
_plain_size = Tensor.size
_plain_dim = Tensor.dim
_plain_numel = Tensor.numel


class _UnderWay:
    """`_layout` of a parameter whose values are on their way: who asks how it lies goes on to read it, and waits first.
    Of a view whose memory is gone (`loans.py`) it raises.

    It only reads, so that a `_layout` of the object's own, as all others have, goes before it.
    """

    def __get__(self, tensor: DTensor | None, kind: type) -> Layout | _UnderWay:
        if tensor is None:
            return self
        owner = tensor.__dict__.get("_loan") or tensor.__dict__.get("_owner")
        if owner is None:
            raise AttributeError("_layout")
        owner.wait()
        return tensor.__dict__["_layout"]


class DTensor(Tensor, metaclass=TensorType):
    """A tensor sharded over a device mesh that is used and debugged as if it were on one device.

    Create one with `distribute_tensor`, `DTensor.from_local`, a factory function or `vescale.parallelize`, never with
    the constructor. `shape`, `size()` and all other metadata describe the global tensor; `to_local()` returns the
    shard.

    `methods.py` adds the methods that need the engine (`redistribute`, `full_tensor`, `grad`, `backward`, operators) to
    the class.
    """

    _layout: Layout = _UnderWay()
    # Of which class it is for `isinstance` and `super`: a parameter of a user's class is of that.
    __class__ = property(attrgetter("_kind"), object.__dict__["__class__"].__set__)
    _kind: type
    __tensor_flatten__ = LeftToPython()

    def __new__(cls, *args, **kwargs):
        from .._errors import PlacementError

        raise PlacementError(
            "DTensor",
            "a DTensor cannot be created with its constructor",
            (),
            [
                ("distribute_tensor(tensor, mesh, placements)", "every rank holds the whole tensor: local slice"),
                ("DTensor.from_local(local, mesh, placements)", "every rank holds its shard: no copy"),
            ],
        )

    # --- layout -------------------------------------------------------------------

    @property
    def mesh_layout(self) -> Layout:
        """Mesh, state per axis, global shape. (`layout` is torch's own, strided: code asks it of any tensor.)"""
        return self._layout.base

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each mesh axis."""
        return self._layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, as given."""
        return self._layout.mesh.device_mesh

    def __getattr__(self, name: str) -> Any:
        return of_class(self, self._kind, name)

    # --- metadata that is read all the time: no dispatch ----------------------------

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self._layout.shape if is_global() else _shape(self)

    @property
    def ndim(self) -> int:
        return self._layout.ndim if is_global() else _plain_dim(self)

    def dim(self) -> int:
        if not is_global():
            return _plain_dim(self)
        check_not_mapped()
        return self._layout.ndim

    def size(self, dim: int | None = None):
        """The global shape, or one dim of it."""
        if not is_global():
            return _plain_size(self) if dim is None else _plain_size(self, dim)
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def numel(self) -> int:
        return self._layout.numel if is_global() else _plain_numel(self)

    nelement = numel

    def __len__(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    # --- what `methods.py` puts on the class, from modules that need it ---------------

    if TYPE_CHECKING:

        @staticmethod
        def from_local(
            local: Tensor,
            device_mesh: DeviceMesh,
            placements: Sequence[Placement],
            *,
            shape: Sequence[int] | None = None,
            stride: Sequence[int] | None = None,
        ) -> DTensor: ...
        def redistribute(self, placements: Sequence[Placement]) -> DTensor: ...
        def to_local(self) -> Tensor: ...
        def full_tensor(self) -> Tensor: ...
        @property
        def shards(self) -> dict[tuple[int, ...], Tensor]: ...

    # --- to look at -------------------------------------------------------------------

    def draw(self) -> Picture:
        """Draws which rank holds which part, hatched if the parts are summands: an SVG, which notebooks show and
        `save(path)` writes. No communication.
        """
        from .._layouts.drawing import draw

        return draw(self._layout)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        # Never communicates: a debugger calls this on one rank, unless it goes through all of them in lockstep.
        states = ", ".join(map(repr, self._layout.states))
        if _prints_global:
            with contextlib.suppress(RuntimeError), torch.no_grad():  # a rank stands elsewhere: what is here is shown
                whole = self.full_tensor()
                with local_only():
                    return f"DTensor({whole!r}, {states} on {self._layout.mesh})"
        with local_only():
            local = Tensor.__repr__(self.detach())
        shape = ", ".join(map(str, self._layout.shape))
        parameter = "Parameter, " if getattr(self, "_is_param", False) else ""
        return f"DTensor({parameter}[{shape}] {states} on {self._layout.mesh}, local={local})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self._layout.shape == () and spec:
            return format(self.item(), spec)
        return repr(self) if self._layout.shape else str(self.item())


DTensor._kind = DTensor

_INTERNAL = frozenset((
    "_layout", "_conversions", "_sliced", "_reduced_grad", "_refusal", "_owner", "_loan", "_source", "_gradient_of",
    "_of",
))  # fmt: skip


def attributes_beside(tensor: Tensor) -> dict[str, Any]:
    """Returns the attributes of a tensor's object beside those by which it is known how it lies: users', and whether it
    is a parameter."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _INTERNAL}


def of_class(tensor: Tensor, kind: type, name: str) -> Any:
    """Finds an attribute that tensors lack, for one that stands for an object of the user's class `kind`."""
    for one in () if kind is DTensor else kind.__mro__:
        if name in vars(one):
            found = vars(one)[name]
            return found.__get__(tensor, kind) if hasattr(found, "__get__") else found
    return object.__getattribute__(tensor, name)


@contextlib.contextmanager
def printing_global() -> Iterator[None]:
    """Within the block all ranks print the same: a DTensor shows the global tensor, for which it communicates."""
    global _prints_global
    before, _prints_global = _prints_global, True
    try:
        yield
    finally:
        _prints_global = before


_prints_global = False


# --- below autograd ---------------------------------------------------------------


def below_autograd() -> bool:
    """True inside an operator of a backward: a `TorchDispatchMode` (a FLOP counter, selective checkpointing) is handed
    the tensors that the graph saved, and there a DTensor is its shard."""
    return _graph_task() != -1 and _is_excluded(DispatchKey.AutogradFunctionality)


def _is_global_above_autograd() -> bool:
    return _is_torch_function_enabled() and not below_autograd()


def watch_autograd() -> None:
    """Makes every DTensor look, from now on, whether it is asked below autograd, where Python code may still be told of
    it. Called when a dispatch mode is seen in a backward, so that nobody else pays for it."""
    global is_global, _shape, _plain_size, _plain_dim, _plain_numel
    if is_global is _is_global_above_autograd:
        return
    is_global = _is_global_above_autograd
    _shape, _plain_size, _plain_dim, _plain_numel = map(_untold, (_shape, _plain_size, _plain_dim, _plain_numel))
    above = DTensor.__dict__["__torch_function__"].__func__

    def dispatch(cls: type, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if below_autograd():
            with local_only():
                return function(*args, **(kwargs or {}))
        return above(cls, function, types, args, kwargs)

    DTensor.__torch_function__ = classmethod(dispatch)


def _untold(read: Callable) -> Callable:
    def plain(*args: object) -> Any:
        with local_only():
            return read(*args)

    return plain


# The class is what `attach` gives to a fresh local result, whatever the layout.
def attach(local: Tensor, layout: Layout) -> DTensor:
    """Makes a fresh plain tensor the DTensor of `layout`. Copies nothing, and adds no autograd node but to a
    number that not every rank holds, which becomes another object, heard of when C++ reads it (`_dispatch/number.py`).

    Never call it on a tensor that somebody else holds: it changes the object.
    """
    if layout.is_number:
        source = local
        if local.requires_grad or local._is_view():
            local = local.as_subclass(DTensor)
            if not source.is_leaf:
                local._source = (source, source._version)  # where a backward may start, past the node between them
        else:  # no view, for it may become a leaf: autograd cannot bring up to date a view of a leaf that is one
            local = _make_subclass(DTensor, local)
        if "_taken" in source.__dict__:  # of what it is a part
            local._taken = source._taken
    else:
        local.__class__ = DTensor
    local._layout = layout
    return local


class LocalNumber(Tensor):
    """A number while it is taken for its local part: what a DTensor's class becomes where plain code is run on it."""

    __torch_function__ = _disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        with _DisableTorchDispatch():
            return function(*args, **kwargs or {})


def source_of(number: DTensor) -> Tensor | None:
    """Returns the plain tensor that a number was made from, if a backward from it is one from the number: nobody wrote
    to it since, or hooked it."""
    source, version = number.__dict__.get("_source", (None, 0))
    with local_only():
        if source is None or number._version != version or number._backward_hooks or number.retains_grad:
            return None
    return source


class LocalNumberParameter(nn.Parameter):
    """A LocalNumber that is a parameter: what was made a number is asked for `__torch_dispatch__`, and a Parameter
    has none. Of every parameter of one element: under ZeRO it lies otherwise by now than when it was made."""

    __torch_dispatch__ = LocalNumber.__torch_dispatch__


def plain_class(tensor: DTensor) -> type[Tensor]:
    """The class under which `tensor` is its local part alone."""
    if tensor.__dict__.get("_is_param"):
        kind = tensor._kind
        return LocalNumberParameter if tensor._layout.numel == 1 else nn.Parameter if kind is DTensor else kind
    return LocalNumber if tensor._layout.is_number else Tensor


def drop_gradients(tensors: Iterable[Tensor]) -> None:
    """`tensor.grad = None` for each, DTensor or not."""
    with local_only():
        for tensor in tensors:
            tensor.__dict__.pop("_reduced_grad", None)
            set_plain_grad(tensor, None)


def set_reduced_grad(tensor: DTensor, gradient: DTensor | None) -> None:
    """Makes `gradient`, already reduced over the axes where it was partial, the reduced part of `tensor.grad`.

    It is kept apart from what autograd accumulates: a later backward's gradient is
    partial again, and the sum of the two would be neither (design section 3,
    contract 9).
    """
    if gradient is None:
        tensor.__dict__.pop("_reduced_grad", None)
    else:
        tensor._reduced_grad = gradient


def requires_grad(tensor: Tensor) -> bool:
    with local_only():
        return tensor.requires_grad
