"""One call's actions, one after another: what each kind of action does, and what waits in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .._errors import PipelineError
from .._torch_private import _get_privateuse1_backend_name
from .._trace.memory import Memories
from .._trace.placeholder import memory_of
from .._transport.messages import PARTS
from .._transport.p2p import Arrival, Header, part_of
from ..action import Action
from ..recording import is_recording, note
from ..simulate import Event
from .call import Call
from .generators import set_states, states
from .loss import Weight, Weights, loss_in
from .member import Member


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
        self._call, self._parts = call, parts
        self._weights, self._scale, self._trains = weights, scale, trains
        self._posted: dict[tuple[str, int, int], Arrival] = {}
        self._unannounced: dict[tuple[str, int, int], int] = {}  # to be received from a peer
        self._made: dict[tuple[str, int, int], tuple[list[Tensor | None], Header]] = {}
        self._seeds: dict[Weight, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._memories = Memories(call.record.slots, member.stages, member.codec.whole)
        self._random = _Random(member.link.device) if call.record.draws_anything else None
        self._table = {
            "F": self._do_forward,
            "B": self._do_backward,
            "I": self._do_input,
            "W": self._do_weight,
            "SEND_F": self._send_forward,
            "SEND_B": self._send_backward,
            "RECV_F": self._receive_forward,
            "RECV_B": self._receive_backward,
            "REDUCE": lambda stage, microbatch, peer: None,  # weights tied over stages are summed at the end
        }

    def do(self, actions: Sequence[Action], doing: Any) -> None:
        """One after another; `doing.action` is the one at hand."""
        table, records = self._table, is_recording()
        for action in actions:
            doing.action = action
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

    # --- compute ------------------------------------------------------------------------

    def _do_forward(self, stage: int, microbatch: int, peer: int | None) -> None:
        arrived, header = self._take("F", stage, microbatch) if stage else ([], ())
        part = self._parts[microbatch]
        if self._random is not None:
            self._random.before(microbatch)
        forward = self._stages[stage].forward
        slot = forward(microbatch, arrived, header, lambda: self._forward(part), self._memories)
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
            slot.output = None
        else:
            self._made["F", stage + 1, microbatch] = (slot.outputs, slot.header)

    def _do_backward(self, stage: int, microbatch: int, peer: int | None) -> None:
        gradients, buffers = self._take_gradients(stage, microbatch)
        leaves, free = self._stages[stage].backward(microbatch, gradients, self._seed(stage, microbatch))
        self._hand_back(stage, microbatch, leaves)
        # The gradient of a value that only passes through is the buffer that it arrived in, which is yet to be sent.
        passing = {memory_of(gradient) for gradient in leaves if gradient is not None}
        self._recycle(free, [buffer for buffer in buffers if memory_of(buffer) not in passing])

    def _do_input(self, stage: int, microbatch: int, peer: int | None) -> None:
        gradients, _ = self._take_gradients(stage, microbatch)
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
            header = tuple(None if gradient is None else part_of(gradient) for gradient in leaves)
            self._made["B", stage - 1, microbatch] = (leaves, header)

    def _take_gradients(self, stage: int, microbatch: int) -> tuple[list[Tensor | None], list[Tensor]]:
        if stage == self._last:
            return [], []
        gradients, _ = self._take("B", stage, microbatch)
        return gradients, [gradient for gradient in gradients if gradient is not None]

    def _take(self, kind: str, stage: int, microbatch: int) -> tuple[list[Tensor | None], Header]:
        """What arrived for a stage: from another rank, or from a neighbouring stage on this one."""
        key = (kind, stage, microbatch)
        if key in self._made:
            made = self._made.pop(key)
            self._link.handed_over(kind, stage, *made)
            return made
        if key in self._unannounced:
            self._posted[key] = self._post_announced(*key, self._unannounced.pop(key))
        arrival = self._posted.pop(key)
        tensors = arrival.wait()
        self._began = perf_counter()
        return tensors, arrival.header

    def _recycle(self, *groups: list[Tensor]) -> None:
        for group in groups:
            while group:
                self._link.recycle(group.pop())

    # --- transfers ----------------------------------------------------------------------

    def _send_forward(self, stage: int, microbatch: int, peer: int) -> None:
        self._send("F", stage + 1, microbatch, peer)

    def _send_backward(self, stage: int, microbatch: int, peer: int) -> None:
        self._send("B", stage - 1, microbatch, peer)

    def _receive_forward(self, stage: int, microbatch: int, peer: int) -> None:
        self._post("F", stage, microbatch, peer)

    def _receive_backward(self, stage: int, microbatch: int, peer: int) -> None:
        self._post("B", stage, microbatch, peer)

    def _send(self, kind: str, to_stage: int, microbatch: int, peer: int) -> None:
        tensors, header = self._made.pop((kind, to_stage, microbatch))
        tag = self._tags(kind, to_stage, microbatch)
        known = self._call.headers.get((kind, to_stage, self._trains))
        if known is None:
            if len(header) > PARTS:
                raise PipelineError("pipeline", f"{len(header)} tensors cross one cut, more than {PARTS}")
            self._call.headers[kind, to_stage, self._trains] = header
            self._link.send_object(peer, self._tags(f"header {kind}", to_stage), header)
        elif known != header:
            tensors = _like(known, header, tensors, kind, to_stage, self._link.device)
        self._link.send(peer, tag, tensors)

    def _post(self, kind: str, stage: int, microbatch: int, peer: int) -> None:
        """A receive whose header is not told yet is posted when it is needed, where messages have tags; else it must
        take its turn, for which the sender is waited for: schedules are proved for a transport that lets every rank do
        one transfer at a time."""
        key = (kind, stage, microbatch)
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


class _Random:
    """The default generators, kept where one device would have them that runs the microbatches one after another.

    What other stages draw is known by the operators of a dry run, replayed on this stage's device. Kernels that take
    numbers otherwise than these operators do (a fused dropout on CUDA) may leave its generator elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", _get_privateuse1_backend_name()):
            warnings.warn(
                f"vescale_pipeline: random numbers of a pipeline on {device.type} may not be those of one device: what "
                "other stages draw is gone past by operators that fused kernels need not agree with",
                stacklevel=2,
            )
        self._device = device
        self._states = {0: states(device)}

    def before(self, microbatch: int) -> None:
        set_states(self._device, self._states[microbatch])

    def after(self, microbatch: int) -> None:
        self._states.setdefault(microbatch + 1, states(self._device))

    def end(self) -> None:
        """Past the last microbatch that was run."""
        set_states(self._device, self._states[max(self._states)])
