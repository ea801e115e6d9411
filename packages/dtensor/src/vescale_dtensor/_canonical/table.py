"""The mode's table of rules: for every function a canonical form, the ordinary rule, or the whole tensor.

    a form                    what sums or contracts, and elementwise functions (`forms.py` and the modules beside it)
    the ordinary rule         what moves data, or asks for metadata: it adds nothing up, forward or backward
    the whole tensor          all else: inputs are gathered, and every rank computes what one device computes

While the mode is on these stand in the table that dispatch looks into. Nothing is asked of a function that has no
rule: it runs whole in any case (`_fallback.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _fallback
from .._arguments import substitute
from .._flat_rules import _elementwise as on_flat
from .._rules import optim
from .._rules.registry import TABLE, Call, Decision, Entry, composite, is_inplace
from .._signature import Signature
from .forms import FORMS, elementwise, of_lists
from .grid import Splits
from .steady import Contiguous, steady_form, steady_run
from .stretch import grouped_attention

# Modules of rules whose functions only move data, forward and backward; a gradient that is met twice is added twice.
_MOVES = frozenset(
    f"vescale_dtensor._rules.{name}"
    for name in "shape view join index metadata python comparison empty fresh random pad regroup carry search".split()
)
_SUMS_BACKWARD = ("trace", "broadcast_tensors", "tile")
_DRAWS = "vescale_rng."
# Functions that have no rule, and would run whole on the strides that gathering happens to give.
_WITHOUT_RULE = [f for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if f is not None]
_ATTENTION = F.scaled_dot_product_attention


def canonical_entries(splits: Splits) -> dict[Callable, Entry]:
    """function -> the entry that stands for it while the mode is on; those that stay as they are, are left out."""
    entries = {function: Entry(function, rule=lambda call: whole(call.function)) for function in _WITHOUT_RULE}
    for function, entry in list(TABLE.items()):
        rule = _rule_of(function, entry, splits)
        if rule is None:
            continue
        changed = entries[function] = Entry(function, rule=rule)
        changed.exact, changed.view, changed.inplace = entry.exact or function in FORMS, entry.view, entry.inplace
    return entries


def _rule_of(function: Callable, entry: Entry, splits: Splits) -> Callable | None:
    if entry.rule is None:
        return None
    form, ordinary = FORMS.get(function), entry.rule
    if form is not None:
        return lambda call: form(call, splits) or whole(function)
    if function is _ATTENTION:
        return lambda call: grouped_attention(call) or ordinary(call)
    module, name = ordinary.__module__, ordinary.__name__
    if module == "vescale_dtensor._rules.pointwise":
        return _elementwise(ordinary, function)
    if name == "pad" and module in _MOVES:
        return lambda call: ordinary(call) if call.get(2, "mode", "constant") == "constant" else whole(function)
    if (module in _MOVES and name not in _SUMS_BACKWARD) or module.startswith(_DRAWS):
        return None
    if ordinary in (optim.foreach, optim.fused):
        return _same_family(lambda call: of_lists(call, ordinary), ordinary)
    return lambda call: whole(function)


def _elementwise(ordinary: Callable, function: Callable) -> Callable:
    def rule(call: Call) -> Decision | Signature:
        signature = ordinary(call)
        if not isinstance(signature, Signature):
            return signature
        if all(operand.layout.flat_axis is None for operand in call.operands):
            return elementwise(call, signature, function) or whole(function)
        steady = steady_form(call)
        decision = None if steady is None else on_flat(call, signature)
        if decision is None:
            return signature if steady is None else whole(function)
        decision.run = steady_run(steady, call.inplace)
        return decision

    return _same_family(rule, ordinary)


def _same_family(rule: Callable, ordinary: Callable) -> Callable:
    """Decisions on flat shards (`_flat_rules.py`) go by the module of a rule."""
    rule.__module__ = ordinary.__module__
    return rule


def whole(function: Callable) -> Decision:
    """The function on whole tensors, on every rank what one device computes."""
    return composite(_fallback.gathered(function, local=compact(function), lacks="canonical form"))


def compact(function: Callable) -> Callable:
    """`function` on contiguous tensors, and its backward on contiguous gradients: kernels round by strides, too, and
    what was gathered has others than what was not. In place, and where it gives a view, it is as it is."""
    if is_inplace(function):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None or kwargs.get("inplace") is True:
            return function(*args, **kwargs)
        out = function(*substitute(args, Tensor.contiguous), **substitute(kwargs, Tensor.contiguous))
        return substitute(out, lambda x: Contiguous.apply(x) if x.requires_grad else x)

    return run
