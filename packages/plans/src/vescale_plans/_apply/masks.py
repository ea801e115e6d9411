"""HuggingFace's attention masks by rows: a rank makes those of its part of the sequence, and no mask is ever full.

transformers makes a mask by a function of places, applied to an index tensor for rows and one for columns that
broadcast (`masking_utils`), through a table that is open to whoever brings an attention of his own. While a model with
a context axis runs, the function is given the rows' places as a tensor that is cut over that axis: what it computes
from them, causal, sliding window, chunks, padding, documents or a user's own, is cut likewise, by the engine's rules.

Where the function is proved to treat each pair of places by itself, not even the rows are made: what it gives is a
`DescribedMask`, of which attention in a ring makes the tiles that it needs, when it needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import (
    INVARIANT,
    DescribedMask,
    Mesh,
    convert_plain,
    is_reproducible,
    layout_of,
    mixing,
    sharded,
    state_of,
)

from .._calls.chain import add_step
from .balance import Balance

_ROWS = 2  # of [batch, heads, rows, columns]


class Context(NamedTuple):
    """A model that runs: its mesh, its context axis, how sequences are dealt out, whether masks may be described."""

    mesh: Mesh
    axis: int
    balance: Balance | None
    describes: bool


_running: list[Context] = []  # the innermost last


class MaskBoundary:
    """A step of the root module: within its forward masks are made by rows."""

    def __init__(self, root: nn.Module, mesh: Mesh, axis: int, balance: Balance | None, describes: bool) -> None:
        self._context = Context(mesh, axis, balance, describes)
        add_step(root, "masks", self._enter, self._leave)

    def _enter(self, root: nn.Module, args: tuple, kwargs: dict) -> None:
        _install()
        _running.append(self._context)
        mixing.enter(*self._context[:2], root)

    def _leave(self, root: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        _running.pop()
        mixing.leave(root)


def _install() -> None:
    """Puts the table's functions that build masks of rows and columns behind `_by_rows`; once."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return
    table = masks.ALL_MASK_ATTENTION_FUNCTIONS
    for name in ("sdpa", "eager"):
        made = table.get(name)
        if made is not None and not hasattr(made, "_vescale"):
            table.register(name, _by_rows(name, made))


def _by_rows(name: str, make: Callable) -> Callable:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("mask_function")
        if _running and given is not None and not kwargs.get("use_vmap"):
            context = _running[-1]

            def of_rows(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                places = batch, head, row, column
                described = _described(given, context, places) if name == "sdpa" else None
                return given(batch, head, _cut(row, context), column) if described is None else described

            kwargs = {**kwargs, "mask_function": of_rows}
        return make(*args, **kwargs)

    made._vescale = True
    return made


def _described(given: Callable, context: Context, places: tuple[Tensor, ...]) -> DescribedMask | None:
    """The mask without its rows. Not where there are no values."""
    if not context.describes or is_reproducible() or torch.compiler.is_compiling():
        return None
    if not all(type(place) is Tensor and place.ndim == 4 and place.device.type != "meta" for place in places):
        return None
    shape = tuple(place.shape[dim] for dim, place in enumerate(places))
    return DescribedMask.of(given, places, _layout(shape, context))


def _cut(rows: Tensor, context: Context) -> Tensor:
    if type(rows) is DTensor or rows.ndim != 4:
        return rows
    return convert_plain(rows, context.mesh, _layout(tuple(rows.shape), context), "attention mask")


def _layout(shape: tuple[int, ...], context: Context) -> Layout:
    mesh, axis, balance, _ = context
    rows_at = sharded(_ROWS) if balance is None else state_of(balance.placement(_ROWS, shape[_ROWS]))
    return layout_of(mesh, [rows_at if at == axis else INVARIANT for at in range(mesh.ndim)], shape)
