"""Scaled dot-product attention.

batch or heads sharded     stay sharded, whatever the backend; no communication
q's sequence sharded       stays sharded: k and v are whole, and causality is that of the rows held here
k's, v's sequence sharded  gathered
all three, on one axis     stay sharded, and meet in a ring, or by an all-to-all over heads, or k and v are gathered:
                           context parallelism (`_context/choice.py` says which)
grouped queries            kv heads sharded like q's where both divide, else whole, each rank taking its own
v partial                  the result is linear in it -> P
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from ..._context.choice import GATHER
from ..._context.meeting import Meeting, gathered, meeting_of, meets, run_for, states_for
from ..._dispatch.signature import Signature, solve
from ..._errors import ShapeError
from ..._layouts.layout import Layout
from ..body import run_body
from ..elements.pointwise import labels_for
from ..registry import Call, Decision, Operand, decomposed, rule
from ..solvers.owned import held_ranges, nothing
from ..traits import NONE, Trait

# Gives what runs on the shards in place of a kernel, which then sees whole sequences: the reproducible mode's.
stand_in: Callable | None = None


@rule(F.scaled_dot_product_attention, exact=True, traits=Trait.DRAWS)
def scaled_dot_product_attention(call: Call):
    """q [..., H, L, E], k [..., H or fewer, S, E], v [..., as k, S, Ev] -> [..., H, L, Ev].

    Dropout falls back: its mask is drawn for the whole.
    """
    return None if call.get(4, "dropout_p", 0.0) else attention(call, F.scaled_dot_product_attention)


def described_attention(query, key, value, mask, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention under a `Description`; on plain tensors the whole mask is made."""
    places = (torch.arange(size, device=query.device) for size in (mask.shape[0], *mask.shape[2:]))
    return F.scaled_dot_product_attention(
        query, key, value, mask.seen(*places), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@rule(described_attention, exact=True, traits=NONE)
def _described(call: Call):
    """Decides as without a mask, if the three meet in a ring; else it falls back."""
    given = dict(zip(("dropout_p", "is_causal", "scale", "enable_gqa"), call.args[4:])) | call.kwargs
    decision = attention(replace(call, args=call.args[:3], kwargs=given), described_attention)
    return decision if getattr(getattr(decision, "run", None), "meets", False) else None


def attention(call: Call, kernel: Callable):
    """Decides as the rule above; `kernel`, which takes the same arguments, is what runs on the shards."""
    query, key, value = call.get(0, "query"), call.get(1, "key"), call.get(2, "value")
    mask = call.get(3, "attn_mask")
    causal, grouped = call.get(5, "is_causal", False), call.get(7, "enable_gqa", False)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        return None
    if grouped and (min(query.ndim, key.ndim, value.ndim) < 3 or key.shape[-3] != value.shape[-3]):
        return None
    if not grouped or key.shape[-3] == query.shape[-3]:
        return _decide(call, query, key, value, mask, causal, "h", kernel)
    if not key.shape[-3] or query.shape[-3] % key.shape[-3]:
        return None
    alike = _decide(call, query, key, value, mask, causal, "alike", kernel)
    return _decide(call, query, key, value, mask, causal, "whole", kernel) if alike is None else alike


def _decide(
    call: Call, query: Operand, key: Operand, value: Operand, mask, causal: bool, heads: str, kernel: Callable
):  # fmt: skip
    """`heads`: "h" where k has as many as q, else whether the fewer kv heads are cut "alike" or stay "whole"."""
    shape = _batch_shape(query, key, value, grouped=heads != "h")
    if shape is None or not (mask is None or isinstance(mask, Operand) and mask.ndim <= len(shape) + 2):
        return None
    if mask is not None:
        _check_mask(mask, (*shape, query.shape[-2], key.shape[-2]))
    kernel = stand_in(kernel) if stand_in is not None else kernel
    places = tuple(("b", d) for d in range(-len(shape), 0))
    found = {}
    for operand, rows, columns in ((query, "l", "e"), (key, "s", "e"), (value, "s", "ev")):
        batch = labels(operand.shape[:-2], shape)
        if operand is not query and heads != "h":
            batch = (*batch[:-1], places[-1] if heads == "alike" else "kv")
        found[operand.index] = (*batch, rows, columns)
    if mask is not None:
        sizes = (*shape, query.shape[-2], key.shape[-2])
        names = (*places, "l", "s")
        found[mask.index] = tuple(None if d is None else names[d] for d in labels_for(mask, sizes))
    meeting = _meeting(call, query, key, value, mask, kernel)
    whole = meeting is not None and stand_in is not None
    gathers = whole or meeting is not None and meeting.choice.way == GATHER
    if gathers:
        moved = gathered(meeting, call.operands, *(call.operands if whole else (key, value)), alike=whole)
        before, call, meeting = call, replace(call, operands=moved), None
    signature = Signature(
        [found[operand.index] for operand in call.operands], [(*places, "l", "ev")],
        whole={"s", "e", "ev", "kv"} | ({"l"} if stand_in is not None else set()), linear=[(value.index,)],
        shapes=[(*shape, query.shape[-2], value.shape[-1])],
        extra=meeting and _extra(meeting, call.operands, query, mask),
    )  # fmt: skip
    decision = solve(call, signature)
    if decision is not None and meeting is not None and not meets(meeting, *decided(decision, query, key)):
        signature.extra = meeting = None
        decision = solve(call, signature)
    if decision is None:
        return None
    if gathers:
        targets = decided(decision, *call.operands)
        decision.targets = tuple(
            None if target is operand.layout else target for target, operand in zip(targets, before.operands)
        )
    here, there = decided(decision, query, key)
    head_axes = here.axes_of(query.ndim - 3) if heads != "h" else ()
    if heads == "alike" and not groups_stay(here, head_axes, key):
        return None
    rows = causal and bool(here.axes_of(query.ndim - 2))
    own_heads = heads == "whole" and bool(head_axes)
    if meeting is not None:
        decision.run = run_for(meeting, here, there, select(here, key) if own_heads else None)
    elif 0 in decision.out.local_shape:
        decision.run = _nothing(decision.out)
    elif rows or own_heads:
        decision.run = _local(here, key, rows, own_heads, kernel)
    elif stand_in is not None:
        decision.run = kernel
    return decision


def _check_mask(mask: Operand, sizes: tuple[int, ...]) -> None:
    """Raises ShapeError where the mask does not broadcast to [..., L, S]: a shard of it might, by accident."""
    if all(own in (1, size) for own, size in zip(reversed(mask.shape), reversed(sizes))):
        return
    raise ShapeError(
        "scaled_dot_product_attention",
        f"a mask of {list(mask.shape)} does not fit scores of {list(sizes)} (batch, heads, queries, keys)",
        [f"attn_mask  {list(mask.shape)}", f"scores     {list(sizes)}"],
        [("a mask of the global sizes", "a dim of size 1 broadcasts; each rank takes its rows")],
    )


def _meeting(call: Call, query: Operand, key: Operand, value: Operand, mask, kernel: Callable) -> Meeting | None:
    """Returns how q, k and v that are cut by sequence meet, if the rest of the call is as they want it."""
    swaps = kernel is F.scaled_dot_product_attention and (mask is None or mask.plain)
    return meeting_of(call.mesh, query, key, value, swaps=swaps)


def _extra(meeting: Meeting, operands: list[Operand], query: Operand, mask) -> Callable:
    """The choice of the axis on which q, k and v meet where they are; `solve` finds that nothing moves for it."""
    return lambda axis: [states_for(meeting, operands, query, mask)] if axis == meeting.axis else []


def decided(decision: Decision, *operands: Operand) -> tuple[Layout, ...]:
    """The layouts that operands will have."""
    return tuple(decision.targets[operand.index] or operand.layout for operand in operands)


def _batch_shape(query: Operand, key: Operand, value: Operand, grouped: bool) -> tuple[int, ...] | None:
    """Batch and head sizes of the result under broadcasting; q's heads where queries are grouped."""
    shapes = [list(operand.shape[:-2]) for operand in (query, key, value)]
    if grouped:
        for shape in shapes:
            shape[-1] = query.shape[-3]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def labels(sizes: tuple[int, ...], shape: tuple[int, ...]) -> tuple:
    """Labels of batch dims of `sizes` in the broadcast batch `shape`: ("b", dim from the right), None if stretched."""
    return tuple(("b", d) if size == shape[d] else None for d, size in enumerate(sizes, -len(sizes)))


def groups_stay(query: Layout, axes: tuple[int, ...], key: Operand, dim: int = -3) -> bool:
    """True if equal cuts of q's and of k's heads, which are their dim `dim`, keep every group with its kv head."""
    states = [query.states[axis] for axis in axes]
    ranks = prod(query.mesh.sizes[axis] for axis in axes)
    return key.shape[dim] % ranks == 0 and all(state.in_one_piece and state.units is None for state in states)


def _nothing(out: Layout):
    """No rows here. The kernels forget the mask's gradient then, which other ranks wait for."""

    def run(query, key, value, attn_mask=None, *args, **kwargs):
        return nothing((query, key, value, attn_mask), out.local_shape)

    return run


def _local(query: Layout, key: Operand, rows: bool, heads: bool, kernel: Callable):
    """Returns the function for this rank's shards.

    rows: q's sequence is sharded and causal, so the mask is cut out of the whole triangle, and keys
    that no row here reaches are left out.
    heads: q's heads are sharded and k's are not, so each rank takes the kv heads of its queries.
    """
    held, reach = _indices(query, query.ndim - 2), key.shape[-2]
    if rows:
        reach = min(reach, max(held, default=0) + 1)
    owners, grouped = _owners(query, key) if heads else ((), False)

    def run(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):  # fmt: skip
        if heads:
            chosen = torch.tensor(owners, dtype=torch.int64, device=query.device)
            key, value = key.index_select(-3, chosen), value.index_select(-3, chosen)
            enable_gqa = grouped
        if rows:
            if attn_mask is not None:
                raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
            key, value = key.narrow(-2, 0, reach), value.narrow(-2, 0, reach)
            places = torch.tensor(held, dtype=torch.int64, device=query.device)
            attn_mask = places.unsqueeze(-1) >= torch.arange(reach, device=query.device)
            is_causal = False
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return run


def select(query: Layout, key: Operand, dim: int = -3) -> Callable:
    """Takes the kv heads that this rank's queries need out of all; as many as queries where they make no groups."""
    owners, _ = _owners(query, key, dim)
    return lambda tensor: tensor.index_select(dim, torch.tensor(owners, dtype=torch.int64, device=tensor.device))


def _owners(query: Layout, key: Operand, dim: int = -3) -> tuple[tuple[int, ...], bool]:
    """The kv heads that this rank's queries need, and whether as groups of equal size: else one per query."""
    ratio = query.shape[dim] // key.shape[dim]
    owners = [head // ratio for head in _indices(query, query.ndim + dim)]
    once = list(dict.fromkeys(owners))
    if once and len(owners) % len(once) == 0 and owners == [o for o in once for _ in range(len(owners) // len(once))]:
        return tuple(once), len(once) < len(owners)
    return tuple(owners), False


def _indices(layout: Layout, dim: int) -> list[int]:
    """The global indices of a dim that this rank holds, in local order."""
    return [index for start, stop in held_ranges(layout, dim) for index in range(start, stop)]


@rule(F.multi_head_attention_forward, traits=Trait.DRAWS)
def multi_head_attention_forward(call: Call):
    """Its Python body on the DTensors: projections, views, products and softmax each by their own rule."""
    return decomposed(run_body(F.multi_head_attention_forward, call.mesh))
