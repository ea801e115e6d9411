"""What a training step holds on to: counted, tensor by tensor, from one step of a few blocks without values.

The model itself is run, forward and backward, on meta tensors, with as many rows as two and as four; what grows with
the rows is an activation, what does not is the size of a parameter. A tensor lies between the tensor axis's matrices,
and is split by it, if it comes out of a split matrix and has not met the next one yet; so is the gradient of a split
table. What a module makes of whole activations that it is given, with split matrices inside (experts and their rows),
is whole on every rank, whether positions are split outside or not. So nothing is assumed about attention, norms, gates
or the loss: they keep what they keep. Keys that are repeated for the kernel of a CPU are told apart; and of a loss over
classes what it makes on the way, since of split ones it is computed in another way (`_rules/solvers/class_parts.py` of
vescale_dtensor): it keeps the scores in place of their logarithms, and makes their gradient in float32, in place.

Which modules of a block are worth computing again in place of all of it follows from the same step: what autograd saves
passes hooks, which note the module that ran. What was made and saved in one module alone is not kept if that module is
computed again; what it was called with is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..._apply.containers import map_tensors
from ..._dry.meta_attention import fused, repeated
from ..._dry.meter import Meter
from ..._torch_private import tree_iter
from ..held import Amount, Block, Holding, Inside, summed
from .blocks import LISTS, Chain, hand_on
from .model import first_tensor, on_meta
from .sample import Sample

ROWS, LONGER = (2, 4), 2
DTYPES = (torch.float32, torch.bfloat16)
LABELS = "labels"
LOOKUPS = (torch.ops.aten.embedding,)
TABLE_GRADIENT = torch.ops.aten.embedding_dense_backward
LOSS_GRADIENTS = (torch.ops.aten.nll_loss_backward, torch.ops.aten.nll_loss2d_backward)
ATTENTION_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def holding_of(
    model: nn.Module, sample: Sample, chains: Sequence[Chain], split: Collection[str], around: Collection[str] = ()
) -> dict[int, Holding]:
    """Bytes of a number -> what is held when the model computes in such numbers; without those in which it does not run
    on tensors without values, or makes nothing that a loss can be made of.

    Arguments:
        split: parameters that the tensor axis splits.
        around: modules that take and give whole activations, with split parameters between.
    """
    stand_ins = {name: like for chain in chains for name, like in chain.skipped.items()}
    found: dict[int, Holding] = {}
    try:
        ran = on_meta(model, stand_ins)
        for parameter in ran.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        hand_on(ran, chains)
        names = [name for chain in chains for name in chain.names if name not in stand_ins]
        for dtype in DTYPES:
            told = (names, split, around, dtype)
            runs = [_Run(ran.to(dtype), sample, *told, rows) for rows in ROWS]
            if (held := _summed(*runs, _longer(ran, sample, *told), sample.positions or 1)) is not None:
                found[dtype.itemsize] = _everywhere(held, chains)
    except Exception:  # of the model's own code: what it is cannot be known, and the formula stands in
        return found
    return found


def _longer(ran: nn.Module, sample: Sample, *told: Any) -> _Run | None:
    """With more positions; None where that many do not go in."""
    try:
        return _Run(ran, sample.longer(LONGER), *told, ROWS[1])
    except Exception:
        return None


def _everywhere(held: Holding, chains: Sequence[Chain]) -> Holding:
    """With blocks that did not run as the last of their kind that did."""
    blocks = {}
    for chain in chains:
        like: dict[int, str] = {}
        for name, kind in zip(chain.names, chain.kinds):
            if name in held.blocks:
                like[kind] = name
            if kind in like:
                blocks[name] = held.blocks[like[kind]]
    return replace(held, blocks=blocks)


class _Fused(TorchFunctionMode):
    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.scaled_dot_product_attention and not (kwargs or {}).get("dropout_p"):
            return fused(*args, **(kwargs or {}), repeat=self._repeat)
        return function(*args, **(kwargs or {}))

    def _repeat(self, shared: Tensor, heads: int) -> Tensor:
        self._log.repeating = heads
        try:
            return repeated(shared, heads)
        finally:
            self._log.repeating = 0


@dataclass
class _Item:
    """`inside`: made within a module that takes and gives whole activations, with split parameters between; `repeated`:
    so often, for a kernel; `loss`: the gradient of logarithms, of so many bytes each."""

    size: int
    born: int
    split: bool
    inside: bool = False
    repeated: int = 0
    loss: int = 0
    died: int | None = None
    kind: str = ""


class _Log(Meter):
    """Storages in the order in which they appear, when they end, and what happens in between."""

    def __init__(self, split: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self.items: list[_Item] = []
        self.at: dict[int, int] = {}
        self.now = 0
        self.inside, self.repeating = False, 0
        self._weights, self._tables, self._mark = split, {tuple(shape) for shape in split.values()}, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is TABLE_GRADIENT:
            marked, self._mark = self._mark, (args[2], args[0].shape[-1]) in self._tables
            made = super().__torch_dispatch__(function, types, args, kwargs)
            self._mark = marked
            return made
        keys = [one.untyped_storage()._cdata for one in _tensors((args, kwargs or {}))]
        marked = any(self.items[self.at[key]].split for key in keys if key in self.at)
        if any(key in self._weights for key in keys):
            marked = not marked and function.overloadpacket not in LOOKUPS
        self._mark = marked
        made = super().__torch_dispatch__(function, types, args, kwargs)
        if function.overloadpacket in LOSS_GRADIENTS:
            self._item(made).loss = made.dtype.itemsize
        elif function.overloadpacket is ATTENTION_GRADIENT:
            for given, grad in zip(args[1:4], made):
                self._item(grad).repeated = self._item(given).repeated
        return made

    def _item(self, tensor: Tensor) -> _Item:
        return self.items[self.at[tensor.untyped_storage()._cdata]]

    def _add(self, key: int, kind: str, size: int) -> None:
        self._known[key] = (kind, size)
        self.at[key] = len(self.items)
        self.items.append(_Item(size, self.now, self._mark, self.inside, self.repeating))
        self.now += 1

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Parameters stand here with no size."""

    def _forget(self, key: int) -> None:
        self._known.pop(key)
        self.items[self.at.pop(key)].died = self.now
        self.now += 1


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_iter(value) if isinstance(one, Tensor)]


