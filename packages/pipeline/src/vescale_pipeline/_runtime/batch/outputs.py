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


def share_outputs(
    member: Member, call: Call, state: Interpreter, weights: Weights, parts: list[Any], forward: Callable[[Any], Any]
) -> Any:
    """Whole outputs: rows of the microbatches one after another, means and sums over rows as weighted sums, what no row
    enters once, and the loss as its `weights` say. In place of what comes from the batch in another way stands a
    placeholder, whose use raises.

    Cost: the outputs, to each rank, from the last that has each.
    """
    tag, record, count = member.tags("loss"), call.record, member.schedule.microbatches
    templates, own = tensors_in(record.result), loss_in(record.result)
    whole: list[Any] = list(templates)
    homes: dict[int, list[int]] = {}
    for at, (template, kind) in enumerate(zip(templates, call.outputs)):
        lost = None if template is own or kind == call.reduction else _lost(kind, call)
        if lost is not None:
            whole[at] = lost_output(template, lost)
            continue
        home = member.schedule.placement[record.returned.get(getattr(template, "key", None), -1)]
        homes.setdefault(home, []).append(at)
    for rank, places in sorted(homes.items()):
        if member.rank != rank:
            header = member.link.receive_object(rank, tag)
            found = member.link.post(rank, tag + 2, header).wait()
        else:
            made, found = [tensors_in(state.outputs.get(i)) for i in range(count)], []
            for at in places:
                key = getattr(templates[at], "key", None)
                column = [state.returned[i][key] if key in record.returned else made[i][at] for i in range(count)]
                column, kind = [member.codec.whole(value) for value in column], call.outputs[at]
                if templates[at] is own:
                    found.append(weighted(column, weights))
                    continue
                found.append(_joined(kind, column, _shares(member, call, kind, weights, parts, forward)))
            header = tuple(map(part_of, found))
            for peer in member.others:
                member.link.send_object(peer, tag, header)
                member.link.send(peer, tag + 2, found)
        for at, tensor in zip(places, found):
            whole[at] = tensor
    member.link.flush()
    return fill(record.result, whole)


def number_shares(
    member: Member, call: Call, weights: Weights, parts: list[Any], forward: Callable[[Any], Any]
) -> dict[int, Weights]:
    """Returns the microbatches' shares in each number that a training call returns, on the rank that makes it. Call it
    before the call's actions: user code may run for it, which a stage's parameters rest after."""
    if member.rank != member.last:
        return {}
    known = [at for at in call.numbers if _lost(call.outputs[at], call) is None]
    return {at: _shares(member, call, call.outputs[at], weights, parts, forward) for at in known}


def share_numbers(member: Member, call: Call, state: Interpreter, shares: dict[int, Weights], loss: Tensor) -> Any:
    """Returns the result of a training call: the `loss`, and numbers over the batch's rows that have no gradient
    (metrics), as in an evaluation. Elsewhere stand placeholders, whose use raises: rows stay where they are, and the
    backward of what has a gradient has run.

    Cost: the numbers, from the rank of the last stage to each other.
    """
    result = call.record.result if call.whole is None else call.whole
    whole = [loss if one is loss_in(result) else one for one in tensors_in(result)]
    numbers = [at for at in call.numbers if _lost(call.outputs[at], call) is None]
    if numbers:
        tag, found = member.tags("loss"), []
        if member.rank != member.last:
            found = member.link.post(member.last, tag + 2, member.link.receive_object(member.last, tag)).wait()
        else:
            for at in numbers:
                column = [state.numbers[i][call.numbers.index(at)] for i in range(member.schedule.microbatches)]
                if any(one is None for one in column):
                    found.append(None)
                    continue
                column, kind = [member.codec.whole(value) for value in column], call.outputs[at]
                found.append(_joined(kind, column, shares[at]))
            header = tuple(None if one is None else part_of(one) for one in found)
            for peer in member.others:
                member.link.send_object(peer, tag, header)
                member.link.send(peer, tag + 2, found)
        for at, number in zip(numbers, found):
            whole[at] = whole[at] if number is None else number
    return fill(result, whole)


def _shares(
    member: Member, call: Call, kind: int | Tag, weights: Weights, parts: list[Any], forward: Callable[[Any], Any]
) -> Weights:
    """Returns each microbatch's share in an output."""
    if not isinstance(kind, frozenset):
        return []
    if kind == call.reduction:
        return weights
    return loss_weights(kind, call.record, forward, parts, member.codec.whole)


def _lost(kind: int | Tag, call: Call) -> Lost | None:
    """Says why an output cannot be told from the microbatches'; None if it can."""
    if not isinstance(kind, frozenset):
        return kind if isinstance(kind, Lost) else None
    weighings = kind - ONCE
    if len(weighings) > 1 or kind == SUM | ONCE:
        return Lost("adding up parts that weigh the microbatches differently")
    if call.leaves_anything and not weighings <= MEAN | SUM:
        return Lost("a mean over labels, in a forward that draws numbers or leaves something behind")
    return None


def _joined(kind: int | Tag, column: list[Tensor], shares: Weights) -> Tensor:
    """One output, of all microbatches'."""
    if type(kind) is int:
        return torch.cat(column, kind)
    if kind == CONSTANT:
        return column[-1]
    if column[0].is_floating_point():
        return weighted(column, shares)
    return torch.stack(column).sum(0).to(column[0].dtype)  # counts: of integers there is no mean
