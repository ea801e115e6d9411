"""Data parallelism, ZeRO 0-3: when buckets are gathered, resharded, filled with gradients and reduced.

Of units (`units.py`) of buckets (`bucket.py`):

    forward    before a block runs its parameters are gathered (ZeRO-3; a cast under a precision), and the block
               that came next in the last pass is started; after it they are resharded
    backward   the first gradient that reaches a block's output (or what else it left: `strays.py`) gathers them again
               and opens its gradient bucket;
               when all of the block's gradients are there, or those of its inputs, their sum over ranks starts
    its end    what has not started does; all sums are waited for and handed out as `param.grad`

A pipeline runs a call in many small forwards and backwards (`in_parts`): every block is
gathered once per call then, by the first part that runs it.

In which order sums start and end is `reductions.py`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from vescale_dtensor.engine import (
    after_backward,
    backwards,
    before_backward,
    forget_all,
    in_backward,
    keeps_graph,
    local_only,
    value_of,
)
from vescale_trace.values import map_tensors, tensors_in

from .._calls.chain import add_step
from .._calls.meanwhile import meanwhile
from .._plan.parts import PlanError, Precision
from .._plan.validate import CONTAINERS
from .._torch_private import DisableTorchFunction, _current_graph_task_id, _get_sequence_nr, queue_callback
from ..installed._carried_hooks import Hooks
from .bucket import Bucket
from .reductions import GradientReductions
from .sharded_parameter import ShardedParameter, Sharing
from .strays import Call, Strays
from .units import FSDPUnit, Pass, units_of


class DataParallel:
    """A model's buckets, and the hooks that move them."""

    def __init__(
        self,
        model: nn.Module,
        sharing: Sharing,
        rows: Mapping[str, int] | None = None,
        closed: Collection[nn.Module] = (),
        own: Mapping[str, Sharing] | None = None,
    ) -> None:
        """`closed`: lists whose members are no blocks, for not all ranks run them. `own`: by the names of modules and
        parameters, where it is not `sharing`."""
        self.sharing = sharing
        self.optimizers: list[weakref.ref] = []  # that step on the buckets
        self.units = units_of(model, sharing, rows or {}, closed, own)
        self._params: dict[Tensor, ShardedParameter] = {}
        for unit in self.units:
            for bucket in unit.buckets:
                self._params.update((param.parameter, param) for param in bucket.params)
                self._listen(unit, bucket, range(len(bucket.params)))
        self._reductions = GradientReductions(sharing)
        self._strays = Strays(self._reached)
        before_backward(self._open_for_graph)
        self._look_at_buckets()
        self._touched = False
        self._asked = 0  # the backward whose end is waited for
        self._task = -1  # the part of it that came to the model first: a reentrant checkpoint is another
        # Whether the backward that runs makes a graph, and whether one from before may run again: a graph that a
        # backward made computes with parameters.
        self._makes_graph = self._made_graph = False
        self._last: dict[bool, FSDPUnit | None] = {False: None, True: None}
        self.enabled, self.holds, self._trains = True, False, False
        self._gathers = any(unit.unsharded for unit in self.units)
        forward = [self.units[-1], *self.units[:-1]]  # until it is seen in what order they run
        for one, other in itertools.pairwise(forward):
            one.next[False], other.next[True] = other, one
        forward[0].next[True] = forward[-1]
        for unit in self.units:
            for module in unit.modules:
                self._install(unit, module)
        for module, precision, returns in self._casting(model, own or {}):
            compute, output = precision.compute, precision.output if returns else None
            before = (lambda _, args, kwargs, to=compute: _cast(to, (args, kwargs))) if precision.cast_inputs else None
            after = (lambda _, args, kwargs, given, to=output: _cast(to, given)) if output is not None else None
            if before is not None or after is not None:
                add_step(module, "precision", before, after)
        add_step(model, "memory", before=self._begin)

    # --- what the optimizer and the user call -------------------------------------------

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Gradients stay partial; the next backward outside reduces their sum."""
        return meanwhile(self, enabled=False)

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """A call that is run in parts, forward and backward (a pipeline's): its gradients stay partial, and what its
        parts gather stays gathered until the backward that releases them; without gradients, until the end."""
        with meanwhile(self, holds=True, enabled=False):
            yield
        if not torch.is_grad_enabled():
            self.rest()

    def take_in(self) -> bool:
        """Parameters that somebody has given other memory lie in their buckets again, with the values that they have:
        before anything reads a bucket. Gives whether there were any. Cost: a look at each parameter."""
        found = False
        for unit in self.units:
            if not unit.is_intact:
                found = True
                unit.reshard()
                for bucket in unit.buckets:
                    if not bucket.is_intact:
                        self._listen(unit, bucket, bucket.take_in())
                unit.is_open = not unit.unsharded
        frozen = [(unit, bucket) for unit, bucket in self._frozen if bucket.is_thawed]
        if frozen:
            self._thaw(frozen)
        return found

    def take_in_before_parts(self) -> bool:
        """The same before a call `in_parts`; where there were any, all parameters are at rest, in their own dtypes."""
        found = self.take_in()
        if found:
            self.rest()
        return found

    def _thaw(self, thawed: list[tuple[FSDPUnit, Bucket]]) -> None:
        """Parameters that were frozen when their buckets were made are trained from here on. A gradient that one of
        them has by now is partial, and summed with the next ones, or before the step."""
        for unit, bucket in thawed:
            bucket.thaw()
            unit.look_at_buckets()
            self._listen(unit, bucket, range(len(bucket.params)))
        self._look_at_buckets()

    def _look_at_buckets(self) -> None:
        every = [(unit, bucket) for unit in self.units for bucket in unit.buckets]
        self._frozen = [(unit, bucket) for unit, bucket in every if not bucket.differentiable]
        apart = [bucket for _, bucket in every if bucket.differentiable and bucket.holders]
        self._reductions.look_at(self.units, apart)
        self._needs_end = bool(apart) or bool(self._reductions.buckets)

    def _listen(self, unit: FSDPUnit, bucket: Bucket, which: Iterable[int]) -> None:
        """Hears when autograd has added to the gradients of these of the bucket's parameters."""
        for i in which if bucket.reduces else ():
            parameter = bucket.params[i].parameter
            with DisableTorchFunction():  # in a forward, of which nothing of it is
                if (hooks := parameter._post_accumulate_grad_hooks) is None:
                    trained = parameter.requires_grad  # torch hangs no hook on what is frozen
                    parameter.requires_grad_(True)
                    hook = self._arrival(unit, bucket, i)
                    bucket.params[i].arrival = parameter.register_post_accumulate_grad_hook(hook)
                    parameter.requires_grad_(trained)
                else:  # an exchange of tensors takes their hooks from autograd, not from the objects
                    parameter._post_accumulate_grad_hooks = hooks

    def end_pass(self) -> None:
        """Ends a backward that raised: gradients that came before are gradients, as on one device, and whoever drops
        them drops all. Before anything looks at gradients, or computes. Where it raised nothing is sent, for it may
        have been on one rank alone."""
        if self._touched and _current_graph_task_id() == -1 and not in_backward():
            self.finish()

    def flush(self) -> None:
        """Reduces whatever is still partial: before an optimizer step that follows `paused` backwards only.

        Afterwards no parameter is on its way, and all are at rest: a step may write.
        """
        if not self.units:
            raise PlanError(
                "optimizer.step",
                "the model was reshaped without this optimizer, whose states are still those of the plan before",
                (),
                [("vescale.reshape(model, [optimizer, other], plan)", "all optimizers that step on the model")],
            )
        self.end_pass()
        self.take_in()
        for unit in self.units:
            for bucket in unit.reduced:
                if bucket.has_partial():
                    bucket.open_gradients()
                    self._touched = True
        with meanwhile(self, enabled=True):
            self.finish()
        self.rest()  # of what is open for a graph that a backward has made, too
        for unit in self.units:
            for bucket in unit.buckets:
                if not bucket.separate:
                    bucket.wait()

    @property
    def runs_hooks(self) -> bool:
        """True if users' hooks on gradients run now, with parameters at rest already."""
        return any(bucket.runs_hooks for unit in self.units for bucket in unit.buckets)

    def rest(self) -> None:
        """Parameters are the full-precision shards, where they are not the same memory: a write to one stays. What is
        gathered ahead goes: it may be older than a write."""
        for unit in self.units:
            unit.reshard()

    def updated(self) -> None:
        """The full-precision shards have changed: parameters follow. Cost: below ZeRO-3 an all-gather of each
        bucket, which the next forward waits for where it first reads one of it, as does whoever reads one before."""
        forget_all()
        self._strays.forget()
        for unit in (self.units[-1], *self.units[:-1]):  # as a forward reads them
            for bucket in unit.buckets:
                bucket.updated()
            unit.is_open = not unit.unsharded
        self._made_graph = False
        for unit in self.units:
            for bucket in unit.buckets:
                if not bucket.separate:
                    bucket.leave_under_way()

    def leave(self) -> tuple[dict[Tensor, Hooks], list[StorageWeakRef]]:
        """The model's parameters lie in no bucket of these any longer; all have come to rest. Gives their users' hooks,
        and the memory, for who wants to know whether anybody holds it still."""
        buckets = [bucket for unit in self.units for bucket in unit.buckets]
        memory = [StorageWeakRef(one.untyped_storage()) for bucket in buckets for one in (bucket.full, bucket.shard)]
        hooks = {param.parameter: param.leave() for bucket in buckets for param in bucket.params}
        for bucket in buckets:
            bucket.full = bucket.shard = bucket._sink = None
        self.units, self._params = [], {}
        return hooks, memory

    def param_of(self, parameter: Tensor) -> ShardedParameter | None:
        """The parameter's place in its bucket, None for a tensor that is no parameter of the model."""
        return self._params.get(parameter)

    def on_host(self) -> list[Tensor]:
        """The buckets' memory on the host: offloaded shards, or their copies, and where gradients arrive."""
        buckets = [bucket for unit in self.units for bucket in unit.buckets]
        params = [param for bucket in buckets for param in bucket.params if param.arriving is not None]
        shards = [bucket.shard for bucket in buckets if bucket.hosted]
        return shards + [param.arriving for param in params] + [param.optimized for param in params if param.is_copied]

    # --- forward --------------------------------------------------------------------------

    def _install(self, unit: FSDPUnit, module: nn.Module) -> None:
        root = unit is self.units[-1]

        def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self._enter(unit, None if root else (args, kwargs))

        def leave(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self._leave(unit, output, root)

        # That a gradient has reached the model is known from its output, so that all ranks take part in the sums.
        # Where some units are gathered in backward, the sums of the others have their place among these gathers.
        if self._gathers or (root and module is unit.modules[0]):
            add_step(module, "parameters", enter if self._gathers else None, leave)

    def _begin(self, root: nn.Module, args: tuple, kwargs: dict) -> None:
        if _current_graph_task_id() == -1:
            self.end_pass()
            self.take_in()
            if not self.holds:
                self.rest()
            self._trains = torch.is_grad_enabled()
            for unit in self.units:
                unit.to_recompute = 0

    def _casting(self, model: nn.Module, own: Mapping[str, Sharing]) -> Iterator[tuple[nn.Module, Precision, bool]]:
        """The modules whose floating inputs are cast: the root, blocks, and where a precision of its own begins; and
        whether it begins there, so that outputs are cast."""
        blocks = {module for unit in self.units for module in unit.modules}
        inside: dict[str, Precision | None] = {}
        for name, module in model.named_modules():
            around = inside[name.rpartition(".")[0]] if name else None
            precision = own.get(name, self.sharing).precision
            inside[name] = around if isinstance(module, CONTAINERS) else precision
            begins = inside[name] != around
            if precision is not None and (begins or module in blocks):
                yield module, precision, begins

    def _enter(self, unit: FSDPUnit, inputs: Any) -> None:
        backward = _current_graph_task_id() != -1
        self._open(unit, backward)
        if backward:
            unit.to_recompute -= unit.to_recompute > 0 and torch.is_grad_enabled()
        elif self._trains and not torch.is_grad_enabled():
            unit.to_recompute += _is_checkpointed(inputs)
        if not torch.is_grad_enabled():
            return
        entry = Pass(_get_sequence_nr())
        unit.entered.append(entry)
        if inputs is not None:
            # The gradients of its inputs are the last that a block computes. (In a recompute, only a reentrant
            # checkpoint's: the others are those of the first pass.)
            passed = partial(self._passed, unit, entry)

            def watch(tensor: Tensor) -> Tensor:
                # What several blocks take (an encoder's output) is watched for the first: the others would wait too.
                with local_only():
                    value = value_of(tensor)
                    if value.requires_grad and (value.is_leaf or not backward) and not hasattr(value, "_watched"):
                        value._watched = True
                        entry.inputs += 1
                        # Of a leaf's gradient and those of the parameters either may come first.
                        late = value.is_leaf
                        value.register_hook(lambda _: queue_callback(passed) if late else passed())
                return tensor

            map_tensors(inputs, watch)

    def _open(self, unit: FSDPUnit, backward: bool) -> None:
        if unit.is_open and not unit.unsharded:
            return
        if not (unit.is_open or unit.is_intact):
            self.take_in()  # which converts, where the parameters' layouts are not the bucket's
        with DisableTorchFunction():  # nothing of it is the forward's: a pipeline's dry run must not see it
            unit.unshard()
            last = self._last[backward]
            if last is not unit:
                if last is not None:
                    last.next[backward] = unit
                self._last[backward] = unit
            self._unshard_ahead(unit, backward)

    def _unshard_ahead(self, unit: FSDPUnit, backward: bool) -> None:
        """Starts to gather the blocks that came next in the last pass, as many and as large as the plan allows."""
        room, following = self.sharing.ahead_bytes, unit
        for _ in range(unit.unsharded[0].sharing.prefetch):
            following = following.next[backward]
            if following is None:
                return
            room = None if room is None else room - following.nbytes
            if room is not None and room < 0:
                return
            if not following.is_open:
                following.start_unshard()
            if following is self.units[-1]:  # with it a backward ends
                return

    def _leave(self, unit: FSDPUnit, output: Any, root: bool) -> None:
        if root:
            self._last[False] = None
        listens = not (unit.may_wait and not self.enabled) and bool(unit.unsharded or self._needs_end)
        gathered = [each for each in (self.units[-2:] if root else [unit]) if each.unsharded]
        if not (listens or gathered):
            return
        outputs: list[int] = []  # the nodes that made them
        entry = unit.entered.pop() if unit.entered else Pass()

        def watch(tensor: Tensor) -> Tensor:
            with local_only():
                if tensor.requires_grad and not tensor.is_leaf:
                    value = value_of(tensor)
                    outputs.append(value.grad_fn._sequence_nr())
                    if listens:
                        value.register_hook(lambda _: self._reached(unit, entry))
            return tensor

        if torch.is_grad_enabled():
            map_tensors(output, watch)
        if _current_graph_task_id() != -1 or self.holds:
            return
        if unit.unsharded and entry.began is not None:
            self._strays.note(Call(unit, entry, _get_sequence_nr(), outputs))
        # The root's parameters and those of the block that backward begins with are needed again at once: they rest,
        # and stay gathered.
        stays = self._keeps_open or (bool(outputs) and unit in self.units[-2:])
        with DisableTorchFunction():
            for each in gathered:
                each.hide() if stays else each.reshard()

    # --- backward -------------------------------------------------------------------------

    def _open_for_graph(self, nodes: Any) -> None:
        """Before a backward that may go through a graph which one before it made."""
        if self._made_graph:
            self.take_in()
            with DisableTorchFunction():
                for unit in self.units:
                    unit.unshard()

    def _reached(self, unit: FSDPUnit, entry: Pass) -> None:
        """A gradient has reached the output of a unit's block."""
        if unit.may_wait and not self.enabled:
            return
        self._ask_for_the_end()
        self._makes_graph = torch.is_grad_enabled()
        if entry not in unit.passes:
            unit.passes.add(entry)
            entry.left = entry.inputs
        if unit.unsharded:
            self._open(unit, True)
        if not unit.touched and not self.holds:  # of a call in parts, nothing is added to them yet
            unit.open_gradients()

    def _passed(self, unit: FSDPUnit, entry: Pass) -> None:
        """The gradient of an input of a unit's block is there; of the last one: this call of the block is through."""
        entry.left -= 1
        if entry.left > 0:
            return
        unit.passes.discard(entry)
        if unit.passes:
            return
        begun = unit.uneven or any(bucket.filled or bucket.started for bucket in unit.reduced)
        if self.enabled and begun and not unit.to_recompute:
            self._reductions.start(unit.reduced)
        if not self._keeps_open:
            unit.reshard()

    @property
    def _keeps_open(self) -> bool:
        return self.holds or self._makes_graph or self._made_graph

    def _arrival(self, unit: FSDPUnit, bucket: Bucket, i: int) -> Callable[[Tensor], None]:
        """The hook of a parameter: autograd has added to its gradient.

        It holds nothing: autograd keeps hooks where no garbage collector sees them, and a model that one of them holds
        would stay for ever. The parameter itself holds its bucket, and that all of this.
        """
        bucket.parallel = self
        held = weakref.ref(unit), weakref.ref(bucket)

        def arrived(parameter: Tensor) -> None:
            unit, bucket = held[0](), held[1]()
            self = bucket.parallel
            if unit.may_wait and not self.enabled and bucket.flat is None:
                return
            self._ask_for_the_end()
            unit.touched = True
            unit.reentered |= _current_graph_task_id() != self._task
            bucket.arrived(i)
            if self.enabled and bucket.is_full and not (bucket.started or unit.uneven or unit.to_recompute):
                self._reductions.start(unit.complete(bool(self._reductions.is_alone)))

        return arrived

    def _ask_for_the_end(self) -> None:
        if in_backward():
            if self._asked != backwards():
                self._asked = backwards()
                if self._touched:
                    self._leave_units()  # as one that raised has left them
                after_backward(self.finish)
        elif not self._touched:
            # The loss was a plain tensor: this backward was not started by us, so we ask to be called at its end.
            queue_callback(self.finish)
        if not self._touched:
            self._task = _current_graph_task_id()
            self._reductions.begin()
        self._touched = True

    def finish(self) -> None:
        """Starts what is left, waits for all, and hands out the reduced gradients."""
        if not self._touched:
            return
        self._touched = False
        try:
            with torch.no_grad():
                self._reductions.finish(self.enabled)
        finally:  # hooks of users' run in it
            self._last[True] = None
            self._leave_units()
            self._made_graph = self._makes_graph or (self._made_graph and keeps_graph())
            self._makes_graph = False
            for unit in self.units:
                if not self._keeps_open:
                    unit.reshard()
                elif unit.is_open and not self.holds:
                    unit.hide()

    def _leave_units(self) -> None:
        for unit in self.units:
            unit.touched = unit.reentered = False
            unit.entered.clear()
            unit.passes.clear()


def _cast(dtype: torch.dtype, values: Any) -> Any:
    """Returns the values, floating tensors among them in this dtype."""
    return map_tensors(values, lambda one: one.to(dtype) if one.dtype.is_floating_point and one.dtype != dtype else one)


def _is_checkpointed(inputs: Any) -> bool:
    """True if a call that makes no graph, in a forward that does, is a reentrant checkpoint's first pass: it is given
    what the graph goes on from."""
    with local_only():
        return any(value_of(tensor).requires_grad for tensor in tensors_in(inputs))
