"""The pruned search against brute force on toys of up to eight blocks, and how it does on the largest published job."""

from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import combinations, pairwise, product
from math import inf
from random import Random

import pytest
import torch
from rich.console import Console
from torch import nn

from vescale_plans.search import (
    Candidate,
    Cutter,
    InfeasibleError,
    Part,
    Request,
    hardware_of,
    memory_of,
    rank,
    sample_of,
    sizes_of,
    structure_of,
)
from vescale_plans.search.candidates import candidates
from vescale_plans.search.pricer import Pricer
from vescale_plans.search.pricing.cost import cost_of
from vescale_plans.search.pricing.hardware import Hardware, Numbers
from vescale_plans.search.progress import Bar
from vescale_plans.search.stages import bound_of
from vescale_testkit import slice_of


def by_force(parts, count, microbatches, limit, again):
    """The least seconds of a step over every cut and every choice of blocks to compute again."""
    best = inf
    places = [at for at in range(1, len(parts)) if parts[at].cuttable]
    for starts in combinations(places, count - 1):
        borders = [0, *starts, len(parts)]
        times = []
        for number, (first, past) in enumerate(pairwise(borders)):
            flight = min(microbatches, count - number)
            times.append(inf)
            held = parts[first:past]
            static, fresh = sum(one.static for one in held), sum(one.fresh for one in held)
            before = [(flight, 0)] + [(min(flight, microbatches - 1), fresh)] * (microbatches > 1)
            for flags in product((False, True) if again else (False,), repeat=past - first):
                kept = held[0].received + sum(one.kept - flag * one.again[1] for one, flag in zip(held, flags))
                sizes = [count * kept + sums + held[-1].begins for count, sums in before]
                sizes += [(count - 1) * kept + sums + fresh + held[0].ends for count, sums in before]
                if static + max(sizes) <= limit:
                    time = sum(one.time for one in held) + sum(one.again[0] for one, f in zip(held, flags) if f)
                    times[-1] = min(times[-1], time)
        best = min(best, sum(times) + (microbatches - 1) * max(times))
    return best


def toy(random, size):
    """Blocks of up to three kinds, the first and the last with something around them."""
    kinds = [(random.uniform(1, 3), random.randint(1, 9), random.randint(3, 9)) for _ in range(random.randint(1, 3))]
    parts = []
    for _ in range(size):
        time, static, kept = random.choice(kinds)
        bounds = {name: random.randint(0, 3) for name in ("received", "begins", "ends", "fresh")}
        again = (round(time / 3, 6), kept - 2)
        parts.append(Part(time, static, kept, again, random.random() < 0.9, **bounds))
    parts[0] = replace(parts[0], time=parts[0].time + random.random(), static=parts[0].static + 4)
    parts[-1] = replace(parts[-1], time=parts[-1].time + random.random(), static=parts[-1].static + 4)
    return parts


def test_cuts_equal_brute_force():
    random, feasible, tight = Random(0), 0, 0
    for _ in range(400):
        parts = toy(random, random.randint(1, 8))
        count, microbatches = random.randint(1, len(parts)), random.randint(1, 8)
        limit, again = random.uniform(10, 80), random.random() < 0.7
        cutter = Cutter(parts, count, microbatches, limit, again)
        found, wanted = cutter.best(), by_force(parts, count, microbatches, limit, again)
        if wanted == inf:
            assert found is None
            continue
        feasible += 1
        tight += bool(found.again)
        assert found.seconds(microbatches) == pytest.approx(wanted, rel=1e-12)
        assert found.memory <= limit
        times = [part.time for part in parts]
        assert bound_of(sum(times), max(times), count, microbatches) <= wanted * (1 + 1e-12)
        assert cutter.made(found.starts).seconds(microbatches) == pytest.approx(wanted, rel=1e-12)
    assert feasible > 100
    assert tight > 30


