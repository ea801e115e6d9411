"""Exchange between the ranks of a pipeline before the actions of a call, and after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_trace.in_step import first_bits, is_turn
from vescale_trace.values import tensors_in

from .._errors import PipelineError
from .._transport.messages import PARTS
from .._transport.p2p import Arrival, Part, part_of
from .batch.given import Runs
from .call import Call
from .interpreter import Interpreter
from .loss import Weights, loss_in, weighted
from .member import Member
from .random_order import digest

FAILED = -1
"""Replaces the mode in a greeting: this rank raised before its call began."""


def all_failed(member: Member, number: int) -> bool:
    """Tells both neighbours, in place of a greeting, that this rank's `number`th call raised before it began; gives
    whether theirs did, too. Cost: as the first round of `greet`."""
    word = [number, FAILED, 0, 0, 0, 0]
    told = member.link.exchange(_at_distance(1, member), member.tags("greet"), word)
    return all(mode == FAILED for _, mode, *_ in told)


def greet(member: Member, number: int, call: Call, parts: list[Any], trains: bool, changed: bool) -> bool:
    """Neighbours compare what they are about to run, as their `number`th call; gives whether `changed` holds anywhere.

    Of `parts`, the batch, the bits are compared in the first calls and then every so many (`vescale_trace.in_step`).

    Every rank hears the word of all: in a ring it goes over ever larger distances, each time with all that is known by
    then. Cost: messages of 48 bytes, each way to two neighbours, and with more than 3 ranks to two others in each of
    the further rounds, log3(ranks) - 1 of them.

    Raises PipelineError where they differ.
    """
    ranks, tag = member.schedule.ranks, member.tags("greet")
    peers = _at_distance(1, member)
    backwards = member.link.backwards
    what_runs = call.digest(member.schedule) ^ _digest_of_batch(member, number - 1, parts)
    mine = [number, int(trains), backwards, what_runs, _digest_of_generator(member, call)]
    for peer, (*theirs, word) in zip(peers, member.link.exchange(peers, tag, [*mine, int(changed)])):
        changed = changed or bool(word)
        if theirs[1] == FAILED:
            member.link.receive_object(peer, tag)  # there is none: ends with a LinkError once the peer has told why
        if theirs != mine:
            if theirs[:2] == mine[:2] and theirs[2] != backwards:
                raise left_out({peer: theirs[2], member.rank: backwards})
            differ = [a != b for a, b in zip(theirs, mine)]
            kinds = ("call", "mode (train or no_grad)", "", "batch, model or schedule", "state of torch's generator")
            what = kinds[differ.index(True)]
            low, high = sorted((peer, member.rank))
            raise PipelineError(
                "pipeline",
                f"ranks {low} and {high} are about to run different things (another {what}): every rank of a "
                "pipeline calls the model with the same batches",
                (),
                [
                    ("seed the loader alike on all ranks", "the same batch, in shapes and order"),
                    ("torch.manual_seed(...) alike on all ranks", "each draws what the other stages draw, too"),
                ],
            )
    known = 3  # ranks in a row, this one in their middle, whose words `changed` has
    while known < ranks:
        tag += 2  # an object takes two
        words = member.link.exchange(_at_distance(known, member), tag, [int(changed)])
        changed, known = changed or any(word for (word,) in words), 3 * known
    return changed


def left_out(backwards: Mapping[int, int]) -> PipelineError:
    """The error for ranks that have not all run the backward of a call, of which one may say how many each has."""
    most = max(backwards.values())
    fewer = next(rank for rank, count in sorted(backwards.items()) if count < most)
    return PipelineError(
        "backward",
        f"rank {fewer} of the pipeline has run {backwards[fewer]} backwards, another {most}: the stages of a rank that "
        "leaves out a call's backward have no gradients, and are not trained",
        (),
        [("loss = model(batch); loss.backward()", "on every rank, the loss is the same on all: not on the last alone")],
    )


def _at_distance(distance: int, member: Member) -> list[int]:
    """The ranks that far from this one in a ring, both ways."""
    ranks = member.schedule.ranks
    return sorted({(member.rank + step) % ranks for step in (-distance, distance)} - {member.rank})


def _digest_of_batch(member: Member, number: int, parts: list[Any]) -> int:
    """Digest of the batch's bits, in the calls that look at them."""
    if not is_turn(number, member.link.device.type):
        return 0
    return hash((*first_bits([member.codec.encode(tensor)[0] for tensor in tensors_in(parts)]),))


def _digest_of_generator(member: Member, call: Call) -> int:
    """Digest of torch's generators, if a call draws anything."""
    return digest(member.link.device) if call.record.draws_anything else 0


