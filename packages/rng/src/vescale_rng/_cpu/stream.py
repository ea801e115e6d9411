"""The `torch` stream on CPU: a shard's part of what torch draws on one device, in bounded memory.

The whole sequence is drawn by torch's own kernels, a chunk at a time, and of each
chunk the shard keeps its places. What makes a chunk equal to the same interval of the
one-shot fill (torch/include/ATen/native/cpu/DistributionTemplates.h):

    contiguous normal, 16 or more   blocks of 16 by Box-Muller, and where they do not come out even the last 16
                                    once more: so chunks are multiples of 16, and the last takes the remainder
    contiguous normal, fewer        one by one in double, the second of each pair kept in the generator: one chunk
    normal of strided memory        likewise one by one, at any size: so the chunk's memory is strided, too
    all else                        one by one, in the order of memory

Places of other ranks are gone past without being drawn. A kernel that seeds another
generator with one word (MKL's bernoulli, on Intel CPUs) cannot be drawn in chunks: then
the whole is drawn, and the memory is that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod

import torch
from torch import Generator, Tensor

from vescale_dtensor import Layout, OperatorError
from vescale_dtensor.engine import PARTIAL, Effects, capturing, global_stride

from .._cuda.fill import check_not_named, fill_parts, generator_on, is_followed
from .._cuda.numbers import fused_dropout_
from .._journal import note
from .._philox.fill import fill_part
from .._philox.philox import Key, next_key
from .._region import Piece, Region
from .._select import current_stream
from .mt19937 import discard, generator_or_default, words_taken
from .scratch import scratch

CHUNK = 1 << 18  # elements; with strided memory beside it 4 MiB of doubles: stays in the cache
BLOCK = 16  # elements that torch's normal makes at once


@dataclass(frozen=True)
class Draw:
    """A fill: `function(tensor, *args, **kwargs)` overwrites the tensor with random numbers of `generator`."""

    function: Callable
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)

    @property
    def generator(self) -> Generator:
        return generator_or_default(self.kwargs.get("generator"))

    def generator_for(self, tensor: Tensor) -> Generator:
        """The one that torch draws from into this tensor."""
        return generator_on(tensor.device, self.kwargs.get("generator"))

    def __call__(self, tensor: Tensor) -> None:
        self.function(tensor, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Order:
    """Memory order of one device's tensor: its dims from the outermost, and whether as a fresh tensor's."""

    dims: tuple[int, ...]
    contiguous: bool


def order_of(local: Tensor, layout: Layout | None = None, fresh: bool = False) -> Order:
    """Returns the order of the whole tensor, or of a fresh one made like it, from its shard's strides."""
    sizes, strides = tuple(local.shape), local.stride()
    shape = sizes
    if layout is not None:
        shape = layout.shape
        strides = strides if layout.is_replicated else global_stride(strides, sizes, layout) or strides
    return _order(strides, shape, fresh)


@lru_cache(maxsize=1024)
def _order(strides: tuple[int, ...], shape: tuple[int, ...], fresh: bool) -> Order:
    """A fresh tensor has no gaps, and otherwise lies as what it is made like."""
    dims = _from_the_outermost(strides, shape)
    long = [dim for dim in dims if shape[dim] != 1]
    contiguous = long == sorted(long) and (fresh or all(strides[d] == prod(shape[d + 1 :]) for d in long))
    return Order(tuple(range(len(shape))) if contiguous else dims, contiguous)


