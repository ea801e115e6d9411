"""verify: proves, before anything runs, that a schedule computes one device's gradients and comes to an end; pure.

What is proved, in this order; the first thing that does not hold is the error:

    numbers    kinds, stages, microbatches and peers exist; a stage's actions are on its rank
    coverage   per stage and microbatch one F, and one B or one I with one W; every
               tensor that changes ranks is sent once, received once, and between the
               right ranks; one REDUCE per stage
    order      on a rank, every tensor is there before it is used: F before its backward, I
               before W, a receive before what consumes it, a send after what makes it, and
               REDUCE after the stage's last weight gradient
    channels   receives of a channel (an ordered pair of ranks) are posted in the order of
               its sends, so that even messages without tags meet their receives
    deadlock   all transfers can complete, under the model of the transport (`schedules/proofs/channels.py`)
    memory     the peak of activations is within the budget, where one is given

That is all there is to be wrong with a schedule: what passes computes each
microbatch's contribution to each gradient once, from the right inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ._errors import ScheduleError
from .action import ALL_MICROBATCHES, FORMAT_VERSION, Action, Schedule
from .schedules.proofs.channels import MODELS, Node, Programs
from .schedules.proofs.table import CODE, NO_PEER, Table
from .simulate import UNIT_COSTS, Costs, peak_memory

F, B, I, W = (CODE[kind] for kind in "FBIW")
SEND_F, RECV_F, SEND_B, RECV_B = (CODE[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"))
REDUCE = CODE["REDUCE"]


@dataclass(frozen=True)
class Verdict:
    """Further properties of a schedule that can run.

    Arguments:
        schedule, transport, costs: as given to `verify`.
    """

    schedule: Schedule
    transport: str
    costs: Costs

    @cached_property
    def deadlocks(self) -> dict[str, list[str]]:
        """The models of a transport (MODELS) under which it would deadlock, each with its shortest circle of waits.

        None of them is the one asked for, or one that allows more.
        """
        return _deadlocks(Table.of(self.schedule), MODELS[MODELS.index(self.transport) + 1 :])

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Returns `vescale_pipeline.peak_memory` of the schedule."""
        return peak_memory(self.schedule, self.costs)

    @property
    def adds_in_order(self) -> bool:
        """Returns the schedule's `adds_in_order`."""
        return self.schedule.adds_in_order


def verify(
    schedule: Schedule, *, transport: str = "pair", budget: float | None = None, costs: Costs = UNIT_COSTS
) -> Verdict:
    """Raises ScheduleError, which names the actions, unless the schedule can run and computes what it should.

    Arguments:
        schedule: any schedule; nothing is assumed about it.
        transport: the model under which it must not deadlock: "buffered", "pair" or "rank".
        budget: the most activation memory that a rank may hold, in the unit of `costs`.
        costs: of a stage's activations.

    Takes time linear in the number of actions, about half a second for a million.
    """
    if transport not in MODELS:
        raise ScheduleError(
            "verify", f"there is no model {transport!r} of a transport", [f"known  {', '.join(MODELS)}"]
        )
    _check_shape(schedule)
    table = Table.of(schedule)
    _check_numbers(table)
    places = _check_coverage(table)
    _check_order(table, places)
    _check_channels(table)
    if _deadlocks(table, (transport,)):
        model, circle = next(iter(_deadlocks(table, MODELS).items()))
        raise ScheduleError("verify", f"deadlock under the model {model!r} of a transport", circle)
    if budget is not None:
        _check_memory(schedule, budget, costs)
    return Verdict(schedule, transport, costs)


