"""The interpreter: runs a schedule on this rank's stages, knowing no schedule by name.

    loss = model(batch)      splits the batch, runs the schedule's actions, forward and
                             backward, and gives the loss, the same on every rank
    loss.backward()          hands the gradients to the parameters

One call is: the inputs' record (a dry run for new shapes), a word with the
neighbouring ranks that all run the same, the actions one after another, the sums of
weights tied over stages, the loss from the last stage. Under `torch.no_grad()` only
the forward actions run.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ._containers import fill, map_tensors, tensors_in
from ._errors import PipelineError
from ._faults import Faults, failure
from ._loss import Gradients, Release, loss_in, no_loss, with_loss
from ._microbatches import loss_weights, split
from ._ownership import Ownership, let_go
from ._p2p import Arrival, Header, Link, LinkError, Part, part_of
from ._placeholder import Current
from ._record import Record, dry_run
from ._skeleton import Station
from ._stage import Codec, Stage, check_uses
from .action import Action, Schedule

TIMEOUT = timedelta(minutes=10)
_FORWARD = frozenset(("F", "SEND_F", "RECV_F"))
_PARTS = 64  # tensors per message, at most: tags are numbered so


class Runtime:
    """Stands before the root module's call.

    Arguments:
        model: whose parameters of other stages are let go.
        schedule: verified; its ranks are `ranks`.
        owned: the cuts, and who owns what: `ownership(model, cuts)` of the whole model.
        ranks: this pipeline's global ranks, in order.
        group: a process group of these ranks that nothing else uses; closed when anything fails.
        codec: for values that are not plain tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        owned: Ownership,
        ranks: list[int],
        group: Any,
        *,
        codec: Codec | None = None,
        timeout: timedelta = TIMEOUT,
        device: torch.device | None = None,
    ) -> None:
        self.schedule = schedule
        self._codec = codec or Codec()
        self._owned = owned
        self._link = Link(ranks, device or torch.device("cpu"), timeout, group)
        self._faults = Faults(f"{'-'.join(map(str, ranks))}/{_number_of(ranks)}")
        self.rank = self._link.rank
        mine = schedule.stages_of(self.rank)
        let_go(model, {name for stage in mine for name in self._owned.names_of(stage)})
        parameters = dict(model.named_parameters())
        self._stages = {
            stage: Stage(stage, {name: parameters[name] for name in self._owned.names_of(stage)}, self._codec)
            for stage in mine
        }
        self._model = model
        self._root = Station(model, "").original
        self._modules = list(model.modules())
        self._parameters = parameters
        self._tied = sorted(name for name, stages in self._owned.stages.items() if len(stages) > 1)
        self._calls: dict[Any, Call] = {}
        self._count = 0
        self._scale = 1.0
        self._gradients: Gradients | None = None
        self._broken: str | None = None
        model.__dict__["_call_impl"] = self

    # --- the model's call -------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if Current.reader is not None:  # the model calls itself
            return self._root(*args, **kwargs)
        if self._broken is not None:
            raise failure(self._broken)
        parts = split((args, kwargs), self.schedule.microbatches)
        doing = _Doing(self.rank)
        try:
            return self._run(self._call_of(parts), parts, doing)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, PipelineError) and doing.action is None:
                raise  # nothing has started: the same on every rank
            self._broken = self._faults.cause_of(error, self.rank, str(doing))
            self._close()
            raise failure(self._broken) from (None if isinstance(error, LinkError) else error)

    def _call_of(self, parts: list[Any]) -> Call:
        """What is known of calls with inputs of these shapes; a dry run for new ones."""
        key = _signature(parts[0], self._modules)
        call = self._calls.get(key)
        if call is None:
            stations = {
                module: Station(module, name) for name, module in self._model.named_modules() if module is not self._model
            }
            record = dry_run(self._model, self._owned.cuts, lambda: self._forward(parts[0]), stations)
            check_uses(record, self._owned.stages, self._owned.cuts)
            for event in record.events:
                if event.module is not None:
                    event.module.__dict__["_call_impl"] = stations[event.module]
            call = self._calls[key] = Call(record, key)
        return call

    def _forward(self, part: Any) -> Any:
        args, kwargs = part
        return self._root(*args, **kwargs)

    def _run(self, call: Call, parts: list[Any], doing: _Doing) -> Any:
        trains = torch.is_grad_enabled()
        if trains and loss_in(call.record.result) is None:
            raise no_loss(call.record.result)
        weights = loss_weights(call.record, self._forward, parts) if loss_in(call.record.result) is not None else []
        self._greet(call, trains, doing)
        for stage in self._stages.values():
            stage.begin(call.record, self.schedule.stages)
        scale = self._gradients.used if self._gradients is not None else 1.0
        state = Interpreter(self, call, parts, weights, scale, trains)
        for action in call.actions(self.schedule, self.rank, trains):
            doing.action = action
            state.do(action)
        state.end()
        doing.action = "the end of the call"
        if not trains:
            return self._evaluated(call, state, weights)
        sums = self._sum_tied()
        loss = self._share_loss(call, state, weights)
        self._link.flush()
        trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        self._gradients = Gradients([sums.get(name) for name in trained], scale)
        anchor = torch.zeros((), requires_grad=True)
        released = Release.apply(self._gradients, loss, anchor, *(self._parameters[name] for name in trained))
        return with_loss(call.record.result, released)

    # --- before and after the actions ---------------------------------------------------

    def _greet(self, call: Call, trains: bool, doing: _Doing) -> None:
        """Neighbours compare what they are about to run. Cost: one message of 24 bytes each way."""
        self._count += 1
        peers = [peer for peer in (self.rank - 1, self.rank + 1) if 0 <= peer < self.schedule.ranks]
        doing.action = f"the beginning of call {self._count}"
        mine = [self._count, int(trains), call.digest(self.schedule)]
        for peer, theirs in zip(peers, self._link.exchange(peers, self._tag("greet"), mine)):
            if theirs != mine:
                what = "call" if theirs[0] != mine[0] else "mode" if theirs[1] != mine[1] else "batch, model or schedule"
                low, high = sorted((peer, self.rank))
                raise PipelineError(
                    "pipeline",
                    f"ranks {low} and {high} are about to run different things (another {what}): every rank of a "
                    "pipeline calls the model with the same batches",
                    (),
                    [("seed the loader alike on all ranks", "the same batch, in shapes and order")],
                )

    def _sum_tied(self) -> dict[str, Tensor | None]:
        """Each weight's gradient; of weights tied over stages, the sum over their uses, stage by stage."""
        per_stage = {index: stage.sums() for index, stage in self._stages.items()}
        sums = {name: gradient for of_stage in per_stage.values() for name, gradient in of_stage.items()}
        placement = self.schedule.placement
        for number, name in enumerate(self._tied):
            users = self._owned.stages[name]
            ranks = sorted({placement[stage] for stage in users})
            if self.rank not in ranks:
                continue
            mine = {stage: per_stage[stage].get(name) for stage in users if placement[stage] == self.rank}
            others = [rank for rank in ranks if rank != self.rank]
            tag = self._tag("tied") + number * _PARTS * self.schedule.stages
            uses = dict(mine)
            if others:
                headers = {stage: None if g is None else part_of(g) for stage, g in mine.items()}
                for rank in others:
                    self._link.send_object(rank, tag, headers)
                    self._link.send(rank, tag + 2, list(mine.values()))
                for rank in others:
                    theirs = self._link.receive_object(rank, tag)
                    arrived = self._link.post(rank, tag + 2, tuple(theirs.values())).wait()
                    uses.update(zip(theirs, arrived))
            total = None
            for stage in users:
                gradient = uses[stage]
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            sums[name] = total
        return sums

    def _share_loss(self, call: Call, state: Interpreter, weights: list[float]) -> Tensor:
        """The batch's loss, from the rank of the last stage."""
        last = self.schedule.placement[-1]
        tag = self._tag("loss")
        if self.rank == last:
            total = None
            for microbatch, weight in enumerate(weights):
                part = state.losses[microbatch] * weight
                total = part if total is None else total + part
            for peer in range(self.schedule.ranks):
                if peer != last:
                    self._link.send(peer, tag, [total])
            return total
        loss = loss_in(call.record.result)
        part = Part((), (), loss.dtype, False)
        return self._link.post(last, tag, (part,)).wait()[0].clone()

    def _evaluated(self, call: Call, state: Interpreter, weights: list[float]) -> Any:
        """Whole outputs, on every rank: rows of the microbatches one after another, a loss as their weighted sum."""
        last = self.schedule.placement[-1]
        result = call.record.result
        own = loss_in(result)
        tensors = tensors_in(result)
        tag = self._tag("loss")
        if self.rank == last:
            columns = list(zip(*(tensors_in(state.outputs[i]) for i in range(self.schedule.microbatches))))
            whole = [self._joined(template is own, column, weights) for template, column in zip(tensors, columns)]
            header = tuple(map(part_of, whole))
            for peer in range(self.schedule.ranks):
                if peer != last:
                    self._link.send_object(peer, tag, header)
                    self._link.send(peer, tag + 2, whole)
        else:
            header = self._link.receive_object(last, tag)
            whole = self._link.post(last, tag + 2, header).wait()
        self._link.flush()
        return fill(result, whole)

    def _joined(self, is_loss: bool, column: tuple[Tensor, ...], weights: list[float]) -> Tensor:
        """One output of all microbatches."""
        values = [self._codec.whole(value) for value in column]
        if is_loss:
            return sum((v * w for v, w in zip(values[1:], weights[1:])), values[0] * weights[0])
        return torch.cat(values) if values[0].ndim else values[-1]

    # --- tags and closing ---------------------------------------------------------------

    def _tag(self, kind: str, stage: int = 0, microbatch: int = 0) -> int:
        """A number per message of a call; the same message of the next call follows it in order."""
        schedule = self.schedule
        place = _TAGS.index(kind) * schedule.stages * schedule.microbatches
        return (place + stage * schedule.microbatches + microbatch) * _PARTS

    def _close(self) -> None:
        for stage in self._stages.values():
            stage.begin(None, self.schedule.stages)
        self._link.close()


