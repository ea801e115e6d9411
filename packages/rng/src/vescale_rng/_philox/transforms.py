"""Turns words into numbers, in the `philox` stream. The same bits on every device where no logarithm, sine or tangent
is.

An element at place i of the global tensor (`fill.py` says which that is) takes

    32 bits, half i % 2 (the low one first) of word i // 2      in float32 and narrower types
    64 bits, word i                                             in float64, and for integers: random_ in all types

A normal takes those of its pair, elements i - i % 2 and the next (Box, Muller 1958): radius from the first, angle from
the second; the even element is the cosine. With u = bits / 2^n, in [0, 1), of as many bits as the type has digits, and
v = (b + 1/2) / 2^n with the leading n = 31 or 53 bits b, in (0, 1]:

    uniform_      from + u (to - from)                  exponential_  -log(v) / lambda
    bernoulli_    1 where u < p, u of 24 or 53 bits     geometric_    ceil(log(v) / log(1 - p)), at least 1
    normal_       mean + std sqrt(-2 log(v)) cos(2 pi u), resp. sin
    log_normal_   its exponential                       cauchy_       median + sigma tan(pi (v - 1/2))
    random_       from + word mod (to - from)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._cpu.scratch import scratch

_MOST = (1 << 63) - 1
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def is_wide(function: Callable, dtype: torch.dtype) -> bool:
    """True if an element takes a whole word."""
    return function is Tensor.random_ or dtype == torch.float64


def numbers(function: Callable, args: tuple, kwargs: dict, words: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of an even count of elements, of which `words` (int64, 1-D) are the bits, the first place even.

    To be copied into a target of type `dtype`. `words` is overwritten.
    """
    return _TABLE[function](words, dtype, *args, **kwargs)


def _bits(words: Tensor, dtype: torch.dtype, digits: int) -> Tensor:
    """The leading digits of every element's bits, as numbers of type float64 or float32, in the memory of the words."""
    kinds = (torch.int64, torch.float64) if dtype == torch.float64 else (torch.int32, torch.float32)
    bits, found = (words.view(kind) for kind in kinds)
    bits.bitwise_right_shift_(8 * bits.itemsize - digits).bitwise_and_((1 << digits) - 1)
    return found.copy_(bits)


def _positive(words: Tensor, dtype: torch.dtype) -> Tensor:
    """v: never zero; small ones with all their digits."""
    digits = 53 if dtype == torch.float64 else 31
    return _bits(words, dtype, digits).add_(0.5).mul_(2.0**-digits)


def _uniform(words: Tensor, dtype: torch.dtype, start: float = 0.0, stop: float = 1.0, **named: float) -> Tensor:
    start, stop = named.get("from", start), named.get("to", stop)
    found = _bits(words, dtype, _DIGITS[dtype]).mul_(2.0 ** -_DIGITS[dtype] * (stop - start))  # a power of two is exact
    return found.add_(start) if start else found


def _bernoulli(words: Tensor, dtype: torch.dtype, p: float = 0.5) -> Tensor:
    digits = 53 if dtype == torch.float64 else 24
    return _bits(words, dtype, digits) < p * 2**digits


def _normal(words: Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    wide = dtype == torch.float64
    found = words.view(torch.float64 if wide else torch.float32)
    lengths, angles, cosines = (_memory(name, words, found) for name in ("lengths", "angles", "cosines"))
    pairs = (words if wide else words.view(torch.int32)).view(-1, 2)
    lengths = _positive(lengths.view(pairs.dtype).copy_(pairs[:, 0]), dtype)
    digits = 53 if wide else 24
    angles = _bits(angles.view(pairs.dtype).copy_(pairs[:, 1]), dtype, digits).mul_(2.0 ** (1 - digits) * math.pi)
    lengths.log_().mul_(-2).sqrt_().mul_(std)
    cosines = torch.cos(angles, out=cosines).mul_(lengths)
    torch.complex(cosines, angles.sin_().mul_(lengths), out=torch.view_as_complex(found.view(-1, 2)))
    return found.add_(mean) if mean else found


def _memory(name: str, words: Tensor, found: Tensor) -> Tensor:
    """Returns memory for a number of every pair."""
    count = len(found) // 2
    return scratch(name, count, found.dtype) if words.device.type == "cpu" else found.new_empty(count)


def _log_normal(words: Tensor, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(words, dtype, mean, std).exp_()


def _exponential(words: Tensor, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    return _positive(words, dtype).log_().mul_(-1 / lambd)


def _cauchy(words: Tensor, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return _positive(words, dtype).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def _geometric(words: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    return _positive(words, dtype).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1)


def _random(words: Tensor, dtype: torch.dtype, *bounds: int | None, **named: int | None) -> Tensor:
    """Unsigned remainders, in int64: of the upper 63 bits first, then of what is left, below twice the count."""
    given = dict(zip(("from", "to") if len(bounds) == 2 else ("to",), bounds)) | named
    start, stop = given.get("from", 0), given.get("to")
    count = (largest(dtype) + 1 if stop is None else stop) - start
    return (words if count >> 64 else unsigned_remainder(words, count)) + start


def unsigned_remainder(words: Tensor, count: int) -> Tensor:
    """Remainder of int64, read as unsigned, by a positive `count` below 2^64: of the upper 63 bits, then of the rest.
    """
    rest = words
    if not count >> 63:
        rest = words - (((words >> 1) & _MOST) // count * 2) * count
    over = (rest ^ ~_MOST) >= count - (1 << 63)
    return torch.where(over, rest - (count - (1 << 64) if count >> 63 else count), rest)


def largest(dtype: torch.dtype) -> int:
    """The largest integer that `random_` draws without bounds."""
    if dtype == torch.bool:
        return 1
    return 1 << _DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max


_TABLE: dict[Callable, Callable[..., Tensor]] = {
    Tensor.uniform_: _uniform,
    Tensor.bernoulli_: _bernoulli,
    Tensor.normal_: _normal,
    Tensor.log_normal_: _log_normal,
    Tensor.exponential_: _exponential,
    Tensor.cauchy_: _cauchy,
    Tensor.geometric_: _geometric,
    Tensor.random_: _random,
}