def _check_shape(schedule: Schedule) -> None:
    if schedule.version != FORMAT_VERSION:
        raise ScheduleError("verify", f"the schedule is of version {schedule.version}, not {FORMAT_VERSION}")
    for name in ("ranks", "microbatches", "stages"):
        number = getattr(schedule, name)
        if not isinstance(number, int) or number < 1:
            raise ScheduleError("verify", f"{name} is {number!r}, not a positive integer")
    if len(schedule.placement) != schedule.stages:
        raise ScheduleError("verify", f"{len(schedule.placement)} stages are placed, not {schedule.stages}")
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError("verify", f"{len(schedule.actions)} ranks have actions, not {schedule.ranks}")
    for stage, rank in enumerate(schedule.placement):
        if not isinstance(rank, int) or not 0 <= rank < schedule.ranks:
            raise ScheduleError("verify", f"stage {stage} is placed on rank {rank!r} of {schedule.ranks}")


def _first(wrong: Tensor) -> int | None:
    """The first place where it holds."""
    return int(wrong.to(torch.uint8).argmax()) if bool(wrong.any()) else None


def _check_numbers(table: Table) -> None:
    schedule = table.schedule
    stages = torch.tensor(schedule.stages)
    reduces = table.kind == REDUCE
    transfers = (table.kind >= SEND_F) & (table.kind <= RECV_B)
    in_range = (table.microbatch >= 0) & (table.microbatch < schedule.microbatches)
    owner = table.placement[table.stage.clamp(0, schedule.stages - 1)]
    for wrong, rule in (
        ((table.stage < 0) | (table.stage >= stages), f"there are stages 0 to {schedule.stages - 1}"),
        (owner != table.rank, "the stage is placed on another rank"),
        (~reduces & ~in_range, f"there are microbatches 0 to {schedule.microbatches - 1}"),
        (reduces & (table.microbatch != ALL_MICROBATCHES), f"REDUCE is of all microbatches, {ALL_MICROBATCHES}"),
        (
            transfers & ((table.peer < 0) | (table.peer >= schedule.ranks)),
            f"its peer is not one of {schedule.ranks} ranks",
        ),
        (~transfers & (table.peer != NO_PEER), "only sends and receives have a peer"),
    ):
        if (index := _first(wrong)) is not None:
            raise ScheduleError("verify", f"numbers: {rule}", [table.where(index)])


def _expected_peers(table: Table) -> dict[int, Tensor]:
    """Kind of transfer -> the peer of each stage; -1 where the stage has no such transfer."""
    placement = table.placement
    none = torch.tensor([-1])
    after, before = torch.cat([placement[1:], none]), torch.cat([none, placement[:-1]])
    after, before = (torch.where(other == placement, -1, other) for other in (after, before))
    return {SEND_F: after, RECV_B: after, RECV_F: before, SEND_B: before}


def _check_coverage(table: Table) -> dict[int, Tensor]:
    """Everything is there once. Gives, per kind, where: place on the rank, [stages, microbatches], -1 for nowhere."""
    schedule = table.schedule
    shape = (schedule.stages, schedule.microbatches)
    if len(table) < shape[0] * shape[1]:
        rule = f"coverage: {len(table)} actions cannot cover {shape[0]} stages and {shape[1]} microbatches"
        raise ScheduleError("verify", rule)
    one = torch.ones(shape, dtype=torch.int64)
    slots = table.stage * schedule.microbatches + table.microbatch.clamp(min=0)
    flat = table.kind * one.numel() + slots
    counts = torch.bincount(flat, minlength=len(CODE) * one.numel()).view(len(CODE), *shape)
    peers = _expected_peers(table)

    split = counts[I] > 0
    expected = {F: one, B: one - split.long(), I: split.long(), W: split.long()}
    expected |= {kind: (of_stage >= 0).long()[:, None].expand(shape) for kind, of_stage in peers.items()}
    for kind, wanted in expected.items():
        if (index := _first((counts[kind] != wanted).flatten())) is not None:
            raise _miscounted(table, flat == kind * one.numel() + index, kind, index, int(wanted.flatten()[index]))
    if (stage := _first(counts[REDUCE][:, 0] != 1)) is not None:
        index = stage * schedule.microbatches
        raise _miscounted(table, flat == REDUCE * one.numel() + index, REDUCE, index, 1)
    for kind, of_stage in peers.items():
        wrong = (table.kind == kind) & (table.peer != of_stage[table.stage])
        if (index := _first(wrong)) is not None:
            right = int(of_stage[table.stage[index]])
            raise ScheduleError("verify", f"coverage: the other end is on rank {right}", [table.where(index)])

    places = torch.full((len(CODE) * one.numel(),), -1, dtype=torch.int64)
    places[flat] = table.place
    return dict(enumerate(places.view(len(CODE), *shape)))


