"""Normalisation by channel: batch_norm, group_norm, instance_norm.

    batch_norm, training    batch or spatial dims sharded: statistics of the GLOBAL batch, two small all-reduces;
                            channels sharded: local. Running statistics are updated in place, in their layout
    batch_norm, eval        local
    group_norm              batch sharded: local; channels sharded between groups: local
    instance_norm           batch and channels sharded: local
    partial input           reduces first
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._conversions.conversion import is_alias
from ..._conversions.convert import convert_operand
from ..._dispatch.signature import Signature, solve
from ..._layouts.layout import Layout, layout_of
from ..._layouts.mesh import Mesh
from ..._layouts.state import INVARIANT
from ..._tensor.tensor import DTensor
from ..registry import Call, Operand, decomposed, rule
from ..solvers.parts import attached, plain, reduced, splits
from .reduce import upcast


def _labels(x: Operand) -> tuple:
    return ("b", "c", *[("s", d) for d in range(x.ndim - 2)])


def _by_channel(call: Call, x: Operand, whole: set, **options) -> Signature:
    inputs = [_labels(x) if operand is x else ("c",) for operand in call.operands]
    options.setdefault("local", lambda _: _or_empty(call.function))
    return Signature(inputs, [_labels(x)], whole=whole, **options)


def _or_empty(function: Callable) -> Callable:
    """`function`, also on an empty shard, which torch's kernels refuse; every operand stays in the graph."""

    def run(input: Tensor, *args, **kwargs) -> Tensor:
        if input.numel():
            return function(input, *args, **kwargs)
        out = input.clone()
        for other in (*args, *kwargs.values()):
            if isinstance(other, Tensor):
                out = out + other.view(1, -1, *[1] * (input.ndim - 2))
        return out

    return run


# --- batch_norm ------------------------------------------------------------------------


def _batch_norm_arguments(call: Call) -> dict:
    """Returns arguments by name, for `F.batch_norm` and for `torch.batch_norm`."""
    names = ["running_mean", "running_var", "weight", "bias", "training"]
    if call.function is torch.batch_norm:
        names = ["weight", "bias", "running_mean", "running_var", "training"]
    return {"input": call.get(0, "input")} | {name: call.get(i, name) for i, name in enumerate(names, 1)}


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(call: Call):
    given = _batch_norm_arguments(call)
    x = given["input"]
    if not isinstance(x, Operand) or x.ndim < 2 or any(o.ndim != 1 for o in call.operands if o is not x):
        return None
    if not given["training"]:
        return _by_channel(call, x, whole=set())
    statistics = [dim for dim in range(x.ndim) if dim != 1]
    if not splits(x.layout, statistics):
        signature = _by_channel(call, x, whole=set(_labels(x)) - {"c"})
        decision = solve(call, signature)
        if decision is not None and _written_where_they_are(call, decision, given):
            return decision
    return decomposed(_torch_batch_norm if call.function is torch.batch_norm else _batch_norm)


def _written_where_they_are(call: Call, decision, given: dict) -> bool:
    """True if the running statistics reach the kernel themselves, not as converted copies."""
    for name in ("running_mean", "running_var"):
        operand = given[name]
        target = decision.targets[operand.index] if operand is not None else None
        if target is not None and not is_alias(operand.layout, target):
            return False
    return True