# The kind of a message by whom it reaches: activations go to the stage after, gradients to the stage before.
_TAGS = ("F", "B", "header F", "header B", "greet", "loss", "tied")


class Call:
    """What is known of calls with inputs of one signature."""

    def __init__(self, record: Record, signature: Any) -> None:
        self.record = record
        self.headers: dict[tuple, Header] = {}
        self._signature = signature
        self._digest: int | None = None
        self._actions: dict[bool, tuple[Action, ...]] = {}

    def actions(self, schedule: Schedule, rank: int, trains: bool) -> tuple[Action, ...]:
        found = self._actions.get(trains)
        if found is None:
            all_of_rank = schedule.actions[rank]
            found = tuple(a for a in all_of_rank if trains or a.kind in _FORWARD)
            self._actions[trains] = found
        return found

    def digest(self, schedule: Schedule) -> int:
        """A number that tells apart what ranks are about to run."""
        if self._digest is None:
            record = self.record
            events = [(event.stage, event.name, event.keys) for event in record.events]
            text = repr((schedule.hash, self._signature, events, record.crossing))
            self._digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return self._digest


class Interpreter:
    """The state of one call: what was posted, what waits, what was made."""

    def __init__(
        self, runtime: Runtime, call: Call, parts: list[Any], weights: list[float], scale: float, trains: bool
    ) -> None:
        self._runtime, self._call, self._parts = runtime, call, parts
        self._weights, self._scale, self._trains = weights, scale, trains
        self._link, self._stages = runtime._link, runtime._stages
        self._stages_in_all = runtime.schedule.stages
        self._placement = runtime.schedule.placement
        self._rank = runtime.rank
        self._posted: dict[tuple[str, int, int], Arrival] = {}
        self._made: dict[tuple[str, int, int], tuple[list[Tensor | None], Header]] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._random = _Random() if call.record.draws_anything else None
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

    def do(self, action: Action) -> None:
        kind, stage, microbatch, peer = action
        self._table[kind](stage, microbatch, peer)

    def end(self) -> None:
        """The generator goes past the last microbatch."""
        if self._random is not None:
            self._random.end()

    # --- compute ------------------------------------------------------------------------

    def _do_forward(self, stage: int, microbatch: int, peer: int | None) -> None:
        arrived, header = self._take("F", stage, microbatch) if stage else ([], ())
        part = self._parts[microbatch]
        if self._random is not None:
            self._random.before(microbatch)
        slot = self._stages[stage].forward(microbatch, arrived, header, lambda: self._runtime._forward(part))
        if self._random is not None:
            self._random.after(microbatch)
        if stage == self._stages_in_all - 1:
            loss = loss_in(slot.output)
            if loss is not None:
                slot.loss = self._runtime._codec.whole(loss)
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
        self._recycle(free, buffers)

    def _do_input(self, stage: int, microbatch: int, peer: int | None) -> None:
        gradients, _ = self._take_gradients(stage, microbatch)
        leaves = self._stages[stage].input_backward(microbatch, gradients, self._seed(stage, microbatch))
        self._hand_back(stage, microbatch, leaves)

    def _do_weight(self, stage: int, microbatch: int, peer: int | None) -> None:
        self._recycle(self._stages[stage].weight_backward(microbatch))

    def _seed(self, stage: int, microbatch: int) -> Tensor | None:
        if stage != self._stages_in_all - 1:
            return None
        return torch.full_like(self.losses[microbatch], self._weights[microbatch] * self._scale)

    def _hand_back(self, stage: int, microbatch: int, leaves: list[Tensor | None]) -> None:
        if stage:
            header = tuple(None if gradient is None else part_of(gradient) for gradient in leaves)
            self._made["B", stage - 1, microbatch] = (leaves, header)

    def _take_gradients(self, stage: int, microbatch: int) -> tuple[list[Tensor | None], list[Tensor]]:
        if stage == self._stages_in_all - 1:
            return [], []
        gradients, _ = self._take("B", stage, microbatch)
        return gradients, [gradient for gradient in gradients if gradient is not None]

    def _take(self, kind: str, stage: int, microbatch: int) -> tuple[list[Tensor | None], Header]:
        """What arrived for a stage: from another rank, or from a neighbouring stage on this one."""
        key = (kind, stage, microbatch)
        arrival = self._posted.pop(key, None)
        if arrival is None:
            return self._made.pop(key)
        return arrival.wait(), arrival.header

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
        tag = self._runtime._tag(kind, to_stage, microbatch)
        known = self._call.headers.get((kind, to_stage, self._trains))
        if known is None:
            if len(header) > _PARTS:
                raise PipelineError("pipeline", f"{len(header)} tensors cross one cut, more than {_PARTS}")
            self._call.headers[kind, to_stage, self._trains] = header
            self._link.send_object(peer, self._runtime._tag(f"header {kind}", to_stage), header)
        elif known != header:
            tensors = _like(known, header, tensors, kind, to_stage)
        self._link.send(peer, tag, tensors)

    def _post(self, kind: str, stage: int, microbatch: int, peer: int) -> None:
        header = self._call.headers.get((kind, stage, self._trains))
        if header is None:
            header = self._link.receive_object(peer, self._runtime._tag(f"header {kind}", stage))
            self._call.headers[kind, stage, self._trains] = header
        tag = self._runtime._tag(kind, stage, microbatch)
        self._posted[kind, stage, microbatch] = self._link.post(peer, tag, header)


