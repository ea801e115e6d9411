"""The numbers of torch's CUDA kernels, in plain torch ops: Philox4x32-10, and what cuRAND and ATen make of its words.

(Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011. cuRAND: curand_uniform.h,
curand_normal.h. ATen: cuda/DistributionTemplates.h, core/TransformationHelper.h.) A word w of 32 bits is the float
w 2^-32 + 2^-33, in (0, 1]; two words x, y are the double (x ^ y 2^21) 2^-53 + 2^-54. Normals are Box and Muller's,
sine first: a pair from two words, or from four in double. What comes after is ATen's, fused multiply-adds included.

Uniform floats, Bernoulli numbers and integers are torch's own to the bit. Where a logarithm, sine, tangent or
exponential is, the device has its own approximations (`__sinf`, `__logf`, ...): on other devices the numbers differ in
the last places, about 1e-6 relative.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._philox.transforms import largest, unsigned_remainder

_MULTIPLIERS, _WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_LOW = (1 << 32) - 1
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def words(thread: Tensor, counter: Tensor, seed: int | Tensor) -> Words:
    """The four words, int64 of the same shape, of a call."""
    a, b, c, d = (half for word in (counter, thread) for half in (word & _LOW, (word >> 32) & _LOW))
    for turn in range(ROUNDS):
        first, second = ((seed >> 32 * at) + turn * weyl & _LOW for at, weyl in enumerate(_WEYL))
        high_a, low_a = _multiplied(a, _MULTIPLIERS[0])
        high_c, low_c = _multiplied(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def _multiplied(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The halves of a product of two words, which has 64 bits: one more than int64 is glad of."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


@dataclass(frozen=True)
class Recipe:
    """Turns random words into numbers of one kind, with the kernel's parameters.

        uniform         from, to - from, to         exponential   -1 / lambda
        bernoulli       p                           geometric     1 - p, of doubles log(1 - p)
        normal          mean, std                   cauchy        median, sigma
        log_normal      mean, std                   integers      from, and how many (modulo 2^64, 0 being all)

    wide: a number takes two words, or a pair of normals four.
    """

    kind: str
    wide: bool
    numbers: tuple[float, ...] = ()
    integers: tuple[int, ...] = ()

    @property
    def lanes(self) -> int:
        """Numbers from one call."""
        return 2 if self.wide else 4

    def made(self, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of the lanes of calls, in torch ops, to be cast to `dtype`."""
        return _MADE[self.kind](self, found, lane, dtype)


def recipe(function: Callable, args: tuple, kwargs: dict, dtype: torch.dtype) -> Recipe:
    """Returns the recipe of `function(tensor of dtype, *args, **kwargs)`, a fill of torch's or `fused_dropout_`."""
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return _RECIPES[function](dtype, *args, **kwargs)


def fused_dropout_(target: Tensor, p: float) -> Tensor:
    """Zeros and ones, ones with probability 1 - p, as `torch.native_dropout` of a tensor like `target` keeps."""
    return target.copy_(torch.native_dropout(torch.ones_like(target), p, True)[1])


# --- recipes ----------------------------------------------------------------------


def _held(value: float, dtype: torch.dtype) -> float:
    """A parameter as the kernel holds it: in double for double, else in float."""
    return torch.tensor(value, dtype=torch.float64 if dtype == torch.float64 else torch.float32).item()


def _uniform(dtype: torch.dtype, start: float = 0.0, stop: float = 1.0, **named: float) -> Recipe:
    low, high = (torch.tensor(named.get(name, value), dtype=dtype) for name, value in (("from", start), ("to", stop)))
    return Recipe("uniform", dtype == torch.float64, (low.item(), (high - low).item(), high.item()))


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Recipe:
    return Recipe("bernoulli", dtype == torch.float64, (_held(p, dtype),))


def _dropout(dtype: torch.dtype, p: float) -> Recipe:
    return Recipe("bernoulli", False, (_held(1 - p, torch.float32),))


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Recipe:
    return Recipe("normal", dtype == torch.float64, (_held(mean, dtype), _held(std, dtype)))


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Recipe:
    return Recipe("log_normal", dtype == torch.float64, (_held(mean, dtype), _held(std, dtype)))


def _exponential(dtype: torch.dtype, lambd: float = 1.0) -> Recipe:
    return Recipe("exponential", dtype == torch.float64, (_held(-1 / _held(lambd, dtype), dtype),))


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Recipe:
    return Recipe("cauchy", dtype == torch.float64, (_held(median, dtype), _held(sigma, dtype)))


def _geometric(dtype: torch.dtype, p: float) -> Recipe:
    if dtype == torch.float64:
        return Recipe("geometric", True, (math.log1p(-p),))
    return Recipe("geometric", False, ((1 - torch.tensor(p, dtype=torch.float32)).item(),))


def _random(dtype: torch.dtype, *bounds: int | None, **named: int | None) -> Recipe:
    given = dict(zip(("from", "to") if len(bounds) == 2 else ("to",), bounds)) | named
    if not given:
        return _integers(dtype in (torch.int64, torch.float64), 0, largest(dtype) + 1)
    start = given.get("from", 0)
    count = (largest(dtype) + 1 if given.get("to") is None else given["to"]) - start
    return _integers(count >= 1 << 28, start, count)


