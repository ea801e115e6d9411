"""Elementwise functions, with broadcasting.

sharded inputs      stay sharded, the others are sliced or used whole
partial inputs      P + P -> P; linear in one P (the others R) -> P; anything else reduces first
in place            self keeps its layout, the others are converted to it
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dispatch.signature import Signature
from ..._torch_private import _special
from ..registry import TABLE, Call, Decision, Operand, both, decomposed, rule
from ..traits import ELEMENTWISE, Trait
from .fresh import zeroed

# f(x) with f not linear: a partial input is reduced first.
NONLINEAR = """abs absolute acos acosh arccos arccosh angle arcsin arcsinh arctan arctanh asin asinh atan atanh atan2
    arctan2 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp
    clamp_max clamp_min clip copysign cos cosh digamma eq erf erfc erfinv exp exp2 expm1 fix float_power floor
    floor_divide
    fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0 igamma igammac isclose isfinite isinf isnan
    isneginf isposinf isreal ldexp le less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit lt maximum minimum mvlgamma nan_to_num ne nextafter not_equal
    polygamma pow reciprocal relu remainder round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh
    trunc xlogy addcdiv gcd lcm threshold celu selu polar""".split()
# f(x) linear in x: partial stays partial.
LINEAR = "neg negative positive conj_physical resolve_conj resolve_neg deg2rad rad2deg".split()
LINEAR_VIEWS = [*both("conj", "real", "imag"), Tensor.real.__get__, Tensor.imag.__get__]
_DUNDER = {
    "nonlinear": "and or xor lshift rshift floordiv mod pow rpow rfloordiv rmod eq ne lt le gt ge invert abs "
    "iand ior ixor ilshift irshift ifloordiv imod ipow rand ror rxor rlshift rrshift".split(),
    "add": "add radd iadd sub rsub isub".split(),
    "mul": "mul rmul imul".split(),
    "div": "truediv rtruediv itruediv div rdiv idiv".split(),
}
_FUNCTIONAL = """relu relu_ relu6 elu elu_ selu selu_ celu celu_ gelu silu mish sigmoid logsigmoid hardswish hardsigmoid
    hardtanh hardtanh_ leaky_relu leaky_relu_ softplus softsign softshrink hardshrink tanh tanhshrink threshold
    threshold_""".split()
# Everything in torch.special but these works element by element.
_SPECIAL = [
    getattr(_special, name)
    for name in dir(_special)
    if name.startswith("special_") and name not in ("special_softmax", "special_log_softmax", "special_logsumexp")
]


def broadcast(operands: list[Operand]) -> tuple[list[tuple], tuple, tuple[int, ...]] | None:
    """Labels of each operand and of the result under broadcasting, and the result's shape.

    Labels count dims from the right; a dim of size 1 that is stretched has none.
    None when the shapes do not broadcast.
    """
    ndim = max((operand.ndim for operand in operands), default=0)
    shape = [1] * ndim
    for operand in operands:
        for d, size in enumerate(operand.shape):
            at = ndim - operand.ndim + d
            if size != 1:
                if shape[at] not in (1, size):
                    return None
                shape[at] = size
    return (
        [labels_for(operand, shape) for operand in operands],
        tuple(range(-ndim, 0)),
        tuple(shape),
    )


def labels_for(operand: Operand, shape) -> tuple:
    """The operand's dims in a broadcast result of `shape`."""
    offset = len(shape) - operand.ndim
    return tuple(d - operand.ndim if size == shape[offset + d] else None for d, size in enumerate(operand.shape))


def elementwise(call: Call, linear=(), addends=()) -> Signature | None:
    found = broadcast(call.operands)
    if found is None:
        return None
    inputs, output, shape = found
    return Signature(inputs, [output], linear=linear, addends=addends, shapes=[shape])


def _methods(*names: str) -> list:
    return [getattr(Tensor, f"__{name}__") for name in names if hasattr(Tensor, f"__{name}__")]


def _namespace(owner, *names: str) -> list:
    return [getattr(owner, name) for name in names if hasattr(owner, name)]


@rule(both(*NONLINEAR), _methods(*_DUNDER["nonlinear"]), _namespace(F, *_FUNCTIONAL), _SPECIAL, traits=ELEMENTWISE)
def nonlinear(call: Call):
    return elementwise(call)


@rule(torch.frexp, Tensor.frexp, traits=ELEMENTWISE)
def frexp(call: Call):
    """Mantissa and exponent."""
    labels = tuple(range(call.operands[0].ndim))
    return Signature([labels], [labels, labels], single=False)


@rule(torch.complex, traits=ELEMENTWISE)
def complex_pair(call: Call):
    """real + i imag: linear in the two together."""
    return elementwise(call, linear=[(0, 1)])


@rule(LINEAR_VIEWS, traits=ELEMENTWISE | Trait.LINEAR | Trait.VIEW)
@rule(both(*LINEAR), _methods("neg", "pos"), Tensor.clone, torch.clone, traits=ELEMENTWISE | Trait.LINEAR)
def linear(call: Call):
    return elementwise(call, linear=[(0,)])


