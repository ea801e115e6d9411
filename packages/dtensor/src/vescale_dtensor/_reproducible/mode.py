"""The switch: the canonical table laid over the ordinary one, plain tensors intercepted, threads fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_trace.arguments import typed_call
from vescale_trace.values import fill, tensors_in

from .._conversions import convert, steps
from .._dispatch.arguments import keyed
from .._dispatch.dispatch import call_entry, look_into
from .._layouts.layout import layout_of
from .._rules.body import body_of
from .._rules.products import attention as attention_rules
from .._rules.registry import CACHE_LIMIT, Call, Decision, Operand
from .._tensor.tensor import DTensor
from .._torch_private import _foreach_norm
from .call import ALONE
from .forms import FORMS
from .functions import channels, convolution, lookup, norms, rows  # noqa: F401 - their forms are registered
from .functions.attention import attend, kernel_for
from .functions.draws import in_rows
from .grid import ReproducibleError, Splits
from .premise import require_premise
from .table import ATTENTION, Overlay, Plain, compact
from .uses import converted, places, replaced

_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_current: reproducible | None = None


class reproducible(TorchFunctionMode):
    """Makes all sums inside the context independent of the mesh: losses, gradients and parameters are equal TO THE BIT
    on every mesh.

        with vescale.reproducible(splits={"batch": 8, "seq": 2, "hidden": 8}):
            train()                      # on one device, or parallelized by any plan

    Every contraction is computed in blocks of a canonical grid, whose shapes are the same on every mesh, and the blocks
    are summed over a fixed tree (`tree.py`): a rank sums the blocks that it holds, the ranks' sums are gathered, and
    all ranks finish the tree alike. One device in the mode holds all blocks. The bits therefore depend on the splits
    and on the hardware, not on the mesh. Compare a run in the mode only with another run in the mode, with the same
    splits.

    Arguments:
        splits: the number of blocks for the first dim of activations ("batch"), their second dim ("seq") and features
            ("hidden"); powers of two. The sizes of the mesh must divide them. More blocks fit more meshes, and cost
            more.
        threads: the number of threads of every process while the mode is on, because kernels round depending on it.

    Functions without a canonical form run on whole tensors, on every rank; a FallbackWarning reports each that gathers
    once. Experts on an expert axis compute on weights gathered over it. Raises ReproducibleError if a shard does not
    consist of whole blocks, with the nearest splits that work; for code that computes on shards out of sight
    (`local_map`, static and compiled modules); and if a mode is opened inside another. Computations on `to_local()` are
    the user's own responsibility. Overhead when off: none; when on: benchmarks/runtime/reproducible.py. Communication:
    every sum over a sharded dim all-gathers the ranks' partial results; in backward, a conversion sends the gradient of
    every use separately (`uses.py`).
    """

    @typed_call
    def __init__(self, splits: Mapping[str, int] | Splits | None = None, *, threads: int = 1) -> None:
        super().__init__()
        if not 1 <= threads <= 1 << 16:
            rule = f"threads is {threads}, not a number from 1 to {1 << 16:,}"
            raise ReproducibleError("reproducible", rule, (), [("threads=1", "")])
        self.splits, self.threads = Splits.of(splits), threads
        self._overlay = Overlay(self.splits)  # a mode that is entered again keeps its decisions

    def __enter__(self) -> reproducible:
        global _current
        if _current is not None and _current is not self:
            rule = "the mode is on already, with other splits or the same"
            raise ReproducibleError("reproducible", rule, (), [("leave the outer one first", "")])
        if _current is None:
            _current = self
            self._table_before = look_into(self._overlay)
            attention_rules.stand_in = kernel_for
            steps.whole_on_first = True
            convert.each_use = converted
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            self._depth = 0
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        global _current
        super().__exit__(*exception)
        self._depth -= 1
        if self._depth:
            return
        _current = None
        look_into(self._table_before)
        attention_rules.stand_in = None
        steps.whole_on_first = False
        convert.each_use = None
        torch.set_num_threads(self._threads_before)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            plain = self._overlay.plain(function)
        except KeyError:
            plain = self._overlay.plain_made(function)
        if plain is None:
            if function not in _BACKWARDS:
                return function(*args, **kwargs)
            with self:  # a checkpoint recomputes in there
                if any(type(t) is DTensor for t in tensors_in((args, kwargs))):
                    return call_entry(self._overlay[function], function, args, kwargs)
                return body_of(function)(*args, **kwargs)
        if plain.draws:
            return in_rows(lambda function, args, kwargs: function(*args, **kwargs), function, args, kwargs)
        if plain.independent and not torch.is_grad_enabled() and "alpha" not in kwargs:
            return function(*args, **kwargs)  # in an optimizer: only gradients of what is stretched have a form
        if function is ATTENTION:
            return self._attention(args, kwargs)
        entry = plain.entry
        tensors = tensors_in((args, kwargs))
        if not tensors or any(type(t) not in _PLAIN for t in tensors) or kwargs.get("out") is not None:
            if function is not _foreach_norm:
                return function(*args, **kwargs)
            own = next((type(t) for t in tensors if getattr(type(t), "before_dtensor", False)), None)
            if own is None:
                return function(*args, **kwargs)
            with self:  # a pipeline's gradients elsewhere: those here are plain, and a matter of the mode
                return own.__torch_function__(function, types, args, kwargs)
        key: Any = (keyed(args, entry.exact), keyed(kwargs, entry.exact))
        try:
            decision = entry.cache.get(key)
        except TypeError:
            key = decision = None
        if decision is None:
            decision = self._decide(plain, args, kwargs, tensors)
            if key is not None:
                if len(entry.cache) >= CACHE_LIMIT:
                    entry.cache.clear()
                entry.cache[key] = decision
        if decision is _AS_IT_IS:
            return function(*args, **kwargs)
        if decision.decomposition is not None:
            with self:
                return decision.decomposition(*args, **kwargs)
        if len(tensors) > 1 and len({id(t) for t in tensors}) < len(tensors) and torch.is_grad_enabled():
            writes = plain.entry.inplace or kwargs.get("inplace") is True
            found = places(tensors, tensors[0] if writes else None)
            if found is not None:
                args, kwargs, _ = replaced(args, kwargs, found)
        return decision.run(*args, **kwargs)

    def _decide(self, plain: Plain, args: tuple, kwargs: dict, tensors: list[Tensor]):
        """The form's decision on a mesh without axes; where DTensors would run whole, the same; or `_AS_IT_IS`."""
        if any(t.is_floating_point() or t.is_complex() for t in tensors):  # integers are exact in any order
            require_premise(tensors[0].device.type)
        operands = [Operand(layout_of(ALONE, (), tuple(t.shape)), False, i) for i, t in enumerate(tensors)]
        abstract, named = fill((args, kwargs), operands)
        entry, function = plain.entry, plain.entry.function
        call = Call(function, abstract, named, operands, ALONE, entry.inplace or named.get("inplace") is True)
        form = FORMS.get(function)
        decision = form(call, self.splits) if form is not None else None
        if form is None and plain.by_item:
            decision = entry.rule(call)
            if not isinstance(decision, Decision) or (decision.run is None and decision.decomposition is None):
                return _AS_IT_IS
            if decision.decomposition is not None:
                decision = None
        return Decision(run=compact(function)) if decision is None else decision

    def _attention(self, args: tuple, kwargs: dict) -> Tensor:
        if any(type(t) not in _PLAIN for t in args[:3]):
            return ATTENTION(*args, **kwargs)
        if kwargs.pop("enable_gqa", False):
            from .functions.attention import repeated

            query, key, value = args[:3]
            count = query.shape[-3] // key.shape[-3]
            with self:
                args = (query, repeated(key, count), repeated(value, count), *args[3:])
        return attend(*args, **kwargs)


def is_reproducible() -> bool:
    """True if the mode is on."""
    return _current is not None


def check_order(operation: str, what: str, *instead: tuple[str, str]) -> None:
    """Raises ReproducibleError while the mode is on: `what` computes on shards, out of the mode's sight. `instead`:
    remedies (code, cost) beside leaving the mode."""
    if _current is not None:
        rule = f"{what} on shards in an order of its own, which the reproducible mode does not see"
        remedies = [*instead, ("outside of vescale.reproducible()", "as fast as ever")]
        raise ReproducibleError(operation, rule, (), remedies)


_PLAIN = (Tensor, torch.nn.Parameter)
_AS_IT_IS = object()