def _from_the_outermost(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The order that torch gives the memory of a tensor made like this one (`at::infer_dense_strides`): by strides, of
    equal ones the shorter dim is the inner, and an expanded dim stays where it is."""

    def swaps(inner: int, outer: int) -> int:
        one, other = strides[inner], strides[outer]
        if not one or not other:
            return 0
        return (one > other) - (one < other) or int(shape[inner] > shape[outer])

    found = [*reversed(range(len(shape)))]  # from the innermost
    for last in range(1, len(found)):
        at = last
        for before in range(last - 1, -1, -1):
            way = swaps(found[before], found[at])
            if way > 0:
                found[before], found[at] = found[at], found[before]
                at = before
            elif way < 0:
                break
    return tuple(reversed(found))


def fill(local: Tensor, layout: Layout, draw: Draw, *, fresh: bool = False, like: Tensor | None = None) -> Tensor:
    """Overwrites this rank's shard `local` (plain) with its part of the draw of the whole; returns it.

    A partial tensor is drawn on the first rank of the axis and zero on the others, whose
    generators go along. On a meta tensor nothing is drawn, as on one device. fresh: nobody has cut `local`
    out of another tensor. like: the shard, as it lies, of what one device's fresh tensor would be made like.
    """
    if local.is_meta:
        draw(local)
        return local
    if (graph := capturing()) is not None:
        return _captured(graph, local, layout, draw, fresh, like)
    if current_stream() == "philox":
        note(draw.function.__name__, draw.generator)
        return _place_philox(local, layout, draw, next_key(draw.generator))
    note(draw.function.__name__, draw.generator_for(local))
    return _place(local, layout, draw, fresh, like)


def _captured(
    graph: Effects, local: Tensor, layout: Layout, draw: Draw, fresh: bool, like: Tensor | None
) -> Tensor:
    """`local` written with what the graph will have drawn when it has come there."""
    if not local.is_contiguous() or (like is not None and not like.is_contiguous()):
        rule = "a compiled block draws for contiguous tensors, and this one is laid out otherwise"
        raise OperatorError(draw.function.__name__, rule, (), [("x.contiguous()", "the block is compiled then")])

    def drawn(one: Tensor) -> list[Tensor]:
        return [fill(torch.empty_like(one), layout, draw, fresh=fresh, like=None if like is None else one)]

    return local.copy_(graph.operator(drawn, [local], [local.shape])[0])


def fill_region(target: Tensor, region: Region, draw: Draw) -> None:
    """Overwrites `target`, on CPU, with its part of a sequence of the torch stream, drawn as a contiguous tensor is."""
    note(draw.function.__name__, draw.generator)
    order = _in_rows(region.sizes)
    _fill_in_chunks([(target, region)], region.numel, target.dtype, order, draw)


@dataclass(frozen=True)
class Taken:
    """A draw that the generator went past, to be placed later, or never: with the generator's state before it, or
    the key that it took."""

    draw: Draw
    state: Tensor
    key: Key | None = None

    def place(self, local: Tensor, layout: Layout | None = None) -> Tensor:
        """Overwrites `local`, the shard of `layout` or all of the tensor, as the draw would have then."""
        if self.key is not None:
            return _place_philox(local, layout, self.draw, self.key)
        generator = Generator()
        generator.set_state(self.state)
        draw = replace(self.draw, kwargs={**self.draw.kwargs, "generator": generator})
        if layout is not None:
            return _place(local, layout, draw, True)
        draw(local)
        return local


def take(draw: Draw, like: Tensor) -> Taken:
    """Goes past what a draw into a tensor like this one, which may be a meta tensor, takes from the generator."""
    generator = draw.generator
    note(draw.function.__name__, generator)
    state = generator.get_state()
    if current_stream() == "philox":
        return Taken(draw, state, next_key(generator))
    if like.numel() <= CHUNK:  # the memory order counts, gaps do not: they change what a normal takes
        order = order_of(like)
        draw(_memory(like.numel(), like.dtype, order.contiguous, _fresh))
    elif _seeds_another(draw, like.dtype):
        draw(torch.empty(BLOCK, dtype=like.dtype))
    else:
        _fill_in_chunks([], like.numel(), like.dtype, order_of(like), draw)
    return Taken(draw, state)


def _place_philox(local: Tensor, layout: Layout | None, draw: Draw, key: Key) -> Tensor:
    args, kwargs = draw.args, {name: value for name, value in draw.kwargs.items() if name != "generator"}
    if layout is None:
        shape = tuple(local.shape)
        parts = [(local, Region(shape, tuple(((0, size),) for size in shape)))]
    elif any(state is PARTIAL and at for state, at in zip(layout.states, layout.mesh.coordinate)):
        return local.zero_()
    else:
        parts = parts_of(local, layout, range(layout.ndim))
    for target, region in parts:
        fill_part(target, region, draw.function, args, kwargs, key)
    return local


Part = tuple[Tensor, Region]
"""A part of the shard, and what it is of the whole: their dims in the same order."""


def _place(local: Tensor, layout: Layout, draw: Draw, fresh: bool, like: Tensor | None = None) -> Tensor:
    zero = any(state is PARTIAL and at for state, at in zip(layout.states, layout.mesh.coordinate))
    order = _in_rows(layout.shape)
    if layout.flat_axis is None:
        order = order_of(local if like is None else like, layout, fresh)
    parts = [] if zero else parts_of(local, layout, order.dims)
    if local.device.type == "cuda":
        _place_on_device(parts, layout, local, order, draw)
    elif not zero and parts and parts[0][1].is_full and layout.flat_axis is None:
        draw(local)
    elif _seeds_another(draw, local.dtype):
        _fill_from_full(parts, _sizes(layout, order), local, order, draw)
    else:
        _fill_in_chunks(parts, layout.numel, local.dtype, order, draw)
    return local.zero_() if zero else local


def _place_on_device(parts: list[Part], layout: Layout, local: Tensor, order: Order, draw: Draw) -> None:
    """Fills by the formula of torch's kernels, where torch follows it on this device, else from the whole."""
    dense = order.contiguous or draw.function is not fused_dropout_
    if dense and is_followed(draw.function, local.dtype, local.device):
        generator = draw.generator_for(local)
        fill_parts(parts, layout.numel, local.dtype, draw.function, draw.args, draw.kwargs, generator)
    else:
        check_not_named(draw.function, local.dtype)
        _fill_from_full(parts, _sizes(layout, order), local, order, draw)


def _in_rows(shape: Sequence[int]) -> Order:
    return Order(tuple(range(len(shape))), True)


def _sizes(layout: Layout, order: Order) -> tuple[int, ...]:
    return tuple(layout.shape[dim] for dim in order.dims)


def parts_of(local: Tensor, layout: Layout, dims: Sequence[int]) -> list[Part]:
    """The shard with its dims in the order `dims`: one part, or the boxes of a flat one."""
    sizes, here = tuple(layout.shape[dim] for dim in dims), layout.mesh.coordinate
    if layout.flat_axis is None:
        ranges = layout.region_at(here)
        return [(local.permute(tuple(dims)), Region(sizes, tuple(ranges[dim] for dim in dims)))]
    parts = []
    for box, offset in layout.boxes_at(here):
        region = Region(sizes, tuple((held,) for held in box))
        parts.append((local[offset : offset + prod(region.shape)].view(region.shape), region))
    return parts


def _fill_in_chunks(parts: list[Part], total: int, dtype: torch.dtype, order: Order, draw: Draw) -> None:
    parts = [_joined(*part) if part[0].is_contiguous() else part for part in parts]
    generator = draw.generator
    chunk = torch.empty((0,), dtype=dtype)
    ahead = 0  # words to go past before the next draw
    skips = total > CHUNK and not _waits(draw, order)
    words = words_taken(draw, dtype, generator, BLOCK) // BLOCK if skips else 0
    for start, stop, pieces in _steps(parts, total, skips):
        # The last chunk is always drawn: a normal may take more words for it than others.
        if skips and not pieces and stop < total:
            ahead += words * (stop - start)
            continue
        if ahead:
            discard(ahead, generator)
            ahead = 0
        if len(chunk) < stop - start:
            chunk = _memory(stop - start, dtype, order.contiguous, partial(scratch, "chunk"))
        drawn = chunk[: stop - start]
        draw(drawn)
        for target, region, piece in pieces:
            _keep(piece, drawn, start, target, region.strides)


def _joined(target: Tensor, region: Region) -> Part:
    region = region.joined()
    return target.view(region.shape), region


def _steps(parts: list[Part], total: int, skips: bool) -> Iterator[tuple[int, int, list[tuple[Tensor, Region, Piece]]]]:
    """The sequence in chunks, with the shard's pieces of each; with `skips`, gaps in larger and larger steps."""

    def held(start: int, stop: int) -> Iterator[tuple[Tensor, Region, Piece]]:
        return ((target, region, piece) for target, region in parts for piece in region.pieces(start, stop))

    start, width = 0, CHUNK
    while start < total:
        last = total - start < width + BLOCK
        if width > CHUNK and (last or next(held(start, start + width), None) is not None):
            width //= 2
            continue
        stop = total if last else start + width
        pieces = [] if width > CHUNK else list(held(start, stop))
        yield start, stop, pieces
        start = stop
        if skips and not pieces:
            width *= 2


def _waits(draw: Draw, order: Order) -> bool:
    """True if normals are made in pairs, the second one waiting in the generator: the cost of a draw depends on it."""
    return draw.function is Tensor.log_normal_ or draw.function is Tensor.normal_ and not order.contiguous


def _keep(piece: Piece, drawn: Tensor, start: int, target: Tensor, strides: tuple[int, ...]) -> None:
    step = drawn.stride(0)
    source = drawn.as_strided(
        piece.shape, [stride * step for stride in strides], drawn.storage_offset() + (piece.start - start) * step
    )
    for dim, (at, size) in enumerate(zip(piece.corner, piece.shape)):
        target = target.narrow(dim, at, size)
    target.copy_(source)


def _memory(count: int, dtype: torch.dtype, contiguous: bool, made: Callable[[int, torch.dtype], Tensor]) -> Tensor:
    return made(count, dtype) if contiguous else made(2 * count, dtype)[::2]


def _fresh(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)


def _fill_from_full(parts: list[Part], sizes: tuple[int, ...], local: Tensor, order: Order, draw: Draw) -> None:
    whole = _memory(prod(sizes), local.dtype, order.contiguous or local.device.type != "cpu", _fresh)
    whole = whole.to(local.device)
    # Such a kernel goes by index, not by memory: it must be given the dims in the user's order.
    undo = [order.dims.index(dim) for dim in range(len(order.dims))]
    strides = [prod(sizes[dim + 1 :]) * whole.stride(0) for dim in range(len(sizes))]
    draw(whole.as_strided(sizes, strides).permute(undo))
    for target, region in parts:
        for piece in region.pieces(0, region.numel):
            _keep(piece, whole, 0, target, region.strides)


def _seeds_another(draw: Draw, dtype: torch.dtype) -> bool:
    return draw.function in _MAY_SEED and _takes_one_word(draw.function, dtype)


# Fills with a kernel of MKL's, in some build of torch, on some CPU.
_MAY_SEED = frozenset({Tensor.bernoulli_, Tensor.exponential_})


@lru_cache(maxsize=64)
def _takes_one_word(function: Callable, dtype: torch.dtype) -> bool:
    generator = Generator()
    draw = Draw(function, (0.5,), {"generator": generator})
    return words_taken(draw, dtype, generator, BLOCK) < BLOCK
