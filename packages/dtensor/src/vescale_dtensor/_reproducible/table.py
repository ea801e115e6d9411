"""The mode's table of rules, an overlay on the ordinary one: for every function a canonical form, the ordinary rule, or
the whole tensor.

    a form                    what sums or contracts, and elementwise functions (`forms.py` and the modules beside it)
    the ordinary rule         what moves data, draws, or asks for metadata: it adds nothing up, forward or backward
    the whole tensor          all else: inputs are gathered, and every rank computes what one device computes

Which of these a function is, its traits say (`_rules/traits.py`), whoever registered it. An entry is made when its
function is first called in the mode, and anew when it is registered anew. A function without a rule runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_trace.values import map_tensors

from .._dispatch import fallback
from .._dispatch.dispatch import call_entry
from .._dispatch.flat_rules import on_flat
from .._dispatch.signature import Signature
from .._rules.elements.pointwise import FUNCTIONS
from .._rules.registry import TABLE, Call, Decision, Entry, decomposed, is_inplace
from .._rules.traits import Trait
from .._rules.views.strided import _strided
from .call import ALONE
from .forms import FORMS, elementwise, of_lists
from .functions.draws import draws_by_place, in_rows
from .functions.position import Contiguous, independent_form, independent_run
from .functions.stretch import grouped_attention
from .grid import Splits
from .premise import require_premise
from .uses import ASKING, apart, handler_of

ATTENTION = F.scaled_dot_product_attention
# The ordinary rule is as good as a form: integers and bools, exact in any order; windows and indexed elements, whose
# gradients are added up on one rank, in their order; and what is made of other functions.
_KEPT = frozenset({
    torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, F.one_hot, torch.bucketize, torch.searchsorted,
    torch.isin, torch.unravel_index, Tensor.unfold, Tensor.as_strided, torch.as_strided, _strided,
    Tensor.__getitem__, Tensor.__setitem__,
})  # fmt: skip
_SAFE = Trait.MOVES | Trait.METADATA | Trait.DRAWS


class Overlay:
    """The table while the mode is on."""

    def __init__(self, splits: Splits) -> None:
        self.splits = splits
        self._entries: dict[Callable, Entry] = {}
        self._plain: dict[Callable, Plain | None] = {}
        self.plain = self._plain.__getitem__
        TABLE.overlays.add(self)

    def __getitem__(self, function: Callable) -> Entry:
        return self._entries.get(function) or self._made(function)

    def _made(self, function: Callable) -> Entry:
        """The entry of a function that was not asked for yet."""
        ordinary = TABLE[function]
        entry = self._canonical(function, ordinary) or ordinary
        if entry.handler is None:
            entry = Entry(function, handler=handler_of(entry), traits=entry.traits)
        if function in ASKING:
            entry = Entry(function, handler=ASKING[function](ordinary), traits=ordinary.traits)
        elif draws_by_place(ordinary):
            entry = Entry(function, handler=partial(in_rows, partial(call_entry, entry)), traits=entry.traits)
        self._entries[function] = entry
        return entry

    def plain_made(self, function: Callable) -> Plain | None:
        """Makes the way to compute with plain tensors, for a function not asked for yet; None if nothing changes."""
        ordinary = TABLE.get(function) or Entry(function)
        entry = ordinary if draws_by_place(ordinary) else self._canonical(function, ordinary)
        self._plain[function] = found = None if entry is None else Plain(entry, ordinary.traits)
        return found

    def forget(self, function: Callable) -> None:
        """The function was registered anew."""
        self._entries.pop(function, None)
        self._plain.pop(function, None)

    def _canonical(self, function: Callable, ordinary: Entry) -> Entry | None:
        rule = _rule_of(function, ordinary, self.splits)
        if rule is None:
            return None
        entry = Entry(function, rule=_after_premise(rule), traits=ordinary.traits)
        entry.exact = ordinary.exact or function in FORMS
        return entry


def _after_premise(rule: Callable) -> Callable:
    """The rule, once the device's kernels were asked for the mode's premise: before anything of a first step runs."""

    def asked(call: Call) -> Any:
        require_premise(call.mesh.device_type)
        return rule(call)

    return asked


class Plain:
    """A function of plain tensors in the mode: its entry, whose decisions are those of a mesh without axes; whether
    every element is computed by itself; whether it is as it is while no gradients are taken; and whether it draws."""

    __slots__ = ("entry", "by_item", "independent", "draws")

    def __init__(self, entry: Entry, traits: Trait) -> None:
        self.entry = entry
        self.by_item = Trait.ELEMENTWISE in traits and not traits & _SAFE
        self.draws = draws_by_place(entry)
        by_element = self.by_item and Trait.LISTS not in traits and entry.function in FUNCTIONS
        self.independent = by_element and independent_form(Call(entry.function, (), {}, [], ALONE)) is None


def _rule_of(function: Callable, entry: Entry, splits: Splits) -> Callable | None:
    """The rule in the mode; None if the ordinary one stays, or there is none."""
    form, ordinary, traits = FORMS.get(function), entry.rule, entry.traits
    if ordinary is None:
        known = entry.handler is not None or is_inplace(function) or _is_attribute(function)
        return None if known else lambda call: on_full_tensors(function)
    if form is not None:
        return lambda call: form(call, splits) or on_full_tensors(function)
    if function is ATTENTION:
        return lambda call: grouped_attention(call) or ordinary(call)
    if function is F.pad:
        return lambda call: (
            ordinary(call) if call.get(2, "mode", "constant") == "constant" else on_full_tensors(function)
        )
    by_item = Trait.ELEMENTWISE in traits
    if function in _KEPT or traits & (Trait.MOVES | Trait.METADATA) or (by_item and Trait.DRAWS in traits):
        return None
    if by_item:
        return _of_lists(ordinary) if Trait.LISTS in traits else _elementwise(ordinary, function)
    return lambda call: on_full_tensors(function)


def _is_attribute(function: Callable) -> bool:
    """An attribute of tensors, or a method that is Python's: it computes nothing."""
    return getattr(function, "__name__", "__get__").startswith("__")


