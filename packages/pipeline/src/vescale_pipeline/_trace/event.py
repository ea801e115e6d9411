"""Notes of a dry run: events, in order, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from vescale_trace.effects import Slot
from vescale_trace.values import tensors_in

from .placeholder import Placeholder
from .seen import Draw, Span


@dataclass(frozen=True)
class Event:
    """A unit's call (`module`) or a function between units, with what comes out: placeholders in `template`.

    Arguments:
        after: what user code draws between this event and the next one: on every stage that comes there.
        attributes: what a unit leaves in modules: (slot, template).
        writes: buffers that other stages need, written here: (slot, key of the value).
        fills: the key of the plain tensor that a function fills with values of the stage.
        inside: the autograd Function that called it, by name; None for none.
        again: whether backward computes it again, in a checkpoint of the model's own code.
        captures: whether a library collects what the module returns, see `captures.py`.
        takes: the keys of the values that it computes with.
    """

    stage: int
    name: str
    module: nn.Module | None
    function: Callable | None
    template: Any
    keys: tuple[int, ...]
    draws: tuple[Draw, ...]
    after: tuple[Draw, ...] = ()
    attributes: tuple[tuple[Slot, Any], ...] = ()
    writes: tuple[tuple[Slot, int], ...] = ()
    fills: int | None = None
    inside: str | None = None
    again: bool = False
    captures: bool = False
    span: Span | None = None
    takes: tuple[int, ...] = ()

    @cached_property
    def is_plain(self) -> bool:
        """True if one value comes out, and nothing else is left."""
        beside = self.draws or self.after or self.attributes or self.writes or self.captures
        return type(self.template) is Placeholder and not beside and self.fills is None and self.inside is None


@dataclass(frozen=True)
class Record:
    """Result of a dry run.

    Arguments:
        events: in order; their stages never decrease.
        result: what the forward returned, placeholders in place of tensors.
        crossing: per cut, the keys of the values that are computed before and used after it, ascending.
        uses: parameter name -> the stages that use it.
        draws_anything: whether anything draws random numbers.
        slots: what a microbatch leaves for the next.
        synced: buffers that several ranks keep: the last stage has them as one device does.
        is_whole: whether every stage must run the user's code to its end, for what that leaves behind.
        written: keys of values that are written in place.
        checkpoints: whether user code computes again in backward.
        open: modules that were called and are no units: their own code runs.
        returned: key of a value that is returned, and not in the last stage -> the last stage that has it.
        takes_own: whether masks are looked at in each call, see `rows/scattered.py`.
    """

    events: tuple[Event, ...]
    result: Any
    crossing: tuple[tuple[int, ...], ...]
    uses: dict[str, tuple[int, ...]]
    draws_anything: bool = field(default=False)
    slots: tuple[Slot, ...] = ()
    synced: tuple[Slot, ...] = ()
    is_whole: bool = False
    written: frozenset[int] = frozenset()
    checkpoints: bool = False
    open: frozenset[nn.Module] = frozenset()
    returned: Mapping[int, int] = field(default_factory=dict)
    takes_own: bool = False


def keys_of(event: Event) -> Iterator[int]:
    """The keys of the values that come out of it, by whichever way."""
    yield from event.keys
    if event.fills is not None:
        yield event.fills
    for _, template in event.attributes:
        yield from (tensor.key for tensor in tensors_in(template) if type(tensor) is Placeholder)
    yield from (key for _, key in event.writes)
