"""Holds the table's traits of functions against torch, by numbers. For tests.

`Watch` sees every call of a function that has traits and, beside the call, tries what the
traits promise: that the function of a slice is the slice of the function, that it is
additive, that it moves elements and takes none twice, and so on. A promise that does not
hold, and something that the function does and is not said, are `wrong`; what was tried is
`tried`. Whoever calls the functions chooses the arguments: torch's operator database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_dtensor._communication.events import function_name
from vescale_dtensor.engine import TABLE, Trait

from ._torch_private import tree_flatten, tree_map, tree_unflatten

# A tensor in the second place lends its dtype and device alone; where(condition) is nonzero. Their rules know.
_LENDS = frozenset({Tensor.to, Tensor.type_as})
_NONZERO = frozenset({torch.where, Tensor.where})
_UNDEFINED = frozenset({torch.empty_like, Tensor.new_empty, Tensor.new_empty_strided})
_SHIFT = 4096.0
_EXACT = {x: x.to_real() for x in (torch.float32, torch.float64, torch.complex64, torch.complex128)}
_TOLERANCE = {
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
}


class Watch(TorchFunctionMode):
    """While it is on, every call of a function of the table is tried."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.tried: dict[Trait, set[Callable]] = {trait: set() for trait in Trait}

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        entry = TABLE.get(function)
        if entry is None or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        fresh = _copied((args, kwargs))
        before = torch.get_rng_state()
        out = function(*args, **kwargs)
        drawn = not torch.equal(before, torch.get_rng_state())
        with _state_kept():
            self._try(entry.traits, Tried(function, *fresh), drawn)
        return out

    def _try(self, traits: Trait, call: Tried, drawn: bool) -> None:
        if drawn:
            self.tried[Trait.DRAWS].add(call.function)
            if Trait.DRAWS not in traits:
                self._note(call, "draws")
        elif not traits & Trait.DRAWS:
            for trait, holds in _PROMISES.items():
                if trait in traits and (found := holds(call)) is not None:
                    self.tried[trait].add(call.function)
                    if not found:
                        self._note(call, f"is not {trait}")
        has_rule = TABLE[call.function].rule is not None
        if has_rule and not traits & (Trait.VIEW | Trait.DRAWS) and call.shares():
            self._note(call, "shares its operand's memory, and is no VIEW")

    def _note(self, call: Tried, what: str) -> None:
        self.wrong.append(f"{function_name(call.function)} {what}: {call}")