def _of_lists(ordinary: Callable) -> Callable:
    return lambda call: of_lists(call, ordinary)


def _elementwise(ordinary: Callable, function: Callable) -> Callable:
    known = function in FUNCTIONS

    def rule(call: Call) -> Decision | Signature | None:
        signature = ordinary(call)
        if not isinstance(signature, Signature):
            made_of_others = isinstance(signature, Decision) and signature.decomposition is not None
            return signature if known or made_of_others else on_full_tensors(function)
        if not known and (call.inplace or len(signature.outputs) != 1 or signature.local is not None):
            return on_full_tensors(function)
        if all(operand.layout.flat_axis is None for operand in call.operands):
            return elementwise(call, signature, function) or on_full_tensors(function)
        independent = independent_form(call)
        decision = None if independent is None else on_flat(call, signature)
        if decision is None:
            return signature if independent is None else on_full_tensors(function)
        decision.run = independent_run(independent, call.inplace)
        return decision

    return rule


def on_full_tensors(function: Callable) -> Decision:
    """The function on whole tensors, on every rank what one device computes."""
    return decomposed(fallback.gathered(function, local=compact(function), lacks="canonical form"))


def compact(function: Callable) -> Callable:
    """`function` on contiguous tensors, and its backward on contiguous gradients: kernels round by strides, too, and
    what was gathered has others than what was not. It may take an operand several times inside: a node before each
    makes one contribution of that. In place, and where it gives a view, it is as it is."""
    if is_inplace(function):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None or kwargs.get("inplace") is True:
            return function(*args, **kwargs)
        args, kwargs = apart(args, kwargs)
        out = function(*map_tensors(args, Tensor.contiguous), **map_tensors(kwargs, Tensor.contiguous))
        return map_tensors(out, lambda x: Contiguous.apply(x) if x.requires_grad else x)

    return run