def sum_tied(member: Member, tied: Sequence[str], in_order: bool) -> dict[str, Tensor | None]:
    """Each weight's gradient; of weights tied over stages, the sum over their uses, stage by stage, and where
    microbatches were kept apart (`in_order`), then over these.

    Cost: of each weight in `tied` the gradients of a rank's uses, to each other rank that uses it.
    """
    per_stage = {index: stage.sums() for index, stage in member.stages.items()}
    sums = {name: gradient for of_stage in per_stage.values() for name, gradient in of_stage.items()}
    placement = member.schedule.placement
    for number, name in enumerate(tied):
        users = member.owned.stages[name]
        ranks = sorted({placement[stage] for stage in users})
        if member.rank not in ranks:
            continue
        mine = {stage: per_stage[stage].get(name) for stage in users if placement[stage] == member.rank}
        others = [rank for rank in ranks if rank != member.rank]
        tag = member.tags("tied") + number * PARTS * member.schedule.stages
        uses = dict(mine)
        header = tuple(None if gradient is None else part_of(gradient) for gradient in mine.values())
        for rank in others:
            member.link.send_object(rank, tag, header)
        for rank in others:
            theirs = [stage for stage in users if placement[stage] == rank]
            arrival = member.link.swap(rank, tag + 2, list(mine.values()), member.link.receive_object(rank, tag))
            uses.update(zip(theirs, arrival.wait()))
        total = None
        for stage in users:
            gradient = uses[stage]
            if gradient is not None:
                total = gradient if total is None else total + gradient
        if total is not None and in_order:
            parts, total = total.unbind(0), None
            for gradient in parts:
                total = gradient if total is None else total + gradient
        sums[name] = total
    return sums


def share_buffers(member: Member, call: Call) -> None:
    """Buffers that several ranks keep, and stages write: as the last stage has them. Cost: these buffers, to each
    rank."""
    buffers = [slot.get() for slot in call.record.synced]
    _share(member, buffers, buffers)


def share_written(member: Member, parts: list[Any], runs: Runs) -> None:
    """Tensors of the batch that the forward writes to: as its runs in the last stage have left them. Cost: these
    tensors, to each rank."""
    for part in parts:
        _share(member, runs.left(part), runs.places(part))


def _share(member: Member, values: list[Tensor], into: list[Tensor]) -> None:
    """The values that the rank of the last stage has, in the memory of `into`, which lies alike on all ranks."""
    last, tag = member.last, member.tags("memory")
    for i in range(0, len(into), PARTS):
        memory = [member.codec.encode(tensor)[0] for tensor in into[i : i + PARTS]]
        if member.rank == last:
            arrived = [member.codec.encode(value)[0] for value in values[i : i + PARTS]]
            for peer in member.others:
                member.link.send(peer, tag, arrived)
            member.link.flush()
        else:
            arrived = member.link.post(last, tag, tuple(map(part_of, memory))).wait()
        for tensor, value in zip(memory, arrived):
            if tensor is not value:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(value)


def await_loss(member: Member, call: Call) -> Arrival | None:
    """Posts the receive of the batch's loss; None on the rank of the last stage, which makes it."""
    if member.rank == member.last:
        return None
    loss = loss_in(call.record.result)
    header = (Part((), (), loss.dtype, False), Part((), (), torch.int64, False))
    return member.link.post(member.last, member.tags("loss"), header if _compares(member, call) else header[:1])


def _compares(member: Member, call: Call) -> bool:
    """True if the ranks' draws are compared. On a device the host would wait for the number: there the next call's
    greeting compares."""
    return call.record.draws_anything and member.link.has_tags


def share_loss(member: Member, call: Call, state: Interpreter, weights: Weights) -> Tensor:
    """The batch's loss, from the rank of the last stage. Cost: a number to each rank.

    Raises PipelineError where ranks have drawn different random numbers.
    """
    last, compares = member.last, _compares(member, call)
    if member.rank == last:
        total = weighted([state.losses[microbatch] for microbatch in range(len(weights))], weights)
        drawn = [torch.tensor(_digest_of_generator(member, call))] if compares else []
        for peer in member.others:
            member.link.send(peer, member.tags("loss"), [total, *drawn])
        return total
    arrival, state.awaited_loss = state.awaited_loss or await_loss(member, call), None
    total, *drawn = arrival.wait()
    if compares and drawn[0].item() != _digest_of_generator(member, call):
        raise PipelineError(
            "pipeline",
            f"ranks {member.link.ranks[member.rank]} and {member.link.ranks[last]} have drawn different random "
            "numbers in this call: something in the forward draws by itself, on one stage only",
            (),
            [("draw with torch's functions, in modules or in their forward", "these are known on all stages")],
        )
    return total.clone()
