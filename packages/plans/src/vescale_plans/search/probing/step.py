"""One training step of a model without values, written down: which storages appear, which end, and what is saved.

The model runs forward and backward on meta tensors. What autograd saves passes hooks, which note the module that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from vescale_trace.values import map_tensors, tensors_in

from ..._calls.meanwhile import meanwhile
from ..._dry.meta_attention import fused, repeated
from ..._dry.meter import Meter
from .blocks import LISTS
from .model import first_tensor, values_kept

LABELS = "labels"
LOOKUPS = (torch.ops.aten.embedding,)
TABLE_GRADIENT = torch.ops.aten.embedding_dense_backward
LOSS_GRADIENTS = (torch.ops.aten.nll_loss_backward, torch.ops.aten.nll_loss2d_backward)
ATTENTION_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


WRITTEN = 2
"""Gradients of scores that attention which is written out makes, in float32, before the scores that it kept may go."""


class _Written(torch.autograd.Function):
    """Attention's output, with the scores that a CPU would keep for its backward."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, shape: tuple[int, ...], log: _Log) -> Tensor:
        ctx.log = log
        with meanwhile(log, writing=True):
            ctx.save_for_backward(made.new_empty(shape, dtype=torch.float32))
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        with meanwhile(ctx.log, writing=True):
            [torch.empty_like(*ctx.saved_tensors) for _ in range(WRITTEN)]
        return grad, None, None


class _Fused(TorchFunctionMode):
    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not F.scaled_dot_product_attention or (kwargs or {}).get("dropout_p"):
            return function(*args, **(kwargs or {}))
        query, key, value = (*args, *((kwargs or {})[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        if query.shape[-1] == value.shape[-1] or query.ndim != 4 or query.shape[1] != key.shape[1]:
            return fused(*args, **(kwargs or {}), repeat=self._repeat)
        made = fused(*args, **(kwargs or {}), repeat=None)
        return _Written.apply(made, (*query.shape[:3], key.shape[2]), self._log)

    def _repeat(self, shared: Tensor, heads: int) -> Tensor:
        with meanwhile(self._log, repeating=heads):
            return repeated(shared, heads)


@dataclass
class Item:
    """`inside`: made within a module that takes and gives whole activations, with split parameters between; `met`: goes
    into a product with a split parameter, before which positions are gathered; `repeated`: so often, for a kernel;
    `written`: scores that a CPU keeps, and a GPU does not; `loss`: the gradient of logarithms, of so many bytes
    each."""

    size: int
    born: int
    split: bool
    inside: bool = False
    met: bool = False
    repeated: int = 0
    written: bool = False
    loss: int = 0
    died: int | None = None
    kind: str = ""


class _Log(Meter):
    """Storages in the order in which they appear, when they end, and what happens in between."""

    def __init__(self, split: Mapping[int, torch.Size]) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.at: dict[int, int] = {}
        self.now = 0
        self.inside, self.repeating = False, 0
        self.writing = False  # whether tensors that appear are scores, split as attention's inputs are
        self._weights, self._tables, self._mark = split, {tuple(shape) for shape in split.values()}, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is TABLE_GRADIENT:
            marked, self._mark = self._mark, (args[2], args[0].shape[-1]) in self._tables
            made = super().__torch_dispatch__(function, types, args, kwargs)
            self._mark = marked
            return made
        keys = [one.untyped_storage()._cdata for one in tensors_in((args, kwargs or {}))]
        marked = any(self.items[self.at[key]].split for key in keys if key in self.at)
        if any(key in self._weights for key in keys):
            marked = not marked and function.overloadpacket not in LOOKUPS
            for key in keys if marked else ():
                if key in self.at:
                    self.items[self.at[key]].met = True
        self._mark = marked
        made = super().__torch_dispatch__(function, types, args, kwargs)
        if function.overloadpacket in LOSS_GRADIENTS:
            self._item(made).loss = made.dtype.itemsize
        elif function.overloadpacket is ATTENTION_GRADIENT:
            for given, grad in zip(args[1:4], made):
                self._item(grad).repeated = self._item(given).repeated
        return made

    def _item(self, tensor: Tensor) -> Item:
        return self.items[self.at[tensor.untyped_storage()._cdata]]

    def _add(self, key: int, kind: str, size: int) -> None:
        self._known[key] = (kind, size)
        self.at[key] = len(self.items)
        self.items.append(Item(size, self.now, self._mark, self.inside, False, self.repeating, self.writing))
        self.now += 1

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Parameters stand here with no size."""

    def _forget(self, key: int) -> None:
        self._known.pop(key)
        self.items[self.at.pop(key)].died = self.now
        self.now += 1


Place = tuple[str, str] | None
"""A block, and a module that it calls; None elsewhere."""


class Step:
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
            stack.enter_context(values_kept(ran))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_Fused(log))
            for parameter in ran.parameters():
                log._known[parameter.untyped_storage()._cdata] = ("host", 0)
                log.at[parameter.untyped_storage()._cdata] = len(log.items)
                log.items.append(Item(0, -1, False, kind="parameter"))
            stack.enter_context(log)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            loss = _loss(ran(*args, **kwargs))
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
            _on_gradient((args, kwargs), lambda: self._set(name, 3))

        def leave(_, args, output):
            self._set(name, 1)
            left = first_tensor(output)
            self.streams[name] = log.at.get(left.untyped_storage()._cdata, -1)
            left.register_hook(lambda _: self._set(name, 2))

        return block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)

    def _around(self, module: nn.Module) -> tuple:
        """Notes what is made between a module's input and its output, in both directions."""
        begin, end = (partial(setattr, self.log, "inside", now) for now in (True, False))

        def enter(_, args, kwargs):
            _on_gradient((args, kwargs), end)
            begin()

        def leave(_, args, output):
            end()
            _on_gradient(output, begin)

        return module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)

    def _set(self, name: str, place: int) -> None:
        self.spans[name][place] = self.log.now

    def _within(self, place: Place, module: nn.Module, twice: set[Place]) -> tuple:
        log = self.log

        def enter(_, args, kwargs):
            if place in self.calls:
                twice.add(place)
            self.calls[place] = [log.now, -1, -1]
            keys = [one.untyped_storage()._cdata for one in tensors_in((args, kwargs))]
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


def _on_gradient(value: Any, call: Callable[[], None]) -> None:
    """Calls when the gradient of the first tensor comes, if it is to have one."""
    first = first_tensor(value)
    if first is not None and first.requires_grad:
        first.register_hook(lambda _: call())


def _called(block: nn.Module, before: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that a block may call: its children, and those of lists."""
    for name, child in block.named_children():
        if isinstance(child, LISTS):
            yield from _called(child, f"{before}{name}.")
        else:
            yield f"{before}{name}", child


def _loss(output: Any) -> Tensor:
    found = [one for one in tensors_in(output) if one.is_floating_point()]
    first = next((one for one in found if not one.ndim), found[0])
    if not first.ndim:
        return first
    if first.ndim > 1:
        flat = first.flatten(0, -2).float()
        return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long))
    return first.float().square().mean()