def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _batch_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
) -> DTensor:  # fmt: skip
    """Training, on statistics over all shards."""
    x = upcast(reduced(input, "batch_norm"))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    count = prod(x.shape[dim] for dim in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    mean = reduced(x.mean(dims, keepdim=True), "batch_norm")
    distance = x - mean
    variance = reduced((distance * distance).mean(dims, keepdim=True), "batch_norm")
    # Before the last that is kept for backward, with which a checkpoint ends its recomputation: so does torch's kernel.
    with torch.no_grad():
        for running, value in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None and count:  # an empty batch says nothing
                _update(running, value, momentum)
    out = distance * (variance + eps).rsqrt()
    if weight is not None:
        out = out * _channelwise(weight, x._layout.mesh, x.ndim)
    if bias is not None:
        out = out + _channelwise(bias, x._layout.mesh, x.ndim)
    out = out if out.dtype == input.dtype else out.to(input.dtype)
    return out.contiguous() if out.ndim < 4 else out  # as torch's kernel, which keeps channels that are the innermost


def _channelwise(values: Tensor, mesh: Mesh, ndim: int) -> DTensor:
    """[C] as [1, C, 1, ...]; plain values are I."""
    layout = values._layout.base if type(values) is DTensor else layout_of(mesh, (INVARIANT,) * mesh.ndim, values.shape)
    rest = (1,) * (ndim - 2)
    return attached(plain(values).view(1, -1, *rest), _with_dim(layout, 1, (1, *layout.shape, *rest)))


def _with_dim(layout: Layout, dim: int, shape) -> Layout:
    """The layout with its one sharded dim as `dim` of another shape."""
    return layout_of(layout.mesh, [s.at(dim) if s.kind == "S" else s for s in layout.states], shape)


def _update(running: Tensor, value: DTensor, momentum: float) -> None:
    """running = (1 - momentum) * running + momentum * value, in the layout of `running`."""
    layout = value._layout.base
    flat = attached(plain(value).reshape(-1), _with_dim(layout, 0, (layout.shape[1],)))
    if type(running) is DTensor:
        running.mul_(1 - momentum).add_(flat, alpha=momentum)
        return
    whole = convert_operand(flat, flat._layout.base, flat._layout.base.invariant, "batch_norm")
    running.mul_(1 - momentum).add_(plain(whole), alpha=momentum)


# --- group_norm, instance_norm ------------------------------------------------------------


@rule(F.group_norm, torch.group_norm)
def group_norm(call: Call):
    """num_groups counts the whole; a shard that starts and ends between groups has its part of them."""
    x, groups = call.get(0, "input"), call.get(1, "num_groups")
    if not isinstance(x, Operand) or x.ndim < 2 or any(o.ndim != 1 for o in call.operands if o is not x):
        return None
    if x.shape[1] % groups or prod(x.shape) // groups <= 1:
        return None  # torch complains
    spatial = set(_labels(x)) - {"b", "c"}

    def local(outs: tuple[Layout, ...]):
        layout = outs[0]
        held = groups // prod(layout.mesh.sizes[axis] for axis in layout.axes_of(1))

        def run(input, num_groups, weight=None, bias=None, eps=1e-5, *rest) -> Tensor:
            return torch.group_norm(input, held, weight, bias, eps)

        return _or_empty(run)

    decision = solve(call, _by_channel(call, x, spatial, local=local))
    if decision is not None and _on_boundaries(decision.out, groups):
        return decision
    return _by_channel(call, x, spatial | {"c"}, local=local)


def _on_boundaries(layout: Layout, groups: int) -> bool:
    """True if every shard of the channels is a whole number of groups."""
    cuts = [layout.states[axis] for axis in layout.axes_of(1)]
    count = prod(layout.mesh.sizes[axis] for axis in layout.axes_of(1))
    return groups % count == 0 and all(cut.in_one_piece and cut.units is None for cut in cuts)


@rule(F.instance_norm, torch.instance_norm)
def instance_norm(call: Call):
    """Decides instance norm; with running statistics to update, the fallback does."""
    names = ["running_mean", "running_var", "weight", "bias", "use_input_stats"]
    if call.function is torch.instance_norm:
        names = ["weight", "bias", "running_mean", "running_var", "use_input_stats"]
    given = {name: call.get(i, name) for i, name in enumerate(names, 1)}
    x, measured = call.get(0, "input"), given["use_input_stats"] in (None, True)
    if not isinstance(x, Operand) or x.ndim < 3 or (measured and given["running_mean"] is not None):
        return None
    return _by_channel(call, x, whole=set(_labels(x)) - {"b", "c"} if measured else set())
