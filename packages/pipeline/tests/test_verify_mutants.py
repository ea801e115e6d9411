"""Every harmful mutant of a schedule is rejected and no correct one is, judged by trying all orders of events.

The judge, `Explorer`, shares nothing with `verify`: no rule about schedules stands in
it, only what ranks and messages do. It runs a small schedule on symbols, in every
order that a transport allows. Messages carry no tags: the k-th receive that a rank posts
from another takes the k-th message that the other posts to it. A schedule is harmful
if in some order a rank cannot do its next action (no such tensor, a wrong tensor, done
before), if something is left over (a tensor, a message, a gradient that lacks a
microbatch), or if everything comes to a halt before the end.
"""

import os
import random
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace

import pytest

from vescale_pipeline import ScheduleError, generate, verify
from vescale_pipeline.schedules import GENERATORS
from vescale_pipeline.verify import MODELS

FULL = os.environ.get("VESCALE_GRID") == "full"
# Ranks, microbatches, stages per rank for kinds that can have any.
SIZES = [
    (1, 2, 2),
    (2, 1, 1),
    (2, 2, 2),
    (2, 3, 1),
    (3, 2, 2),
    (3, 3, 1),
    (2, 4, 2),
    (4, 2, 1),
    (3, 4, 2),
    (4, 4, 1),
    (4, 4, 2),
]
MUTANTS = 200 if FULL else 16  # of each kind of mutation, of each kind of schedule


class Harm(Exception):
    """What would go wrong."""


@dataclass
class Rank:
    """One rank: its place in its program, its tensors, what it has posted."""

    rank: int
    place: int = 0
    tensors: dict = field(default_factory=dict)
    computed: frozenset = frozenset()
    gradients: tuple = ()
    reduced: frozenset = frozenset()
    # Of each peer, the values sent and the names received under, in order of posting.
    sends: dict = field(default_factory=dict)
    receives: dict = field(default_factory=dict)
    # All posts in order: (peer, whether it sends, which of these).
    posts: tuple = ()

    def __copy__(self):
        new = object.__new__(Rank)
        new.__dict__.update(self.__dict__)
        new.tensors, new.sends, new.receives = dict(self.tensors), dict(self.sends), dict(self.receives)
        return new

    def take(self, *name):
        """A tensor is used once; one that is posted for but has not arrived is None, and stays."""
        if name not in self.tensors:
            raise Harm(f"rank {self.rank} has no {name}")
        if self.tensors[name] is None:
            return None
        return self.tensors.pop(name)

    def put(self, value, *name):
        if name in self.tensors:
            raise Harm(f"rank {self.rank} has {name} already")
        self.tensors[name] = value

    def once(self, *what):
        if what in self.computed:
            raise Harm(f"rank {self.rank} computes {what} again")
        self.computed |= {what}


