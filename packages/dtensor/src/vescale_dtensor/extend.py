"""Extension by users' own functions: rules, local maps, autograd Functions; and zero-copy bridges to torch's
DTensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from vescale_trace.values import map_tensors

from ._conversions.convert import alias, convert, from_plain
from ._dispatch.dispatch import call
from ._dispatch.fallback import gathered as run_whole
from ._dispatch.signature import Signature
from ._errors import PlacementError
from ._layouts.layout import canonical_states, layout_of
from ._layouts.mesh import mesh_of
from ._layouts.state import INVARIANT, REPLICATE
from ._reproducible.mode import check_order
from ._rules.registry import Call, decomposed, late_rule_of, rule
from ._rules.traits import Trait
from ._tensor.construct import from_local, redistribute
from ._tensor.tensor import DTensor
from .placement import Partial, Placement, Replicate, Shard


def register_rule(
    *functions: Callable | Iterable[Callable], exact: bool = False, view: bool = False, traits: Trait | None = None
) -> Callable:
    """Decorator that registers a rule for `functions` (a kernel, a `torch.library` op, a Function's apply).

    A rule takes a `Call` and returns a `Signature`, a `Decision`, `decomposed(fn)` or None; see
    `vescale_dtensor.rules`. Functions that do not reach `__torch_function__` by themselves must be called through
    `local_map` instead.

    Example::

        @register_rule(torch.ops.mylib.scale, traits=Trait.ELEMENTWISE | Trait.LINEAR)
        def scale(call):
            dims = tuple(range(call.operands[0].ndim))
            return Signature([dims], [dims])

    Arguments:
        exact: whether the decision depends on the value of float arguments.
        view: the same as Trait.VIEW.
        traits: what the functions do, whatever their layouts; see `Trait`. A function without traits may do anything
            with its elements: flat shards (ZeRO, optimizer states) are gathered for it, and in the reproducible mode it
            runs on whole tensors. If none are given, a function keeps the traits that it already has. A Signature of a
            LINEAR function that names nothing as `linear` is linear in its first tensor.
    """
    if view:
        traits = (traits or Trait(0)) | Trait.VIEW

    def register(decide: Callable) -> Callable:
        rule(*functions, exact=exact, traits=traits)(_linear(decide) if traits and Trait.LINEAR in traits else decide)
        return decide

    return register


def _linear(decide: Callable) -> Callable:
    @functools.wraps(decide)
    def linear(call: Call) -> Any:
        found = decide(call)
        return replace(found, linear=[(0,)]) if isinstance(found, Signature) and not found.linear else found

    return linear


def local_map(
    function: Callable,
    out_placements: Sequence[Placement | Sequence[Placement] | None],
    in_placements: Sequence[Sequence[Placement] | None] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
) -> Callable:
    """Turns a `function` of local tensors into a function of DTensors.

    Arguments:
        out_placements: placements of the result, or one such list per result.
        in_placements: placements to which each positional tensor is converted; None leaves it unchanged. Communication
            as for `redistribute`.
        device_mesh: needed if no argument is a DTensor.
        shapes: global shapes of the results; without them, the ranks exchange their local shapes (a small all-gather).

    The local gradient of an input must be this rank's shard (if sharded) or this rank's contribution (if replicated):
    what autograd gives if ranks do different work.
    """

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        check_order("local_map", "a mapped function computes")
        mesh = device_mesh
        local = []
        for i, argument in enumerate(args):
            if type(argument) is DTensor:
                mesh = mesh or argument.device_mesh
                wanted = in_placements[i] if in_placements is not None else None
                argument = alias(_as_replicate(argument if wanted is None else redistribute(argument, wanted)))
            local.append(argument)
        if mesh is None:
            raise PlacementError(
                "local_map", "no argument is a DTensor, and no device_mesh was given", (), [("device_mesh=mesh", "")]
            )
        out = function(*local, **kwargs)
        many = isinstance(out, (tuple, list))
        outs = list(out) if many else [out]
        places: list[Any] = list(out_placements) if many else [out_placements]
        results = []
        for i, (one, placement) in enumerate(zip(outs, places)):
            shape = tuple(shapes[i]) if shapes is not None else None
            results.append(from_local(one, mesh, placement, shape=shape) if isinstance(one, Tensor) else one)
        return type(out)(results) if many else results[0]

    return mapped


def _as_replicate(tensor: DTensor) -> DTensor:
    """Replicated inputs as R: the function may do different work on each rank."""
    layout = tensor._layout.base
    states = [REPLICATE if state is INVARIANT else state for state in layout.states]
    return convert(tensor, layout.with_states(states), "local_map")


_shown: list[Callable[[Any], Any]] = []


def show_functions(instead: Callable[[Any], Any]) -> None:
    """Applies users' autograd Functions to `instead(argument)` from now on: for whoever follows a program without
    values by a mode of functions, to which `apply` does not come."""
    _shown.append(instead)


def _returning_full(body: Callable) -> Callable:
    """Gathers what a Function has computed with DTensors that it holds, a module's weights: its operands are whole."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(body(*args, **kwargs), lambda one: one.full_tensor() if type(one) is DTensor else one)

    vars(run)["full"] = True
    return run


def register_function(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Makes a user's autograd Function correct on DTensors: inputs are gathered, it runs on whole tensors, and outputs
    are replicated.

    `Function.apply` does not reach `__torch_function__`, and the forward of a Function runs without gradients, so
    conversions inside it would leave no trace. To communicate less, also register a rule for `function.apply`.
    Idempotent; also a decorator.
    """
    for name in ("forward", "backward", "vjp"):
        body = getattr(function, name)
        if body is not getattr(torch.autograd.Function, name) and "full" not in vars(body):
            setattr(function, name, staticmethod(_returning_full(body)))
    if "_vescale_apply" in function.__dict__:
        return function
    original = function.apply
    inherited = getattr(function, "_vescale_apply", None)  # of the class that this one extends
    if inherited is not None and "apply" not in function.__dict__:
        original = MethodType(inherited.__func__, function)

    def apply(*args: Any, **kwargs: Any) -> Any:
        for instead in _shown:
            args = tuple(map(instead, args))
        kinds = set(map(type, args))
        if DTensor in kinds and not any(getattr(kind, "before_dtensor", False) for kind in kinds):
            return call(apply, *args, **kwargs)
        return original(*args, **kwargs)  # beside what has no values, function by function

    def gathered(*args: Any, **kwargs: Any) -> Any:
        return run_whole(apply, local=original)(*args, **kwargs)

    def on_shards(*args: Any) -> Any:
        """Runs a rule for `apply`: on plain shards, so that the backward finds plain ones, too."""
        return original(*[alias(argument) if type(argument) is DTensor else argument for argument in args])

    functools.update_wrapper(apply, original, assigned=("__doc__",), updated=())
    apply.__name__ = f"{function.__name__}.apply"
    vars(apply)["_local"] = on_shards
    setattr(function, "_vescale_apply", original)  # noqa: B010  # a class has no writable __dict__
    setattr(function, "apply", staticmethod(apply))  # noqa: B010
    vars(apply)["function"] = function
    late = late_rule_of(function)
    rule(apply)(lambda asked: (None if late is None else late(asked)) or decomposed(gathered))
    return function


# --- torch's own DTensor -----------------------------------------------------------


def to_torch(tensor: DTensor) -> TorchDTensor:
    """Returns torch's DTensor over the same local storage; differentiable, no copy.

    Raises PlacementError for a placement that torch's DTensor does not have (InterleavedShard, RaggedShard).
    """
    layout = tensor._layout.base
    for placement in layout.placements:
        if not isinstance(placement, (Shard, Replicate, Partial)):
            raise PlacementError(
                "to_torch",
                f"torch's DTensor has no {placement!r}",
                [repr(layout)],
                [("tensor.redistribute(...) to Shard or Replicate first", "an all-to-all or all-gather")],
            )
    # Gradients of torch's replicated tensors are replicated: I. One that is partial here would count n times.
    states = [INVARIANT if state is REPLICATE else state for state in layout.states]
    tensor = convert(tensor, layout.with_states(states), "to_torch")
    stride = torch.empty(layout.shape, device="meta").stride()
    return TorchDTensor.from_local(
        tensor.to_local(), layout.device_mesh, layout.placements, run_check=False, shape=torch.Size(layout.shape),
        stride=stride,
    )  # fmt: skip


def from_torch(tensor: TorchDTensor) -> DTensor:
    """Returns veScale's DTensor over the local storage of torch's; differentiable, no copy."""
    mesh = mesh_of(tensor.device_mesh)
    states = canonical_states("from_torch", tensor.placements, mesh, tensor.shape, replicated=INVARIANT)
    grads = [state.gradient.placement for state in states]
    return from_plain(tensor.to_local(grad_placements=grads), layout_of(mesh, states, tuple(tensor.shape)))
