"""Differentiable conversions: the forward moves the value, the backward moves the gradient back.

`convert` is what dispatch, `redistribute` and every rule use. The backward of a
conversion a -> b is the conversion g(b) -> g(a), made by the same Function, so that
it is itself differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from .._communication import events
from .._dispatch.functorch import check_outside
from .._errors import ImplicitCommunicationError, PlainTensorError
from .._layouts.layout import Layout, layout_of
from .._layouts.mesh import Mesh
from .._layouts.state import INVARIANT
from .._tensor.tensor import DTensor, attach, local_only
from .._torch_private import _are_functorch_transforms_active
from .._torch_private import _disabled_torch_function_impl as _disabled
from .conversion import communicates, plan
from .memo import recall, remember
from .slices import as_slice
from .steps import Route, route_of


class Convert(Function):
    """Local tensor -> local tensor along a route. Call `convert_tracked`, with dispatch disabled."""

    @staticmethod
    def forward(ctx, local: Tensor, route: Route, own: bool) -> Tensor:
        ctx.materialize_grads = False  # who gives no gradient gives none, and not zeros
        ctx.way = (route, events._current)
        return _moved(local, route, own)

    @staticmethod
    def backward(ctx, grad: Tensor | None):
        if grad is None:
            return None, None, None
        route, cause = ctx.way
        events.restore_cause(cause)
        with local_only():
            if is_grad_enabled():
                return convert_tracked(grad, route.back, False), None, None
            if type(grad) is not Tensor:  # from a Function that ran a graph of its own: a reentrant checkpoint
                grad = grad.detach()
            recipe = route.back.recipe
            return grad if recipe is None else recipe(grad), None, None


# torch's `Function.apply` first looks for functorch's wrappers, in Python; this is what it then calls. In a backward
# the engine calls `apply` of the graph's node, which looks for what a user may have called it; here it is known.
_apply = super(Function, Convert).apply
Convert._backward_cls.apply = Convert.backward


def convert_tracked(local: Tensor, route: Route, own: bool) -> Tensor:
    """`Convert.apply`."""
    if _are_functorch_transforms_active():
        return Convert.apply(local, route, own)
    return _apply(local, route, own)


class Alias(Function):
    """The same local values in another tensor object: the boundary between plain tensors and DTensors."""

    @staticmethod
    def forward(ctx, local: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        with local_only():
            return local.detach()

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> Tensor | None:
        return grad


def alias(tensor: Tensor) -> Tensor:
    """A plain tensor that shares storage, version and autograd history with `tensor`."""
    if is_grad_enabled():
        tensor = read(tensor)
    elif type(tensor) is DTensor:
        _ = tensor._layout  # waits for what is on its way
    with local_only():
        if is_grad_enabled() and tensor.requires_grad:
            return Alias.apply(tensor)
        return tensor.detach()


def to_plain(tensor: DTensor) -> Tensor:
    """The local shard as a plain tensor, differentiable."""
    return alias(tensor)


def from_plain(local: Tensor, layout: Layout) -> DTensor:
    """A DTensor over the storage of `local`, differentiable."""
    return attach(alias(local), layout)


def on_device(tensor: Tensor, mesh: Mesh) -> Tensor:
    """A local tensor on the mesh's device, differentiable: itself where it lies there, or has no values (meta).

    The host does not wait for a copy from its own memory, unless that is pinned: then the caller could write to it
    before it was read.
    """
    device = mesh.device_type
    here = tensor.device.type
    if here == device or here == "meta":
        return tensor
    return tensor.to(device, non_blocking=here == "cpu" and not tensor.is_pinned())


def read(tensor: Tensor) -> Tensor:
    """Returns the tensor a function computes with: `tensor`, but for a parameter at rest in memory that somebody owns.

    Autograd knows a parameter by one shape, and its part at rest has another: its owner gives a tensor of the same
    values, through which a gradient finds its way. The layout of such a parameter is an untracked one.
    """
    owner = tensor.__dict__.get("_owner") if type(tensor) is DTensor else None
    if owner is None or not tensor._layout.is_untracked:
        return tensor
    given = owner.read(tensor)
    if given is not tensor:
        given.__dict__["_of"] = tensor
    return given


def convert(tensor: DTensor, target: Layout, cause: object = "redistribute", *, own: bool = False) -> DTensor:
    """`tensor` under the layout `target`; the tensor itself when it is there already.

    own: the result is the caller's to write to: it is shared with no other
    conversion and is no slice of `tensor`.
    """
    source = tensor._layout.base
    if source is target:
        return tensor
    if tensor._layout is not source:
        tensor = read(tensor)
    events.set_cause(cause, tensor, source, target)
    return _converted(tensor, source, target, fresh=True, own=own)


def convert_plain(local: Tensor, mesh: Mesh, target: Layout, cause: object) -> DTensor:
    """A plain tensor, taken as alike on all ranks (I), under the layout `target`."""
    if type(local) is not Tensor:
        refuse_foreign(cause, [local])
    events.set_cause(cause)
    return _converted(local, layout_of(mesh, (INVARIANT,) * mesh.ndim, target.shape), target, fresh=True)


def refuse_foreign(function: object, tensors: Iterable[Tensor]) -> None:
    """Raises where one of the tensors is torch's own DTensor, which says how it lies where nobody here reads, or one of
    another library that computes by functions of its own: quantised weights."""
    for tensor in tensors:
        if type(tensor).__module__.startswith("torch.distributed.tensor"):
            raise PlainTensorError(
                events.function_name(function),
                "torch's own DTensor is combined with one of veScale's, which would treat it as a plain tensor",
                [f"operand  {list(tensor.shape)} {tensor.placements}"],
                [
                    (
                        "DTensor.from_local(t.to_local(), t.device_mesh, t.placements)",
                        "veScale's, with the same layout: no copy",
                    ),
                    ("t.full_tensor()", "the whole tensor, plain: an all-gather or all-reduce"),
                ],
            )
        if hasattr(tensor, "__tensor_flatten__") and type(tensor).__torch_function__ is not _disabled:
            kind = f"{type(tensor).__module__.split('.')[0]}'s {type(tensor).__name__}"
            raise PlainTensorError(
                events.function_name(function),
                f"{kind} meets a DTensor: it computes with functions of its own, which do not know about shards",
                [f"operand  {list(tensor.shape)} {tensor.dtype}"],
                [
                    ("state = vescale.whole_state_dict(model)", "load it on one device, and quantise that model"),
                    ("tensor.dequantize()", "a plain tensor, if the class has this method"),
                ],
            )


# While a model with a context axis runs: what is told of each operand that does not fit (`_context/mixing.py`).
about_to_move: Callable | None = None


def convert_operand(
    tensor: Tensor, source: Layout, target: Layout, function: object, explanation: tuple | None = None
) -> Tensor:
    """Converts, for dispatch, an input whose layout does not fit.

    The result is only read: where values stay and no gradient flows it is
    `tensor` itself. Under `strict()` a conversion that communicates raises.
    """
    if events.strict_depth and communicates(source, target):
        raise_implicit(tensor, source, target, function, explanation)
    if about_to_move is not None:
        about_to_move(source, target, function)
    events.set_cause(function, tensor, source, target)
    return _converted(tensor, source, target, fresh=False)


def _converted(tensor: Tensor, source: Layout, target: Layout, fresh: bool, own: bool = False) -> Tensor:
    if events.watch is not None:
        return events.watch(_make, tensor, source, target, fresh, own)
    return _make(tensor, source, target, fresh, own)


# While the reproducible mode is on: conversions with gradient, a node for each use (`_reproducible/uses.py`).
each_use: Callable | None = None


def _make(tensor: Tensor, source: Layout, target: Layout, fresh: bool, own: bool) -> Tensor:
    with local_only():
        if each_use is not None and is_grad_enabled() and tensor.requires_grad:
            if _are_functorch_transforms_active():
                check_outside(events.cause().function)
            return each_use(tensor, source, target, own)
        known = None if own else recall(tensor, target)
        if known is not None:
            return known
        apply = _apply
        if _are_functorch_transforms_active():
            check_outside(events.cause().function)
            apply = Convert.apply
        route = route_of(source, target)
        if is_grad_enabled() and tensor.requires_grad:
            # A caller who asked for a conversion may write to its result; what is only read may be part of another.
            if not fresh and tensor._is_view() and (part := as_slice(_make, tensor, source, target)) is not None:
                return part
            out = apply(tensor, route, own)
        elif route.is_alias and not fresh:
            return tensor
        else:
            out = _moved(tensor, route, own)
        out = attach(out, target)
        if not own:
            remember(tensor, target, out, moves=not route.is_alias)
        return out


def _moved(local: Tensor, route: Route, own: bool) -> Tensor:
    """The route's result, as another tensor object; with `own`, also over other memory where only a part is left."""
    out = local if route.recipe is None else route.recipe(local)
    if own and route.only_cuts and shares_storage(out, local):
        return own_copy(out)
    return out.detach() if out is local else out