def test_a_bar_shows_what_takes_long_on_the_first_ranks_terminal_alone(monkeypatch):
    cases = [(True, 0.0, "0", True), (True, 60.0, "0", False), (False, 0.0, "0", False), (True, 0.0, "1", False)]
    for terminal, after, rank_of_torchrun, shown in cases:
        monkeypatch.setenv("RANK", rank_of_torchrun)
        console = Console(file=StringIO(), force_terminal=terminal, width=80)
        with Bar(console, after) as bar:
            assert list(bar.over("counting", range(4))) == [0, 1, 2, 3]
            bar.tick("waiting")
        assert ("counting" in console.file.getvalue()) == shown


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Blocks of two kinds, between a table and a head that weigh as much as some blocks."""

    def __init__(self, blocks, width=64, words=512):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 1024 if at % 3 == 1 else 256) for at in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module", params=(2, 5, 8))
def structure(request):
    return structure_of(Toy(request.param), sample_of(Toy(request.param), torch.arange(6)[None]))


MEMORIES = (3e6, 4e6, 6e6, 1e7, 2e7, 1e9)


@pytest.mark.parametrize(("world", "batch"), slice_of([(2, 8), (4, 8), (8, 16), (6, 12), (8, 8)], 2))
@pytest.mark.parametrize("memory", slice_of(MEMORIES, 2))
def test_the_pruned_search_equals_brute_force(structure, world, batch, memory):
    request = Request(structure, world, batch, 32, hardware_of("cpu"), memory)
    pricer = Pricer(request)
    wanted = inf
    for one in request.candidates():
        if one.virtual > 1:  # are dealt out, not searched: what counts is that none is passed over
            found = pricer.exactly(one, whole=False)
            wanted = min(wanted, inf if found is None else found.cost.total)
            continue
        rough = pricer.evenly(one)
        parts = pricer.cutter(one, 0).parts
        room = memory - pricer._working(one)
        step = by_force(parts, one.pp, one.microbatches, room, one.checkpointing)
        waiting = rough.cost.busy / one.microbatches * (one.pp - 1)
        wanted = min(wanted, step + rough.cost.total - rough.cost.busy - waiting)
    if wanted == inf:
        with pytest.raises(InfeasibleError):
            rank(request)
        return
    best = rank(request)[0]
    assert best.cost.total == pytest.approx(wanted, rel=1e-9)
    assert best.memory.total <= memory


def test_the_order_of_candidates_and_the_choice_are_the_same_every_time(structure):
    request = Request(structure, 8, 16, 32, hardware_of("h100"), 1e9)
    assert rank(request) == rank(request)


def test_microbatches_have_as_many_rows_each(structure):
    """Also of a batch that no degree divides, of which ranks of the data axis have unequal parts."""
    odd = 0
    for world, batch in product((1, 2, 3, 4, 6, 8, 12), range(1, 20)):
        legal = list(candidates(structure, world, batch, seq=32))
        assert all(batch % one.microbatches == 0 and one.microbatches <= batch // one.dp for one in legal)
        odd += sum(one.pp > 1 and batch % one.dp > 0 for one in legal)
    assert odd


def test_no_plan_is_called_checkpointing_that_computes_nothing_again(structure):
    """Nor is it cheaper than the same plan without."""
    for memory in MEMORIES:
        try:
            best = rank(Request(structure, 8, 16, 32, hardware_of("h100"), memory))
        except InfeasibleError:
            continue
        assert len({one.candidate for one in best}) == len(best)
        for one in best:
            assert bool(one.again) == one.candidate.checkpointing
    asked = Request(structure, 4, 8, 32, hardware_of("h100"), 1e12)
    pricer = Pricer(asked)
    for candidate in asked.candidates():
        if candidate.checkpointing:
            ways = (candidate, replace(candidate, checkpointing=False))
            free, plain = (pricer.exactly(one, whole=False) for one in ways)
            assert free.candidate == plain.candidate
            assert free.cost.total == pytest.approx(plain.cost.total, rel=1e-12)


@pytest.mark.parametrize(
    ("node", "stride", "size", "inside"),
    [(8, 1, 8, True), (6, 1, 4, False), (6, 1, 3, True), (6, 3, 2, True), (6, 2, 2, False), (8, 4, 4, False)],
)
def test_a_link_is_inside_where_no_group_crosses_a_border(node, stride, size, inside):
    hardware = replace(hardware_of("h100"), node=node)
    groups = [range(first, first + stride * size) for first in range(0, 24 * node, stride * size)]
    crosses = any(group[0] // node != group[-1] // node for group in groups)
    assert crosses != inside
    assert (hardware.link(stride, size) is hardware.inside) == inside
    assert hardware.joining(node).link(stride, size).bandwidth >= hardware.link(stride, size).bandwidth


@pytest.mark.parametrize(
    ("ranks", "node"), [(32, 32), (64, 64), (72, 72), (128, 64), (144, 72), (512, 64), (576, 64), (100, 72)]
)
def test_a_job_over_several_racks_takes_64_of_each_72(ranks, node):
    """Where it consists of such parts, as schedulers deal them out; groups of powers of two then cross no border."""
    joined = hardware_of("gb200").joining(ranks)
    assert joined.node == node
    for size in (8, 32, 64):
        assert joined.crosses(1, size) == (node % size != 0)
    assert hardware_of("h100").joining(128).node == 8
    assert Hardware.from_json(hardware_of("gb200").to_json()).segment == 64


def test_a_group_receives_over_the_links_of_all_its_ranks_in_a_node():
    """Eight ranks of a node that gather the same have eight links for it; one rank in each node has its own."""
    hardware = hardware_of("h100")
    hardware = replace(hardware, inside=replace(hardware.inside, latency=0), across=replace(hardware.across, latency=0))
    inside, own = 1e9 / hardware.inside.bandwidth, 1e9 / hardware.across.bandwidth
    assert hardware.collective_seconds("all_gather", 8, 1e9, 1) == pytest.approx(inside)
    for stride in (1, 2, 4):
        seconds = hardware.collective_seconds("all_gather", 64 // stride, 1e9, stride)
        assert seconds == pytest.approx(own / (8 // stride) + inside)
    assert hardware.collective_seconds("all_gather", 8, 1e9, 8) == pytest.approx(own)
    apart = hardware.collective_seconds("send", 2, 1e9, 8), hardware.collective_seconds("all_to_all", 16, 1e9)
    assert apart == pytest.approx((own, own))  # nobody else in the node wants these
    slow = replace(hardware, inside=replace(hardware.inside, bandwidth=1e9))  # where the way inside is the longer one
    assert slow.collective_seconds("all_gather", 16, 1e9) == pytest.approx(own)


@pytest.mark.parametrize(
    ("node", "stride", "size", "links"), [(8, 1, 16, 8), (8, 2, 8, 4), (8, 1, 12, 4), (6, 1, 4, 2)]
)
def test_the_fewest_links_of_any_group_count(node, stride, size, links):
    hardware = replace(hardware_of("h100"), node=node)
    assert hardware.crosses(stride, size) and hardware.links(stride, size) == links
    groups = [range(first, first + size) for first in range(0, size * node, size)]  # by their places along the axis
    parts = [Counter(rank * stride // node for rank in group) for group in groups]
    assert min(min(part.values()) for part in parts) == links


def test_products_are_near_those_that_were_measured_on_a_h100():
    """XLA's table for sm_90, bfloat16: for moments, so what a training reaches is less, and in proportion."""
    measured = {
        (4096, 4096, 4096): 783e12, (4096, 4096, 2048): 739e12, (4096, 4096, 512): 543e12, (2048, 2048, 2048): 632e12,
        (1024, 2048, 2048): 524e12, (1024, 1024, 2048): 350e12, (512, 512, 4096): 175e12, (1024, 1024, 512): 146e12,
        (256, 256, 4096): 84e12, (4096, 512, 4096): 650e12, (512, 2048, 4096): 431e12,
    }  # fmt: skip
    shares = [2 * m * n * k / hardware_of("h100").product_seconds(m, n, k) / of for (m, n, k), of in measured.items()]
    assert all(0.7 < share < 1.2 for share in shares), shares


