"""Masks that are described: a function of places stands for a mask, of which a rank makes the tiles that it needs.

Such a function says of every pair of a row and a column by itself whether the row sees the column: it takes index
tensors that broadcast, [batch, 1, 1, 1], [1, 1, 1, 1], [1, 1, rows, 1] and [1, 1, 1, columns], computes with them
element by element, and looks places up in tensors (`padding[batch, column]`). Then the mask of a tile is the tile of
the mask. That it is so is not believed: the function runs on one place, and on every tile, under a mode that lets
nothing pass but operations with the trait ELEMENTWISE, and look-ups by such indices. What passes not has no
description, and its mask is made as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._layouts.region import Ranges
from .._rules.registry import TABLE
from .._rules.traits import Trait
from .._tensor.tensor import DTensor
from .tiles import Tile

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
EDGE = 256
"""Rows and columns of the squares that are either all seen, or not at all, or masked; at least so many, and so that a
rank's rows have `SQUARES` of them."""
SQUARES = 8
_READS = frozenset({Tensor.device.__get__, Tensor.dtype.__get__})
_CONSTANTS = frozenset({Tensor.new_ones, Tensor.new_zeros, Tensor.new_tensor, Tensor.new_full})


class NotDescribedError(Exception):
    """The function does something that may tell one place from another."""


class Description:
    """A mask [batch, 1, rows, columns], true where a row sees a column. Equal to all of its shape: what is decided for
    one is decided for another, and none holds on to its tensors there."""

    def __init__(
        self, function: MaskFunction, shape: tuple[int, int, int, int], device: torch.device,
        of: Sequence[Description] = (),
    ) -> None:  # fmt: skip
        """Raises NotDescribedError. Tensors that are looked up are made whole: one gather each where they are cut.

        of: those that it is made of, whose tensors are as they were then.
        """
        self.shape = shape
        self.device = device
        self.function = function
        # what is looked up, and the same whole
        self._tables = {key: known for one in of for key, known in one._tables.items()}
        self._held: dict[Any, Held] = {}
        place = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
        self._called(place, place.clone(), place.clone(), place.clone(), found=True)

    def __eq__(self, other: object) -> bool:
        return type(other) is Description and other.shape == self.shape

    def __hash__(self) -> int:
        return hash(self.shape)

    def held(self, batch: Ranges, rows: Ranges) -> Held:
        """The part of a rank that holds these rows of the batch and of queries."""
        key = batch, rows
        if key not in self._held:
            self._held[key] = Held(self, batch, rows)
        return self._held[key]

    def seen(self, batch: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """[batch, 1, rows, columns], for places in one dim each."""
        head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.device)
        found = self._called(batch.view(-1, 1, 1, 1), head, rows.view(1, 1, -1, 1), columns.view(1, 1, 1, -1))
        return found.expand(len(batch), 1, len(rows), len(columns))

    def _called(self, *indices: Tensor, found: bool = False) -> Tensor:
        with _Watch(self._tables, found, indices) as watch:
            out = self.function(*indices)
        if type(out) is not Tensor or out.dtype != torch.bool or out.ndim != 4 or not watch.made(out):
            raise NotDescribedError
        return out


