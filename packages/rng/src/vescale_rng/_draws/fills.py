"""In-place fills, nn.init and the functions that draw into the layout of their input.

    uniform_, normal_, random_, ...   the shard's part, in place; nothing is communicated, old values do not count
    nn.init.*                         torch's own formulas, which call the fills
    *_like                            in the layout of the input; whole where that is partial
    bernoulli_ with a tensor          uniform numbers in the layout of the target, compared with the probabilities
    torch.normal                      standard normal numbers, times std, plus mean, as torch's CPU kernel does

On CUDA a Bernoulli number by its own probability has a kernel of its own: it is drawn whole and sliced, as
vescale_dtensor alone would do; so is everything on other devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.engine import (
    TABLE,
    attach,
    check_writable,
    gathered,
    handler,
    local_only,
    requires_grad,
)

from .._cpu.stream import Draw, fill
from .._select import current_stream
from .._torch_private import _calculate_correct_fan

_FILLS = [
    getattr(Tensor, name)
    for name in "uniform_ normal_ exponential_ cauchy_ geometric_ log_normal_ random_ bernoulli_".split()
]
_LIKE = {torch.rand_like: Tensor.uniform_, torch.randn_like: Tensor.normal_, torch.randint_like: Tensor.random_}
_REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# What they are without this package.
_WHOLE = {function: TABLE[function].handler for function in (*_FILLS, *_LIKE)}


def draws_for(tensor: DTensor) -> bool:
    """True if this package draws for the tensor: on CPU, on meta, where nothing is drawn, and from the philox stream.
    """
    return tensor.device.type in ("cpu", "meta") or current_stream() == "philox"


def fills_for(tensor: DTensor) -> bool:
    """True if this package fills the tensor with numbers of one distribution, on CUDA too."""
    return draws_for(tensor) or tensor.device.type == "cuda"


def draw_into(own: DTensor, draw: Draw, *, fresh: bool = False, like: DTensor | None = None) -> DTensor:
    """`own` overwritten in place, with torch's own complaint when it is a leaf that requires grad. fresh, like: it was
    made like another tensor."""
    if torch.is_grad_enabled() and requires_grad(own):
        own.zero_()  # the history of an overwritten tensor: its gradient ends here
    else:
        check_writable(draw.function, own)
    with torch.no_grad(), local_only():
        fill(own.detach(), own._layout.base, draw, fresh=fresh, like=None if like is None else like.detach())
    return own


def empty_as(own: DTensor, **options: Any) -> DTensor:
    """`empty_like(own, **options)`, laid out alike; whole where `own` is partial."""
    layout = own._layout.reduced
    with torch.no_grad(), local_only():
        return attach(torch.empty_like(own.detach(), **options), layout)


def drawn_by(drawn: DTensor, *parameters: Any) -> DTensor:
    """`drawn`, with the history that torch gives it: what it was drawn by has a gradient, of zeros."""
    trained = [one for one in parameters if isinstance(one, Tensor) and requires_grad(one)]
    if not trained or not torch.is_grad_enabled():
        return drawn
    kept = [one.redistribute(placements=drawn.placements) if type(one) is DTensor else one for one in trained]
    return sum(kept, drawn).to(drawn.dtype).copy_(drawn)  # all that is left of the sum is where its gradient ends


@handler(_FILLS)
def fill_in_place(function: Callable, args: tuple, kwargs: dict) -> Any:
    own, *rest = args
    by_tensor = function is Tensor.bernoulli_ and isinstance(rest[0] if rest else kwargs.get("p"), Tensor)
    if type(own) is not DTensor or not (draws_for(own) if by_tensor else fills_for(own)):
        return _WHOLE[function](function, args, kwargs)
    if by_tensor:
        return _bernoulli_in_place(own, *rest, **kwargs)
    return draw_into(own, Draw(function, tuple(rest), kwargs))


def _bernoulli_in_place(own: DTensor, p: Tensor, *, generator: torch.Generator | None = None) -> DTensor:
    """One where a uniform number, of double precision if p is, lies below p; else zero."""
    if p.dtype not in _REAL:
        raise RuntimeError(f"bernoulli_: probabilities are floating-point numbers, not {p.dtype}")
    partial = type(p) is DTensor and p._layout.is_partial
    with torch.no_grad():
        with local_only():
            if not partial and not p.is_meta and not bool(((p >= 0) & (p <= 1)).all()):
                raise RuntimeError("bernoulli_: expected every probability to be at least 0 and at most 1")
        uniform = empty_as(own, dtype=torch.float64 if p.dtype == torch.float64 else torch.float32)
        drawn = draw_into(uniform, Draw(Tensor.uniform_, (), {"generator": generator}), fresh=True, like=own) < p
        drawn = drawn.to(own.dtype)
    return own.copy_(drawn_by(drawn, p))


@handler(nn.init.normal_)
def init_normal(function: Callable, args: tuple, kwargs: dict) -> Any:
    return _filled_without_grad(Tensor.normal_, _given(args, kwargs, mean=0.0, std=1.0))


@handler(nn.init.uniform_)
def init_uniform(function: Callable, args: tuple, kwargs: dict) -> Any:
    return _filled_without_grad(Tensor.uniform_, _given(args, kwargs, a=0.0, b=1.0))


@handler(nn.init.kaiming_uniform_)
def init_kaiming_uniform(function: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's formula, on the global sizes. (torch hands this function over whole; its siblings call the fills.)"""
    tensor, a, mode, nonlinearity, generator = _given(args, kwargs, a=0, mode="fan_in", nonlinearity="leaky_relu")
    if 0 in tensor.shape:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=3)
        return tensor
    fan = _calculate_correct_fan(tensor, mode)
    bound = sqrt(3.0) * (nn.init.calculate_gain(nonlinearity, a) / sqrt(fan))
    return _filled_without_grad(Tensor.uniform_, (tensor, -bound, bound, generator))


