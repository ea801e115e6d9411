"""Attention over sequences that are packed one behind the other, and flash-attn's own functions.

heads (or batch) sharded    stay sharded; no communication. Grouped queries as in scaled_dot_product_attention
tokens sharded              gathered, or their cut moves to the heads: where a sequence begins is known of all tokens
pages of a cache, dropout, slopes, probabilities asked for    the function runs whole

    torch.nn.attention.varlen                 `varlen_attn`, by its operator
    flash_attn, flash_attn_interface          `flash_attn_func`, `flash_attn_varlen_func`, by their autograd Functions

They are imported when somebody needs them, so their rules wait by name (`late_rule`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from vescale_trace.values import map_tensors

from ..._conversions.convert import alias
from ..._dispatch.signature import Signature, solve
from ..._layouts.layout import Layout, layout_of
from ..._layouts.state import INVARIANT
from ..._tensor.tensor import DTensor
from ..registry import Call, Decision, Operand, late_rule
from ..solvers.owned import nothing
from .attention import decided, groups_stay, select

HEADS = -2
PAGES = 12
"""Position at which torch's operator takes a table of pages."""


@late_rule("torch_attn::_varlen_attn")
def varlen_attn(call: Call) -> Decision | None:
    """q [T, Hq, D], k and v [S, Hkv, D], beginnings [N + 1] -> [T, Hq, D], logarithms of sums [Hq, T], a state [2]."""
    if call.get(PAGES, "block_table") is not None or len(call.args) < 3:
        return None
    decision = _by_heads(call, *call.args[:3])
    if decision is None:
        return None
    out: Layout = decision.out
    sums = [state.at(0) if state.is_sharded else state for state in out.states]
    drawn = layout_of(out.mesh, (INVARIANT,) * out.mesh.ndim, (2,))
    decision.out = out, layout_of(out.mesh, tuple(sums), (out.shape[1], out.shape[0])), drawn
    decision.run = _three(decision.run, decision.out)
    return decision


def _three(attend: Callable, outs: tuple[Layout, ...]) -> Callable:
    def run(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = attend(query, *args, **kwargs)
        if isinstance(found, tuple):  # what has no gradient is the very object that backward finds, and stays plain
            return tuple(one if one.requires_grad else one.detach() for one in found)
        return found, found.new_zeros(outs[1].local_shape).float(), found.new_zeros(outs[2].shape)  # no heads here

    return run


def _of_flash_attn(call: Call) -> Decision | None:
    """q [T, Hq, D] or [B, L, Hq, D], as torch's -> as q."""
    names = list(inspect.signature(call.function.function.forward).parameters)[1:]
    given = dict(zip(names, call.args)) | call.kwargs
    whole = ("dropout_p", "alibi_slopes", "block_table", "return_softmax", "return_attn_probs", "qv")
    operands = [given.get(name) for name in ("q", "k", "v")]
    if any(given.get(name) not in (None, False, 0.0) for name in whole) or not all(
        isinstance(one, Operand) for one in operands
    ):
        return None
    return _by_heads(call, *operands)


for _module in ("flash_attn.flash_attn_interface", "flash_attn_interface"):
    late_rule(*(f"{_module}.{name}" for name in ("FlashAttnFunc", "FlashAttnVarlenFunc")))(_of_flash_attn)


def _by_heads(call: Call, query: Operand, key: Operand, value: Operand) -> Decision | None:
    """Decides with the result alone as output, cut by heads and, of four dims, by the batch."""
    if {query.ndim, key.ndim, value.ndim} not in ({3}, {4}) or key.shape[:-1] != value.shape[:-1]:
        return None
    heads, shared = query.shape[HEADS], key.shape[HEADS]
    if not shared or heads % shared or 0 in query.shape:
        return None
    if heads == shared:
        return _decide(call, query, key, value, "h")
    alike = _decide(call, query, key, value, "alike")
    return _decide(call, query, key, value, "whole") if alike is None else alike


def _decide(call: Call, query: Operand, key: Operand, value: Operand, heads: str) -> Decision | None:
    kv = "kv" if heads == "whole" else "h"
    batch = ("b",) if query.ndim == 4 else ()
    found = {query.index: (*batch, "t", "h", "d"), key.index: (*batch, "s", kv, "d")}
    found[value.index] = (*batch, "s", kv, "e")
    signature = Signature(
        [found.get(operand.index, (None,) * operand.ndim) for operand in call.operands], [(*batch, "t", "h", "e")],
        whole={"t", "s", "d", "e", "kv"}, shapes=[(*query.shape[:-1], value.shape[-1])],
    )  # fmt: skip
    decision = solve(call, signature)
    if decision is None:
        return None
    here, _ = decided(decision, query, key)
    axes = here.axes_of(query.ndim + HEADS) if heads != "h" else ()
    if heads == "alike" and not groups_stay(here, axes, key, HEADS):
        return None
    own = select(here, key, HEADS) if heads == "whole" and axes else None
    decision.run = _local(call.function, decision.out, own)
    return decision


def _local(function: Callable, out: Layout, own: Callable | None) -> Callable:
    """`function` on plain shards; own: takes the kv heads of this rank's queries."""
    local = getattr(function, "_local", function)

    def run(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if 0 in out.local_shape:
            return nothing((query, key, value), out.local_shape)
        if own is not None:
            key, value = own(key), own(value)
        return local(*map_tensors((query, key, value, *args), _plain), **map_tensors(kwargs, _plain))

    return run


def _plain(tensor: Tensor) -> Tensor:
    return alias(tensor) if type(tensor) is DTensor else tensor