class Held:
    """One rank's part of a mask's description, as a ring asks for it."""

    ndim = 4
    dtype = torch.bool
    requires_grad = False

    def __init__(self, description: Description, batch: Ranges, rows: Ranges) -> None:
        self.description = description
        self._batch, self._rows = _places(batch, description.device), _places(rows, description.device)
        self.known: tuple[Any, Any] | None = None  # which blocks are seen by whom, see `empty`

    @property
    def device(self) -> torch.device:
        return self.description.device

    def part(self, tile: Tile) -> Tensor | None:
        """[batch, 1, rows, columns]; None if the tile's rows see all of its columns."""
        if tile.clear:
            return None
        columns = torch.arange(*tile.places, device=self.device)
        return self.description.seen(self._batch, self._rows[slice(*tile.rows)], columns)

    def rows(self, columns: int) -> Tensor:
        """[batch, 1, rows, columns]: all of it."""
        return self.description.seen(self._batch, self._rows, torch.arange(columns, device=self.device)).contiguous()

    def tiles(self, blocks: tuple[Ranges, ...]) -> tuple[tuple[Tile, ...], ...]:
        """Per block of columns, what the rows see of it: squares that are all seen, joined, and others with a mask.
        One wait for the device."""
        edge = max(EDGE, -(-len(self._rows) // SQUARES))
        squares: list[tuple[int, Tile]] = []
        told: list[Tensor] = []
        for at, block in enumerate(blocks):
            for top in range(0, len(self._rows), edge):
                rows, column = (top, min(top + edge, len(self._rows))), 0
                for start, stop in block:
                    for first in range(start, stop, edge):
                        last = min(first + edge, stop)
                        square = Tile(rows, (column + first - start, column + last - start), (first, last))
                        seen = self.part(square)
                        squares.append((at, square))
                        told.append(torch.stack((seen.any(), seen.all())))
                    column += stop - start
        found: list[list[Tile]] = [[] for _ in blocks]
        for (at, square), (is_any, is_all) in zip(squares, torch.stack(told).tolist() if told else ()):
            if is_any:
                _join(found[at], square._replace(clear=is_all))
        return tuple(tuple(_stacked(each)) for each in found)


def _join(found: list[Tile], square: Tile) -> None:
    """Adds a square, to its neighbour on the left where both are clear, or neither is."""
    last = found[-1] if found else None
    follows = last is not None and last.rows == square.rows and last.clear == square.clear
    if follows and last.columns[1] == square.columns[0] and last.places[1] == square.places[0]:
        columns, places = (last.columns[0], square.columns[1]), (last.places[0], square.places[1])
        square = square._replace(columns=columns, places=places)
        found.pop()
    found.append(square)


def _stacked(found: list[Tile]) -> list[Tile]:
    """Clear tiles of the same columns that lie one below the other as one."""
    out: dict[tuple, Tile] = {}
    for tile in found:
        above = out.get((tile.columns, tile.rows[0])) if tile.clear else None
        if above is not None:
            del out[tile.columns, tile.rows[0]]
            tile = tile._replace(rows=(above.rows[0], tile.rows[1]))
        out[(tile.columns, tile.rows[1]) if tile.clear else (tile.columns, tile.rows)] = tile
    return list(out.values())


class _Watch(TorchFunctionMode):
    """Lets a mask function do what leaves every pair of places by itself, and gives it whole tensors to look up.

    tables: by the id of a tensor, itself and the same whole; found: whether these are found out now.
    """

    def __init__(self, tables: dict[int, tuple[Tensor, Tensor]], found: bool, indices: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._tables, self._found = tables, found
        self._made = {id(index): index for index in indices}

    def made(self, tensor: Any) -> bool:
        """True if it was computed from places."""
        return id(tensor) in self._made

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _READS and self.made(args[0]):
            return function(*args)
        if function is Tensor.__getitem__:
            args = self._looked_up(*args), args[1]
        elif not self._is_by_itself(function, args, kwargs):
            raise NotDescribedError(function)
        out = function(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise NotDescribedError(function)
        self._made[id(out)] = out
        return out

    def _is_by_itself(self, function: Any, args: tuple, kwargs: dict) -> bool:
        values = (*args, *kwargs.values())
        if any(isinstance(value, (list, dict)) or isinstance(value, tuple) and value for value in values):
            return False
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not all(map(self.made, tensors)):
            return False
        if function is Tensor.to:
            return True
        if function in _CONSTANTS:
            return len(args) > 1 and args[1] == ()
        entry = TABLE.get(function)
        traits = entry.traits if entry is not None else Trait(0)
        return Trait.ELEMENTWISE in traits and not traits & (Trait.DRAWS | Trait.READS) and not entry.inplace

    def _looked_up(self, table: Tensor, index: Any) -> Tensor:
        """The whole of a tensor of which every dim is indexed by places."""
        if not isinstance(index, tuple) or self.made(table) or table.ndim != len(index):
            raise NotDescribedError("getitem")
        if not all(isinstance(one, Tensor) and self.made(one) and one.dtype == torch.int64 for one in index):
            raise NotDescribedError("getitem")
        known = self._tables.get(id(table))
        if known is None:
            if not self._found or type(table) not in (Tensor, DTensor) or table.requires_grad:
                raise NotDescribedError("getitem")
            whole = table.full_tensor() if type(table) is DTensor else table
            known = self._tables[id(table)] = table, whole.clone()  # as it is now, whatever is written to it later
        return known[1]


def _places(ranges: Ranges, device: torch.device) -> Tensor:
    held = [torch.arange(start, stop, device=device) for start, stop in ranges]
    return torch.cat(held) if held else torch.zeros(0, dtype=torch.int64, device=device)