def _integers(wide: bool, start: int, count: int) -> Recipe:
    count %= 1 << 64
    return Recipe("integers", wide, integers=(start, count - (1 << 64) if count >> 63 else count))


_RECIPES: dict[Callable, Callable[..., Recipe]] = {
    Tensor.uniform_: _uniform,
    Tensor.bernoulli_: _bernoulli,
    Tensor.normal_: _normal,
    Tensor.log_normal_: _log_normal,
    Tensor.exponential_: _exponential,
    Tensor.cauchy_: _cauchy,
    Tensor.geometric_: _geometric,
    Tensor.random_: _random,
    fused_dropout_: _dropout,
}


# --- numbers ----------------------------------------------------------------------


def _picked(values: tuple[Tensor, ...], lane: Tensor) -> Tensor:
    return torch.stack(values, -1).gather(-1, lane.unsqueeze(-1)).squeeze(-1)


def _float(word: Tensor) -> Tensor:
    return word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)


def _double(x: Tensor, y: Tensor) -> Tensor:
    return (x ^ y << 21).to(torch.float64).mul_(2.0**-53).add_(2.0**-54)


def _uniform_numbers(own: Recipe, found: Words, lane: Tensor) -> Tensor:
    if own.wide:
        return _double(_picked(found[::2], lane), _picked(found[1::2], lane))
    return _float(_picked(found, lane))


def _normal_numbers(own: Recipe, found: Words, lane: Tensor) -> Tensor:
    if own.wide:
        x0, x1, y0, y1 = found
        u, v = _double(x0, x1), (y0 ^ y1 << 21).to(torch.float64).mul_(2.0**-52).add_(2.0**-53).mul_(math.pi)
    else:
        turn = (torch.tensor(2.0**-32) * torch.tensor(2 * math.pi)).item()  # multiplied as floats
        u, y = _float(_picked(found[::2], lane // 2)), _picked(found[1::2], lane // 2).to(torch.float32)
        v = fused(y, turn, turn / 2)
    return torch.where(lane % 2 == 0, v.sin(), v.cos()).mul_(u.log_().mul_(-2).sqrt_())


def fused(x: Tensor, factor: float, summand: float) -> Tensor:
    """x * factor + summand, rounded once, in x's type; factor and summand are numbers of that type.

    In float32 by way of float64, where the product is exact and the sum is rounded to odd (Boldo, Melquiond:
    Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd, 2008); in float64 twice.
    """
    product = x.to(torch.float64) * factor
    total = product + summand
    if x.dtype == torch.float64:
        return total
    back = total - product
    error = (product - (total - back)) + (summand - back)
    bits = total.view(torch.int64)
    odd = bits + torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where((error != 0) & (bits & 1 == 0), odd, bits).view(torch.float64).to(x.dtype)


def _made_uniform(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    low, width, high = own.numbers
    value = fused(_uniform_numbers(own, found, lane), width, low).to(dtype)
    return torch.where(value == high, low, value)


def _made_bernoulli(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    return _uniform_numbers(own, found, lane) < own.numbers[0]


def _made_normal(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    mean, std = own.numbers
    return fused(_normal_numbers(own, found, lane), std, mean)


def _made_log_normal(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    return _made_normal(own, found, lane, dtype).exp_()


def _made_exponential(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    value, epsilon = _uniform_numbers(own, found, lane), 2.0**-53 if own.wide else 2.0**-24
    return torch.where(value >= 1 - epsilon, -epsilon, value.log()).mul_(own.numbers[0])


def _made_cauchy(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    median, sigma = own.numbers
    value = _uniform_numbers(own, found, lane)
    value = value if own.wide else value.clamp_(2.0**-23, 1 - 2.0**-23)
    return fused(value.sub_(0.5).mul_(math.pi).tan_(), sigma, median)


def _made_geometric(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    value, failed = _uniform_numbers(own, found, lane).log_(), own.numbers[0]
    return value.div_(failed if own.wide else torch.tensor(failed).log()).ceil_()


def _made_integers(own: Recipe, found: Words, lane: Tensor, dtype: torch.dtype) -> Tensor:
    start, count = own.integers
    if not own.wide:
        return _picked(found, lane) % count + start
    value = _picked(found[::2], lane) << 32 | _picked(found[1::2], lane)
    return (unsigned_remainder(value, count % (1 << 64)) if count else value) + start


_MADE: dict[str, Callable[[Recipe, Words, Tensor, torch.dtype], Tensor]] = {
    "uniform": _made_uniform,
    "bernoulli": _made_bernoulli,
    "normal": _made_normal,
    "log_normal": _made_log_normal,
    "exponential": _made_exponential,
    "cauchy": _made_cauchy,
    "geometric": _made_geometric,
    "integers": _made_integers,
}


def told(made: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    """The recipe's numbers and integers on the device; kept, for the host waits for a copy."""
    return (
        _copied(array("d", made.numbers).tobytes(), torch.float64, device),
        _copied(array("q", made.integers).tobytes(), torch.int64, device),
    )


@lru_cache(maxsize=256)
def _copied(values: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8).view(dtype).to(device)