def own_copy(local: Tensor) -> Tensor:
    """A clone. Dims of one index get the strides of a fresh tensor, too, which say whether it was permuted."""
    return local.clone(memory_format=torch.contiguous_format if local.is_contiguous() else torch.preserve_format)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """True if two local tensors lie in the same memory. Call with dispatch disabled."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def raise_implicit(
    tensor: Tensor, source: Layout, target: Layout, function: object, explanation: tuple | None = None
) -> None:
    """`explanation` is a rule's own: why the operand must move, and remedies."""
    steps = ", ".join(f"{s.kind} on {source.mesh.names[s.axis]!r}" for s in plan(source, target) if s.kind != "nothing")
    reason, remedies = explanation or ("", ())
    raise ImplicitCommunicationError(
        events.function_name(function),
        f"needs an implicit conversion under strict(): {steps}" + (f"\n  {reason}" if reason else ""),
        [describe("from", tensor, source), describe("to", tensor, target)],
        [*remedies, (f"tensor.redistribute({target.placements!r})", f"the same {steps}, asked for")],
    )


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def describe(name: str, tensor: Tensor, layout: Layout) -> str:
    """`lhs  f32[8, 16]  R, S(1)  on (dp=2, tp=4)`: an operand in an error message."""
    with local_only():
        dtype = tensor.dtype
    shape = ", ".join(map(str, layout.shape))
    states = ", ".join(map(repr, layout.states))
    return f"{name}  {_SHORT.get(dtype, str(dtype))}[{shape}]  {states}  on {layout.mesh}"
