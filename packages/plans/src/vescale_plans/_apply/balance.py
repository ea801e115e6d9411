"""Cuts sequences so that attention is the same work on every rank.

Under a causal mask a row's work grows with its place. In a zigzag each rank gets a front and a back part, which
together are the same work for all. Where work grows to a window's width only, or begins anew with each document, parts
are dealt out by their work, as few as bring the ranks within `CLOSE` of each other.

What a model does with its sequence is guessed from its modules and its config. A wrong guess costs communication or
balance, never a result.
"""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import InterleavedShard, Placement, Shard, zigzag
from vescale_dtensor.engine import Mesh, cut_ranges, is_reproducible

from .._plan.fields import PlanFields
from .._torch_private import _ConvNd

CLOSE = 0.04
"""The difference between the ranks with most and with least work, relative to the mean."""
PARTS = (2, 4, 8, 16)
"""Parts of a sequence per rank: each pair of parts that see each other is a kernel of its own."""
LEAST = 8
"""Rows that a part has at least, where a rank has more than two."""
MIXERS = (_ConvNd, nn.RNNBase)
"""Modules that meet positions without attention, and for which parts in one piece are better."""
_CAUSAL = re.compile(r"is_causal\s*=\s*True")

Documents = tuple[tuple[int, ...], ...]
"""Per row of a batch, where its documents begin."""


class Balance:
    """The layout of sequences of one model: `placement` of a dim, for the batch that is under way."""

    def __init__(self, ranks: int, windows: tuple[int | None, ...], pinned: bool) -> None:
        self._ranks = ranks
        self._pinned = pinned  # by the plan, in the reproducible mode too, which computes attention whole on each rank
        self._windows = windows
        self._documents: Documents = ()

    def look_at(self, batch: dict[str, Any]) -> None:
        """Notes where documents begin: places that begin anew."""
        places = batch.get("position_ids")
        self._documents = ()
        if type(places) is Tensor and places.ndim == 2 and not places.is_meta and places.numel():
            starts = places[:, 1:] != places[:, :-1] + 1
            if bool(starts.any()):
                self._documents = tuple((0, *(row.nonzero().flatten() + 1).tolist()) for row in starts)

    def placement(self, dim: int, size: int) -> Placement:
        if is_reproducible() and not self._pinned:
            return Shard(dim)
        order = order_for(size, self._ranks, self._windows, self._documents)
        return Shard(dim) if order is None else InterleavedShard(dim, 1, order)


def balance_of(plan: PlanFields, mesh: Mesh, model: nn.Module) -> Balance | None:
    """Returns the balance; None if sequences are cut in one piece for each rank. The mesh may be smaller than the
    plan's: one rank."""
    if plan.context_axis is None or plan.context_layout == "contiguous":
        return None
    if plan.context_layout == "auto" and (plan.context not in ("auto", "ring") or not _is_causal(model)):
        return None
    ranks = mesh.sizes[mesh.axis(plan.context_axis)]
    return Balance(ranks, windows_of(model), pinned=plan.context_layout != "auto")


def _is_causal(model: nn.Module) -> bool:
    """True if all attention says that it is causal, and nothing else is known to mix positions."""
    said = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if any(isinstance(module, MIXERS) for module in model.modules()) or not all(said):
        return False
    return bool(said) or any(_calls_causal(kind) for kind in {type(module) for module in model.modules()})


@lru_cache(maxsize=1024)
def _calls_causal(kind: type[nn.Module]) -> bool:
    if kind.__module__.startswith("torch."):
        return False
    try:
        return bool(_CAUSAL.search(inspect.getsource(kind.forward)))
    except (OSError, TypeError):
        return False


def windows_of(model: nn.Module) -> tuple[int | None, ...]:
    """Each layer's sliding window, None for a whole sequence, as transformers' configs say it."""
    config = getattr(model, "config", None)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int):
        return (None,)
    if not kinds:
        return (window,) if getattr(config, "use_sliding_window", True) else (None,)
    return tuple(sorted({window if "sliding" in kind else None for kind in kinds}, key=str))


@lru_cache(maxsize=4096)
def order_for(
    size: int, ranks: int, windows: tuple[int | None, ...], documents: Documents = ()
) -> tuple[int, ...] | None:
    """Returns the owner of each chunk of a sequence; None for one part per rank, if that is balanced and most keys stay
    where they are. Every rank has as many chunks as the others."""
    until = _work(size, windows, documents)
    tried: list[tuple[float, tuple[int, ...] | None]] = []
    if None not in windows or documents:
        tried.append((spread_of(None, size, ranks, windows, documents), None))
    for parts in PARTS:
        if parts > 2 and size < parts * ranks * LEAST or tried and tried[-1][0] <= CLOSE:
            break
        order = zigzag(ranks) if parts == 2 and not tried else _dealt(parts, ranks, size, until)
        tried.append((spread_of(order, size, ranks, windows, documents), order))
    return min(tried, key=lambda one: one[0])[1]


def _dealt(parts: int, ranks: int, size: int, until: list[int]) -> tuple[int, ...]:
    """The chunks with most work first, each to the rank that has least so far and room for it."""
    count = parts * ranks
    chunk = -(-size // count)
    work = [until[min(size, (at + 1) * chunk)] - until[min(size, at * chunk)] for at in range(count)]
    order, done, held = [0] * count, [0] * ranks, [0] * ranks
    for at in sorted(range(count), key=lambda at: -work[at]):
        rank = min((r for r in range(ranks) if held[r] < parts), key=lambda r: done[r])
        order[at], done[rank], held[rank] = rank, done[rank] + work[at], held[rank] + 1
    return tuple(order)


def spread_of(
    order: tuple[int, ...] | None, size: int, ranks: int, windows: tuple[int | None, ...], documents: Documents = ()
) -> float:
    """The difference of work between the ranks with most and least, relative to the mean."""
    parts = cut_ranges(Shard(0) if order is None else InterleavedShard(0, 1, order), size, ranks)
    until = _work(size, windows, documents)
    work = [sum(until[stop] - until[start] for start, stop in ranges) for ranges in parts]
    return (max(work) - min(work)) * ranks / max(1, sum(work))


@lru_cache(maxsize=64)
def _work(size: int, windows: tuple[int | None, ...], documents: Documents) -> list[int]:
    """[size + 1]: pairs of the rows before each place."""
    place = torch.arange(size)
    total = torch.zeros(size, dtype=torch.int64)
    for starts in documents or ((0,),):
        begins = torch.zeros(size, dtype=torch.int64)
        begins[torch.tensor(starts)] = torch.tensor(starts)
        seen = place - begins.cummax(0).values + 1
        for window in windows:
            total += seen if window is None else seen.clamp(max=window)
    return [0, *total.cumsum(0).tolist()]
