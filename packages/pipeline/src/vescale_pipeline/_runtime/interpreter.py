"""One call's actions, one after another: what each kind of action does, and what waits in between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import tensors_in

from .._errors import PipelineError
from .._trace.memory import Memories
from .._transport.messages import PARTS
from .._transport.p2p import Arrival, Header, header_of
from ..recording import is_recording, note
from ..simulate import Event
from .call import Call, Turn
from .loss import Weight, Weights, loss_in
from .member import Member
from .random_order import RandomOrder


class Interpreter:
    """The state of one call: what was posted, what waits, what was made.

    Arguments:
        forward: the model's own, of a microbatch.
        parts: the microbatches.
        weights: what each microbatch's loss counts for.
        scale: what the user's backward is expected to scale the loss by.
        trains: whether gradients are computed.
    """

    def __init__(
        self,
        member: Member,
        forward: Callable[[Any], Any],
        call: Call,
        parts: list[Any],
        weights: Weights,
        scale: Weight,
        trains: bool,
    ) -> None:
        self._forward, self._codec = forward, member.codec
        self._link, self._tags, self._stages = member.link, member.tags, member.stages
        self._rank, self._last = member.rank, member.schedule.stages - 1
        self._placement, self._places = member.schedule.placement, member.places
        self._call, self._parts, self._numbers = call, parts, call.numbers
        self._weights, self._scale, self._trains = weights, scale, trains
        self._posted: dict[tuple[str, int, int], Arrival] = {}
        self._unannounced: dict[tuple[str, int, int], int] = {}  # to be received from a peer
        self._made: dict[tuple[str, int, int], tuple[list[Tensor | None], Header]] = {}
        self._handed: dict[int, Header] = {}  # of the last microbatch's gradients, by stage
        self._seeds: dict[Weight, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.awaited_loss: Arrival | None = None  # of the batch, where another rank makes it
        self.outputs: dict[int, Any] = {}
        self.numbers: dict[int, list[Tensor | None]] = {}  # `Call.numbers`, those without a gradient
        self.returned: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by microbatch, of stages before the last
        self._memories = Memories(call.record.slots, member.stages, member.codec.whole)
        self._random = RandomOrder(member.link.device) if call.record.draws_anything else None
        self._table = {
            "F": self._do_forward,
            "B": self._do_backward,
            "I": self._do_input,
            "W": self._do_weight,
            "SEND_F": partial(self._send, "F", 1),
            "SEND_B": partial(self._send, "B", -1),
            "RECV_F": partial(self._post, "F"),
            "RECV_B": partial(self._post, "B"),
            "REDUCE": lambda stage, microbatch, peer: None,  # weights tied over stages are summed at the end
        }

    def do(self, turns: Sequence[Turn], doing: Any) -> None:
        """One after another; `doing.action` is the one at hand."""
        table, records = self._table, is_recording()
        for action, ahead in turns:
            doing.action = action
            for receive in ahead:
                table[receive.kind](*receive[1:])
            kind, stage, microbatch, peer = action
            if not records:
                table[kind](stage, microbatch, peer)
                continue
            self._began = perf_counter()
            table[kind](stage, microbatch, peer)
            note(Event(self._rank, action, self._began, perf_counter()))

    def end(self) -> None:
        """The generator goes past the last microbatch, and the model keeps what that left."""
        self._memories.end()
        if self._random is not None:
            self._random.end()

    def close(self) -> None:
        """Lets go of everything that was posted."""
        self._posted.clear()
        self._made.clear()
        self.awaited_loss = None

    # --- compute ------------------------------------------------------------------------

    def _do_forward(self, stage: int, microbatch: int, peer: int | None) -> None:
        arrived, header = self._take("F", stage, microbatch) if stage else ([], ())
        part = self._parts[microbatch]
        if self._random is not None:
            self._random.before(microbatch)
        forward = self._stages[stage].forward
        slot = forward(microbatch, arrived, header, partial(self._forward, part), self._memories)
        if slot.returned:
            self.returned[microbatch] |= slot.returned
        if self._random is not None:
            self._random.after(microbatch)
        if stage == self._last:
            loss = loss_in(slot.output)
            if loss is not None:
                weight = self._weights[microbatch]
                slot.loss, slot.counts = self._codec.whole(loss), isinstance(weight, Tensor) or weight != 0
                self.losses[microbatch] = slot.loss.detach()
            if not self._trains:
                self.outputs[microbatch] = slot.output
            elif self._numbers:
                made = tensors_in(slot.output)
                self.numbers[microbatch] = [None if made[at].requires_grad else made[at] for at in self._numbers]
            slot.output = None
        else:
            self._made["F", stage + 1, microbatch] = (slot.outputs, slot.header)

    def _do_backward(self, stage: int, microbatch: int, peer: int | None) -> None:
        gradients = self._take_gradients(stage, microbatch)
        leaves, free = self._stages[stage].backward(microbatch, gradients, self._seed(stage, microbatch))
        self._hand_back(stage, microbatch, leaves)
        self._recycle(free)
        self._recycle(gradients)

    def _do_input(self, stage: int, microbatch: int, peer: int | None) -> None:
        gradients = self._take_gradients(stage, microbatch)
        leaves = self._stages[stage].input_backward(microbatch, gradients, self._seed(stage, microbatch))
        self._hand_back(stage, microbatch, leaves)

    def _do_weight(self, stage: int, microbatch: int, peer: int | None) -> None:
        self._recycle(self._stages[stage].weight_backward(microbatch))

    def _seed(self, stage: int, microbatch: int) -> Tensor | None:
        if stage != self._last:
            return None
        weight = self._weights[microbatch]
        seed = self._seeds.get(weight)
        if seed is None:
            loss, factor = self.losses[microbatch], weight * self._scale
            seed = factor.to(loss.dtype) if isinstance(factor, Tensor) else torch.full_like(loss, factor)
            self._seeds[weight] = seed
        return seed

    def _hand_back(self, stage: int, microbatch: int, leaves: list[Tensor | None]) -> None:
        if stage:
            header = self._handed[stage] = header_of(leaves, repeat(None), self._handed.get(stage))
            self._made["B", stage - 1, microbatch] = (leaves, header)

    def _take_gradients(self, stage: int, microbatch: int) -> list[Tensor | None]:
        return [] if stage == self._last else self._take("B", stage, microbatch)[0]

    def _take(self, kind: str, stage: int, microbatch: int) -> tuple[list[Tensor | None], Header]:
        """Returns a stage's input, from another rank or from a neighbouring stage on this one."""
        key = (kind, stage, microbatch)
        arrival = self._posted.pop(key, None)
        if arrival is None:
            if key in self._made:
                tensors, header = self._made.pop(key)
                self._link.handed_over(kind, stage, tensors, header)
                # Others, so that whoever keeps those that the neighbour made is seen by the owners of their memory.
                return [None if tensor is None else tensor.detach() for tensor in tensors], header
            arrival = self._post_announced(*key, self._unannounced.pop(key))
        tensors = arrival.wait()
        sender = stage - 1 if kind == "F" else stage + 1
        self._link.drop_sent(self._placement[sender], self._places[kind, sender, microbatch])
        self._began = perf_counter()
        return tensors, arrival.header

    def _recycle(self, free: list[Tensor | None]) -> None:
        while free:
            if (tensor := free.pop()) is not None:
                self._link.recycle(tensor)

    # --- transfers ----------------------------------------------------------------------

    def _send(self, kind: str, way: int, stage: int, microbatch: int, peer: int) -> None:
        to_stage = stage + way
        tensors, header = self._made.pop((kind, to_stage, microbatch))
        tag = self._tags(kind, to_stage, microbatch)
        known = self._call.headers.get((kind, to_stage, self._trains))
        if known is None:
            if len(header) > PARTS:
                raise PipelineError("pipeline", f"{len(header)} tensors cross one cut, more than {PARTS}")
            self._call.headers[kind, to_stage, self._trains] = header
            self._link.send_object(peer, self._tags(f"header {kind}", to_stage), header)
        elif known is not header and known != header:
            tensors = _like(known, header, tensors, kind, to_stage, self._link.device)
        self._link.send(peer, tag, tensors, self._places[kind, to_stage, microbatch])

    def _post(self, kind: str, stage: int, microbatch: int, peer: int) -> None:
        """A receive whose header is not told yet is posted when it is needed, where messages have tags; else it must
        take its turn, for which the sender is waited for: schedules are proved for a transport that lets every rank do
        one transfer at a time. Nothing is left to do at the turn of what was posted ahead."""
        key = (kind, stage, microbatch)
        if key in self._posted or key in self._unannounced:
            return
        if self._link.has_tags and (kind, stage, self._trains) not in self._call.headers:
            self._unannounced[key] = peer
        else:
            self._posted[key] = self._post_announced(*key, peer)

    def _post_announced(self, kind: str, stage: int, microbatch: int, peer: int) -> Arrival:
        header = self._call.headers.get((kind, stage, self._trains))
        if header is None:
            header = self._link.receive_object(peer, self._tags(f"header {kind}", stage))
            self._call.headers[kind, stage, self._trains] = header
        return self._link.post(peer, self._tags(kind, stage, microbatch), header)


def _like(known: Header, header: Header, tensors: list, kind: str, stage: int, device: torch.device) -> list:
    """A message of the form that the other end expects; a gradient that nothing flowed into is zero."""
    fitting = []
    for expected, part, tensor in zip(known, header, tensors):
        if expected is not None and part is None and kind == "B":
            tensor = torch.zeros(expected.shape, dtype=expected.dtype, device=device)
        elif expected is not None and part is not None and expected[::2] == part[::2]:  # all but strides and grad
            if expected.stride != part.stride:
                fresh = torch.empty_strided(expected.shape, expected.stride, dtype=part.dtype, device=device)
                tensor = fresh.copy_(tensor)
        elif expected != part:
            raise PipelineError(
                "pipeline",
                f"what crosses the cut before stage {stage if kind == 'F' else stage + 1} has a different form "
                "than in the microbatch before",
                [f"before  {known}", f"now     {header}"],
                [("let nothing but the shapes of its inputs decide what a forward computes", "")],
            )
        fitting.append(tensor)
    return fitting