@rule(both("add", "sub", "subtract", "rsub"), _methods(*_DUNDER["add"]), traits=ELEMENTWISE)
def add(call: Call):
    """P + P -> P, and a replicated addend enters on the first rank; a number added to P is not linear."""
    both_tensors = isinstance(call.get(0, "input"), Operand) and isinstance(call.get(1, "other"), Operand)
    return elementwise(call, linear=[(0, 1)] if both_tensors else ())


@rule(both("mul", "multiply"), _methods(*_DUNDER["mul"]), traits=ELEMENTWISE | Trait.LINEAR)
def mul(call: Call):
    return elementwise(call, linear=[(i,) for i in range(len(call.operands))])


@rule(both("div", "divide", "true_divide"), _methods(*_DUNDER["div"]), traits=ELEMENTWISE)
def div(call: Call):
    """Linear in the numerator, without rounding."""
    if call.kwargs.get("rounding_mode") is not None or call.name in ("__rtruediv__", "__rdiv__"):
        return elementwise(call)
    first_is_tensor = isinstance(call.get(0, "input"), Operand)
    return elementwise(call, linear=[(0,)] if first_is_tensor else ())


@rule(both("addcmul"), traits=ELEMENTWISE)
def addcmul(call: Call):
    """input + value * a * b."""
    return elementwise(call, linear=[(0, 1), (0, 2)])


@rule(both("lerp"), traits=ELEMENTWISE)
def lerp(call: Call):
    return elementwise(call, linear=[(0, 1)])


@rule(torch.where, Tensor.where, traits=ELEMENTWISE)
def where(call: Call):
    """Linear in the two branches together, when both are tensors."""
    if len(call.operands) < 3:
        return elementwise(call) if len(call.args) + len(call.kwargs) == 3 else None  # where(condition) is nonzero
    first = 0 if call.function is torch.where else 1
    condition = {0: 0, 1: 1}[first]
    return elementwise(call, linear=[tuple(i for i in range(3) if i != condition)])


@rule(both("masked_fill"), traits=ELEMENTWISE)
def masked_fill(call: Call):
    """The mask is any, the fill a number or 0-dim tensor."""
    return elementwise(call)


_CASTS = "float double half bfloat16 cfloat cdouble chalf".split()
_ROUNDING_CASTS = "int long short char byte bool".split()


@rule([getattr(Tensor, name) for name in _CASTS], traits=ELEMENTWISE | Trait.LINEAR)
def cast(call: Call):
    return elementwise(call, linear=[(0,)])


@rule([getattr(Tensor, name) for name in _ROUNDING_CASTS], traits=ELEMENTWISE)
def rounding_cast(call: Call):
    """Casts to an integer or bool: not linear, a partial input reduces first."""
    return elementwise(call)


_SAME = "to type_as cpu cuda contiguous type to_dense".split()


@rule([getattr(Tensor, name) for name in _SAME], traits=ELEMENTWISE)
def to(call: Call):
    dtypes = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, torch.dtype)]
    floating = all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    if len(call.operands) > 1:  # .to(other), .type_as(other): only the other's dtype and device count
        return decomposed(_to_other)
    if call.function is Tensor.type:
        if len(call.args) + len(call.kwargs) == 1:
            return Decision()  # asks for the type's name
        floating = floating and bool(dtypes)
    return elementwise(call, linear=[(0,)] if floating else ())


def _to_other(tensor: Tensor, other: Tensor, *args, **kwargs) -> Tensor:
    return tensor.to(other.device, other.dtype, *args, **kwargs)


@rule(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, traits=ELEMENTWISE | Trait.METADATA)
def filled_like(call: Call):
    """Like the input's layout; values do not count, so a partial input gives a whole result, and nothing moves."""
    if len(call.operands) > 1:
        return elementwise(call)
    run = zeroed(call.function) if call.function is torch.zeros_like else None
    return Decision(out=call.operands[0].layout.reduced, run=run)


@rule(Tensor.zero_, torch.zero_, traits=ELEMENTWISE | Trait.LINEAR)
def zero_(call: Call):
    """Zero is zero in any layout, partial included."""
    return elementwise(call, linear=[(0,)])


@rule(Tensor.fill_, torch.fill, torch.fill_, traits=ELEMENTWISE)
def fill(call: Call):
    return elementwise(call)


@rule(Tensor.copy_, traits=ELEMENTWISE)
def copy_(call: Call):
    """Linear in the tensor that is copied; a number is a fill, which is not: each rank would put it into its part."""
    return elementwise(call, linear=[(0, 1)] if len(call.operands) == 2 else ())


FUNCTIONS = frozenset(function for function, entry in TABLE.items() if Trait.ELEMENTWISE in entry.traits)
"""torch's elementwise functions. What users register later is not among them."""
