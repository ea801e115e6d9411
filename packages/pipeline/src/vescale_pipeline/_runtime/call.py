"""Facts about calls with inputs of one signature: their record, the forms of their messages, their digest."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, nn

from vescale_trace.values import map_tensors, tensors_in

from .._trace.event import Record
from .._trace.placeholder import Placeholder
from .._trace.rows.tags import Tag
from .._transport.p2p import Header
from ..action import COMPUTE, Action, Schedule
from .loss import loss_in

Turn = tuple[Action, tuple[Action, ...]]
"""An action, and the receives that are posted before it is done."""
_FORWARD = frozenset(("F", "SEND_F", "RECV_F"))
_FLAGS = frozenset((bool, float))


class Call:
    """See the module.

    `headers` holds, by kind of message, stage and whether gradients are computed, what is sent for every microbatch:
    how a tensor lies, and whether its gradient is awaited, which depends on what the stages before train.
    `reduction` tells how the loss comes from the batch's rows; None until a loss is asked for. `outputs` tells of all
    that the forward returns how it does: the dim that has the rows, or a tag; None until they are. `written`: the
    places of the tensors, among those of the arguments, that the forward writes to. `numbers`: places of a training
    call's outputs beside the loss that come from all rows, as a metric does, and that the last stage makes.
    """

    def __init__(self, record: Record, signature: Any) -> None:
        self.record = record
        self.reduction: Tag | None = None
        self.outputs: list[int | Tag] | None = None
        self.numbers: list[int] = []
        self.whole: Any = None  # what the forward returns for the whole batch, where a dry run has told
        self.written: set[int] = set()
        self.headers: dict[tuple, Header] = {}
        self._signature = signature
        self._digest: int | None = None
        self._turns: dict[bool, tuple[Turn, ...]] = {}

    def is_told(self, outputs: list[int | Tag]) -> None:
        """How each output comes from the batch's rows is known from now on."""
        templates, own = tensors_in(self.record.result), loss_in(self.record.result)
        self.outputs = outputs
        self.numbers = [
            at
            for at, (template, kind) in enumerate(zip(templates, outputs))
            if isinstance(kind, frozenset) and template is not own
            if type(template) is Placeholder and template.key not in self.record.returned
        ]

    @property
    def looks_ahead(self) -> bool:
        """True if a microbatch's labels are counted, or its masks looked at, for which user code runs once more."""
        counts = isinstance(self.reduction, frozenset) and any(type(kind) is int for kind in self.reduction)
        return counts or self.record.takes_own

    def forget_headers(self) -> None:
        """Something is trained that was not, or no longer is, on some rank: all ranks tell the forms anew."""
        self.headers.clear()

    @property
    def leaves_anything(self) -> bool:
        """True if user code changes the model or the generator when it runs once more."""
        return bool(self.record.slots) or self.record.draws_anything

    def turns(self, schedule: Schedule, rank: int, trains: bool, posts_ahead: bool) -> tuple[Turn, ...]:
        """A rank's actions in order; `posts_ahead` is whether receives may be posted before their turn."""
        found = self._turns.get(trains)
        if found is None:
            actions = [a for a in schedule.actions[rank] if trains or a.kind in _FORWARD]
            found = self._turns[trains] = _with_receives(actions) if posts_ahead else tuple((a, ()) for a in actions)
        return found

    def digest(self, schedule: Schedule) -> int:
        """A number that tells apart what ranks are about to run."""
        if self._digest is None:
            record = self.record
            events = [(event.stage, event.name, event.keys) for event in record.events]
            text = repr((schedule.hash, self._signature, events, record.crossing))
            self._digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return self._digest


def _with_receives(actions: list[Action]) -> tuple[Turn, ...]:
    """Receives are posted one computation early. What is sent is then on its way at once: gloo keeps at the sender what
    nobody waits for yet, which costs two more messages, and a wait for them. Cost: the memory of one message more for
    each kind that arrives."""
    turns: list[Turn] = []
    ahead: list[Action] = []
    for action in reversed(actions):
        if action.kind in COMPUTE:
            turns.append((action, tuple(reversed(ahead))))
            ahead.clear()
            continue
        if action.kind.startswith("RECV"):
            ahead.append(action)
        turns.append((action, ()))
    return tuple(reversed(turns))


def signature_of(inputs: Any, modules: list[nn.Module]) -> Any:
    """Returns all that decides a forward's path: structure and shapes of its inputs, plain values, and flags of modules
    (train or eval); for a module's fractions (a dropout's probability) whether they are zero, and nothing is drawn."""
    tensors: list = []

    def seen(tensor: Tensor) -> None:
        tensors.append((tuple(tensor.shape), str(tensor.dtype)))
        return None

    rest = map_tensors(inputs, seen)
    flags = [value != 0 for module in modules for value in module.__dict__.values() if type(value) in _FLAGS]
    return (tuple(tensors), repr(rest), bytes(flags))