class Tried:
    """A function and arguments of its own, to call it with again and again."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.function = function
        self.leaves, self.tree = tree_flatten((args, kwargs))
        self.at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [self.leaves[i] for i in self.at]
        self.inplace = TABLE[function].inplace

    def __call__(self, tensors: Iterable[Tensor] | None = None, *, copied: bool = True) -> list[Any]:
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, self.tensors if tensors is None else tensors):
            leaves[i] = tensor.clone() if copied else tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        return tree_flatten(self.function(*args, **kwargs))[0]

    def shares(self) -> bool:
        """True if a result lies in the memory of the first tensor, and is not that tensor itself."""
        if self.inplace or not self.tensors:
            return False
        first = self.tensors[0]
        out = self(copied=False)
        return any(isinstance(x, Tensor) and x is not first and _memory(x) == _memory(first) for x in out)

    def __repr__(self) -> str:
        return str(tree_map(lambda x: list(x.shape) if isinstance(x, Tensor) else x, self.leaves))[:300]


def _slices(call: Tried) -> bool | None:
    """The function of a slice is the slice of the function, and so is its gradient."""
    if Trait.LISTS in TABLE[call.function].traits:
        return _item_by_item(call)
    if call.function in _LENDS and len(call.tensors) > 1 or call.function in _UNDEFINED or not call.tensors:
        return None
    if call.function in _NONZERO and len(call.leaves) == 1:
        return None
    shape = torch.broadcast_shapes(*[x.shape for x in call.tensors])
    if not shape or 0 in shape:
        return None
    part = [slice(n // 3, max(n // 3 + 1, n - n // 4)) for n in shape]

    def cut(x: Tensor) -> Tensor:
        own = part[len(shape) - x.ndim :]
        return x[tuple(s if n != 1 else slice(None) for s, n in zip(own, x.shape))]

    whole, sliced = call(), call([cut(x) for x in call.tensors])
    if not all(isinstance(x, Tensor) for x in whole):
        return None  # Tensor.type() gives a name
    same = all(a.shape == shape and _close(cut(a), b) for a, b in zip(whole, sliced))
    return same and _sliced_gradient(call, cut, shape)


def _sliced_gradient(call: Tried, cut: Callable, shape: torch.Size) -> bool:
    found = []
    for cutting in (lambda x: x, cut):
        inputs = [cutting(x.detach()) for x in call.tensors]
        own = [x.requires_grad_() for x in inputs if x.is_floating_point()]
        with torch.enable_grad():
            try:
                out = [x for x in call(inputs) if x.requires_grad]
                if not own or not out:
                    return True
                found.append(torch.autograd.grad(out, own, [torch.ones_like(x) for x in out], allow_unused=True))
            except RuntimeError:  # not differentiable
                return True
    pairs = [(a, b) for a, b in zip(*found) if a is not None and a.shape == shape]
    return all(b is not None and _close(cut(a), b) for a, b in pairs)


def _item_by_item(call: Tried) -> bool | None:
    args, kwargs = tree_unflatten(call.leaves, call.tree)
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    if len(lists[0]) < 2 or any(len(a) != len(lists[0]) for a in lists):
        return None

    def results(at: slice) -> list[Tensor]:
        given = [_copied(a[at]) if isinstance(a, (list, tuple)) else a for a in args]
        out = call.function(*given, **kwargs)
        return [x for a in given if isinstance(a, list) for x in a] if call.inplace else list(out)

    whole, count = results(slice(None)), len(lists[0])
    return all(_close(x, y) for i in range(count) for x, y in zip(whole[i::count], results(slice(i, i + 1))))


def _additive(call: Tried) -> bool | None:
    """f(x + y) = f(x) + f(y), in floating point, of what is finite."""
    first = call.tensors[0] if call.tensors else None
    if first is None or not (first.is_floating_point() or first.is_complex()) or not first.isfinite().all():
        return None
    other = torch.randn(first.shape, dtype=first.dtype)
    results = [call([x, *call.tensors[1:]]) for x in (first + other, first, other)]
    if not all(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in results[0]):
        return None
    return all(_close(a, b + c, _tolerance(first)) for a, b, c in zip(*results) if a.isfinite().all())


def _moves(call: Tried) -> bool | None:
    """Shifted operands shift what is taken from them, and nothing is there twice."""
    if not call.tensors or any(x.dtype not in _EXACT for x in call.tensors):
        return None
    own: list[Tensor] = []
    shifted: list[Tensor] = []
    count = 1
    for x in call.tensors:
        shape, numel = (*x.shape, 2) if x.is_complex() else x.shape, x.numel() * (1 + x.is_complex())
        numbers = torch.arange(count, count + numel, dtype=_EXACT[x.dtype]).view(shape)
        count += numel
        for values, made in ((numbers, own), (numbers + _SHIFT, shifted)):
            made.append(torch.view_as_complex(values) if x.is_complex() else values)
    if count > _SHIFT:
        return None
    pairs = list(zip(call(own), call(shifted)))
    if not all(isinstance(a, Tensor) and a.dtype in _EXACT for a, _ in pairs):
        return None
    before, after = (torch.cat([_real(x) for x in side]) for side in zip(*pairs))
    if before.dtype != _EXACT[call.tensors[0].dtype]:
        return None  # bits under another dtype
    taken = before != after
    values = before[taken]
    known = torch.cat([_real(x) for x in own])
    exact = torch.equal(after[taken], values + _SHIFT) and bool(torch.isin(values, known).all())
    return exact and values.unique().numel() == values.numel()


def _real(x: Tensor) -> Tensor:
    """Its numbers; without signs, where they are conjugated."""
    return (torch.view_as_real(x.resolve_conj()).abs() if x.is_complex() else x).flatten()


def _aliases(call: Tried) -> bool | None:
    return True if call.inplace or call.shares() else None


def _by_shape_alone(call: Tried) -> bool | None:
    if call.function in _UNDEFINED:
        return None
    first, *rest = call.tensors
    call(first.to("meta") if x is first else x for x in call.tensors)  # needs no values
    pairs = zip(call(), call([torch.ones_like(first), *rest]))
    return all(_close(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _reads(call: Tried) -> bool | None:
    return not any(isinstance(x, Tensor) for x in call())


def _keeps_order(call: Tried) -> bool | None:
    """True if it returns its first tensor, in other dims."""
    if not call.tensors or any(isinstance(leaf, torch.dtype) for leaf in call.leaves):
        return None  # bits under another dtype
    (out,) = call()
    return isinstance(out, Tensor) and torch.equal(out.reshape(-1), call.tensors[0].reshape(-1))


_PROMISES: dict[Trait, Callable[[Tried], bool | None]] = {
    Trait.ELEMENTWISE: _slices,
    Trait.LINEAR: _additive,
    Trait.MOVES: _moves,
    Trait.VIEW: _aliases,
    Trait.ORDERED: _keeps_order,
    Trait.METADATA: _by_shape_alone,
    Trait.READS: _reads,
}


def _tolerance(x: Tensor) -> float:
    return _TOLERANCE.get(x.dtype, 1e-8)


def _close(a: Tensor, b: Tensor, least: float = 0.0) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    tolerance = max(_tolerance(a), least)
    scale = a.abs().nan_to_num(0, 0, 0).max().item() if a.is_floating_point() and a.numel() else 1.0
    return torch.allclose(a, b, tolerance, tolerance * max(scale, 1e-30), equal_nan=True)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and x.numel() else id(x)


def _copied(value: Any) -> Any:
    with torch.no_grad():
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


@contextmanager
def _state_kept() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(before)
