"""What a forward does to local tensors, written down: the tape of one module call, and its recorder.

Operators are seen below autograd, so that it does not matter through which function
the user, or a rule, came to them. A tensor on a tape is a `Ref`: its place in a numbered
storage. Storages are held weakly: the number is never given twice, and nothing is kept
alive. What is on a tape, in order:

    Op          a local operator: its arguments with refs in place of tensors, its results
    Conversion  a change of layout, as a whole; by a plan's boundary, or by dispatch
    Crossing    another module was called
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.multiprocessing.reductions import StorageWeakRef

from .._communication import events
from .._dispatch.number import under_mode
from .._layouts.layout import Layout
from .._tensor.bits import bits_of
from .._tensor.tensor import local_only
from .._torch_private import TorchDispatchMode
from .._torch_private import _top_saved_tensors_default_hooks as _saved_tensors_hooks

_RANDOM = torch.Tag.nondeterministic_seeded
_READS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"})
_COMMUNICATES = frozenset({"c10d", "_c10d_functional", "_dtensor"})
_CONSTANT = "aten::lift_fresh"
SMALL = 4096  # elements of a constant that is compared by value


class Ref(NamedTuple):
    """Where a tensor lies."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Storages:
    """Numbers for storages, each given once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}
        self._of: dict[int, StorageWeakRef] = {}

    def ref(self, tensor: Tensor) -> Ref:
        """Call with dispatch disabled."""
        if tensor.layout is not torch.strided:
            return Ref(id(tensor), 0, tuple(tensor.shape), (), tensor.dtype)
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:  # the weak reference keeps the address taken
            known = self._known[storage._cdata] = (len(self._of) + 1, StorageWeakRef(storage))
            self._of[known[0]] = known[1]
        return Ref(known[0], tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def any_alive(self, numbers: Iterable[int]) -> bool:
        """Whether anybody still holds one of these storages."""
        return any(number in self._of and not self._of[number].expired() for number in numbers)


@dataclass(slots=True)
class Op:
    """One local operator.

    written: storages that it wrote to. hooked: saved tensors went through hooks. copying: it copies only so
    that later writes stay apart.
    """

    function: Any
    args: Any
    kwargs: Any
    line: str
    random: bool = False
    out: Any = None
    written: tuple[int, ...] = ()
    constant: bytes | None = None
    hooked: bool = False
    copying: bool = False

    @property
    def name(self) -> str:
        return self.function._schema.name

    @property
    def reads_value(self) -> bool:
        return self.name in _READS

    @property
    def communicates(self) -> bool:
        return self.function.namespace in _COMMUNICATES


@dataclass(slots=True)
class Conversion:
    """`source` under the layout `before` became `result` under `after`. `by`: whose boundary it is, or None."""

    source: Tensor
    before: Layout
    result: Tensor
    after: Layout
    cause: object
    line: str
    by: object = None
    refs: tuple[Ref, Ref] = ()


@dataclass(slots=True)
class Crossing:
    """A call of another module: `frame` is the caller's, `inputs` are refs and values in the order of the call."""

    frame: Any
    inputs: tuple
    line: str = ""


Tape = list  # of Op | Conversion | Crossing


@dataclass
class Taping(TorchDispatchMode):
    """A dispatch mode that writes operators on the innermost tape. `check(op)` is called before one runs."""

    storages: Storages
    tapes: list[Tape] = field(default_factory=list)
    check: Callable[[Op], None] | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        value = under_mode(self, function, types, args, kwargs)
        if value is not NotImplemented:
            return value
        with local_only():
            if self.paused or not self.tapes or _have_no_data((args, kwargs)):
                return function(*args, **kwargs)
            op = self._op(function, args, kwargs)
            if self.check is not None:
                self.check(op)
            out = function(*args, **kwargs)
            if _have_no_data(out):
                return out
            op.out = refs_of(out, self.storages)
        self.tapes[-1].append(op)
        return out

    def _op(self, function: Any, args: tuple, kwargs: dict) -> Op:
        op = Op(function, refs_of(args, self.storages), refs_of(kwargs, self.storages), events.user_line())
        op.random = _RANDOM in function.tags and _draws(function._schema, args, kwargs)
        op.copying = events.copying
        op.hooked = _saved_tensors_hooks(True) is not None
        if function._schema.is_mutable:
            op.written = tuple(_written(function._schema, args, kwargs, self.storages))
        if op.name == _CONSTANT and args[0].numel() <= SMALL and not args[0].is_meta:
            op.constant = bytes_of(args[0])
        return op


def _have_no_data(value: Any) -> bool:
    """Whether there are tensors in it, none with data. What is asked of such (a rule asks torch for the shapes of the
    parts of a tensor) computes nothing, and is asked once: whether that is in a recorded pass is chance."""
    return set(_kinds(value)) == {True}


def _kinds(value: Any) -> Iterator[bool]:
    if isinstance(value, Tensor):
        yield value.is_meta
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _kinds(item)
    elif isinstance(value, dict):
        yield from _kinds(tuple(value.values()))


def _draws(schema: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator that may draw does: attention draws where it has a probability."""
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


def _written(schema: Any, args: tuple, kwargs: dict, storages: Storages):
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, Tensor):
                yield storages.ref(tensor).storage


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor, bit by bit. Call with dispatch disabled."""
    return bits_of(tensor).cpu().numpy().tobytes()


def refs_of(value: Any, storages: Storages) -> Any:
    """`value` with a ref in place of every tensor; lists are tuples. Call with dispatch disabled."""
    if isinstance(value, Tensor):
        return storages.ref(value)
    if isinstance(value, (tuple, list)):
        return tuple([refs_of(item, storages) for item in value])
    if isinstance(value, dict):
        return tuple([(name, refs_of(item, storages)) for name, item in value.items()])
    return value


def grad_state() -> tuple[bool, bool]:
    """What a caller may have changed around a call: grad mode, and hooks on saved tensors."""
    return is_grad_enabled(), _saved_tensors_hooks(True) is not None
