"""The result of an evaluation, on every rank: what one device would have returned for the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_trace.values import fill, tensors_in

from ..._trace.placeholder import lost_output
from ..._trace.rows.tags import CONSTANT, MEAN, ONCE, SUM, Lost, Tag
from ..._transport.p2p import part_of
from ..call import Call
from ..interpreter import Interpreter
from ..loss import Weights, loss_in, weighted
from ..member import Member
from .microbatches import loss_weights


def shares_of(
    member: Member, call: Call, weights: Weights, parts: list[Any], forward: Callable[[Any], Any], trains: bool
) -> dict[int, Weights]:
    """Returns the microbatches' shares in each output that a call returns, on the rank that makes it. Call it before
    the call's actions: user code may run for it, which a stage's parameters rest after."""
    mine = [at for at, rank in _homes(member, call, trains).items() if rank == member.rank]
    return {at: _shares(member, call, _kind(call, at), weights, parts, forward) for at in mine}


def share_outputs(
    member: Member, call: Call, state: Interpreter, shares: dict[int, Weights], loss: Tensor | None = None
) -> Any:
    """Returns the result of a call, whole: rows of the microbatches one after another, means and sums over rows as
    weighted sums, what no row enters once. In place of what comes from the batch in another way stands a placeholder,
    whose use raises; in training, where `loss` is the call's, in place of all but numbers without a gradient (metrics):
    rows stay where they are, and the backward of what has a gradient has run.

    Cost: the outputs, to each rank, from the last that has each.
    """
    record, tag, trains = call.record, member.tags("loss"), loss is not None
    result = call.whole if trains and call.whole is not None else record.result
    own, whole, homes = loss_in(result), tensors_in(result), _homes(member, call, trains)
    for at, one in enumerate(whole):
        if trains:
            whole[at] = loss if one is own else one
        elif at not in homes:
            whole[at] = lost_output(one, _lost(call, at))
    for rank in sorted({*homes.values()}):
        places = [at for at in homes if homes[at] == rank]
        if member.rank != rank:
            found = member.link.post(rank, tag + 2, member.link.receive_object(rank, tag)).wait()
        else:
            found = [_joined(member, call, at, _column(state, call, at, trains), shares[at]) for at in places]
            header = tuple(None if one is None else part_of(one) for one in found)
            for peer in member.others:
                member.link.send_object(peer, tag, header)
                member.link.send(peer, tag + 2, found)
        for at, tensor in zip(places, found):
            whole[at] = whole[at] if tensor is None else tensor
    member.link.flush()
    return fill(result, whole)


def _homes(member: Member, call: Call, trains: bool) -> dict[int, int]:
    """Returns the last rank that has each output which can be told from the microbatches'; of a training call, of its
    numbers."""
    record, placement = call.record, member.schedule.placement
    templates = tensors_in(record.result)
    places = call.numbers if trains else range(len(templates))
    stages = {at: record.returned.get(getattr(templates[at], "key", None), -1) for at in places}
    return {at: placement[stage] for at, stage in stages.items() if _lost(call, at) is None}


def _column(state: Interpreter, call: Call, at: int, trains: bool) -> list[Tensor | None]:
    """Returns an output of each microbatch."""
    if trains:
        return [state.numbers[i][call.numbers.index(at)] for i in sorted(state.numbers)]
    key = getattr(tensors_in(call.record.result)[at], "key", None)
    if key in call.record.returned:
        return [state.returned[i][key] for i in sorted(state.returned)]
    return [tensors_in(state.outputs[i])[at] for i in sorted(state.outputs)]


def _kind(call: Call, at: int) -> int | Tag:
    """Returns how an output comes from the batch: the loss as it was said or found for the whole call."""
    is_loss = tensors_in(call.record.result)[at] is loss_in(call.record.result)
    return call.reduction if is_loss else call.outputs[at]


def _shares(
    member: Member, call: Call, kind: int | Tag, weights: Weights, parts: list[Any], forward: Callable[[Any], Any]
) -> Weights:
    """Returns each microbatch's share in an output."""
    if not isinstance(kind, frozenset):
        return []
    if kind == call.reduction:
        return weights
    return loss_weights(kind, call.record, forward, parts, member.codec.whole)


def _lost(call: Call, at: int) -> Lost | None:
    """Says why an output cannot be told from the microbatches'; None if it can."""
    kind = _kind(call, at)
    if kind == call.reduction:
        return None
    if not isinstance(kind, frozenset):
        return kind if isinstance(kind, Lost) else None
    weighings = kind - ONCE
    if len(weighings) > 1 or kind == SUM | ONCE:
        return Lost("adding up parts that weigh the microbatches differently")
    if call.leaves_anything and not weighings <= MEAN | SUM:
        return Lost("a mean over labels, in a forward that draws numbers or leaves something behind")
    return None


def _joined(member: Member, call: Call, at: int, column: list[Tensor | None], shares: Weights) -> Tensor | None:
    """One output, of all microbatches'; None where one has it with a gradient."""
    if any(one is None for one in column):
        return None
    column, kind = [member.codec.whole(value) for value in column], _kind(call, at)
    if type(kind) is int:
        return torch.cat(column, kind)
    if kind == CONSTANT:
        return column[-1]
    if column[0].is_floating_point():
        return weighted(column, shares)
    return torch.stack(column).sum(0).to(column[0].dtype)  # counts: of integers there is no mean