class Explorer:
    """Explores one schedule under one model of a transport: "buffered", "pair" or "rank"."""

    def __init__(self, schedule, model, eager=True):
        self.schedule, self.model, self.eager = schedule, model, eager
        self.states = 0

    def harm(self):
        """None for a schedule that is right in every order; else what goes wrong in one."""
        try:
            start = [Rank(rank) for rank in range(self.schedule.ranks)], Counter()
            seen, stack = set(), [start]
            while stack:
                ranks, arrived = stack.pop()
                if self.eager:
                    ranks = [copy(rank) for rank in ranks]
                    for rank in ranks:
                        while self.step(rank):
                            pass
                key = tuple(rank.place for rank in ranks), frozenset(arrived.items())
                if key in seen:
                    continue
                seen.add(key)
                self.states += 1
                following = list(self.following(ranks, arrived))
                if not following:
                    self.check_end(ranks, arrived)
                stack += following
        except Harm as harm:
            return str(harm)
        return None

    def following(self, ranks, arrived):
        if not self.eager:
            for index, rank in enumerate(ranks):
                moved = copy(rank)
                if self.step(moved):
                    yield [*ranks[:index], moved, *ranks[index + 1 :]], arrived
        for source in ranks:
            for peer in source.sends:
                which = arrived[source.rank, peer]
                if self.may_arrive(ranks, arrived, source.rank, peer, which):
                    target = copy(ranks[peer])
                    name = target.receives[source.rank][which]
                    target.tensors[name] = source.sends[peer][which]
                    yield (
                        [*ranks[:peer], target, *ranks[peer + 1 :]],
                        arrived + Counter({(source.rank, peer): 1}),
                    )

    def may_arrive(self, ranks, arrived, source, target, which):
        if not (which < len(ranks[source].sends[target]) and which < len(ranks[target].receives.get(source, ()))):
            return False
        return self.is_first(ranks[source], target, True, which, arrived) and self.is_first(
            ranks[target], source, False, which, arrived
        )

    def is_first(self, rank, peer, sends, which, arrived):
        """Whether this post is first of those that its stream still holds."""
        if self.model == "buffered":
            return True
        for other, other_sends, other_which in rank.posts:
            if self.model == "pair" and other != peer:
                continue
            channel = (rank.rank, other) if other_sends else (other, rank.rank)
            if other_which >= arrived[channel]:
                return (other, other_sends, other_which) == (peer, sends, which)
        return False

    def step(self, rank):
        """Does a rank's next action, if it need not wait."""
        actions = self.schedule.actions[rank.rank]
        if rank.place == len(actions):
            return False
        kind, stage, microbatch, peer = actions[rank.place]
        schedule = self.schedule
        if not (0 <= stage < schedule.stages and schedule.placement[stage] == rank.rank):
            raise Harm(f"rank {rank.rank} has no stage {stage}")
        if kind == "REDUCE":
            if microbatch != -1 or peer is not None or stage in rank.reduced:
                raise Harm(f"stage {stage} is reduced again, or in part")
            rank.reduced |= {stage}
        elif not 0 <= microbatch < schedule.microbatches:
            raise Harm(f"there is no microbatch {microbatch}")
        elif kind in "FBIW":
            if peer is not None:
                raise Harm(f"{kind} has a peer")
            if not self.compute(rank, kind, stage, microbatch):
                return False
        else:
            self.post(rank, kind, stage, microbatch, peer)
        rank.place += 1
        return True

    def compute(self, rank, kind, stage, microbatch):
        last = self.schedule.stages - 1
        if kind == "F":
            if stage > 0:
                got = rank.take("activation", stage, microbatch)
                if got is None:
                    return False
                if got != ("F", stage - 1, microbatch):
                    raise Harm(f"F of stage {stage}, microbatch {microbatch} gets {got}")
            rank.once(kind, stage, microbatch)
            rank.put(True, "saved", stage, microbatch)
            if stage < last:
                self.hand_on(rank, ("F", stage, microbatch), stage, "activation", stage + 1, microbatch)
            return True
        if kind == "W":
            rank.once(kind, stage, microbatch)
            rank.take("residue", stage, microbatch)
        else:
            if stage < last:
                got = rank.take("gradient", stage, microbatch)
                if got is None:
                    return False
                if got != ("I", stage + 1, microbatch):
                    raise Harm(f"{kind} of stage {stage}, microbatch {microbatch} gets {got}")
            rank.take("saved", stage, microbatch)
            rank.once("I", stage, microbatch)
            if stage > 0:
                self.hand_on(rank, ("I", stage, microbatch), stage, "gradient", stage - 1, microbatch)
            if kind == "I":
                rank.put(True, "residue", stage, microbatch)
        if kind in "BW":
            if stage in rank.reduced:
                raise Harm(f"a gradient of stage {stage} comes after it was reduced")
            rank.gradients += ((stage, microbatch),)
        return True

    def hand_on(self, rank, value, stage, what, target, microbatch):
        """What was computed goes to the neighbour on this rank, or lies ready to be sent."""
        if self.schedule.placement[target] == rank.rank:
            rank.put(value, what, target, microbatch)
        else:
            rank.put(value, "out", what, stage, microbatch)

    def post(self, rank, kind, stage, microbatch, peer):
        what = "activation" if kind.endswith("F") else "gradient"
        if peer is None or not 0 <= peer < self.schedule.ranks:
            raise Harm(f"there is no rank {peer}")
        if kind.startswith("SEND"):
            value = rank.take("out", what, stage, microbatch)
            rank.posts += ((peer, True, len(rank.sends.get(peer, ()))),)
            rank.sends[peer] = (*rank.sends.get(peer, ()), value)
        else:
            name = (what, stage, microbatch)
            rank.put(None, *name)
            rank.posts += ((peer, False, len(rank.receives.get(peer, ()))),)
            rank.receives[peer] = (*rank.receives.get(peer, ()), name)

    def check_end(self, ranks, arrived):
        every = [(stage, m) for stage in range(self.schedule.stages) for m in range(self.schedule.microbatches)]
        gradients = []
        for rank in ranks:
            if rank.place < len(self.schedule.actions[rank.rank]):
                raise Harm(f"rank {rank.rank} waits for ever before action {rank.place}")
            if rank.tensors:
                raise Harm(f"rank {rank.rank} keeps {sorted(map(str, rank.tensors))}")
            for peer, sent in rank.sends.items():
                if arrived[rank.rank, peer] < len(sent):
                    raise Harm(f"messages from rank {rank.rank} to {peer} are left")
            for peer, received in rank.receives.items():
                if arrived[peer, rank.rank] < len(received):
                    raise Harm(f"receives of rank {rank.rank} from {peer} are left")
            gradients += rank.gradients
        if sorted(gradients) != every:
            raise Harm("a gradient lacks a microbatch, or has it twice")
        if any(stage not in rank.reduced for rank in ranks for stage in self.schedule.stages_of(rank.rank)):
            raise Harm("a stage is not reduced")


