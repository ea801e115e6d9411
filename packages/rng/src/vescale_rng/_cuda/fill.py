"""The `torch` stream on CUDA: a shard's part of what torch draws on one device, at the cost of the shard.

Every element is computed by itself: its place in the memory of the whole tensor says which thread makes it and by
which call (`launch.py`), and the call says what it is (`numbers.py`, or `triton.py`, the same in one kernel). The
one device is the tensor's own, unless `use_geometry` names another. One kind of GPU was at hand for this, an H200: so
the formula is held against torch itself, once for every function and dtype on every device, and where it is not
followed to the bit, the whole is drawn and cut instead, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod

import torch
from torch import Generator, Tensor

from .._region import Region
from .._select import RandomStreamError
from .kernels import kernels_for
from .launch import Geometry, Launch, dropout, fills
from .numbers import Recipe, fused_dropout_, recipe, words
from .recorded import note_moved, recorded

CHUNK = 1 << 20  # elements at a time, in torch ops: a dozen int64 tensors of them
_named: Geometry | None = None
Part = tuple[Tensor, Region]


class use_geometry:
    """Draws on CUDA devices the numbers that a device of this geometry would draw, from now on or within a `with`
    block.

        vescale_rng.use_geometry(vescale_rng.Geometry(multiprocessors=108, threads=2048))  # an A100, on any GPU

    Use the same geometry on every rank. None, the default, is the device's own.
    """

    def __init__(self, geometry: Geometry | None) -> None:
        global _named
        self._before, _named = _named, geometry

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        global _named
        _named = self._before


def generator_on(device: torch.device, generator: Generator | None) -> Generator:
    """The generator that torch draws from on a device."""
    if generator is not None or device.type != "cuda":
        return torch.default_generator if generator is None else generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def fill_parts(
    parts: list[Part], count: int, dtype: torch.dtype, function: Callable, args: tuple, kwargs: dict,
    generator: Generator,
) -> None:  # fmt: skip
    """Overwrites the parts of a tensor of `count` elements; the generator goes on as if it had been filled."""
    geometry, graph = _named or Geometry.of(generator.device), recorded()
    if graph is not None:
        if generator is not graph.generator:
            raise _of_another(function)
        graph.moved = fill_from(parts, count, dtype, function, args, kwargs, geometry, graph.start, graph.moved)
        return
    before = generator.get_offset()
    offset = fill_from(parts, count, dtype, function, args, kwargs, geometry, generator.initial_seed(), before)
    generator.set_offset(offset)
    note_moved(offset - before)


def _of_another(function: Callable) -> RandomStreamError:
    return RandomStreamError(
        function.__name__,
        "a graph is captured, and its draws are those of the device's own generator",
        (),
        [("generator=None", "the device's own"), ("draw outside of the step", "and give it the numbers")],
    )


def fill_from(
    parts: list[Part], count: int, dtype: torch.dtype, function: Callable, args: tuple, kwargs: dict,
    geometry: Geometry, seed: int | Tensor, offset: int,
) -> int:  # fmt: skip
    """Likewise for any state of a generator, on any device; returns the offset after it. A seed with a fourth of an
    offset, int64 on the device, is read there, and `offset` counted from it."""
    made = recipe(function, args, kwargs, dtype)
    if function is fused_dropout_:
        launches, offset = dropout(count, dtype.itemsize, geometry, offset)
    else:
        launches, offset = fills(count, dtype.itemsize, made.lanes, geometry, offset)
    for target, region in parts:
        if not target.numel():
            continue
        kernels = kernels_for(target.device)
        if kernels is not None:
            kernels.fill_part(target, region, launches, seed, made)
        else:
            _fill_part(target, region, launches, seed, made)
    return offset


def _fill_part(target: Tensor, region: Region, launches: list[Launch], seed: int | Tensor, made: Recipe) -> None:
    out = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    flat = out.view(-1)
    for first, places in _places(region, target.device):
        found = torch.empty(len(places), dtype=target.dtype, device=target.device)
        for launch in launches:
            inside = (places >= launch.start) & (places < launch.start + launch.count)
            if bool(inside.all()):
                found = _numbers(launch, places, seed, made, target.dtype)
            elif bool(inside.any()):
                found[inside] = _numbers(launch, places[inside], seed, made, target.dtype)
        flat[first : first + len(places)] = found
    if out is not target:
        target.copy_(out)


def _numbers(launch: Launch, places: Tensor, seed: int | Tensor, made: Recipe, dtype: torch.dtype) -> Tensor:
    thread, counter, lane = launch.made_by(places)
    if isinstance(seed, Tensor):
        seed, before = seed
        counter = counter + before
    return made.made(words(thread, counter, seed), lane, dtype).to(dtype)


def _places(region: Region, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The region's places in the whole, in the order of the shard, by chunks: (first local index, places)."""
    shape = region.shape
    indices = [
        torch.cat([torch.arange(*span, device=device) for span in held]) * stride
        for held, stride in zip(region.ranges, region.strides)
    ]
    for first in range(0, prod(shape), CHUNK):
        flat = torch.arange(first, min(first + CHUNK, prod(shape)), device=device)
        places = torch.zeros_like(flat)
        for dim in reversed(range(len(shape))):
            places += indices[dim][flat % shape[dim]]
            flat = flat // shape[dim]
        yield first, places


# --- is it torch's own? -----------------------------------------------------------

_SAMPLES = {"geometric_": (0.3,), "fused_dropout_": (0.3,), "bernoulli_": (0.3,)}


@lru_cache(maxsize=256)
def is_followed(function: Callable, dtype: torch.dtype, device: torch.device) -> bool:
    """True if torch's own fill of some hundred thousand numbers on this device matches the formula bitwise."""
    generator, geometry = Generator(device).manual_seed(11), Geometry.of(device)
    args = _SAMPLES.get(function.__name__, ())
    for count in (1000, 2 * geometry.launched(1 << 40) + 516):
        wanted, found = (torch.zeros(count, dtype=dtype, device=device) for _ in range(2))
        if function is fused_dropout_:
            state = torch.cuda.get_rng_state(device)
            torch.cuda.set_rng_state(generator.get_state(), device)
            function(wanted, *args)
            after = torch.cuda.default_generators[device.index or 0].get_offset()
            torch.cuda.set_rng_state(state, device)
        else:
            offset = generator.get_offset()
            function(wanted, *args, generator=generator)
            after = generator.get_offset()
            generator.set_offset(offset)
        whole = Region((count,), (((0, count),),))
        offset = fill_from([(found, whole)], count, dtype, function, args, {}, geometry, 11, generator.get_offset())
        if offset != after or not torch.equal(wanted, found):
            warnings.warn(
                f"vescale_rng: {function.__name__} of {dtype} is not drawn on this device as the formula says: "
                "every rank draws the whole tensor and keeps its shard",
                stacklevel=2,
            )
            return False
    return True


def check_not_named(function: Callable, dtype: torch.dtype) -> None:
    """Raises RandomStreamError where another device's numbers are wanted and the formula is not to be trusted."""
    if _named is not None:
        raise RandomStreamError(
            function.__name__,
            f"{dtype} is not drawn on this device as the formula says, so the numbers of {_named} are not known",
            (),
            [("use_geometry(None)", "this device's own numbers"), ('use_stream("philox")', "the same on every GPU")],
        )
