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

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import PipelineError
from .._trace.containers import fill, tensors_in
from .._trace.dry_run import dry_run
from .._trace.memory import kept_as_it_was
from .._trace.notes import Notes
from .._trace.placeholder import current
from .._trace.reduction import MEAN, reduction
from .._transport.faults import Faults, failure
from .._transport.messages import PARTS, Recorder, Tags
from .._transport.p2p import Link, Part, part_of
from .._transport.watch import watch
from .._transport.words import LinkError
from ..action import Action, Schedule
from .call import Call, signature_of
from .elsewhere import Elsewhere, Placed, norms_of_gradients
from .generators import digest
from .interpreter import Interpreter
from .loss import Gradients, Weights, loss_in, no_loss, released, weighted, with_loss
from .microbatches import loss_weights, split
from .ownership import Ownership, disown_buffers, let_go
from .skeleton import Run, Station
from .stage import Codec, Stage, check_schedule, check_uses

TIMEOUT = timedelta(minutes=10)


class Runtime:
    """Stands before the root module's call.

    Arguments:
        model: whose parameters of other stages are let go.
        schedule: verified; its ranks are `ranks`.
        owned: the cuts, and who owns what: `ownership(model, cuts)` of the whole model.
        ranks: this pipeline's global ranks, in order.
        group: a process group of these ranks that nothing else uses; closed when anything fails.
        codec: for values that are not plain tensors.
        loss: "mean" or "sum" of the microbatches' losses; None finds out.
        in_order: whether weights tied over stages are added up microbatch by microbatch, as on one device, for which
            every microbatch's gradient of theirs is kept; else stage by stage.
        during: a context for a call's actions, in which reductions of gradients wait: a call's gradients are reduced
            once, when the user's backward releases them.
        ended: what is known of why a rank of the world ended, if anything is: the first cause of a lost connection.
        recorder: is told of every transfer.
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
        loss: str | None = None,
        in_order: Callable[[], bool] = lambda: False,
        during: Callable[[], AbstractContextManager] = nullcontext,
        ended: Callable[[], str | None] = lambda: None,
        timeout: timedelta = TIMEOUT,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.schedule = schedule
        self.codec = codec or Codec()
        self._during, self._in_order = during, in_order
        self._loss = frozenset((loss,)) if loss is not None else None
        self.tags = Tags(schedule.stages, schedule.microbatches)
        self._owned = owned
        name = f"vescale_pipeline/{'-'.join(map(str, ranks))}/{_number_of(ranks)}"
        self.ranks, self.faults = ranks, Faults(name, ended)
        device, is_known = device or torch.device("cpu"), lambda: self.faults.is_known
        self.link = Link(ranks, device, timeout, group, name, self.tags, is_known, recorder)
        self.rank = self.link.rank
        mine = schedule.stages_of(self.rank)
        let_go(model, {name for stage in mine for name in self._owned.names_of(stage)})
        disown_buffers(model, owned, mine)
        parameters = dict(model.named_parameters())
        self.stages = {
            stage: Stage(stage, {name: parameters[name] for name in self._owned.names_of(stage)}, self.codec)
            for stage in mine
        }
        self._model = model
        self._root = Station(model, "").original
        self._modules = list(model.modules())
        self._parameters = parameters
        self._tied = sorted(name for name, stages in self._owned.stages.items() if len(stages) > 1)
        self._calls: dict[Any, Call] = {}
        self.calls = 0
        self._scale = 1.0
        self._gradients: Gradients | None = None
        self._state: Interpreter | None = None
        self._broken: str | None = None
        self._in_call = False
        self._elsewhere = Elsewhere(self._norm_elsewhere, self.link.device)
        self._reveals = False
        model.__dict__["_call_impl"] = self
        model.__dict__["parameters"] = self._all_parameters
        watch(self)

    @property
    def is_above_units(self) -> bool:
        """Whether the user's code runs that spans stages: on placeholders, which the reader of the moment answers."""
        return current.reader is not None

    # --- the model's call -------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current.reader is not None:  # the model calls itself
            return self._root(*args, **kwargs)
        self._check()
        parts = split((args, kwargs), self.schedule.microbatches, self.codec.parts)
        doing = _Doing()
        self._in_call = True
        try:
            return self._run(self._call_of(parts, (args, kwargs)), parts, doing)
        except BaseException as error:
            if isinstance(error, PipelineError) and doing.action is None:
                raise  # nothing has started: the same on every rank
            self._broken = self.faults.cause_of(error, self.link.ranks[self.rank], str(doing))
            self._close()
            if not isinstance(error, Exception):
                raise  # an interrupt, or an exit, stays what it is
            if isinstance(error, LinkError):
                error.__traceback__ = None  # its frames hold transfers, and these the connections
                raise failure(self._broken) from None
            raise failure(self._broken) from error
        finally:
            self._in_call = False

    def _check(self) -> None:
        """Raises what this rank knows of a failure."""
        if self._broken is None and self.faults.is_known:
            self._broken = self.faults.known
            self._close()
        if self._broken is not None:
            raise failure(self._broken)

    def waits(self) -> bool:
        """Whether a failure of other ranks matters now; see `_transport/watch.py`."""
        return self._broken is None and (self._in_call or not self.link.has_tags)

    def wake(self) -> None:
        """Ends the waits of this rank, from another thread."""
        self.link.wake()

    def _call_of(self, parts: list[Any], whole: Any) -> Call:
        """What is known of calls with inputs of these shapes; a dry run for new ones, and one of the whole batch to
        find how a loss comes from its rows."""
        key = signature_of(parts[0], self._modules)
        call = self._calls.get(key)
        if call is None:
            stations = {module: Station(module, name) for name, module in self._model.named_modules() if name}
            notes = Notes()
            record = dry_run(
                self._model, self._owned.cuts, lambda: self.forward(parts[0]), stations, notes, self._owned.buffers
            )
            check_schedule(record, self.schedule)
            check_uses(record, self._owned.stages, self._owned.cuts)
            for event in record.events:
                if event.module is not None:
                    event.module.__dict__["_call_impl"] = stations[event.module]
            call = Call(record, key)
            loss = loss_in(record.result)
            if loss is not None:
                call.reduction = self._loss or (MEAN if len(parts) == 1 else None)
            if loss is not None and call.reduction is None:
                others = Notes()
                again = dry_run(
                    self._model, self._owned.cuts, lambda: self.forward(whole), stations, others, self._owned.buffers
                )
                call.reduction = reduction(notes, others, len(parts), (loss, loss_in(again.result)))
            self._calls[key] = call
        return call

    def forward(self, part: Any) -> Any:
        args, kwargs = part
        return self._root(*args, **kwargs)

    def _run(self, call: Call, parts: list[Any], doing: _Doing) -> Any:
        trains = torch.is_grad_enabled()
        if trains and loss_in(call.record.result) is None:
            raise no_loss(call.record.result)
        if self._model._forward_hooks and not self._reveals:
            self._reveals = True
            self._model.register_forward_hook(_reveal, prepend=True)
        has_loss = call.reduction is not None
        with self._during():
            weights = []
            if has_loss:
                with kept_as_it_was(self._model) if call.counts_labels and call.leaves_anything else nullcontext():
                    weights = loss_weights(call.reduction, call.record, self.forward, parts, self.codec.whole)
            self._greet(call, trains, doing)
            for stage in self.stages.values():
                stage.begin(call.record, self.schedule.stages, self._tied if self._in_order() else ())
            scale = self._gradients.used if self._gradients is not None else 1.0
            state = self._state = Interpreter(self, call, parts, weights, scale, trains)
            state.do(call.actions(self.schedule, self.rank, trains), doing)
        state.end()
        doing.action = "the end of the call"
        self._share_buffers(call)
        if not trains:
            return self._evaluated(call, state, weights)
        sums = self._sum_tied()
        loss = self._share_loss(call, state, weights)
        self.link.flush()
        trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        self._elsewhere.exists = True
        parameters = [self._parameters[name] for name in trained]
        loss, self._gradients = released([sums.get(name) for name in trained], scale, loss, parameters, self._check)
        return with_loss(call.record.result, loss)

    # --- the norm of all gradients --------------------------------------------------------

    def _all_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """`model.parameters()`: this rank's, and what stands for the others'."""
        yield from nn.Module.parameters(self._model, recurse)
        yield self._elsewhere

    def _norm_elsewhere(self, order: float) -> Placed:
        """The norms of the gradients that this rank does not hold. Call it on all ranks of the pipeline. Cost: to and
        from each rank one message of 8 bytes per gradient, told by the first that holds it, and a word of which there
        are."""
        placement, tag = self.schedule.placement, self.tags("norm")
        peers = [peer for peer in range(self.schedule.ranks) if peer != self.rank]
        places = {name: place for place, name in enumerate(self._owned.stages)}
        first = {name: placement[stages[0]] for name, stages in self._owned.stages.items()}
        held = {name: self._parameters[name].grad for name in places if name in self._parameters}
        here = {name: gradient for name, gradient in held.items() if gradient is not None}
        mine = [name for name in here if first[name] == self.rank]
        norms = norms_of_gradients([here[name] for name in mine], order, self.codec.whole)
        word = [(places[name], norm.dtype) for name, norm in zip(mine, norms)]
        told = torch.stack(norms).double() if norms else torch.empty(0, dtype=torch.float64, device=self.link.device)
        for peer in peers:
            self.link.send_object(peer, tag, word)
        known, at_hand = {places[name] for name in held}, {places[name] for name in here}
        words = [self.link.receive_object(peer, tag) for peer in peers]
        arrivals = [
            self.link.swap(peer, tag + 2, [told], (Part((len(theirs),), (1,), torch.float64, False),))
            for peer, theirs in zip(peers, words)
        ]
        norms_here = dict(zip([place for place, _ in word], told.unbind()))
        elsewhere, dtypes = {}, []
        for theirs, arrival in zip(words, arrivals):
            for (place, dtype), norm in zip(theirs, arrival.wait()[0].unbind()):
                if place not in known:
                    elsewhere[place] = norm
                    dtypes.append(dtype)
                elif place in at_hand:
                    norms_here[place] = norm
        self.link.flush()
        dtype = reduce(torch.promote_types, dtypes) if dtypes else None
        return Placed(elsewhere, dtype, norms_here)

    # --- before and after the actions ---------------------------------------------------

    def _greet(self, call: Call, trains: bool, doing: _Doing) -> None:
        """Neighbours compare what they are about to run. Cost: one message of 32 bytes each way."""
        self.calls = self.link.calls = self.calls + 1
        peers = [peer for peer in (self.rank - 1, self.rank + 1) if 0 <= peer < self.schedule.ranks]
        doing.action = f"the beginning of call {self.calls}"
        mine = [self.calls, int(trains), call.digest(self.schedule), self._digest_of_generator(call)]
        for peer, theirs in zip(peers, self.link.exchange(peers, self.tags("greet"), mine)):
            if theirs != mine:
                first = next(i for i, (a, b) in enumerate(zip(theirs, mine)) if a != b)
                kinds = ("call", "mode (train or no_grad)", "batch, model or schedule", "state of torch's generator")
                what = kinds[first]
                low, high = sorted((peer, self.rank))
                raise PipelineError(
                    "pipeline",
                    f"ranks {low} and {high} are about to run different things (another {what}): every rank of a "
                    "pipeline calls the model with the same batches",
                    (),
                    [
                        ("seed the loader alike on all ranks", "the same batch, in shapes and order"),
                        ("torch.manual_seed(...) alike on all ranks", "each draws what the other stages draw, too"),
                    ],
                )

    def _digest_of_generator(self, call: Call) -> int:
        """Of torch's generators, where a call draws anything."""
        return digest(self.link.device) if call.record.draws_anything else 0

    def _sum_tied(self) -> dict[str, Tensor | None]:
        """Each weight's gradient; of weights tied over stages, the sum over their uses, stage by stage, and where
        microbatches were kept apart, then over these."""
        per_stage = {index: stage.sums() for index, stage in self.stages.items()}
        sums = {name: gradient for of_stage in per_stage.values() for name, gradient in of_stage.items()}
        placement = self.schedule.placement
        for number, name in enumerate(self._tied):
            users = self._owned.stages[name]
            ranks = sorted({placement[stage] for stage in users})
            if self.rank not in ranks:
                continue
            mine = {stage: per_stage[stage].get(name) for stage in users if placement[stage] == self.rank}
            others = [rank for rank in ranks if rank != self.rank]
            tag = self.tags("tied") + number * PARTS * self.schedule.stages
            uses = dict(mine)
            headers = {stage: None if g is None else part_of(g) for stage, g in mine.items()}
            for rank in others:
                self.link.send_object(rank, tag, headers)
            for rank in others:
                theirs = self.link.receive_object(rank, tag)
                arrival = self.link.swap(rank, tag + 2, list(mine.values()), tuple(theirs.values()))
                uses.update(zip(theirs, arrival.wait()))
            total = None
            for stage in users:
                gradient = uses[stage]
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            if total is not None and self._in_order():
                parts, total = total.unbind(0), None
                for gradient in parts:
                    total = gradient if total is None else total + gradient
            sums[name] = total
        return sums

    def _share_buffers(self, call: Call) -> None:
        """Buffers that several ranks keep, and stages write: as the last stage has them. Cost: these buffers, to each
        rank."""
        last, tag = self.schedule.placement[-1], self.tags("memory")
        for i in range(0, len(call.record.synced), PARTS):
            buffers = [self.codec.encode(slot.get())[0] for slot in call.record.synced[i : i + PARTS]]
            if self.rank == last:
                for peer in range(self.schedule.ranks):
                    if peer != last:
                        self.link.send(peer, tag, buffers)
                self.link.flush()
            else:
                arrived = self.link.post(last, tag, tuple(map(part_of, buffers))).wait()
                with torch.no_grad():
                    for buffer, value in zip(buffers, arrived):
                        buffer.copy_(value)

    def _share_loss(self, call: Call, state: Interpreter, weights: Weights) -> Tensor:
        """The batch's loss, from the rank of the last stage."""
        last = self.schedule.placement[-1]
        tag = self.tags("loss")
        # On a device the host would wait for the number: there the next call's greeting compares.
        compares = call.record.draws_anything and self.link.has_tags
        if self.rank == last:
            total = weighted([state.losses[microbatch] for microbatch in range(len(weights))], weights)
            drawn = [torch.tensor(self._digest_of_generator(call))] if compares else []
            for peer in range(self.schedule.ranks):
                if peer != last:
                    self.link.send(peer, tag, [total, *drawn])
            return total
        loss = loss_in(call.record.result)
        header = (Part((), (), loss.dtype, False), Part((), (), torch.int64, False))
        total, *drawn = self.link.post(last, tag, header if compares else header[:1]).wait()
        if compares and drawn[0].item() != self._digest_of_generator(call):
            raise PipelineError(
                "pipeline",
                f"ranks {self.link.ranks[self.rank]} and {self.link.ranks[last]} have drawn other random numbers in "
                "this call: something in the forward draws by itself, on one stage only",
                (),
                [("draw with torch's functions, in modules or in their forward", "these are known on all stages")],
            )
        return total.clone()

    def _evaluated(self, call: Call, state: Interpreter, weights: Weights) -> Any:
        """Whole outputs, on every rank: rows of the microbatches one after another, a loss as their weighted sum."""
        last = self.schedule.placement[-1]
        result = call.record.result
        own = loss_in(result)
        tensors = tensors_in(result)
        tag = self.tags("loss")
        if self.rank == last:
            columns = list(zip(*(tensors_in(state.outputs[i]) for i in range(self.schedule.microbatches))))
            whole = [self._joined(template is own, column, weights) for template, column in zip(tensors, columns)]
            header = tuple(map(part_of, whole))
            for peer in range(self.schedule.ranks):
                if peer != last:
                    self.link.send_object(peer, tag, header)
                    self.link.send(peer, tag + 2, whole)
        else:
            header = self.link.receive_object(last, tag)
            whole = self.link.post(last, tag + 2, header).wait()
        self.link.flush()
        return fill(result, whole)

    def _joined(self, is_loss: bool, column: tuple[Tensor, ...], weights: Weights) -> Tensor:
        """One output of all microbatches."""
        values = [self.codec.whole(value) for value in column]
        if is_loss:
            return weighted(values, weights)
        return torch.cat(values) if values[0].ndim else values[-1]

    def _close(self) -> None:
        """Lets go of all that holds a connection, and of the connections."""
        if self._state is not None:
            self._state.close()
        for stage in self.stages.values():
            stage.begin(None, self.schedule.stages)
        self.link.close()


def _reveal(root: nn.Module, args: tuple, output: Any) -> Any:
    """The root's other hooks see real outputs on the stage that has them."""
    return current.reader.reveal(output) if isinstance(current.reader, Run) else output


class _Doing:
    """What a rank is at, for the text of a failure."""

    def __init__(self) -> None:
        self.action: Action | str | None = None

    def __str__(self) -> str:
        action = self.action
        if not isinstance(action, Action):
            return action or "a call"
        of = "" if action.kind == "REDUCE" else f" of microbatch {action.microbatch}"
        return f"stage {action.stage}, {action.kind}{of}"


_numbers: dict[tuple[int, ...], int] = {}


def _number_of(ranks: list[int]) -> int:
    """How many pipelines these ranks had before: each has an entry of its own in the store."""
    key = tuple(ranks)
    _numbers[key] = _numbers.get(key, 0) + 1
    return _numbers[key]