def _schedules(kind):
    for ranks, microbatches, virtual in SIZES:
        virtual = GENERATORS[kind].virtual or virtual
        yield generate(kind, ranks, microbatches, virtual)


def _edit(schedule, rank, change):
    """The schedule with a rank's list changed by a function that is given a copy of it."""
    actions = list(schedule.actions[rank])
    change(actions)
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :]))


def _at(schedule, random, of=lambda action: True):
    """A rank and a place where such an action stands."""
    places = [(r, i) for r, actions in enumerate(schedule.actions) for i, a in enumerate(actions) if of(a)]
    return random.choice(places) if places else None


def drop(schedule, random):
    rank, place = _at(schedule, random)
    return _edit(schedule, rank, lambda actions: actions.pop(place))


def duplicate(schedule, random):
    rank, place = _at(schedule, random)
    to = random.choice([place + 1, random.randint(0, len(schedule.actions[rank]))])
    return _edit(schedule, rank, lambda actions: actions.insert(to, actions[place]))


def swap(schedule, random):
    rank, place = _at(schedule, random)
    last = len(schedule.actions[rank]) - 1
    to = random.choice([min(place + 1, last), random.randint(0, last)])

    def change(actions):
        actions[place], actions[to] = actions[to], actions[place]

    return _edit(schedule, rank, change)


def move(schedule, random):
    rank, place = _at(schedule, random)
    to = random.randint(0, len(schedule.actions[rank]) - 1)
    return _edit(schedule, rank, lambda actions: actions.insert(to, actions.pop(place)))


def swap_same_kind(schedule, random):
    """Two sends, two receives or two computations of one stage: what a wrong order of microbatches looks like."""
    rank, place = _at(schedule, random)
    kind, stage, *_ = schedule.actions[rank][place]
    alike = [i for i, a in enumerate(schedule.actions[rank]) if a[:2] == (kind, stage)]
    to = random.choice(alike)

    def change(actions):
        actions[place], actions[to] = actions[to], actions[place]

    return _edit(schedule, rank, change)


def swap_both_ends(schedule, random):
    """Two transfers in another order, at the sender and at the receiver: often right."""
    sender = _at(schedule, random, lambda action: action.kind.startswith("SEND"))
    if sender is None:
        return schedule
    rank, place = sender
    kind, stage, microbatch, peer = schedule.actions[rank][place]
    other = random.randrange(schedule.microbatches)
    step = 1 if kind == "SEND_F" else -1
    ends = ((rank, kind, stage, peer), (peer, kind.replace("SEND", "RECV"), stage + step, rank))
    for end, end_kind, end_stage, end_peer in ends:

        def change(actions, kind=end_kind, stage=end_stage, peer=end_peer):
            one, two = (actions.index((kind, stage, m, peer)) for m in (microbatch, other))
            actions[one], actions[two] = actions[two], actions[one]

        schedule = _edit(schedule, end, change)
    return schedule


def retag(schedule, random):
    rank, place = _at(schedule, random)
    kinds = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE"]

    def change(actions):
        actions[place] = actions[place]._replace(kind=random.choice(kinds))

    return _edit(schedule, rank, change)


def wrong_id(schedule, random):
    rank, place = _at(schedule, random)

    def change(actions):
        action = actions[place]
        name = random.choice(["stage", "microbatch", "peer"] if action.peer is not None else ["stage", "microbatch"])
        beyond = {"stage": schedule.stages, "microbatch": schedule.microbatches, "peer": schedule.ranks}[name]
        actions[place] = action._replace(**{name: random.randint(-1, beyond)})

    return _edit(schedule, rank, change)