Place = tuple[str, str] | None
"""A block, and a module that it calls; None elsewhere."""


class _Run:
    """One step. `spans`: block -> [forward begins, ends, backward begins, ends]; `streams`: block -> item; `calls`:
    place -> [forward begins, ends, backward begins], of modules called once; `taken`: place -> items that they are
    called with; `saved`: item -> the places where it was saved for backward."""

    def __init__(self, ran, sample, names, split, around, dtype, rows) -> None:
        ran.zero_grad(set_to_none=True)
        named = dict(ran.named_parameters(remove_duplicate=False))
        weights = [named[n] for n in split if n in named and named[n].ndim > 1]
        log = self.log = _Log({one.untyped_storage()._cdata: one.shape for one in weights})
        self.spans: dict[str, list[int]] = {}
        self.streams: dict[str, int] = {}
        self.calls: dict[Place, list[int]] = {}
        self.taken: dict[Place, set[int]] = {}
        self.saved: dict[int, set[Place]] = {}
        self._running: list[Place] = [None]
        twice: set[Place] = set()
        args, kwargs = sample.repeat(rows)
        args, kwargs = map_tensors((args, kwargs), lambda t: t.to("meta", dtype) if t.is_floating_point() else t)
        if LABELS in signature(ran.forward).parameters and LABELS not in kwargs and "input_ids" in kwargs:
            kwargs[LABELS] = kwargs["input_ids"]
        with ExitStack() as stack:
            for name in names:
                block = ran.get_submodule(name)
                called = [hook for inner, child in _called(block) for hook in self._within((name, inner), child, twice)]
                for hook in (*self._watch(name, block), *called):
                    stack.callback(hook.remove)
            for name in around:
                if any(name.startswith(f"{block}.") for block in names):
                    for hook in self._around(ran.get_submodule(name)):
                        stack.callback(hook.remove)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_Fused(log))
            for parameter in ran.parameters():
                log._known[parameter.untyped_storage()._cdata] = ("host", 0)
                log.at[parameter.untyped_storage()._cdata] = len(log.items)
                log.items.append(_Item(0, -1, False, kind="parameter"))
            stack.enter_context(log)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            loss = _loss(ran(*args, **kwargs), rows)
            self.lost = log.now
            loss.backward()
            self.done = log.now
            for parameter in ran.parameters():
                if parameter.grad is not None:
                    log.items[log.at[parameter.grad.untyped_storage()._cdata]].kind = "gradient"
        for place in twice:
            del self.calls[place]

    def _watch(self, name: str, block: nn.Module) -> tuple:
        log = self.log

        def enter(_, args, kwargs):
            self.spans[name] = [log.now, -1, -1, -1]
            entered = first_tensor((args, kwargs))
            if entered is not None and entered.requires_grad:
                entered.register_hook(lambda _: self._set(name, 3))

        def leave(_, args, output):
            self._set(name, 1)
            left = first_tensor(output)
            self.streams[name] = log.at.get(left.untyped_storage()._cdata, -1)
            left.register_hook(lambda _: self._set(name, 2))

        return block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)

    def _around(self, module: nn.Module) -> tuple:
        """Notes what is made between a module's input and its output, in both directions."""
        log = self.log

        def begin(*_) -> None:
            log.inside = True

        def end(*_) -> None:
            log.inside = False

        def enter(_, args, kwargs):
            entered = first_tensor((args, kwargs))
            if entered is not None and entered.requires_grad:
                entered.register_hook(end)
            begin()

        def leave(_, args, output):
            end()
            left = first_tensor(output)
            if left is not None and left.requires_grad:
                left.register_hook(begin)

        return module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)

    def _set(self, name: str, place: int) -> None:
        self.spans[name][place] = self.log.now

    def _within(self, place: Place, module: nn.Module, twice: set[Place]) -> tuple:
        log = self.log

        def enter(_, args, kwargs):
            if place in self.calls:
                twice.add(place)
            self.calls[place] = [log.now, -1, -1]
            keys = [one.untyped_storage()._cdata for one in _tensors((args, kwargs))]
            self.taken[place] = {log.at[key] for key in keys if key in log.at}
            self._running.append(place)

        def leave(_, args, output):
            self._running.pop()
            self.calls[place][1] = log.now

        return module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, Place]:
        place = self._running[-1]
        if (item := self.log.at.get(tensor.untyped_storage()._cdata)) is not None:
            self.saved.setdefault(item, set()).add(place)
        return tensor.detach(), place

    def _unpack(self, packed: tuple[Tensor, Place]) -> Tensor:
        tensor, place = packed
        if place in self.calls and self.calls[place][2] < 0:
            self.calls[place][2] = self.log.now
        return tensor