def test_what_a_system_holds_per_parameter_is_data(structure):
    """Parameters and gradients in bfloat16, and a copy in float32 that the optimizer steps, are 16 bytes as well."""
    own = hardware_of("h100")
    mixed = replace(own, numbers=Numbers(parameters=2, states=12, gradients=2, sums=1, stepping=0))
    assert Hardware.from_json(mixed.to_json()).numbers == mixed.numbers
    for candidate in (Candidate(dp=4, zero=1, microbatches=2), Candidate(pp=2, dp=2, microbatches=2, zero=1)):
        ours, theirs = (memory_of(sizes_of(structure, 1), candidate, one, 8, 32) for one in (own, mixed))
        assert 2 * ours.parameters == (4 / candidate.dp + 2) * theirs.parameters  # wide ones sharded, narrow ones whole
        assert 3 * ours.states == pytest.approx(2 * theirs.states, abs=16)
        twice = ours.gradients > 2 * theirs.gradients  # when a pipeline's backward ends, with its own beside the sums
        assert ours.gradients == (4 if twice else 2) * theirs.gradients
        assert not twice or candidate.pp > 1
        assert ours.total > theirs.total


def test_a_system_that_adds_up_gradients_as_they_come_holds_one_sum_of_them(structure):
    """Units' shards are added to earlier sums one by one, as torch's FSDP does, or all at a backward's end, as ours:
    until then those of the blocks that it has been through lie beside them."""
    sizes, own = sizes_of(structure, 1), hardware_of("h100")
    come = replace(own, numbers=Numbers(sums=1))
    block = (sizes.held - sizes.outside) / sizes.blocks * 4 / 2
    blocks = [block * through for through in range(1, sizes.blocks)] + [structure.parameters * 4 / 2]
    for zero, more in ((1, 0), (2, 1), (3, 1)):
        candidate = Candidate(dp=2, zero=zero, microbatches=2, checkpointing=True)
        ours, theirs = (memory_of(sizes, candidate, one, 4, 8) for one in (own, come))
        beside = ours.gradients - theirs.gradients
        assert theirs.gradients == structure.parameters * 4 // (2 if zero > 1 else 1)
        assert min(abs(beside - one) for one in (blocks if more else [0])) <= 16


