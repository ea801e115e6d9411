"""Interleaved stages in the search: offered, dealt out, held within memory, and chosen where the bubble counts."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
import torch
from torch import nn

from vescale_plans import PlanError
from vescale_plans.search import (
    Candidate,
    Explanation,
    Part,
    Request,
    hardware_of,
    plan_of,
    rank,
    sample_of,
    structure_of,
)
from vescale_plans.search.candidates import VIRTUAL
from vescale_plans.search.decision import schedule
from vescale_plans.search.pricer import Pricer
from vescale_plans.search.pricing.interleaved import Interleaved
from vescale_plans.search.pricing.memory import Held
from vescale_plans.search.stages import moments
from vescale_testkit import slice_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """`head`: a matrix of its own, one "tied" to the table's, or by a "function" of the table's."""

    def __init__(self, blocks, width=64, words=64, head="own"):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        if head != "function":
            self.head = nn.Linear(width, words, bias=False)
        if head == "tied":
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if hasattr(self, "head") else nn.functional.linear(x, self.table.weight)


def structure(blocks, **sizes):
    with torch.device("meta"):
        model = Net(blocks, **sizes)
    return structure_of(model, sample_of(model, torch.arange(6)[None]))


@pytest.fixture(scope="module")
def sixteen():
    return structure(16, width=4096, words=512)


def request(found, world=8, batch=8, memory=1e12, **more):
    return Request(found, world, batch, 2048, hardware_of("h100"), memory, **more)


# ------------------------------------------------------------------------------- the space


@pytest.mark.parametrize(("world", "batch"), slice_of([(4, 8), (8, 8), (8, 12), (6, 12)], 2))
def test_no_two_candidates_are_the_same_plan(world, batch):
    """Neither written out nor by what is computed: each differs in a field of the plan."""
    found = structure(8)
    legal = request(found, world, batch).candidates()
    assert {one.virtual for one in legal} > {1}
    assert len(set(legal)) == len(legal)
    plans = {plan_of(found, one).to_json() for one in legal}
    assert len(plans) == len(legal)


def test_what_is_offered_has_a_part_for_each_stage_and_whole_rounds():
    found = structure(13)
    legal = [one for one in request(found, 16, 32).candidates() if one.virtual > 1]
    assert {(one.pp, one.virtual) for one in legal} == {(2, 2), (2, 3), (2, 4), (4, 2), (4, 3)}
    assert all(one.microbatches % one.pp == 0 for one in legal)
    assert {one.virtual for one in request(found, 16, 32, pin={"virtual": 3}).candidates()} == {3}
    assert {one.virtual for one in request(found, 16, 32, forbid=("virtual",)).candidates()} == {1}
    assert any(one.microbatches == 1 for one in request(found, 16, 32, forbid=("microbatches",)).candidates())


def test_a_plan_is_written_with_its_stages():
    found = structure(13)
    plan = plan_of(found, Candidate(pp=2, dp=2, microbatches=4, virtual=3))
    assert (plan.pipeline.schedule, plan.pipeline.virtual, len(plan.pipeline.cuts)) == ("interleaved", 3, 5)
    assert plan_of(found, Candidate(pp=2, microbatches=4)).pipeline.schedule == "1f1b"


# ------------------------------------------------------------------------------- the choice


def test_they_are_chosen_where_the_bubble_counts_and_not_where_it_does_not(sixteen):
    """With as few microbatches as ranks, waiting is half of a 1F1B step; with many, what is sent more often counts."""
    pinned = {"pp": 8, "tp": 1, "dp": 1, "checkpointing": False}
    few = rank(request(sixteen, batch=8, pin={**pinned, "microbatches": 8}))
    assert few[0].candidate.virtual == 2
    plain = next(one for one in few if one.candidate.virtual == 1)
    assert few[0].cost.pipeline < 0.6 * plain.cost.pipeline
    assert few[0].cost.total < 0.8 * plain.cost.total
    slow = replace(hardware_of("h100"), across=replace(hardware_of("h100").across, bandwidth=1e8), node=1)
    many = rank(replace(request(sixteen, batch=512, pin={**pinned, "microbatches": 512}), hardware=slow))
    assert many[0].candidate.virtual == 1


def test_more_microbatches_in_flight_take_more_memory(sixteen):
    pricer = Pricer(request(sixteen, batch=64))
    ways = [Candidate(pp=8, microbatches=64, virtual=virtual) for virtual in (1, 2)]
    plain, taking_turns = (pricer.evenly(one).memory for one in ways)
    held = Held(pricer._sizes_at(1), ways[0], pricer.request.hardware, 64, 2048)
    more = 7 / 2 * held.kept() / 8 + (23 - 8) * held.received()  # each of 23 half stages is given its own
    assert taking_turns.activations - plain.activations == pytest.approx(more, rel=0.15)
    one, two = (pricer.exactly(one, whole=False).memory for one in ways)
    assert one.total < two.total <= 1.02 * taking_turns.total
    assert (one.parameters, one.states) <= (two.parameters, two.states)
    tight = replace(pricer.request, limit=(one.total + two.total) / 2)
    assert Pricer(tight).exactly(ways[0], whole=False) is not None
    assert Pricer(tight).exactly(ways[1], whole=False) is None
    again = Pricer(tight).exactly(replace(ways[1], checkpointing=True), whole=False)
    assert 0 < len(again.again) < 16
    assert again.memory.total <= tight.limit


def test_a_bound_is_below_every_price(sixteen):
    """For all that is offered, with and without memory for it."""
    for memory in (1e12, 1e10):
        pricer = Pricer(request(sixteen, 16, 16, memory))
        for one in pricer.request.candidates():
            if one.virtual > 1 and (found := pricer.exactly(one, whole=False)) is not None:
                assert pricer.bound(one, whole=False) <= found.cost.total
                assert found.memory.total <= memory
                assert len(found.cuts) == one.pp * one.virtual - 1
                assert pricer.exactly(one, whole=False, below=0.9 * found.cost.total) is None


@pytest.mark.parametrize("head", ["tied", "function"])
def test_a_table_that_is_the_head_too_is_computed_with_at_the_end_and_held_at_both(head):
    """As a head of its own is: the first stage looks up, the last one multiplies."""
    sizes = {"width": 1024, "words": 32768}
    own, tied = structure(8, **sizes), structure(8, **sizes, head=head)
    plans = []
    for virtual in (1, 2):
        ways = [Candidate(pp=2, dp=4, microbatches=4, virtual=virtual, checkpointing=on) for on in (False, True)]
        for one in ways:
            first, other = (Pricer(request(found, 8, 32)).exactly(one, whole=True) for found in (own, tied))
            assert other.cuts == first.cuts
            assert other.cost.busy == pytest.approx(first.cost.busy, rel=1e-9)
            assert other.cost.pipeline == pytest.approx(first.cost.pipeline, rel=1e-9)
            held = replace(other.memory, gathered=0)  # beside the head's gradient, which waits for the table's
            assert held == replace(first.memory, gathered=0)
            plans.append(other.cuts)
    assert plans[0] == ("blocks.5",)  # the head takes as long as two blocks
    alone = [Pricer(request(found, 8, 32)).exactly(Candidate(dp=8), whole=False) for found in (own, tied)]
    assert alone[0].cost.compute == alone[1].cost.compute
    assert alone[0].memory.parameters - alone[1].memory.parameters == 1024 * 32768 * (4 + 2)


def test_a_head_is_not_computed_again(sixteen):
    """It is in no block: what blocks take again does not depend on it."""
    ways, more = [Candidate(dp=8, checkpointing=on) for on in (True, False)], []
    for found in (sixteen, structure(16, width=4096, words=65536)):
        whole, plain = (Pricer(request(found, 8, 32)).evenly(one).cost.busy for one in ways)
        more.append(whole - plain)
    assert more[0] == pytest.approx(more[1], rel=1e-9)
    assert more[0] > 0


# ------------------------------------------------------------------------------- the deal


def size_of(parts, spans, among, again):
    """Bytes of a rank at the fullest of these moments."""
    static = sum(parts[at].static for span in spans for at in span)
    kept = [sum(5 - 4 * (at in again) for at in span) for span in spans]
    return static + max(sum(map(int.__mul__, moment.flight, kept)) for moment in among)


def test_a_deal_fits_and_computes_no_more_again_than_it_must():
    """Of 300 models: what is said of the fullest rank is what its stages keep, and one block less would not fit."""
    random, fitting, tight = Random(0), 0, 0
    for _ in range(300):
        ranks, virtual = random.randint(2, 4), random.choice(VIRTUAL)
        microbatches, size = ranks * random.randint(1, 4), ranks * virtual + random.randint(0, 9)
        parts = [Part(2.0, 3, 5, (0.5, 4)) for _ in range(size)]
        parts[-1] = replace(parts[-1], time=2.0 + 2 * random.random(), static=9)
        free = Interleaved(parts, ranks, microbatches, inf, virtual=virtual).best()
        limit = random.uniform(0.2, 1.05) * free.memory
        found = Interleaved(parts, ranks, microbatches, limit, True, virtual).best()
        if found is None:
            continue
        fitting, tight = fitting + 1, tight + bool(found.again)
        borders = [*found.starts, size]
        assert found.starts[0] == 0
        assert all(start < stop for start, stop in pairwise(borders))
        memories = []
        for one in range(ranks):
            spans = [range(*borders[at : at + 2]) for at in range(one, ranks * virtual, ranks)]
            among = moments(ranks, virtual, microbatches, one)

            memories.append(size_of(parts, spans, among, found.again))
            for at in found.again & {at for span in spans for at in span}:
                assert size_of(parts, spans, among, found.again - {at}) > limit
        assert found.memory == max(memories) <= limit
        assert found.total == pytest.approx(sum(part.time for part in parts) + 0.5 * len(found.again))
        assert found.seconds(microbatches) >= free.seconds(microbatches)
    assert fitting > 100
    assert tight > 50


@pytest.mark.parametrize("heavy", [0.5, 1.5, 2.5, 4.0])
@pytest.mark.parametrize("size", range(4, 10))
def test_of_two_deals_the_faster_one_is_taken_with_what_it_computes_again(size, heavy):
    """Dealt out by time, what lies at the end shares a stage with fewer parts; computed again, that may be the slower
    deal, and yet there is one."""
    parts = [Part(2.0, 1, 1, (0.7, 1)) for _ in range(size - 1)] + [Part(2.0 + heavy, 1, 1, (0.7 + heavy / 3, 1))]
    dealt = Interleaved(parts, 2, 4, inf, "all", 2)
    ways = [one for starts in (dealt._by_time(), dealt._by_number()) if (one := dealt.made(starts)) is not None]
    assert dealt.best().seconds(4) == min(one.seconds(4) for one in ways)


def test_explanations_name_the_schedule(sixteen):
    asked = request(sixteen, pin={"pp": 4, "tp": 1, "dp": 2, "virtual": 2})
    best = rank(asked)
    assert schedule(best[0]).startswith("interleaved 1F1B, 4 ranks with 2 stages each")
    page = Explanation(asked, tuple(best))
    assert "virtual=2" in str(page)
    with pytest.raises(PlanError, match="virtual"):
        request(sixteen, pin={"turns": 2}).candidates()