def _given(args: tuple, kwargs: dict, **defaults: Any) -> tuple:
    """The arguments of an init function in order: the tensor, those with `defaults`, the generator."""
    names = ("tensor", *defaults, "generator")
    given = {"generator": None, **defaults, **dict(zip(names, args)), **kwargs}
    return tuple(given[name] for name in names)


def _filled_without_grad(fill_: Callable, given: tuple) -> DTensor:
    tensor, *parameters, generator = given
    with torch.no_grad():
        return fill_(tensor, *parameters, generator=generator)


@handler(list(_LIKE))
def like(function: Callable, args: tuple, kwargs: dict) -> Any:
    own, *rest = args if args else (kwargs["input"],)
    if not fills_for(own) or torch.device(kwargs.get("device") or own.device) != own.device:
        return _WHOLE[function](function, args, kwargs)
    options = {name: value for name, value in kwargs.items() if name not in ("input", "generator", "low", "high")}
    wants_grad = options.pop("requires_grad", False)
    seeded = {"generator": kwargs["generator"]} if "generator" in kwargs else {}
    bounds = (*rest, *(kwargs[name] for name in ("low", "high") if name in kwargs))
    bounds = (0, *bounds)[-2:] if function is torch.randint_like else ()
    with torch.no_grad():
        made = empty_as(own, **options)
        alike = options.get("memory_format", torch.preserve_format) is torch.preserve_format
        drawn = draw_into(made, Draw(_LIKE[function], bounds, seeded), fresh=True, like=own if alike else None)
    return drawn.requires_grad_(wants_grad)


@handler(torch.bernoulli, Tensor.bernoulli)
def bernoulli(function: Callable, args: tuple, kwargs: dict) -> Any:
    """A fresh tensor of zeros and ones, by the probabilities in the input or by the one number given."""
    kwargs = dict(kwargs)
    own, *rest = args if args else (kwargs.pop("input"),)
    if type(own) is not DTensor or not draws_for(own) or kwargs.get("out") is not None:
        return gathered(function)(*args, **kwargs)
    p = rest[0] if rest else kwargs.pop("p", own)
    with torch.no_grad():
        drawn = empty_as(own, memory_format=torch.contiguous_format).bernoulli_(p, **kwargs)
    return drawn_by(drawn, own, *(() if p is own else (p,)))


@handler(torch.normal)
def normal(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Standard normal numbers in the layout of mean and std, times std, plus mean."""
    given = dict(zip(("mean", "std"), args)) | kwargs
    mean, std, generator = given["mean"], given.get("std", 1.0), given.get("generator")
    leading = mean if isinstance(mean, Tensor) else std
    alike = not isinstance(mean, Tensor) or not isinstance(std, Tensor) or mean.shape == std.shape
    if type(leading) is not DTensor or not fills_for(leading) or not alike or given.get("out") is not None:
        return gathered(function)(*args, **kwargs)
    with torch.no_grad():
        drawn = empty_as(leading, memory_format=torch.contiguous_format)
        if isinstance(std, Tensor):
            drawn.normal_(generator=generator).mul_(std).add_(mean)
        else:
            drawn.normal_(0, std, generator=generator).add_(mean)
    return drawn_by(drawn, mean, std)