def test_a_system_that_hides_nothing_shows_all_of_a_pipeline_s_transfers(structure):
    sizes, one = sizes_of(structure, 1), Candidate(pp=2, microbatches=4)
    hardware = replace(hardware_of("h100"), node=1, across=replace(hardware_of("h100").across, bandwidth=1e6))
    most, some = (cost_of(sizes, one, replace(hardware, hidden=hidden), 8, 32).pipeline for hidden in (0.0, 0.7))
    assert 3 * some < most < 4 * some


@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e8, 1e10])
def test_no_computation_hides_two_transfers_of_the_data_axis(structure, bandwidth):
    """Reductions and gathers are on the same links: what is hidden of all of them is at most `hidden` of what a rank
    computes."""
    own, sizes = hardware_of("h100"), sizes_of(structure, 1)
    slow = replace(own, node=1, across=replace(own.across, bandwidth=bandwidth))
    for pp, zero, microbatches in product((1, 2), (0, 1, 2, 3), (1, 4)):
        one = Candidate(pp=pp, dp=4, zero=zero, microbatches=microbatches)
        shown, less = (cost_of(sizes, one, replace(slow, hidden=hidden), 16, 32) for hidden in (0.0, own.hidden))
        assert own.hidden > 0 and less.data <= shown.data
        assert shown.data - less.data <= own.hidden * shown.compute * (1 + 1e-9), one
