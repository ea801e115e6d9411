"""The formula of `launch.py` and `numbers.py` as one kernel, in Triton: a number is computed as it is written;
and the words of the philox stream.

Compiled, logarithms, sines and the like are the CUDA library's own that torch's kernels call; under Triton's
interpreter (TRITON_INTERPRET=1), which is how it is tested without a GPU, they are numpy's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from math import pi, prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._region import Region
from .launch import Launch
from .numbers import Recipe, told

COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
if COMPILED:
    from triton.language.extra import libdevice
_ELEMENTS = 1024  # of a program
_PI = tl.constexpr(pi)
# 2^-32 times 2 pi, each as a float, multiplied as floats.
_TURN = tl.constexpr((torch.tensor(2.0**-32) * torch.tensor(2 * pi)).item())
_EPSILON = tl.constexpr(2.0**-24)
_WIDE_EPSILON = tl.constexpr(2.0**-53)
_LEAST = tl.constexpr(2.0**-23)


@triton.jit
def _float(word):
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@triton.jit
def _double(x, y):
    mixed = x.to(tl.uint64) ^ (y.to(tl.uint64) << 21)
    return mixed.to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17


@triton.jit
def _log(x, FAST: tl.constexpr):
    if COMPILED and FAST and x.dtype == tl.float32:
        return libdevice.fast_logf(x)
    elif COMPILED:
        return libdevice.log(x)
    else:
        return tl.log(x)


@triton.jit
def _normal(a, b, c, d, lane, WIDE: tl.constexpr):
    if WIDE:
        angle = (c.to(tl.uint64) ^ (d.to(tl.uint64) << 21)).to(tl.float64) * 2.220446049250313e-16
        angle = angle + 1.1102230246251565e-16
        length = tl.sqrt(-2.0 * _log(_double(a, b), False))
        if COMPILED:
            sine, cosine = libdevice.sinpi(angle), libdevice.cospi(angle)
        else:
            sine, cosine = tl.sin(angle * _PI), tl.cos(angle * _PI)
        return tl.where(lane == 0, sine, cosine) * length
    else:
        x, y = tl.where(lane < 2, a, c), tl.where(lane < 2, b, d)
        angle = tl.fma(y.to(tl.float32), tl.full(y.shape, _TURN, tl.float32), tl.full(y.shape, _TURN / 2, tl.float32))
        length = tl.sqrt_rn(-2.0 * _log(_float(x), False))
        if COMPILED:
            sine, cosine = libdevice.fast_sinf(angle), libdevice.fast_cosf(angle)
        else:
            sine, cosine = tl.sin(angle), tl.cos(angle)
        return tl.where(lane % 2 == 0, sine, cosine) * length


@triton.jit
def _fused(x, factor, summand):
    return tl.fma(
        x, tl.full(x.shape, 0, x.dtype) + factor.to(x.dtype), tl.full(x.shape, 0, x.dtype) + summand.to(x.dtype)
    )


@triton.jit
def _fill(
    out, numbers, integers, count, base, n1, n2, g0, g1, g2, s0, s1, s2, start, stop, threads, counter, seed, recorded,
    RECORDED: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    last, rest = index % n2, index // n2
    place = base + rest // n1 * g0 + rest % n1 * g1 + last * g2
    address = out + (rest // n1 * s0 + rest % n1 * s1 + last * s2)
    held = (index < count) & (place >= start) & (place < stop)
    at = place - start
    if VECTOR > 1:
        group, inside = at // VECTOR, at % VECTOR
        thread, lane = group % threads, inside % 4
        call = counter + group // threads * (1 if VECTOR < 8 else VECTOR // 4) + inside // 4
    else:
        turn = at // threads
        thread, lane = at % threads, turn % LANES
        call = counter + turn // LANES
    if RECORDED:
        seed = tl.load(recorded)
        call = call + tl.load(recorded + 1)
    a, b, c, d = tl.philox(
        seed, (call & 0xFFFFFFFF).to(tl.uint32), (call >> 32).to(tl.uint32),
        (thread & 0xFFFFFFFF).to(tl.uint32), (thread >> 32).to(tl.uint32),
    )  # fmt: skip
    if KIND == "integers":
        first, size = tl.load(integers), tl.load(integers + 1).to(tl.uint64, bitcast=True)
        if WIDE:
            value = tl.where(lane == 0, a, c).to(tl.uint64) << 32 | tl.where(lane == 0, b, d).to(tl.uint64)
        else:
            value = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)).to(tl.uint64)
        value = tl.where(size == 0, value, value % tl.where(size == 0, 1, size))
        found = value.to(tl.int64, bitcast=True) + first
    else:
        one, two = tl.load(numbers), tl.load(numbers + 1)
        if KIND == "normal" or KIND == "log_normal":
            found = _fused(_normal(a, b, c, d, lane, WIDE), two, one)
            if KIND == "log_normal":
                if COMPILED and not WIDE:
                    found = libdevice.fast_expf(found)
                elif COMPILED:
                    found = libdevice.exp(found)
                else:
                    found = tl.exp(found)
        else:
            if WIDE:
                x = tl.where(lane == 0, _double(a, b), _double(c, d))
            else:
                x = _float(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))
            if KIND == "uniform":
                found = _fused(x, two, one).to(out.dtype.element_ty)
                high = tl.load(numbers + 2).to(out.dtype.element_ty)
                found = tl.where(found == high, one.to(out.dtype.element_ty), found)
            elif KIND == "bernoulli":
                found = x < one.to(x.dtype)
            elif KIND == "exponential":
                epsilon: tl.constexpr = _WIDE_EPSILON if WIDE else _EPSILON
                found = tl.where(x >= 1 - epsilon, -epsilon, _log(x, True)) * one.to(x.dtype)
            elif KIND == "geometric":
                if WIDE:
                    found = tl.ceil(_log(x, True) / one)
                else:  # the logarithm of the chance to fail is the device's own, too: a quotient may be an integer
                    failed = tl.full(x.shape, 0, x.dtype) + one.to(x.dtype)
                    found = tl.ceil(tl.div_rn(_log(x, True), _log(failed, True)))
            else:
                if not WIDE:
                    x = tl.minimum(tl.maximum(x, _LEAST), 1 - _LEAST)
                angle = (x - 0.5) * _PI
                if COMPILED and not WIDE:
                    slope = libdevice.fast_tanf(angle)
                elif COMPILED:
                    slope = libdevice.tan(angle)
                else:
                    slope = tl.sin(angle) / tl.cos(angle)
                found = _fused(slope, two, one)
    tl.store(address, found.to(out.dtype.element_ty), mask=held)


def fill_part(target: Tensor, region: Region, launches: list[Launch], seed: int | Tensor, made: Recipe) -> None:
    """Overwrites `target`, which holds `region` of a tensor that the launches make. On the current stream."""
    numbers, integers = told(made, target.device)
    is_recorded = isinstance(seed, Tensor)
    state = (0, seed) if is_recorded else (seed, integers)
    for sizes, base, strides, own in _boxes(target, region):
        count = prod(sizes)
        for launch in launches:
            _fill[(triton.cdiv(count, _ELEMENTS),)](
                own, numbers, integers, count, base, sizes[1], sizes[2], *strides, *own.stride(),
                launch.start, launch.start + launch.count, launch.threads, launch.counter, *state, RECORDED=is_recorded,
                KIND=made.kind, WIDE=made.wide, LANES=launch.lanes, VECTOR=launch.vector, ELEMENTS=_ELEMENTS,
            )  # fmt: skip


def _boxes(target: Tensor, region: Region) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...], Tensor]]:
    """The region as boxes of three dims: sizes, place of the corner, strides of the whole, and the shard's view."""
    if target.is_contiguous():
        region = region.joined()
        target = target.view(region.shape)
    for spans in product(*map(_cuts, region.ranges)):
        own = target
        for dim, (_, at, size) in enumerate(spans):
            own = own.narrow(dim, at, size)
        base = sum(first * stride for (first, _, _), stride in zip(spans, region.strides))
        outer = own.shape[: max(0, own.ndim - 3)]
        for corner in product(*map(range, outer)):
            shift = sum(at * stride for at, stride in zip(corner, region.strides))
            one, strides = own[corner], region.strides[len(outer) :]
            missing = 3 - one.ndim
            yield (1,) * missing + tuple(one.shape), base + shift, (0,) * missing + strides, one[(None,) * missing]