def weights_early(schedule, random):
    """W before its I; of a schedule without W, a B that is split the wrong way round."""
    at = _at(schedule, random, lambda action: action.kind in "WB")
    rank, place = at

    def change(actions):
        weights = actions[place]._replace(kind="W")
        inputs = weights._replace(kind="I")
        if actions[place].kind == "B":
            actions[place : place + 1] = [weights, inputs]
        else:
            actions.insert(random.randint(0, actions.index(inputs)), actions.pop(place))

    return _edit(schedule, rank, change)


def extra_weights(schedule, random):
    rank, place = _at(schedule, random, lambda action: action.kind in "BIW")
    to = random.choice([place + 1, len(schedule.actions[rank]) - 1])
    return _edit(schedule, rank, lambda actions: actions.insert(to, actions[place]._replace(kind="W")))


def split_backward(schedule, random):
    """A B as I and, later, W: right, unless it comes after REDUCE."""
    at = _at(schedule, random, lambda action: action.kind == "B")
    if at is None:
        return schedule
    rank, place = at

    def change(actions):
        weights = actions[place]._replace(kind="W")
        actions[place] = weights._replace(kind="I")
        actions.insert(random.randint(place + 1, len(actions)), weights)

    return _edit(schedule, rank, change)


def other_rank(schedule, random):
    """An action given to another rank."""
    rank, place = _at(schedule, random)
    action = schedule.actions[rank][place]
    schedule = _edit(schedule, rank, lambda actions: actions.pop(place))
    to = random.randrange(schedule.ranks)
    return _edit(schedule, to, lambda actions: actions.insert(random.randint(0, len(actions)), action))


MUTATIONS = (
    drop,
    duplicate,
    swap,
    move,
    swap_same_kind,
    swap_both_ends,
    retag,
    wrong_id,
    weights_early,
    extra_weights,
    split_backward,
    other_rank,
)


def _rejects(schedule, model):
    try:
        verify(schedule, transport=model)
    except ScheduleError as error:
        return str(error)
    return None


def _check_against_explorer(schedule, eager=True):
    """Under each model: verify accepts what the explorer finds right, and only that. Gives what it found."""
    found = {}
    for model in MODELS:
        found[model] = Explorer(schedule, model, eager).harm()
        rejected = _rejects(schedule, model)
        assert (found[model] is None) == (rejected is None), (
            f"{model}: explorer {found[model]!r}, verify {rejected!r}\n"
            + "\n".join(" ".join(map(str, actions)) for actions in schedule.actions)
        )
    return found


@pytest.mark.parametrize("kind", GENERATORS)
def test_no_generated_schedule_is_rejected(kind):
    for schedule in _schedules(kind):
        assert not any(_check_against_explorer(schedule).values())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutants_are_judged_as_by_trying_every_order(mutation):
    harmful = right = 0
    for kind in GENERATORS:
        schedules = list(_schedules(kind))
        for number in range(MUTANTS):
            source = random.Random(f"{kind} {mutation.__name__} {number}")
            found = _check_against_explorer(mutation(source.choice(schedules), source))
            harmful += any(found.values())
            right += not any(found.values())
    assert harmful + right == MUTANTS * len(GENERATORS)
    # The mutations do what they are for.
    assert harmful > 0 or mutation is swap_both_ends
    assert right > 0 or mutation not in (swap, move, swap_same_kind, swap_both_ends, split_backward)
    assert right == 0 or mutation not in (drop, duplicate, weights_early, extra_weights)


@pytest.mark.parametrize("mutation", [swap, move, swap_both_ends], ids=lambda mutation: mutation.__name__)
def test_judging_by_fewer_orders_is_no_different(mutation):
    """Ranks that run as far as they can, as above, hide no order: here they also stop anywhere."""
    for kind in GENERATORS:
        source = random.Random(f"{kind} {mutation.__name__}")
        schedule = generate(kind, 2, 2, GENERATORS[kind].virtual or 1)
        for _ in range(MUTANTS // 4):
            mutant = mutation(schedule, source)
            assert list(_check_against_explorer(mutant)) == list(_check_against_explorer(mutant, eager=False))


def test_random_lists_of_right_actions():
    """Any order of the right actions: mostly deadlocks and uses before making, now and then right."""
    right = Counter()
    for number in range(20 * MUTANTS):
        source = random.Random(number)
        kind = source.choice(list(GENERATORS))
        schedule = generate(kind, 2, source.choice([1, 2]), GENERATORS[kind].virtual or 1)
        for _ in range(source.randint(1, 4)):
            schedule = swap(schedule, source)
        for model, harm in _check_against_explorer(schedule).items():
            right[model] += harm is None
    assert right["buffered"] >= right["pair"] >= right["rank"] > 0
