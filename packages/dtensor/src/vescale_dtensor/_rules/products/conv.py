"""Convolution, pooling, resampling: functions of images, one sample at a time.

    batch sharded                       free
    weight's output channels sharded    output channels sharded
    input channels sharded on both      -> P (a bias then enters on the first rank only)
    grouped: whole groups sharded       free, with fewer groups per rank, in one piece or several
    pooling, resampling                 batch and channels free
    spatial dims                        whole: halos are not exchanged

Output sizes come from torch itself, run on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._layouts.layout import Layout
from ..._torch_private import _nn
from ..empty import guarded
from ..registry import Call, Operand, rule

_DIMS = {"1d": 1, "2d": 2, "3d": 3}


def output_shapes(call: Call, dtypes: Sequence[torch.dtype] = ()) -> tuple[list[tuple[int, ...]], bool]:
    """The global shapes of the results, and whether there is just one."""

    def meta(value):
        if isinstance(value, Operand):
            dtype = dtypes[value.index] if value.index < len(dtypes) else torch.float32
            return torch.empty(value.shape, dtype=dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(meta(item) for item in value)
        return value

    out = call.function(*map(meta, call.args), **{name: meta(value) for name, value in call.kwargs.items()})
    single = isinstance(out, Tensor)
    return [tuple(one.shape) for one in ([out] if single else out)], single


# --- convolution ---------------------------------------------------------------------


@rule(torch.conv1d, torch.conv2d, torch.conv3d)
def conv(call: Call) -> Signature | None:
    """x [b, c, ...], weight [o, c / groups, ...], bias [o] -> [b, o, ...]."""
    return _convolution(call, call.get(6, "groups", 1), transposed=False)


@rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def conv_transpose(call: Call) -> Signature | None:
    """x [b, c, ...], weight [c, o / groups, ...], bias [o] -> [b, o, ...]."""
    return _convolution(call, call.get(6, "groups", 1), transposed=True)


def _convolution(call: Call, groups: int, transposed: bool) -> Signature | None:
    x, weight = call.operands[:2]
    n = weight.ndim - 2
    shapes, _ = output_shapes(call)
    batch = ("b",) if x.ndim == n + 2 else ()
    window = (None,) * n
    if groups == 1:
        kernel = ("c", "o") if transposed else ("o", "c")
        channels, summed, whole, run = ("c", "o"), {"c"}, (), call.function
    else:
        kernel, channels, summed = ("g", None), ("g", "g"), ()
        whole = () if _keeps_groups(call, groups, len(batch), shapes[0][len(batch)]) else {"g"}
        run = _regrouped(call.function, len(batch), x.shape[len(batch)] // groups)
    inputs = [(*batch, channels[0], *window), (*kernel, *window)]
    addends = ()
    if len(call.operands) == 3:
        inputs.append((channels[1],))
        addends = (2,)
    return Signature(
        inputs, [(*batch, channels[1], *window)], summed=summed, linear=[(0,), (1,)], addends=addends,
        whole=whole, shapes=shapes, local=guarded(run, _bias if addends else None),
    )  # fmt: skip


def _bias(input: Tensor, weight: Tensor, bias: Tensor, *_, **__) -> Tensor:
    """Returns the sum of a convolution over no input channels."""
    return bias.reshape(-1, *[1] * (weight.ndim - 2))


def _keeps_groups(call: Call, groups: int, channel: int, out: int) -> bool:
    """True if every cut of the channels that the solver may choose gives each rank whole groups.

    It may cut them on each axis that shards anything: evenly, or as an operand brings it, in as many chunks as its
    segments or its dealing out have. A channel that is a group of its own, and gives one `out`, may lie anywhere.
    """
    if groups == call.operands[0].shape[channel] == out:
        return True
    chunks = {
        axis: call.mesh.sizes[axis]
        for operand in call.operands
        for axis, state in enumerate(operand.states)
        if state.kind == "S"
    }
    for operand, dim in zip(call.operands, (channel, 0, 0)):
        for axis in operand.layout.axes_of(dim):
            state = operand.states[axis]
            if state.units is not None:
                return False
            brought = state.groups * (call.mesh.sizes[axis] if state.order is None else len(state.order))
            chunks[axis] = lcm(chunks[axis], brought)
    return groups % prod(chunks.values()) == 0


def _regrouped(function: Callable, channel: int, per_group: int) -> Callable:
    """`function` with the number of groups that the local channels hold."""

    def run(input, weight, bias=None, *rest, **kwargs):
        groups = input.shape[channel] // per_group
        if len(rest) > 3:
            rest = (*rest[:3], groups, *rest[4:])
        else:
            kwargs["groups"] = groups
        return function(input, weight, bias, *rest, **kwargs)

    return run


# --- one sample, or one channel of one sample, at a time --------------------------------


def per_sample(call: Call, lead: int, linear: bool = False, dtypes: Sequence[torch.dtype] = ()) -> Signature:
    """All operands and results share their first `lead` dims, which are free; the others are whole."""
    shapes, single = output_shapes(call, dtypes)
    labels = [tuple(range(lead)) + (None,) * (operand.ndim - lead) for operand in call.operands]
    outs = [tuple(range(lead)) + (None,) * (len(shape) - lead) for shape in shapes]
    return Signature(
        labels, outs, linear=[tuple(range(len(labels)))] if linear else (), shapes=shapes, single=single,
        local=guarded(call.function),
    )  # fmt: skip


def _functions(*names: str) -> list[Callable]:
    owners = (F, torch, _nn)
    return [getattr(owner, name) for name in names for owner in owners if callable(getattr(owner, name, None))]


def _sized(*stems: str) -> list[Callable]:
    return _functions(*[stem.replace("Nd", suffix) for stem in stems for suffix in _DIMS])


@rule(
    _sized(
        "max_poolNd", "max_poolNd_with_indices", "adaptive_max_poolNd", "adaptive_max_poolNd_with_indices", "lp_poolNd"
    )
)
def pool(call: Call) -> Signature:
    """Batch and channels are free; the indices count within one channel."""
    x = call.operands[0]
    return per_sample(call, x.ndim - _name_dims(call))


@rule(_sized("avg_poolNd", "adaptive_avg_poolNd"))
def average_pool(call: Call) -> Signature:
    return per_sample(call, call.operands[0].ndim - _name_dims(call), linear=True)


def _name_dims(call: Call) -> int:
    return _POOL_DIMS[call.function]


_POOL_DIMS = {
    function: n
    for suffix, n in _DIMS.items()
    for stem in ("max_poolNd", "max_poolNd_with_indices", "adaptive_max_poolNd", "adaptive_max_poolNd_with_indices",
                 "lp_poolNd", "avg_poolNd", "adaptive_avg_poolNd", "max_unpoolNd")
    for function in _functions(stem.replace("Nd", suffix))
}  # fmt: skip


@rule(_sized("max_unpoolNd"))
def max_unpool(call: Call) -> Signature:
    """Values and indices together: batch and channels are free."""
    x = call.operands[0]
    return per_sample(call, x.ndim - _name_dims(call), dtypes=(torch.float32, torch.int64))


@rule(F.interpolate, F.upsample, F.upsample_nearest, F.upsample_bilinear, exact=True)
def interpolate(call: Call) -> Signature:
    """Every mode is linear in the pixels; batch and channels are free. The scale is part of the decision."""
    return per_sample(call, 2, linear=True)


@rule(torch.pixel_shuffle, torch.pixel_unshuffle)
def pixel_shuffle(call: Call) -> Signature:
    """Channels become space: only what is before them is free."""
    return per_sample(call, call.operands[0].ndim - 3, linear=True)


@rule(_functions("channel_shuffle", "native_channel_shuffle"))
def channel_shuffle(call: Call) -> Signature:
    return per_sample(call, 1, linear=True)


@rule(F.unfold, F.fold)
def unfold(call: Call) -> Signature:
    x = call.operands[0]
    batched = x.ndim == (4 if call.function is F.unfold else 3)
    return per_sample(call, int(batched), linear=True)


@rule(F.local_response_norm)
def local_response_norm(call: Call) -> Signature:
    """A window of channels: only the batch is free."""
    return per_sample(call, 1)


@rule(F.glu, _nn.glu)
def glu(call: Call) -> Signature:
    """The two halves of `dim` meet: it is whole."""
    x = call.operands[0]
    dim = call.get(1, "dim", -1) % x.ndim
    labels = tuple(None if d == dim else d for d in range(x.ndim))
    shape = tuple(size // 2 if d == dim else size for d, size in enumerate(x.shape))
    return Signature([labels], [labels], shapes=[shape])


@rule(torch.prelu, Tensor.prelu)
def prelu(call: Call) -> Signature | None:
    """x [b, c, ...], one weight or one per channel."""
    x, weight = call.operands
    labels = tuple(range(x.ndim))
    if weight.layout.numel == 1:
        return Signature([labels, (None,) * weight.ndim], [labels])
    return Signature([labels, (1,)], [labels]) if x.ndim > 1 and weight.ndim == 1 else None


@rule(F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
def grid_sample(call: Call) -> Signature:
    """x [b, c, ...], grid [b, ..., n]: batch and channels are free, linear in x."""
    x, grid = call.operands
    window = (None,) * (x.ndim - 2)
    shape = (*x.shape[:2], *grid.shape[1:-1])
    return Signature(
        [("b", "c", *window), ("b", *window, None)], [("b", "c", *window)], linear=[(0,)], shapes=[shape],
        local=guarded(call.function),
    )  # fmt: skip


@rule(F.affine_grid)
def affine_grid(call: Call) -> Signature:
    """theta [b, n, n + 1], size (b, c, ...) -> [b, ..., n]; the local size has the local batch."""
    theta = call.operands[0]
    size = tuple(call.get(1, "size"))
    align = call.get(2, "align_corners")

    def local(outs: tuple[Layout, ...]) -> Callable:
        mine = (outs[0].local_shape[0], *size[1:])
        return guarded(lambda theta, *_, **__: F.affine_grid(theta, mine, align))(outs)

    return Signature(
        [("b", None, None)], [("b", *(None,) * (len(size) - 1))], linear=[(0,)],
        shapes=[(*theta.shape[:1], *size[2:], len(size) - 2)], local=local,
    )  # fmt: skip


@rule(torch.bilinear)
def bilinear(call: Call) -> Signature:
    """x1 [..., i], x2 [..., j], weight [o, i, j], bias [o] -> [..., o]."""
    x1, _, weight = call.operands[:3]
    batch = tuple(("b", d) for d in range(x1.ndim - 1))
    bias = [("o",)] if len(call.operands) == 4 else []
    return Signature(
        [(*batch, "i"), (*batch, "j"), ("o", "i", "j"), *bias], [(*batch, "o")], summed={"i", "j"},
        linear=[(0,), (1,), (2,)], addends=(3,) if bias else (), shapes=[(*x1.shape[:-1], weight.shape[0])],
        local=guarded(call.function, (lambda x1, x2, weight, bias: bias) if bias else None),
    )  # fmt: skip
