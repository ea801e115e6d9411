"""flex_attention: attention with users' functions of places (torch.nn.attention.flex_attention).

batch or heads sharded     stay sharded; no communication. Block masks are cut alike, functions are told global places
q's sequence sharded       stays sharded, and k and v are whole, where each rank's rows are whole blocks of the mask;
                           else q is gathered, too
k's, v's sequence sharded  gathered
grouped queries            as in scaled_dot_product_attention
what the functions hold    whole, and its gradient is a sum where ranks do different work
v partial                  the result is linear in it -> P, where nothing else is asked for
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from ..._dispatch.signature import Signature, solve
from ..._errors import ShapeError
from ..._flex.blocks import WHOLE, Places, is_aligned
from ..._flex.call import Form, attended, flex_attention
from ..._flex.door import FLEX
from ..._layouts.layout import Layout
from ..registry import Call, Decision, Operand, handler, rule
from ..solvers.owned import held_ranges, nothing
from ..traits import NONE
from .attention import decided, groups_stay, labels, select

handler(FLEX.function, traits=NONE)(flex_attention)


@rule(attended, traits=NONE)
def _flex(call: Call) -> Decision | None:
    """q [B, Hq, L, E], k [B or 1, Hkv, S, E], v [as k, S, Ev] -> [B, Hq, L, Ev], and statistics [B, Hq, L]."""
    query, key, value, _, form = call.args
    if not _is_attention(query, key, value, form):
        return None  # torch says of the whole what is wrong
    _check_lists(form, query)
    if key.shape[1] == query.shape[1]:
        return _decide(call, "h", rows=True)
    alike = _decide(call, "alike", rows=True)
    return _decide(call, "whole", rows=True) if alike is None else alike


def _is_attention(query: Operand, key: Operand, value: Operand, form: Form) -> bool:
    if {operand.ndim for operand in (query, key, value)} != {4} or key.shape[:3] != value.shape[:3]:
        return False
    if query.shape[3] != key.shape[3] or key.shape[0] not in (1, query.shape[0]) or 0 in (*query.shape, *key.shape):
        return False
    if form.lists is not None and form.edge != WHOLE and form.lengths != (query.shape[2], key.shape[2]):
        return False
    return key.shape[1] == query.shape[1] or form.grouped and query.shape[1] % key.shape[1] == 0


def _check_lists(form: Form, query: Operand) -> None:
    """Raises ShapeError where the mask is not for one sequence and head or for all of them: a shard of it might be."""
    lists = form.lists
    if lists is None or len(lists) == 3 and lists[0] in (1, query.shape[0]) and lists[1] in (1, query.shape[1]):
        return
    raise ShapeError(
        "flex_attention",
        f"a block mask of {list(lists[:-1])} sequences and heads does not fit queries of {list(query.shape[:2])}",
        [f"block_mask  {list(lists[:-1])}", f"query       {query.layout!r}"],
        [("create_block_mask(mask_mod, B, H, ...)", "of the global batch and heads, or None for all alike")],
    )


def _decide(call: Call, heads: str, rows: bool) -> Decision | None:
    """`heads`: as in attention's rule. `rows`: whether the queries' sequence may stay cut."""
    query, key, value, _, form = call.args
    batch = labels(key.shape[:1], query.shape[:1])  # a batch of one is for all
    kv = {"h": ("h",), "alike": ("h",), "whole": ("kv",)}[heads]
    found = {query.index: (("b", -1), "h", "l", "e"), key.index: (*batch, *kv, "s", "e")}
    found[value.index] = (*batch, *kv, "s", "ev")
    signature = Signature(
        [found.get(operand.index, (None,) * operand.ndim) for operand in call.operands],
        [(("b", -1), "h", "l", "ev"), *[(("b", -1), "h", "l")] * len(form.statistics)],
        whole={"s", "e", "ev", "kv", *_undivided(call, query), *(() if rows else ("l",))},
        linear=() if form.statistics else [(value.index,)],
        shapes=[(*query.shape[:3], value.shape[3]), *[query.shape[:3]] * len(form.statistics)],
        single=False,
    )  # fmt: skip
    decision = solve(call, signature)
    if decision is None:
        return None
    here, _ = decided(decision, query, key)
    if rows and here.axes_of(2) and not _rows_stay(here, form):
        return _decide(call, heads, rows=False)
    axes = here.axes_of(1) if heads != "h" else ()
    if heads == "alike" and not groups_stay(here, axes, key):
        return None
    decision.run = _local(here, decision.out, form, select(here, key) if heads == "whole" and axes else None)
    return decision


def _undivided(call: Call, query: Operand) -> list:
    """Labels of a batch and of heads that nobody has cut, and that not every axis would cut evenly: moved there from
    the sequence, they would leave ranks with nothing to do."""
    found = []
    for dim, label in enumerate((("b", -1), "h")):
        is_cut = any(operand.layout.axes_of(dim) for operand in call.operands[:3])
        if not is_cut and any(query.shape[dim] % size for size in call.mesh.sizes):
            found.append(label)
    return found


def _rows_stay(query: Layout, form: Form) -> bool:
    """True if every rank's rows are whole blocks of the mask. The same on all ranks."""
    if form.lists is None:
        return True
    if form.edge == WHOLE or form.is_ordered:
        return False
    everywhere = product(*map(range, query.mesh.sizes))
    return all(is_aligned(query.region_at(at)[2], form.edge, query.shape[2]) for at in everywhere)


def _local(query: Layout, outs: tuple[Layout, ...], form: Form, own_heads: Callable | None) -> Callable:
    """Returns the function for this rank's shards; own_heads: takes the kv heads of its queries."""
    cut = [held_ranges(query, dim) if query.axes_of(dim) else None for dim in range(3)]
    places, empty = Places(*cut), 0 in outs[0].local_shape
    grouped = form.grouped

    def run(query, key, value, held, form):
        if empty:
            return tuple(nothing((query, key, value, *held), out.local_shape) for out in outs)
        groups = grouped
        if own_heads is not None:
            key, value = own_heads(key), own_heads(value)
            groups = key.shape[1] != query.shape[1]
        return form.run(query, key, value, held, places, groups)

    return run
