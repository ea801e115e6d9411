"""Look-ups in a table: F.embedding and its relatives.

    table sharded by row       each rank looks up the ids it holds, zeros elsewhere -> P
    table sharded by column    the result is sharded on its last dim
    ids sharded                the result is sharded alike, the table is whole
    table partial              the look-up is linear in it -> P

No communication in any of these, forward or backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._dispatch.signature import Signature, solve
from ..._errors import OperatorError
from ..._tensor.tensor import DTensor
from ..registry import Call, Operand, decomposed, rule
from ..solvers.owned import check_range, held_ranges, nothing, owned


@rule(F.embedding)
def embedding(call: Call):
    """ids [...], weight [V, C] -> [..., C]."""
    ids, weight = call.get(0, "input"), call.get(1, "weight")
    return _decide(
        call, ids, weight,
        padding_idx=call.get(2, "padding_idx"), max_norm=call.get(3, "max_norm"),
        by_frequency=call.get(5, "scale_grad_by_freq", False), sparse=call.get(6, "sparse", False),
        run=_embedding,
    )  # fmt: skip


@rule(torch.embedding)
def torch_embedding(call: Call):
    """The same with weight first; padding_idx -1 is none."""
    padding_idx = call.get(2, "padding_idx", -1)
    return _decide(
        call, call.get(1, "indices"), call.get(0, "weight"),
        padding_idx=None if padding_idx == -1 else padding_idx, max_norm=None,
        by_frequency=call.get(3, "scale_grad_by_freq", False), sparse=call.get(4, "sparse", False),
        run=_torch_embedding,
    )  # fmt: skip


@rule(F.embedding_bag)
def embedding_bag(call: Call):
    """Gathers, but for a max_norm's write to the table."""
    return None if call.get(3, "max_norm") is None else decomposed(_bag_of_renormed)


def _decide(call: Call, ids: Operand, weight: Operand, *, padding_idx, max_norm, by_frequency, sparse, run):
    if weight.ndim != 2 or (padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]):
        return None  # the function itself says what is wrong
    if sparse:
        raise OperatorError(
            call.name,
            "a sparse gradient cannot be reduced or moved between layouts",
            [f"weight  {weight!r}"],
            [("sparse=False", "a dense gradient of the local rows")],
        )
    if max_norm is not None:
        return decomposed(_renormed)
    places = tuple(("i", d) for d in range(ids.ndim))
    labels = {id(ids): places, id(weight): ("v", "c")}
    # Frequencies are those of the ids of all ranks, and of whole rows.
    whole = {"v", *places} if by_frequency else ()
    partial = tuple(i for i, operand in enumerate(call.operands) if operand is weight)
    decision = solve(
        call,
        Signature(
            [labels[id(operand)] for operand in call.operands], [(*places, "c")],
            summed={"v"}, whole=whole, linear=[partial], shapes=[(*ids.shape, weight.shape[1])],
        ),
    )  # fmt: skip
    if decision is not None:
        table = decision.targets[weight.index] or weight.layout
        if table.axes_of(0):
            decision.run = run(table, padding_idx)
    return decision


def _embedding(table, padding_idx):
    look_up = _rows_of(table, padding_idx)

    def run(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
        return look_up(input, weight)

    return run


def _torch_embedding(table, padding_idx):
    look_up = _rows_of(table, padding_idx)

    def run(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
        return look_up(indices, weight)

    return run


def _rows_of(table, padding_idx):
    """The look-up in this rank's rows of a table sharded by row."""
    rows, ranges = table.shape[0], held_ranges(table, 0)
    if padding_idx is not None:
        index, mine = owned(torch.tensor(padding_idx % rows), ranges)
        padding_idx = int(index) if bool(mine) else None

    def look_up(ids: Tensor, weight: Tensor) -> Tensor:
        check_range((ids >= 0) & (ids < rows), "index out of range in self")
        if not weight.shape[0]:
            return nothing((weight,), (*ids.shape, weight.shape[1]))
        index, mine = owned(ids, ranges)
        return F.embedding(index, weight, padding_idx).masked_fill_(~mine.unsqueeze(-1), 0)

    return look_up


def _renormed(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    _renorm(input, weight, max_norm, norm_type)
    return F.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)


def _bag_of_renormed(input, weight, offsets=None, max_norm=None, norm_type=2.0, *more, **options):
    _renorm(input, weight, max_norm, norm_type)
    return F.embedding_bag(input, weight, offsets, None, norm_type, *more, **options)


def _renorm(input, weight, max_norm, norm_type):
    """max_norm: the rows that are looked up are scaled down in place first, in the table's own layout."""
    with torch.no_grad():
        ids = input.full_tensor() if type(input) is DTensor else input
        used = torch.zeros(weight.shape[0], dtype=torch.bool, device=ids.device)
        used[ids.reshape(-1)] = True
        norms = torch.linalg.vector_norm(weight.detach(), norm_type, dim=1)
        scale = torch.where(used & (norms > max_norm), max_norm / (norms + 1e-7), torch.ones_like(norms))
        weight.mul_(scale.unsqueeze(1))
