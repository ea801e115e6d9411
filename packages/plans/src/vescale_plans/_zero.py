"""Data parallelism, ZeRO 0-3: when buffers are gathered, let go, filled with gradients and reduced.

A `Unit` is one block of the model with its buffers (`_buffer.py`); the root is the last.

    forward    before a block runs its parameters are gathered (ZeRO-3; a cast under a precision), and the block
               that came next in the last pass is started; after it they are let go
    backward   the first gradient that reaches a block's output gathers them again and opens its gradient buffer;
               when all of the block's gradients are there, or those of its inputs, their sum over ranks starts
    its end    what has not started does; all sums are waited for and handed out as `param.grad`

A pipeline runs a call in many small forwards and backwards (`in_parts`): every block is
gathered once per call then, by the first part that runs it.

Sums start in one fixed order, that of the units reversed, so that all ranks start the
same collectives whatever each of them used. A gradient that comes again after its sum
has started (a reentrant checkpoint, a block that runs twice) is summed in a second
round. Each contribution is thereby reduced exactly once and then ADDED to what earlier
backwards left: several backwards before a step come out as on one device (design
section 3, contract 9).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id

from vescale_dtensor import DTensor
from vescale_dtensor.engine import PENDING, after_backward, forget_all, in_backward, local_only

from ._blocks import blocks_of, owners
from ._buffer import Buffer, InFlight, Sharing, Usage
from ._containers import map_tensors

# Below ZeRO-3 blocks share buffers of a quarter of the model, within these bounds: fewer collectives than one per
# block, and still some that start while backward runs.
BUCKET_BYTES, LEAST_BUCKET_BYTES, BUCKETS = 25 << 20, 1 << 20, 4
# Parameters of a block that are pending over other axes than most go to the root when they are this few, relatively:
# one collective for all norms of a model instead of one per block.
_FEW = 1 / 16
# Sums under way before the oldest is waited for: bounds the memory of gradients under ZeRO-2 and 3.
_IN_FLIGHT = 2


class Pass:
    """One call of a block in a forward pass: open in backward from the first gradient of its outputs on, until those
    of all its inputs are there. (A block that is called twice has two.)"""

    __slots__ = ("inputs",)

    def __init__(self) -> None:
        self.inputs = 0


class Unit:
    """Blocks that are gathered and reduced together."""

    def __init__(self, name: str, modules: list[nn.Module], buffers: list[Buffer]) -> None:
        self.name, self.modules, self.buffers = name, modules, buffers
        self.fetched = [buffer for buffer in buffers if buffer.separate]
        self.reduced = [buffer for buffer in buffers if buffer.reduces]
        # Autograd may keep gradients that nobody sums yet, as it does on one device: they come in the sum's dtype.
        self.may_wait = not self.fetched and all(buffer.reduce is buffer.dtype for buffer in self.reduced)
        self.is_open = not self.fetched
        self.next: dict[bool, Unit | None] = {False: None, True: None}  # by whether this is a backward
        self.started = False
        self.touched = False
        self.entered: list[Pass] = []  # calls that have not returned
        self.passes: set[Pass] = set()  # in backward, those that a gradient has reached

    def fetch(self) -> None:
        for buffer in self.fetched:
            buffer.fetch()

    def open(self) -> None:
        """The block computes with whole parameters from here on."""
        if self.is_open:
            return
        self.fetch()
        for buffer in self.fetched:
            buffer.wait()
            buffer.expose(True)
        self.is_open = True

    def close(self) -> None:
        if self.is_open or any(buffer.ready for buffer in self.fetched):
            for buffer in self.fetched:
                buffer.let_go()
        self.is_open = not self.fetched

    def open_gradients(self) -> None:
        self.touched = True
        for buffer in self.reduced:
            buffer.open_gradients()

    @property
    def is_full(self) -> bool:
        return all(buffer.is_full for buffer in self.reduced)



class DataParallel:
    """A model's buffers, and the hooks that move them."""

    def __init__(self, model: nn.Module, sharing: Sharing, rows: Mapping[str, int] | None = None) -> None:
        self.sharing = sharing
        self.units = _units(model, sharing, rows or {})
        self._home: dict[int, tuple[Unit, Buffer, int]] = {}
        for unit in self.units:
            for buffer in unit.buffers:
                for i, slot in enumerate(buffer.slots):
                    self._home[id(slot.parameter)] = (unit, buffer, i)
                    if buffer.reduces:
                        slot.parameter.register_post_accumulate_grad_hook(self._arrival(unit, buffer, i))
        self._order = [unit for unit in reversed(self.units) if unit.reduced]
        self._next_start = 0
        self._running: list[InFlight] = []
        self._touched = False
        self._last: dict[bool, Unit | None] = {False: None, True: None}
        self.enabled, self.holds = True, False
        forward = [self.units[-1], *self.units[:-1]]  # until it is seen in what order they run
        for one, other in itertools.pairwise(forward):
            one.next[False], other.next[True] = other, one
        forward[0].next[True] = forward[-1]
        for unit in self.units:
            for module in unit.modules:
                self._install(unit, module)
        if sharing.compute is not None:
            model.register_forward_pre_hook(self._cast, with_kwargs=True)
        after_backward(self.finish)

    # --- what the optimizer and the user call -------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients stay pending; the next backward outside reduces their sum."""
        saved, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = saved

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """A call that is run in parts, forward and backward (a pipeline's): its gradients stay pending, and what its
        parts gather stays gathered until the backward that releases them; without gradients, until the end."""
        self.holds = True
        try:
            with self.paused():
                yield
        finally:
            self.holds = False
        if not torch.is_grad_enabled():
            self.rest()

    def flush(self) -> None:
        """Reduces whatever is still pending: before an optimizer step that follows `paused` backwards only."""
        for unit in self.units:
            for buffer in unit.reduced:
                if buffer.has_pending():
                    buffer.open_gradients()
                    self._touched = True
        saved, self.enabled = self.enabled, True
        try:
            self.finish()
        finally:
            self.enabled = saved

    def rest(self) -> None:
        """Parameters are the masters, where they are not the same memory: a write to one stays."""
        for unit in self.units:
            unit.close()

    def updated(self) -> None:
        """The masters have changed: parameters follow. Cost: below ZeRO-3 an all-gather of each buffer."""
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.updated()
            unit.is_open = not unit.fetched
        for unit in self.units:
            for buffer in unit.buffers:
                if not buffer.separate:
                    buffer.wait()
        forget_all()

    def slot_of(self, parameter: Tensor):
        """The parameter's place in its buffer, None for a tensor that is no parameter of the model."""
        found = self._home.get(id(parameter))
        return None if found is None else found[1].slots[found[2]]

    # --- forward --------------------------------------------------------------------------

    def _install(self, unit: Unit, module: nn.Module) -> None:
        root = unit is self.units[-1]
        if unit.fetched:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._enter(unit, None if root else (args, kwargs)),
                with_kwargs=True, prepend=True,
            )  # fmt: skip
        # That a gradient has reached the model is known from its output, so that all ranks take part in the sums.
        if unit.fetched or (root and module is unit.modules[0] and any(each.reduced for each in self.units)):
            module.register_forward_hook(lambda _, args, output: self._leave(unit, output, root))

    def _cast(self, root: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Floating inputs in the dtype that the model computes in."""
        compute = self.sharing.compute
        return map_tensors((args, kwargs), lambda one: one.to(compute) if one.is_floating_point() else one)

    def _enter(self, unit: Unit, inputs: Any) -> None:
        backward = _current_graph_task_id() != -1
        self._open(unit, backward)
        if inputs is not None and torch.is_grad_enabled():
            # The gradients of its inputs are the last that a block computes. (In a recompute, only a reentrant
            # checkpoint's: the others are those of the first pass.)
            entry = Pass()
            unit.entered.append(entry)

            def watch(tensor: Tensor) -> Tensor:
                # What several blocks take (an encoder's output) is watched for the first: the others would wait too.
                with local_only():
                    if tensor.requires_grad and (tensor.is_leaf or not backward) and not hasattr(tensor, "_watched"):
                        tensor._watched = True
                        entry.inputs += 1
                        tensor.register_hook(lambda _: self._passed(unit, entry))
                return tensor

            map_tensors(inputs, watch)

    def _open(self, unit: Unit, backward: bool) -> None:
        if unit.is_open and not unit.fetched:
            return
        with torch._C.DisableTorchFunction():  # nothing of it is the forward's: a pipeline's dry run must not see it
            unit.open()
            last = self._last[backward]
            if last is not unit:
                if last is not None:
                    last.next[backward] = unit
                self._last[backward] = unit
            following = unit.next[backward]
            if following is not None and not following.is_open:
                following.fetch()

    def _leave(self, unit: Unit, output: Any, root: bool) -> None:
        if root:
            self._last[False] = None
        if unit.may_wait and not self.enabled:
            return
        in_graph = False
        entry = unit.entered.pop() if unit.entered else Pass()

        def watch(tensor: Tensor) -> Tensor:
            nonlocal in_graph
            with local_only():
                if tensor.requires_grad and not tensor.is_leaf:
                    in_graph = True
                    tensor.register_hook(lambda _: self._reached(unit, entry))
            return tensor

        if torch.is_grad_enabled():
            map_tensors(output, watch)
        if unit.fetched and _current_graph_task_id() == -1:
            # The root's parameters, and those of the block that backward begins with, are needed again at once.
            stays = in_graph and (root or unit is self.units[-2])
            if not stays and not self.holds:
                with torch._C.DisableTorchFunction():
                    unit.close()

    # --- backward -------------------------------------------------------------------------

    def _reached(self, unit: Unit, entry: Pass) -> None:
        """A gradient has reached the output of a unit's block."""
        if unit.may_wait and not self.enabled:
            return
        self._ask_for_the_end()
        unit.passes.add(entry)
        if unit.fetched:
            self._open(unit, True)
        if not unit.touched:
            unit.open_gradients()

    def _passed(self, unit: Unit, entry: Pass) -> None:
        """The gradient of an input of a unit's block is there; of the last one: this call of the block is through."""
        entry.inputs -= 1
        if entry.inputs > 0:
            return
        unit.passes.discard(entry)
        if unit.passes:
            return
        if self.enabled and not unit.started and any(buffer.filled for buffer in unit.reduced):
            unit.started = True
            self._start_in_order()
        if not self.holds:
            unit.close()

    def _arrival(self, unit: Unit, buffer: Buffer, i: int) -> Callable[[Tensor], None]:
        """The hook of a parameter: autograd has added to its gradient."""
        may_wait = unit.may_wait

        def arrived(parameter: Tensor) -> None:
            if may_wait and not self.enabled and buffer.flat is None:
                return
            self._ask_for_the_end()
            unit.touched = True
            buffer.arrived(i)
            if self.enabled and not unit.started and unit.is_full:
                unit.started = True
                self._start_in_order()

        return arrived

    def _ask_for_the_end(self) -> None:
        if not self._touched:
            self._touched = True
            if not in_backward():
                # The loss was a plain tensor: this backward was not started by us, so we ask to be called at its end.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _start_in_order(self) -> None:
        while self._next_start < len(self._order) and self._order[self._next_start].started:
            self._start(self._order[self._next_start])
            self._next_start += 1

    def _start(self, unit: Unit) -> None:
        with torch.no_grad():
            for buffer in unit.reduced:
                self._running.append(buffer.start())
            for flight in self._running[:-_IN_FLIGHT]:
                flight.pending.advance()

    def finish(self) -> None:
        """Starts what is left, waits for all, and hands out the reduced gradients."""
        if not self._touched:
            return
        self._touched = False
        with torch.no_grad():
            if self.enabled:
                for unit in self._order:
                    unit.started = True
                self._start_in_order()
                for unit in self._order:  # what came again after its sum had started
                    for buffer in unit.reduced:
                        if buffer.flat is not None:
                            self._running.append(buffer.start())
                running, self._running = self._running, []
                usage = Usage(running, self.sharing.mesh) if self.sharing.zero >= 2 else None
                for flight in running:
                    flight.pending.advance()
                for flight in running:
                    flight.finish(usage)
                if usage is not None:
                    usage.close()
            else:
                for unit in self._order:
                    for buffer in unit.reduced:
                        buffer.leave_pending()
        self._next_start = 0
        self._last[True] = None
        for unit in self.units:
            unit.started = unit.touched = False
            unit.entered.clear()
            unit.passes.clear()
            if not self.holds:
                unit.close()


def _units(model: nn.Module, sharing: Sharing, rows: Mapping[str, int]) -> list[Unit]:
    """The units of a model in its order, the root's last."""
    blocks = blocks_of(model)
    owner = owners(model, blocks)
    named: dict[int, list[tuple[str, DTensor]]] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is DTensor:
            named.setdefault(owner[id(parameter)], []).append((name, parameter))
    groups: list[tuple[list[str], list[nn.Module], list[tuple[str, DTensor]]]] = []
    root = list(named.get(-1, ()))
    whole = sharing.zero >= 3 or sharing.compute is not None
    every = [one for members in named.values() for one in members]
    limit = min(max(_bytes(every) // BUCKETS, LEAST_BUCKET_BYTES), BUCKET_BYTES)
    for index, (name, module) in enumerate(blocks):
        mine, few = _without_few(named.get(index, []))
        root += few
        if groups and not whole and _bytes(groups[-1][2]) + _bytes(mine) <= limit:
            names, modules, members = groups[-1]
            groups[-1] = ([*names, name], [*modules, module], members + mine)
        elif mine:
            groups.append(([name], [module], mine))
    rooted = [model]
    if groups and not whole and _bytes(groups[0][2]) + _bytes(root) <= limit:
        _, modules, members = groups.pop(0)  # the last that backward reaches, as the root's are
        rooted, root = [model, *modules], root + members
    units = [Unit(", ".join(n), modules, _buffers(m, sharing, rows)) for n, modules, m in groups]
    return [*units, Unit("", rooted, _buffers(root, sharing, rows))]


def _without_few(named: list[tuple[str, DTensor]]) -> tuple[list, list]:
    """A block's parameters, and those few that are pending over other axes than most of it."""
    if not named:
        return [], []
    sizes: dict[tuple, int] = {}
    for _, parameter in named:
        sizes[_key(parameter)] = sizes.get(_key(parameter), 0) + parameter.numel()
    most = max(sizes, key=lambda key: sizes[key])
    few = {key for key, size in sizes.items() if key != most and size < _FEW * sizes[most]}
    return [one for one in named if _key(one[1]) not in few], [one for one in named if _key(one[1]) in few]


def _key(parameter: DTensor) -> tuple:
    """What parameters of one buffer have in common: the axes over which their gradients are pending, and more."""
    layout = parameter.mesh_layout
    states = layout.gradient.states
    axes = tuple(a for a, state in enumerate(states) if state is PENDING and layout.mesh.sizes[a] > 1)
    return axes, parameter.dtype, parameter.device, parameter.requires_grad


def _buffers(named: list[tuple[str, DTensor]], sharing: Sharing, rows: Mapping[str, int]) -> list[Buffer]:
    """The parameters by what they have in common, cut where a buffer would outgrow its size below ZeRO-3."""
    groups: list[tuple[tuple, list]] = []
    for name, parameter in named:
        key = _key(parameter)
        mine = next((group for k, group in reversed(groups) if k == key), None)
        if mine is None or (sharing.zero < 3 and _bytes(mine) + _bytes([(name, parameter)]) > BUCKET_BYTES):
            groups.append((key, mine := []))
        mine.append((name, parameter))
    return [Buffer(group, key[0], sharing, [_rows(name, rows) for name, _ in group]) for key, group in groups]


def _rows(name: str, rows: Mapping[str, int]) -> int:
    return next((value for glob, value in rows.items() if fnmatchcase(name, glob)), 0)


def _bytes(named: list[tuple[str, DTensor]]) -> int:
    with local_only():
        return sum(parameter.nbytes for _, parameter in named)
