"""A tensor that stands for a described mask: attention in a ring takes the description, all else the mask itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_trace.values import map_tensors

from .._dispatch.dispatch import call
from .._errors import InternalError
from .._layouts.layout import Layout
from .._rules.products.attention import described_attention
from .._rules.registry import TABLE, Operand
from .._rules.solvers.owned import held_ranges
from .._rules.traits import Trait
from .._tensor.tensor import DTensor, attach, local_only
from .._torch_private import _make_wrapper_subclass
from .choice import RING, pinned
from .described import Description, MaskFunction, NotDescribedError
from .meeting import meeting_of

_PROPERTIES = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "shape", "ndim", "layout", "requires_grad", "is_meta", "is_cuda", "is_cpu")
)
_met: dict[tuple, bool] = {}
"""True if operands of these layouts meet in a ring, by layouts and what is pinned."""
_LIMIT = 4096


class DescribedMask(Tensor):
    """[batch, 1, rows, columns], boolean, without memory. Attention in a ring takes its description; what combines it
    with other masks element by element is described again; all else gets the mask, which is made then, once."""

    before_dtensor = True

    @staticmethod
    def __new__(cls, description: Description, layout: Layout) -> DescribedMask:
        mask = _make_wrapper_subclass(cls, description.shape, dtype=torch.bool, device=description.device)
        mask._description, mask._rows, mask._mask = description, layout, None
        return mask

    @classmethod
    def of(cls, function: MaskFunction, places: Sequence[Tensor], layout: Layout) -> DescribedMask | None:
        """`function(*places)`, for places [batch, 1, 1, 1], [1, 1, 1, 1], [1, 1, rows, 1] and [1, 1, 1, columns]; None
        where it cannot be described. The same on all ranks.

        layout: of the mask, its rows cut by one axis: it is the mask's own where somebody needs it.
        """
        if layout.shape[1] != 1 or any(place.numel() != layout.shape[dim] for dim, place in enumerate(places)):
            return None
        tables = [place.view(-1) for place in places]

        def at(*indices: Tensor) -> Tensor:
            return function(*(table[(index,)] for table, index in zip(tables, indices)))

        return cls._described(at, layout, places[0].device)

    @classmethod
    def _described(
        cls, function: MaskFunction, layout: Layout, device: torch.device, of: Sequence[Description] = ()
    ) -> DescribedMask | None:
        try:
            return cls(Description(function, layout.shape, device, of), layout)
        except NotDescribedError:
            return None

    def made(self) -> Tensor:
        """The mask."""
        if self._mask is None:
            batch, _, _, columns = self._rows.shape
            held = self._description.held(((0, batch),), held_ranges(self._rows, 2))
            self._mask = attach(held.rows(columns), self._rows)
        return self._mask

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            if cls._meets(*args, **kwargs):
                return cls._attended(*args, **kwargs)
        else:
            entry = TABLE.get(function)
            traits = entry.traits if entry is not None else Trait(0)
            if Trait.METADATA in traits or function in _PROPERTIES:
                with local_only():
                    return function(*args, **kwargs)
            if _keeps(function, args, kwargs):
                return args[0]
            if Trait.ELEMENTWISE in traits and (combined := _combined(function, args, kwargs)) is not None:
                return combined
        return function(*map_tensors(args, _made), **map_tensors(kwargs, _made))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise InternalError("a described mask was taken for one that has memory", function=function)

    @staticmethod
    def _meets(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> bool:  # fmt: skip
        """True if the description is all that is needed of the mask."""
        if type(attn_mask) is not DescribedMask or attn_mask._mask is not None or dropout_p or is_causal:
            return False
        if not all(type(tensor) is DTensor and tensor._layout.ndim == 4 for tensor in (query, key, value)):
            return False
        mesh, (axis,) = attn_mask._rows.mesh, attn_mask._rows.axes_of(2)
        layouts = tuple(tensor._layout.base for tensor in (query, key, value))
        if any(layout.mesh is not mesh for layout in layouts):
            return False
        batch, _, rows, columns = attn_mask._description.shape
        shape = layouts[0].shape
        if (batch, rows, columns) != (shape[0], shape[2], layouts[1].shape[2]):
            return False
        asked = (*layouts, axis, pinned(mesh, axis))
        if asked not in _met:
            if len(_met) >= _LIMIT:
                _met.clear()
            _met[asked] = _ring(layouts, axis)
        return _met[asked]

    @staticmethod
    def _attended(query: DTensor, key: DTensor, value: DTensor, attn_mask: DescribedMask, *args, **kwargs) -> Tensor:
        return call(described_attention, query, key, value, attn_mask._description, *args, **kwargs)


def _ring(layouts: tuple[Layout, ...], axis: int) -> bool:
    operands = [Operand(layout, False, index) for index, layout in enumerate(layouts)]
    meeting = meeting_of(layouts[0].mesh, *operands, swaps=True)
    return meeting is not None and meeting.axis == axis and meeting.choice.way == RING


def _keeps(function: Callable, args: tuple, kwargs: dict) -> bool:
    """True if the result is the mask itself, under another name."""
    mask, rest = args[0] if args else None, args[1:]
    if type(mask) is not DescribedMask or kwargs:
        return False
    if function is Tensor.to:
        return rest in ((mask._description.device,), (torch.bool,))
    if function is Tensor.expand:
        asked = rest[0] if len(rest) == 1 else rest
        return len(asked) == 4 and all(size in (-1, own) for size, own in zip(asked, mask._description.shape))
    if function is Tensor.__getitem__ and isinstance(rest[0], tuple) and len(rest[0]) <= 4:
        sizes = mask._description.shape
        return all(
            type(one) is slice and one.start in (None, 0) and one.step is None
            and (one.stop is None or type(one.stop) is int and one.stop >= size)
            for one, size in zip(rest[0], sizes)
        )  # fmt: skip
    return False


def _combined(function: Callable, args: tuple, kwargs: dict) -> DescribedMask | None:
    """Applies a function to the elements of described masks and of tensors that broadcast to their shape, none of which
    has both rows and columns; None if that gives no described mask."""
    first = next((value for value in args if type(value) is DescribedMask), None)
    if first is None or kwargs:
        return None
    for value in args:
        if type(value) is DescribedMask:
            if value._rows is not first._rows or value._mask is not None:
                return None
        elif isinstance(value, Tensor) and not _is_table(value, first._rows.shape):
            return None
    operands = [_elements(value) for value in args]

    def at(*indices: Tensor) -> Tensor:
        return function(*(operand(indices) for operand in operands))

    of = [value._description for value in args if type(value) is DescribedMask]
    return DescribedMask._described(at, first._rows, first._description.device, of)


def _is_table(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    fits = len(sizes) == 4 and all(own in (1, size) for own, size in zip(sizes, shape))
    promotes = tensor.ndim > 0 or tensor.dtype == torch.bool  # a number's dtype counts less than a dim's
    return fits and promotes and 1 in sizes[2:] and type(tensor) in (Tensor, DTensor)


def _elements(value: Any) -> Callable[[tuple[Tensor, ...]], Any]:
    """Gives an operand's elements at places."""
    if type(value) is DescribedMask:
        function = value._description.function
        return lambda indices: function(*indices)
    if not isinstance(value, Tensor):
        return lambda indices: value
    table = value if value.ndim else value.view(1)
    sizes = tuple(table.shape)

    def looked_up(indices: tuple[Tensor, ...]) -> Tensor:
        own = indices[4 - len(sizes) :]
        return table[tuple(index if size > 1 else index * 0 for index, size in zip(own, sizes))]

    return looked_up


def _made(tensor: Tensor) -> Tensor:
    return tensor.made() if type(tensor) is DescribedMask else tensor