def _called(block: nn.Module, before: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What a block may call: its children, of lists theirs."""
    for name, child in block.named_children():
        if isinstance(child, LISTS):
            yield from _called(child, f"{before}{name}.")
        else:
            yield f"{before}{name}", child


def _loss(output: Any, rows: int) -> Tensor:
    found = _floats(output)
    for one in found:
        if not one.ndim:
            return one
    first = found[0]
    if first.ndim > 1:
        flat = first.flatten(0, -2).float()
        return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long))
    return first.float().square().mean()


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return [one for one in found if one.is_floating_point()]


def _summed(few: _Run, many: _Run, longer: _Run | None, positions: int) -> Holding | None:
    if len(few.log.items) != len(many.log.items) or list(few.spans) != list(many.spans):
        return None
    if longer is not None and len(longer.log.items) != len(many.log.items):
        longer = None
    thirds = longer.log.items if longer is not None else [None] * len(many.log.items)
    amounts = [_amount(*three, positions) for three in zip(few.log.items, many.log.items, thirds)]
    items = many.log.items
    spans = sorted(many.spans.items(), key=lambda one: one[1][0])
    inside: dict[str, Amount] = {}
    for name, (start, stop, *_) in spans:
        inside[name] = summed(
            amount
            for amount, one in zip(amounts, items)
            if start <= one.born < stop and not one.kind and (one.died is None or one.died > many.lost)
        )
    changes = sorted(
        [(one.born, amount, 1) for amount, one in zip(amounts, items) if not one.kind]
        + [(one.died, amount, -1) for amount, one in zip(amounts, items) if not one.kind and one.died is not None],
        key=lambda each: each[0],
    )
    phases: dict[tuple, list[Amount]] = {}
    began = {name: _began(many, name) for name in many.spans}
    live = Amount()
    for time, amount, sign in changes:
        if time > many.done:
            break
        live = live.plus(amount, sign)
        below, key = Amount(), ("tail",)
        for name, (start, stop, back, end) in spans:
            if start <= time < stop:
                key = ("forward", name)
                break
            if back <= time < end:
                key = ("backward", name, tuple(one for one, begins in began[name] if time < begins))
                break
            if time >= stop and time < back:
                below = below.plus(inside[name])
                key = ("loss",)
        phases.setdefault(key, []).append(live.plus(below, -1))
    blocks = {
        name: Block(
            inside[name],
            amounts[many.streams[name]],
            {key[2]: _worst(each) for key, each in phases.items() if key[:2] == ("backward", name)},
            _again(many, name, amounts),
        )
        for name, _ in spans
    }
    return Holding(blocks, _worst(phases.get(("loss",), ())), _worst(phases.get(("tail",), ())))


def _began(run: _Run, block: str) -> list[tuple[str, int]]:
    """When the backward of each module of a block begins, of those that save anything."""
    return [(place[1], begins) for place, (_, _, begins) in run.calls.items() if place[0] == block and begins >= 0]


def _again(run: _Run, block: str, amounts: Sequence[Amount]) -> Mapping[str, Inside]:
    """Of the modules that a block calls. What those of a name are given in all blocks (a mask) is held by the first."""
    handed = set().union(*run.taken.values())
    found = {}
    for place, (start, stop, begins) in run.calls.items():
        if place[0] != block or begins < 0:
            continue
        saved, made = Amount(), Amount()
        alike = [(other, items) for other, items in run.taken.items() if other[1] == place[1]]
        first = {at: other for other, items in reversed(alike) for at in items}
        for at, (amount, one) in enumerate(zip(amounts, run.log.items)):
            if one.kind:
                continue
            kept = one.died is None or one.died > run.lost
            if start <= one.born < stop:
                made = made.plus(amount)
                if kept and run.saved.get(at) == {place} and at not in handed:
                    saved = saved.plus(amount)
            elif not kept and first.get(at) == place:
                saved = saved.plus(amount, -1)
        found[place[1]] = Inside(saved, made)
    return found


def _amount(few: _Item, many: _Item, longer: _Item | None, positions: int) -> Amount:
    """From one tensor's sizes with two and four rows, and with four of twice the positions."""
    low, high = ROWS
    row = (many.size - few.size) / (high - low)
    fixed = max(0.0, many.size - high * row)
    square = meeting = 0.0
    if longer is not None and row:
        square = max(0.0, (longer.size - fixed) / high - LONGER * row) / (LONGER * (LONGER - 1) * positions**2)
    elif longer is not None and longer.size >= LONGER**2 * fixed:
        fixed, meeting = 0.0, fixed / positions**2
    each = row / positions - square * positions
    if many.split:
        kept = Amount(split_meet=square, meet=meeting, fixed_split=fixed)
        if many.loss:  # split, it is made of numbers of four bytes, and narrower ones after it
            return kept._replace(classes=each, classes_split=4 / many.loss * each if many.loss < 4 else 0.0)
        once = each / max(1, many.repeated)
        return kept._replace(split=once, repeated=each - once)
    kept = Amount(whole_meet=square, fixed=fixed, meet=meeting)
    return kept._replace(gathered=each) if many.inside else kept._replace(whole=each)


def _worst(amounts: Sequence[Amount]) -> tuple[Amount, ...]:
    """Those that no other is as large as in every part."""
    kept: list[Amount] = []
    for one in sorted({Amount(*(round(part, 3) for part in amount)) for amount in amounts}, reverse=True):
        if not any(all(k >= o for k, o in zip(other, one)) for other in kept):
            kept.append(one)
    return tuple(kept)