def _miscounted(table: Table, found: Tensor, kind: int, index: int, wanted: int) -> ScheduleError:
    stage, microbatch = divmod(index, table.schedule.microbatches)
    name = list(CODE)[kind]
    action = Action(name, stage, ALL_MICROBATCHES if kind == REDUCE else microbatch)
    times = f"{int(found.sum())} times, not {wanted}"
    where = [table.where(int(i)) for i in found.nonzero()[:4, 0]]
    return ScheduleError("verify", f"coverage: {action} is there {times}", where)


def _check_order(table: Table, places: dict[int, Tensor]) -> None:
    """Checks that on its rank, a tensor is made before it is used."""
    backward = torch.maximum(places[B], places[I])
    same_rank = (table.placement[1:] == table.placement[:-1])[:, None]
    last_weights = torch.maximum(places[B], places[W])
    rules = (
        ("F", places[F], "its backward", backward),
        ("I", places[I], "W", places[W]),
        ("F", places[F], "SEND_F", places[SEND_F]),
        ("the backward", backward, "SEND_B", places[SEND_B]),
        ("RECV_F", places[RECV_F], "F", places[F]),
        ("RECV_B", places[RECV_B], "the backward", backward),
        ("F of the stage before", torch.where(same_rank, places[F][:-1], -1), "F", places[F][1:]),
        ("the backward of the stage after", torch.where(same_rank, backward[1:], -1), "the backward", backward[:-1]),
        ("the last weight gradient", last_weights, "REDUCE", places[REDUCE][:, :1].expand_as(last_weights)),
    )
    for first, earlier, second, later in rules:
        wrong = (earlier >= later) & (earlier >= 0) & (later >= 0)
        if (index := _first(wrong.flatten())) is not None:
            rank = int(table.placement[index // wrong.shape[1]])
            actions = table.schedule.actions[rank]
            there = sorted(int(place.flatten()[index]) for place in (later, earlier))
            lines = [f"rank {rank}, action {place}: {actions[place]}" for place in there]
            raise ScheduleError("verify", f"order: {second} stands before {first}", lines)


def _check_channels(table: Table) -> None:
    """The k-th receive of each ordered pair of ranks is of what its k-th send sends."""
    sends, send_names = _messages(table, SEND_F, SEND_B, sends=True)
    receives, receive_names = _messages(table, RECV_F, RECV_B, sends=False)
    if (index := _first(send_names != receive_names)) is not None:
        raise ScheduleError(
            "verify",
            "channels: the next send and the next receive between two ranks are not of the same tensor",
            [table.where(int(sends[index])), table.where(int(receives[index]))],
        )


def _messages(table: Table, forward: int, backward: int, sends: bool) -> tuple[Tensor, Tensor]:
    """Actions of the sends, or of the receives, by channel and then in order; and the transfer of each."""
    actions = ((table.kind == forward) | (table.kind == backward)).nonzero()[:, 0]
    rank, peer = table.rank[actions], table.peer[actions]
    channels = (rank, peer) if sends else (peer, rank)
    order = torch.argsort(channels[0] * table.schedule.ranks + channels[1], stable=True)
    actions = actions[order]
    return actions, _transfers(table)[actions]


def _transfers(table: Table) -> Tensor:
    """Numbers the transfer of each send and receive: one per direction, sending stage and microbatch."""
    kind, stage = table.kind, table.stage
    sender = stage - (kind == RECV_F).long() + (kind == RECV_B).long()
    is_backward = (kind == SEND_B) | (kind == RECV_B)
    return (is_backward * table.schedule.stages + sender) * table.schedule.microbatches + table.microbatch


def _deadlocks(table: Table, models: Sequence[str]) -> dict[str, list[str]]:
    """Model -> the shortest circle of waits under it, for people; models without one are absent."""
    schedule = table.schedule
    transfers = _transfers(table)
    is_transfer = (table.kind >= SEND_F) & (table.kind <= RECV_B)
    posts = Programs(_per_rank(table, is_transfer, 2 * transfers), _ends(schedule))
    if posts.runs_in_step():
        return {}
    # A compute action waits for the transfer of what it consumes, if that comes from another rank.
    peers = _expected_peers(table)
    forward = (table.kind == F) & (peers[RECV_F][table.stage] >= 0)
    backward = ((table.kind == B) | (table.kind == I)) & (peers[RECV_B][table.stage] >= 0)
    sender = table.stage + backward.long() - forward.long() + backward * schedule.stages
    waits = 2 * (sender * schedule.microbatches + table.microbatch) + 1
    events = torch.where(is_transfer, 2 * transfers, waits)
    programs = Programs(_per_rank(table, is_transfer | forward | backward, events), posts.ends)
    found = {model: programs.shortest_cycle(model) for model in models}
    return {model: list(_explain(table, cycle, programs)) for model, cycle in found.items() if cycle is not None}


def _per_rank(table: Table, chosen: Tensor, values: Tensor) -> list[list[int]]:
    counts = torch.bincount(table.rank[chosen], minlength=table.schedule.ranks)
    return [part.tolist() for part in torch.split(values[chosen], counts.tolist())]


def _ends(schedule: Schedule) -> list[tuple[int, int]]:
    """Sending and receiving rank by number of transfer."""
    placement = schedule.placement
    downwards = [*zip(placement, (*placement[1:], placement[-1]))]
    upwards = [*zip(placement, (placement[0], *placement[:-1]))]
    return [ends for ends in (*downwards, *upwards) for _ in range(schedule.microbatches)]


def _explain(table: Table, cycle: list[Node], programs: Programs) -> Iterator[str]:
    """Yields who waits for whom, a line each."""
    microbatches, stages = table.schedule.microbatches, table.schedule.stages

    def transfer(number: int) -> str:
        slot, microbatch = divmod(number, microbatches)
        backward, stage = divmod(slot, stages)
        sender, receiver = programs.ends[number]
        return f"rank {sender}'s {Action('SEND_B' if backward else 'SEND_F', stage, microbatch, receiver)}"

    for (kind, number), (next_kind, following) in zip(cycle, cycle[1:] + cycle[:1]):
        if kind == "rank":
            slot, microbatch = divmod(following, microbatches)
            backward, stage = divmod(slot, stages)
            before = f"the backward of stage {stage - 1}" if backward else f"F of stage {stage + 1}"
            yield f"rank {number}, before {before} and microbatch {microbatch}, waits for {transfer(following)}"
        elif next_kind == "rank":
            yield f"{transfer(number)} waits until rank {following} gets there"
        else:
            yield f"{transfer(number)} waits behind {transfer(following)}"


def _check_memory(schedule: Schedule, budget: float, costs: Costs) -> None:
    peaks = peak_memory(schedule, costs)
    if max(peaks) > budget:
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        raise ScheduleError(
            "verify",
            f"memory: rank {rank} holds activations of {peaks[rank]:g} at its peak, more than the budget of {budget:g}",
            [f"peaks by rank  {', '.join(f'{peak:g}' for peak in peaks)}"],
            [('generate("v-half", ...)', "half of 1F1B's peak"), ("fewer forwards ahead", "a longer bubble")],
        )
