"""Linear layers whose three products are of float8 numbers, by torch's scaled product.

    recipe            input, weight   gradient of the output   one scale for               the scale
    fp8_tensorwise    e4m3            e5m2                     a tensor                    dtype's largest / tensor's
    fp8_rowwise       e4m3            e4m3                     what one sum runs over      that, down to a power of two

These are torchao's recipes `tensorwise` and `rowwise` (`torchao.float8.Float8LinearConfig.from_recipe_name`). e4m3 has
a bit of mantissa more, e5m2 the range that the gradients of a whole tensor need (arXiv:2209.05433); those of one row
need less. Scales are dynamic: of the very tensor that is multiplied.

A scale is of the global tensor: the largest number is looked for over all mesh axes that cut what the scale is for. So
scales and float8 numbers are one device's on every mesh, given the same operands, and products are as in the dtype in
which the layer computes: one device's where no sum is cut. Numbers of a sum's parts are not those of the sum: no
operand is partial, nor is the gradient of the output (`Signature.whole_gradient`).

Zeros fill dims that are no multiples of 16, which kernels on accelerators ask for; they change no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..._communication import events
from ..._communication.collectives import all_gather
from ..._dispatch.signature import Signature
from ..._errors import OperatorError
from ..._layouts.layout import Layout
from ..._layouts.mesh import Mesh
from ..._layouts.state import PARTIAL
from ..._torch_private import DisableTorchFunction, _scaled_mm

E4M3 = torch.float8_e4m3fn
ALIGNED = 16
LEAST = 1e-12
"""What the largest number of a tensor is taken for at least, as torchao does: one of zeros has a scale."""
_EXPONENT = 0x7F800000  # the bits of a float32 that are its power of two


class Recipe(NamedTuple):
    """by_row: one scale per row of what is contracted, else one. gradient: the dtype of the output's gradient."""

    by_row: bool
    gradient: torch.dtype


RECIPES: dict[str, Recipe] = {
    "fp8_tensorwise": Recipe(False, torch.float8_e5m2),
    "fp8_rowwise": Recipe(True, E4M3),
}

Dims = tuple[int, int]
"""Which dims of two operands a product contracts: 1 the last one, 0 all before it."""
OUTPUT, OF_INPUT, OF_WEIGHT = (1, 1), (1, 0), (0, 0)


class Float8(NamedTuple):
    """A tensor in float8, and its scale: one number, or one for each row of what is contracted; as many dims."""

    numbers: Tensor
    scale: Tensor


class Scaling(NamedTuple):
    """How one linear layer's operands are scaled. axes: of the mesh, that cut the rows of the input ("m"), the layer's
    outputs ("n") and its features ("k")."""

    recipe: Recipe
    mesh: Mesh
    axes: Mapping[str, tuple[int, ...]]

    def quantised(self, tensor: Tensor, names: str, along: int, dtype: torch.dtype, scale: Tensor | None) -> Float8:
        """Returns `tensor` in float8; `scale` is None where the pass forward has not asked for it.

        names: of its first dims, and of its last. along: what is contracted, as in `Dims`.
        Cost without a scale: an all-gather of one number, or one per row, over the axes that cut what a scale is for.
        """
        most = torch.finfo(dtype).max
        if scale is None:
            largest = self._largest(tensor, names, along)
            scale = (most / largest.double().clamp(min=LEAST)).float()
            if self.recipe.by_row:
                scale = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
        return Float8((tensor.float() * scale).clamp_(-most, most).to(dtype), scale)

    def _largest(self, tensor: Tensor, names: str, along: int) -> Tensor:
        last = tensor.ndim - 1
        dims = tuple(range(tensor.ndim) if not self.recipe.by_row else (last,) if along else range(last))
        axes = {axis for name in (names[along] if self.recipe.by_row else names) for axis in self.axes[name]}
        kept = [1 if d in dims else size for d, size in enumerate(tensor.shape)]
        largest = tensor.abs().amax(dims, keepdim=True) if tensor.numel() else tensor.new_zeros(kept)
        for axis in sorted(axes):
            largest = all_gather(largest, self.mesh, (axis,)).amax(0)
        return largest


Multiply = Callable[[Float8, Float8, Dims, torch.dtype], Tensor]


def by_tensor(left: Float8, right: Float8, dims: Dims, dtype: torch.dtype) -> Tensor:
    """The product by torch's kernel, [rows, columns]."""
    units = [each.scale.reciprocal().view(()) for each in (left, right)]
    return _multiplied(left, right, dims, units, dtype)


def by_row(left: Float8, right: Float8, dims: Dims, dtype: torch.dtype) -> Tensor:
    """Likewise, scaled afterwards: torch's kernel that takes scales of rows is slower but for the output, and to
    multiply by powers of two rounds nothing. The numbers' own product may be more than float16 holds."""
    one = left.scale.new_ones(())
    wide = torch.float32 if dtype is torch.float16 else dtype
    return unscaled(_multiplied(left, right, dims, [one, one], wide), left, right, dims).to(dtype)