def _cuts(held: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """Index ranges as (first, local index, size)."""
    found, at = [], 0
    for low, high in held:
        found.append((low, at, high - low))
        at += high - low
    return found


# --- the philox stream ------------------------------------------------------------


@triton.jit
def _words(places, found, key, count, ELEMENTS: tl.constexpr):
    """Philox4x64-10, a block per place; both words of the key go on by their Weyl numbers."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    place = tl.load(places + index, mask=index < count, other=0)
    a = (place // 4 + 1).to(tl.uint64)
    b, c, d = tl.zeros_like(a), tl.zeros_like(a), tl.zeros_like(a)
    one = b + tl.load(key).to(tl.uint64, bitcast=True)
    two = b + tl.load(key + 1).to(tl.uint64, bitcast=True)
    left, right = b + 0xD2E7470EE14C6C93, b + 0xCA5A826395121157
    for _ in range(10):
        high, low = tl.umulhi(a, left), a * left
        other, under = tl.umulhi(c, right), c * right
        a, b, c, d = other ^ b ^ one, under, high ^ d ^ two, low
        one, two = one + 0x9E3779B97F4A7C15, two + 0xBB67AE8584CAA73B
    lane = place % 4
    word = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    tl.store(found + index, word.to(tl.int64, bitcast=True), mask=index < count)


def words_at(places: Tensor, key: tuple[int, int]) -> Tensor:
    """Computes `philox.words_at` in one kernel."""
    flat = places.contiguous().view(-1)
    found, count = torch.empty_like(flat), flat.numel()
    signed = [word - (1 << 64) if word >> 63 else word for word in key]
    words = torch.tensor(signed, dtype=torch.int64, device=flat.device)
    _words[(triton.cdiv(count, _ELEMENTS),)](flat, found, words, count, ELEMENTS=_ELEMENTS)
    return found.view(places.shape)
