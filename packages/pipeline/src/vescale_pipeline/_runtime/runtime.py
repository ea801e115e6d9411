"""A pipeline's runtime: stands before the model's call, and runs a schedule, knowing none by name.

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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from vescale_trace.values import tensors_in

from .._errors import PipelineError
from .._trace.dry_run import dry_run
from .._trace.event import Record
from .._trace.memory import kept_as_it_was
from .._trace.placeholder import current
from .._trace.rows.notes import Notes
from .._trace.rows.reduction import outputs, reduction
from .._trace.rows.tags import MEAN
from .._transport.faults import Faults, PipelineFailure, failure
from .._transport.messages import Recorder, Tags
from .._transport.p2p import Link
from .._transport.words import LinkError
from ..action import Action, Schedule
from .backward import hooks_aside
from .batch.given import Runs, Watched, check_views
from .batch.microbatches import check_awaits_no_gradient, loss_weights, split
from .batch.outputs import share_outputs, shares_of
from .call import Call, signature_of
from .call_exchange import all_failed, await_loss, greet, share_buffers, share_loss, share_written, sum_tied
from .casts import Casts
from .interpreter import Interpreter
from .loss import Gradients, loss_in, no_loss, released
from .member import Member
from .other_stages.moment import moment
from .other_stages.stand_ins import OtherStages
from .other_stages.told import norms_of_model
from .other_stages.total_norm import Chosen
from .ownership import Ownership, disown_buffers, holds_elsewhere, named_everywhere, release
from .skeleton import Run, Station
from .stage import Codec, Stage, check_uses

READING = "what the stages will meet"
"""Computed on placeholders, which stand for no memory."""


class Runtime:
    """Stands before the root module's call.

    Arguments:
        model: whose parameters of other stages are let go.
        schedule: verified; its ranks are `ranks`.
        owned: the cuts, and who owns what: `ownership(model, cuts)` of the whole model.
        ranks: this pipeline's global ranks, in order.
        group: a process group of these ranks that nothing else uses; closed when anything fails.
        store: where the ranks leave word, under names that no earlier world of theirs has used.
        timeout: of every wait for another rank.
        codec: for values that are not plain tensors.
        loss: "mean" or "sum" of the microbatches' losses; None finds out.
        in_order: whether weights tied over stages are added up microbatch by microbatch, as on one device, for which
            every microbatch's gradient of theirs is kept; else stage by stage.
        during: a context for a call's actions, in which reductions of gradients wait: a call's gradients are reduced
            once, when the user's backward releases them.
        ended: what is known of why a rank of the world ended, if anything is: the first cause of a lost connection.
        recorder: is told of every transfer.
        link: makes the messages to the other ranks.
        beginning: is told of every action before it is done, and of READING before a call looks at what it will meet.
        compute: the floating dtype that stages compute with parameters in, where that is not the parameters' own.
        before: is called before a call looks at the model: parameters that were given other memory take it. Gives
            whether there were any.
        watch: has a thread of the process call `look` again and again, and `lost` where a wait is in vain; with itself,
            which has a `store` of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        owned: Ownership,
        ranks: list[int],
        group: Any,
        store: Any,
        *,
        timeout: timedelta,
        codec: Codec | None = None,
        loss: str | None = None,
        in_order: Callable[[], bool] = lambda: False,
        during: Callable[[], AbstractContextManager] = nullcontext,
        ended: Callable[[], str | None] = lambda: None,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
        link: Callable[..., Link] = Link,
        beginning: Callable[[Action | str], None] | None = None,
        compute: torch.dtype | None = None,
        before: Callable[[], bool] = lambda: False,
        watch: Callable[[Any], None] = lambda looker: None,
    ) -> None:
        self._during, self._in_order, self._before = during, in_order, before
        self._loss = frozenset((loss,)) if loss is not None else None
        name = f"vescale_pipeline/{'-'.join(map(str, ranks))}/{_number_of(ranks)}"
        self.ranks, self.faults = ranks, Faults(store, name, ended)
        device, is_known = device or torch.device("cpu"), lambda: self.faults.is_known
        codec, tags = codec or Codec(), Tags(schedule.stages, schedule.microbatches)
        self._beginning = beginning
        link = link(ranks, device, timeout, group, store, name, tags, is_known, recorder)
        mine = schedule.stages_of(link.rank)
        release(model, {name for stage in mine for name in owned.names_of(stage)})
        disown_buffers(model, owned, mine)
        parameters = dict(model.named_parameters())
        stages = {
            stage: Stage(stage, {name: parameters[name] for name in owned.names_of(stage)}, codec) for stage in mine
        }
        self.schedule, self.link, self.tags, self.rank = schedule, link, tags, link.rank
        self._member = Member(schedule, owned, parameters, codec, link, tags, stages, self._beside)
        self._model = model
        self._read = partial(dry_run, model, owned.cuts, buffers=owned.buffers, compute=compute)
        self._root = Station(model, "").original
        self._modules = list(model.modules())
        self._tied = sorted(name for name, stages in owned.stages.items() if len(stages) > 1)
        self._calls: dict[Any, Call] = {}
        self._casts = Casts(model, [one for stage in stages.values() for one in stage.parameters.values()])
        self._trained: list[str] | None = None  # of this rank's parameters, at the last call
        self.calls = 0
        self._scale = 1.0
        self._gradients: Gradients | None = None
        self._state: Interpreter | None = None
        self._broken: str | None = None
        self._in_call = False
        kinds = (True, False) if owned.has_frozen and owned.has_trained else (None,)
        self._other_stages = [
            OtherStages(
                partial(norms_of_model, self._member, trained=kind),
                self._moment,
                link.device,
                owned.has_trained if kind is None else kind,
            )
            for kind in kinds
        ]
        self._chosen = Chosen(self._member, model)
        self._reveals: Any = None
        model.__dict__["_call_impl"] = self
        model.__dict__["parameters"] = self._all_parameters
        for module in model.modules():
            if holds_elsewhere(module):
                module.__dict__["named_parameters"] = partial(self._named_parameters, module)
        watch(self)  # last: it calls from now on

    def leave(self) -> None:
        """Takes itself off the model, whose parameters are to be those of all stages again, and closes the connections,
        over which nobody sends any more: every rank is beyond its last call. Losses of before have no backward after.
        """
        held = self._model.__dict__
        _put_back(held, self._root)
        del held["parameters"]
        for module in self._modules:
            if isinstance(station := module.__dict__.get("_call_impl"), Station):
                _put_back(module.__dict__, station.original)
            if getattr(module.__dict__.get("named_parameters"), "func", None) == self._named_parameters:
                del module.__dict__["named_parameters"]
        if self._reveals is not None:
            self._reveals.remove()
        Chosen.pipelines.discard(self._chosen)
        self._broken = "the model was given another plan since the call"
        self._gradients = None
        self._close()

    @property
    def is_above_units(self) -> bool:
        """True while user code runs that spans stages: on placeholders, which the reader of the moment answers."""
        return current.reader is not None

    def is_of_one_stage(self, module: nn.Module) -> bool:
        """True if one of this rank's stages owns all parameters of a module."""
        held = set(map(id, module.parameters()))
        owned = (set(map(id, stage.parameters.values())) for stage in self._member.stages.values())
        return not holds_elsewhere(module) and any(map(held.issubset, owned))

    # --- the model's call -------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current.reader is not None:  # the model calls itself
            return self._root(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Tensors of this mode count no writes, and buffers for receives are used again, in training too.
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        self._check()
        doing = _Doing() if self._beginning is None else _Told(self._beginning)
        self._in_call = True
        try:
            if torch.is_grad_enabled():
                check_awaits_no_gradient((args, kwargs))
            parts = split((args, kwargs), self.schedule.microbatches, self._member.codec.parts)
            if self._beginning is not None:
                self._beginning(READING)
            if self._before() and self._casts.follow():  # records are of the dtypes before
                self._calls.clear()
                self._trained = None
            return self._run(self._call_of(parts, (args, kwargs)), parts, doing)
        except BaseException as error:
            if isinstance(error, PipelineError) and doing.action is None and self._fails_everywhere():
                raise  # nothing has started on any rank: the next call may go well
            failed = self._failed(error, str(doing))
            if not isinstance(error, Exception):
                raise  # an interrupt, or an exit, stays what it is
            raise failed from (None if isinstance(error, LinkError) else error)
        finally:
            self._in_call = False

    def _failed(self, error: BaseException, doing: str) -> PipelineFailure:
        """The failure that this rank raises, with the first cause, for an error of its own while it was `doing`
        something; it is told and the connections are closed."""
        self._broken = self.faults.cause_of(error, self.link.ranks[self.rank], doing)
        self._close()
        if isinstance(error, LinkError):
            error.__traceback__ = None  # its frames hold transfers, and these the connections
        return failure(self._broken)

    @contextmanager
    def _beside(self, doing: str) -> Iterator[None]:
        """Guards what ranks tell each other outside of calls."""
        self._check()
        before, self._in_call = self._in_call, True
        try:
            yield
        except LinkError as error:
            raise self._failed(error, doing) from None
        finally:
            self._in_call = before

    def _check(self) -> None:
        """Raises what this rank knows of a failure."""
        if self._broken is None and self.faults.is_known:
            self._broken = self.faults.known
            self._close()
        if self._broken is not None:
            raise failure(self._broken)

    def _releases(self) -> None:
        """This rank's backward takes a call's gradients."""
        self._check()
        self.link.backwards += 1

    def _fails_everywhere(self) -> bool:
        """True if the others raise before this call begins, too: they do if all run the same code on the same batch."""
        try:
            return all_failed(self._member, self.calls + 1)
        except LinkError:
            return False

    def look(self, watch: Any) -> None:
        """Ends this rank's waits, in the watch's thread, if others have failed. On NCCL no connection closes then."""
        if self._waits():
            following = self.ranks[(self.rank + 1) % len(self.ranks)]
            cause = self.faults.told(watch) or watch.silent(watch.hear([following]))
            if cause is not None:
                self.lost(watch, cause)

    def lost(self, watch: Any, why: str) -> None:
        """Ends this rank's waits, which are in vain, in the watch's thread."""
        if self._waits():
            self.faults.publish(why, watch.store)
            self.link.wake()

    def _waits(self) -> bool:
        """True if a failure of other ranks matters now: in a call, or always where the device runs behind the host."""
        return self._broken is None and not self.faults.is_known and (self._in_call or not self.link.has_tags)

    def _call_of(self, parts: list[Any], whole: Any) -> Call:
        """Returns the facts about calls with inputs of these shapes; runs a dry run for new ones, and one of the whole
        batch to find how a loss, or an evaluation's every output, comes from its rows."""
        key = signature_of(parts[0], self._modules)
        call, evaluates = self._calls.get(key), not torch.is_grad_enabled()
        if call is not None and (call.outputs is not None or not evaluates):
            return call
        stations = {module: Station(module, name) for name, module in self._model.named_modules() if name}
        notes, others, returned, written = Notes(), Notes(), [], set()

        def kept(part: Any) -> Any:
            watched = Watched(part)
            returned.append(self.forward(watched.copy))
            written.update(watched.written())
            return returned[-1]

        record = self._read(lambda: kept(parts[0]), stations, notes)
        small = tensors_in(returned[0])
        if call is None:
            call = self._new_call(record, stations, key)
            if loss_in(record.result) is not None:
                call.reduction = self._loss or (MEAN if len(parts) == 1 else None)
        loss, again = loss_in(record.result), None
        if loss is not None and call.reduction is None:
            returned.clear()
            again = self._read(lambda: kept(whole), stations, others)
            call.reduction = reduction(notes, others, len(parts), (loss, loss_in(again.result)))
        if evaluates or len(small) > 1:
            if again is None and len(parts) > 1:
                returned.clear()
                with suppress(Exception):  # an object of the caller's that holds what a part left, as a cache does
                    again = self._read(lambda: kept(whole), stations, others)
            call.whole = None if again is None else again.result
            call.is_told(outputs(notes, others, len(parts), (small, tensors_in(returned[:1]))))
        if notes.takes_own and (self._loss is None or evaluates or call.numbers):
            call.record = replace(call.record, takes_own=True)
        check_views(whole, parts[0], written, lambda tensor: self._member.codec.encode(tensor)[0])
        call.written |= written
        self._calls[key] = call
        return call

    def _new_call(self, record: Record, stations: dict[nn.Module, Station], key: Any) -> Call:
        """Calls that go as the record says; stations stand before the modules that they meet."""
        owned = self._member.owned
        check_uses(record, owned.stages, owned.cuts)
        units = {event.module for event in record.events if event.module is not None}
        within = {module for unit in units for module in unit.modules()} - units
        for module, station in stations.items():
            if module not in within:  # one that was not called may be in another microbatch, which is refused there
                module.__dict__["_call_impl"] = station
        return Call(record, key)

    def forward(self, part: Any) -> Any:
        args, kwargs = part
        return self._root(*args, **kwargs)

    def _run(self, call: Call, parts: list[Any], doing: _Doing) -> Any:
        trains = torch.is_grad_enabled()
        if trains and loss_in(call.record.result) is None:
            raise no_loss(call.record.result)
        if self._model._forward_hooks and self._reveals is None:
            self._reveals = self._model.register_forward_hook(_reveal, prepend=True)
        has_loss = call.reduction is not None
        runs = Runs(self.forward, call.written)
        with self._during():
            weights = []
            if has_loss or call.record.takes_own:
                with kept_as_it_was(self._model) if call.looks_ahead and call.leaves_anything else nullcontext():
                    weights = loss_weights(call.reduction, call.record, runs.alone, parts, self._member.codec.whole)
            shares = shares_of(self._member, call, weights, parts, runs.alone, trains)
            self.calls = self.link.calls = self.calls + 1
            doing.action = f"the beginning of call {self.calls}"
            trained = {name: one for name, one in self._member.parameters.items() if one.requires_grad}
            changed, self._trained = list(trained) != self._trained, list(trained)
            if greet(self._member, self.calls, call, parts, trains, changed):
                for known in self._calls.values():
                    known.forget_headers()
            for stage in self._member.stages.values():
                stage.begin(call.record, self.schedule.stages, self._tied if self._in_order() else ())
            scale = self._gradients.used if self._gradients is not None else 1.0
            state = self._state = Interpreter(self._member, runs.of_stage, call, parts, weights, scale, trains)
            if trains and self.link.has_tags:
                # Before its turn: the last stage's rank goes on to the optimizer while others end their backwards.
                state.awaited_loss = await_loss(self._member, call)
            with hooks_aside(trained.values()):
                state.do(call.turns(self.schedule, self.rank, trains, self.link.has_tags), doing)
        state.end()
        doing.action = "the end of the call"
        share_buffers(self._member, call)
        if call.written:
            share_written(self._member, parts, runs)
        if not trains:
            return share_outputs(self._member, call, state, shares)
        sums = sum_tied(self._member, self._tied, self._in_order())
        loss = share_loss(self._member, call, state, weights)
        self._other_stages[0].exists = True
        self._chosen.called()
        gradients = [sums.get(name) for name in trained]
        loss, self._gradients = released(gradients, scale, loss, list(trained.values()), self._releases)
        return share_outputs(self._member, call, state, shares, loss)

    # --- the norm of all gradients --------------------------------------------------------

    def _moment(self, values: bool) -> tuple:
        return moment(self._member.parameters.values(), self.calls, values)

    def _all_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """`model.parameters()`: this rank's, and what stands for the others'."""
        yield from nn.Module.parameters(self._model, recurse)
        if not self.is_above_units:
            yield from self._other_stages

    def _named_parameters(self, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """`module.named_parameters()`: this rank's; in a forward's code all, so that every rank traces it alike."""
        if not self.is_above_units:
            yield from nn.Module.named_parameters(module, *args, **kwargs)
            return
        yield from named_everywhere(module, *args, **kwargs)

    def _close(self) -> None:
        """Lets go of all that holds a connection, and of the connections."""
        if self._state is not None:
            self._state.close()
        for stage in self._member.stages.values():
            stage.begin(None, self.schedule.stages)
        self.link.close()


def _put_back(held: dict[str, Any], call: Any) -> None:
    """What stood before a module's call stands there again; torch's own is the class's."""
    if isinstance(call, MethodType):
        del held["_call_impl"]
    else:
        held["_call_impl"] = call


def _reveal(root: nn.Module, args: tuple, output: Any) -> Any:
    """The root's other hooks see real outputs on the stage that has them."""
    return current.reader.reveal(output) if isinstance(current.reader, Run) else output


class _Doing:
    """Names a rank's current action, for the text of a failure."""

    def __init__(self) -> None:
        self.action: Action | str | None = None

    def __str__(self) -> str:
        action = self.action
        if not isinstance(action, Action):
            return action or "a call"
        of = "" if action.kind == "REDUCE" else f" of microbatch {action.microbatch}"
        return f"stage {action.stage}, {action.kind}{of}"


class _Told(_Doing):
    """The same, and somebody is told of it."""

    def __init__(self, beginning: Callable[[Action | str], None]) -> None:
        super().__init__()
        self._beginning = beginning

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "action" and value is not None:
            self._beginning(value)


_numbers: dict[tuple[int, ...], int] = {}


def _number_of(ranks: list[int]) -> int:
    """Returns how many pipelines these ranks had before: each has an entry of its own in the store."""
    key = tuple(ranks)
    _numbers[key] = _numbers.get(key, 0) + 1
    return _numbers[key]