def unscaled(product: Tensor, left: Float8, right: Float8, dims: Dims) -> Tensor:
    """The product of two operands' numbers, [..., columns], as that of the operands."""
    rows = left.scale if dims[0] and product.ndim == left.scale.ndim else left.scale.reshape(-1, 1)
    return product * rows.reciprocal() * right.scale.reciprocal().reshape(-1)


def _multiplied(left: Float8, right: Float8, dims: Dims, units: list[Tensor], dtype: torch.dtype) -> Tensor:
    one, other = (_rows(each.numbers, along) for each, along in zip((left, right), dims))
    rows, columns = one.shape[0], other.shape[0]
    if not (one.numel() and other.numel()):
        return units[0].new_zeros(rows, columns, dtype=dtype)
    one, other = _filled(one, 0), _filled(other, -columns % ALIGNED)
    made = _scaled_mm(one, other.t(), *units, out_dtype=dtype, use_fast_accum=dims == OUTPUT)
    return made if made.shape[1] == columns else made[:, :columns].contiguous()


def _rows(numbers: Tensor, along: int) -> Tensor:
    """[rows, contracted]."""
    numbers = numbers.reshape(-1, numbers.shape[-1])
    return numbers if along else numbers.t()


def _filled(numbers: Tensor, rows: int) -> Tensor:
    """The contracted dim, the last, filled up, and as many rows appended; contiguous."""
    columns = -numbers.shape[1] % ALIGNED
    return F.pad(numbers, (0, columns, 0, rows)) if rows or columns else numbers.contiguous()


class ScaledLinear(Function):
    """x [..., k], weight [n, k] -> [..., n], and both gradients. `multiply`: how the products are computed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scaling: Scaling, multiply: Multiply) -> Tensor:
        with DisableTorchFunction():
            events.set_cause("scales of linear")
            ctx.cause, ctx.scaling, ctx.multiply = events.current_cause(), scaling, multiply
            of_x = scaling.quantised(x, "mk", 1, E4M3, None)
            of_weight = scaling.quantised(weight, "nk", 1, E4M3, None)
            scales = () if scaling.recipe.by_row else (of_x.scale, of_weight.scale)  # both ways those of the tensor
            ctx.save_for_backward(x, weight, *scales)
            return multiply(of_x, of_weight, OUTPUT, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():
            rule = "what a linear layer quantises has no second derivative, and a graph of the gradient is asked for"
            remedies = [("create_graph=False", ""), ("Precision(products=None)", "for layers that a Policy names")]
            raise OperatorError("linear", rule, (), remedies)
        x, weight, *scales = ctx.saved_tensors  # with modes in sight: a checkpoint may compute them again
        scaling, multiply, (needs_x, needs_weight, *_) = ctx.scaling, ctx.multiply, ctx.needs_input_grad
        of_x, of_weight = scales or (None, None)
        with DisableTorchFunction():
            events.restore_cause(ctx.cause)
            dtype, rows_apart = scaling.recipe.gradient, scaling.recipe.by_row
            along = scaling.quantised(grad, "mn", 1, dtype, None) if needs_x or not rows_apart else None
            grad_x = grad_weight = None
            if needs_x:
                other = scaling.quantised(weight, "nk", 0, E4M3, of_weight)
                grad_x = multiply(along, other, OF_INPUT, x.dtype).view(x.shape)
            if needs_weight:
                across = scaling.quantised(grad, "mn", 0, dtype, None) if rows_apart else along
                other = scaling.quantised(x, "mk", 0, E4M3, of_x)
                grad_weight = multiply(across, other, OF_WEIGHT, weight.dtype).view(weight.shape)
            return grad_x, grad_weight, None, None


def scaling_of(products: str, out: Layout) -> Scaling:
    """Returns how operands are scaled by their places, which the layout of the output tells."""
    last = out.ndim - 1
    rows = tuple(axis for axis, state in enumerate(out.states) if state.kind == "S" and state.dim < last)
    summed = tuple(axis for axis, state in enumerate(out.states) if state is PARTIAL)
    return Scaling(RECIPES[products], out.mesh, {"m": rows, "n": out.axes_of(last), "k": summed})


def lowered(signature: Signature, products: str) -> Signature:
    """Returns the signature of a linear layer whose products are of float8 numbers."""
    return replace(signature, linear=(), whole_gradient=True, local=partial(_local, products))


def _local(products: str, outs: tuple[Layout, ...]) -> Callable:
    scaling = scaling_of(products, outs[0])
    multiply = by_row if scaling.recipe.by_row else by_tensor

    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = input.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            input, weight = (one.to(torch.get_autocast_dtype(kind)) for one in (input, weight))
        if input.dtype is not weight.dtype:
            return F.linear(input, weight, bias)  # which says what is wrong
        out = ScaledLinear.apply(input, weight, scaling, multiply)
        return out if bias is None else out + bias.to(out.dtype)

    return run