def _like(known: Header, header: Header, tensors: list, kind: str, stage: int) -> list:
    """A message of the form that the other end expects; a gradient that nothing flowed into is zero."""
    fitting = []
    for expected, part, tensor in zip(known, header, tensors):
        if expected is not None and part is None and kind == "B":
            tensor = torch.zeros(expected.shape, dtype=expected.dtype)
        elif expected is not None and part is not None and expected.shape == part.shape and expected.dtype == part.dtype:
            if expected.stride != part.stride:
                tensor = torch.empty_strided(expected.shape, expected.stride, dtype=part.dtype).copy_(tensor)
        elif expected != part:
            raise PipelineError(
                "pipeline",
                f"what crosses the cut before stage {stage if kind == 'F' else stage + 1} has another form than in the "
                "microbatch before",
                [f"before  {known}", f"now     {header}"],
                [("let nothing but the shapes of its inputs decide what a forward computes", "")],
            )
        fitting.append(tensor)
    return fitting


class _Random:
    """The default generator, kept where one device would have it that runs the microbatches one after another."""

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {0: torch.get_rng_state()}

    def before(self, microbatch: int) -> None:
        torch.set_rng_state(self._states[microbatch])

    def after(self, microbatch: int) -> None:
        self._states.setdefault(microbatch + 1, torch.get_rng_state())

    def end(self) -> None:
        """Past the last microbatch that was run."""
        torch.set_rng_state(self._states[max(self._states)])


class _Doing:
    """What a rank is at, for the text of a failure."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.action: Action | str | None = None

    def __str__(self) -> str:
        action = self.action
        if not isinstance(action, Action):
            return str(action or "a call")
        text = f"stage {action.stage}, {action.kind}"
        if action.kind != "REDUCE":
            text += f" of microbatch {action.microbatch}"
        return text if action.peer is None else f"{text} with rank {action.peer}"


def _signature(inputs: Any, modules: list[nn.Module]) -> Any:
    """What decides the way of a forward: structure and shapes of its inputs, plain values, train or eval."""
    tensors: list = []

    def seen(tensor: Tensor) -> None:
        tensors.append((tuple(tensor.shape), str(tensor.dtype)))
        return None

    rest = map_tensors(inputs, seen)
    return (tuple(tensors), repr(rest), tuple(module.training for module in modules))


_numbers: dict[tuple[int, ...], int] = {}


def _number_of(ranks: list[int]) -> int:
    """How many pipelines these ranks had before: each has an entry of its own in the store."""
    key = tuple(ranks)
    _numbers[key] = _numbers.get(key, 0) + 1
    return _numbers[key]

