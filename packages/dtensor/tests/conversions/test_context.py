"""Context parallelism: attention over a cut sequence, in a ring, by heads and gathered, against one device."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import (
    GradientError,
    InterleavedShard,
    Replicate,
    Shard,
    comm_trace,
    distribute_tensor,
    zigzag,
)
from vescale_dtensor._context.choice import AUTO, GATHER, HEADS, RING, Problem, chosen, pin
from vescale_dtensor._context.heads import kv_heads
from vescale_dtensor._context.tiles import needs, tiles
from vescale_dtensor._layouts.mesh import mesh_of as engine_mesh
from vescale_dtensor._layouts.region import cut
from vescale_dtensor._layouts.state import sharded
from vescale_testkit import mesh_of, run_ranks, slice_of
from vescale_testkit.oracle import compare, spread

SDPA = F.scaled_dot_product_attention
WAYS = (RING, HEADS, GATHER, AUTO)


# --- which rows meet which columns -------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_cover_what_is_seen_once(causal):
    for rows, columns, count, groups in itertools.product((1, 5, 8, 12), (3, 8, 12), (1, 2, 3, 4), (1, 2)):
        if rows % groups or columns % groups:
            continue
        state = sharded(0, groups)
        mine, theirs = cut(state, rows, count), cut(state, columns, count)
        for rank, block in itertools.product(range(count), repeat=2):
            held, places = _places(mine[rank]), _places(theirs[block])
            wanted = torch.tensor([[column <= row or not causal for column in places] for row in held])
            found = torch.zeros(len(held), len(places), dtype=torch.long)
            for tile in tiles(mine[rank], theirs[block], causal):
                part = found[slice(*tile.rows), slice(*tile.columns)]
                part += torch.ones_like(part).tril() if tile.triangle else 1
                assert places[slice(*tile.columns)] == list(range(*tile.places))
            assert torch.equal(found, wanted.long().view_as(found)), (rows, columns, count, groups, rank, block)
            assert needs(mine, theirs, causal)[rank][block] == bool(found.any())


def _places(ranges):
    return [place for start, stop in ranges for place in range(start, stop)]


# --- against one device ------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way(ranks, way):
    def check():
        mesh = mesh_of(ranks)
        pin(engine_mesh(mesh), 0, way)

        def attend(q, kv, value, **options):
            tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (q, kv, value)]
            compare(lambda *t: SDPA(*t, **options), tensors, [(Shard(2),)] * 3, mesh)

        for rows, columns, causal in itertools.product((8, 7, 3), (8, 9), (False, True)):
            attend((2, 4, rows, 4), (2, 4, columns, 4), (2, 4, columns, 4), is_causal=causal, scale=0.3)
        attend((2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 8, 6), is_causal=True, enable_gqa=True)
        attend((2, 4, 8, 4), (2, 1, 8, 4), (2, 1, 8, 4), enable_gqa=True)

    run_ranks(ranks, check)


@pytest.mark.parametrize("way", [RING, HEADS, GATHER])
def test_beside_tensor_and_data_parallelism(way):
    """Heads that another axis has cut, more ranks than heads of keys, and a batch that is cut, too."""

    def check():
        mesh = mesh_of(2, 2)
        pin(engine_mesh(mesh), 0, way)
        for other, kv in itertools.product((Shard(0), Shard(1), Replicate()), (4, 2, 1)):
            shapes = (2, 4, 7, 4), (2, kv, 7, 4), (2, kv, 7, 4)
            tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
            compare(lambda *t: SDPA(*t, is_causal=True, enable_gqa=True), tensors, [(Shard(2), other)] * 3, mesh)

    run_ranks(4, check)


MASKS = ("none", "causal", "boolean", "rows of a batch", "padding", "added", "learned", "window", "documents", "heads")


LAYOUTS = (
    lambda ranks: Shard(2),
    lambda ranks: InterleavedShard(2, 1, zigzag(ranks)),
    lambda ranks: InterleavedShard(2, 1, (*range(ranks), *range(ranks), *reversed(range(ranks)))),
)


def problem(seed):
    """Sizes, a mask's kind, dtype and way of one random problem."""
    draw = random.Random(seed)
    kv = draw.choice((1, 2, 3, 4))
    rows = draw.randint(1, 40)
    return {
        "seed": seed,
        "kind": MASKS[seed % len(MASKS)],
        "way": (RING, HEADS, RING, GATHER, AUTO)[seed // len(MASKS) % 5],
        "layout": LAYOUTS[seed % len(LAYOUTS)],
        "batch": draw.randint(1, 3),
        "heads": kv * draw.choice((1, 2, 4)),
        "kv": kv,
        "rows": rows,
        "columns": rows if draw.random() < 0.7 else draw.randint(1, 40),
        "size": (size := draw.choice((1, 3, 8, 16, 64))),
        "value_size": size if draw.random() < 0.8 else draw.choice((2, 5, 16)),
        "dtype": draw.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16)),
        "scale": draw.choice((None, None, 0.25, 0.5)),  # none so large that its log-sum-exp has no digits left
    }


def made(p):
    """q, k, v, the mask or None, and whether it is causal."""
    generator = torch.Generator().manual_seed(p["seed"])

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, heads, rows, columns = p["batch"], p["heads"], p["rows"], p["columns"]
    at, to = torch.arange(rows)[:, None], torch.arange(columns)
    documents = torch.randint(3, (batch, max(rows, columns)), generator=generator).sort(-1).values
    mask = {
        "boolean": lambda: numbers(rows, columns) > -0.3,
        "rows of a batch": lambda: numbers(batch, 1, rows, columns) > 0,
        "padding": lambda: (to < torch.randint(1, columns + 1, (batch, 1), generator=generator))[:, None, None],
        "added": lambda: numbers(rows, columns).masked_fill(to > at + 3, -torch.inf),
        "learned": lambda: numbers(1, heads, rows, columns).requires_grad_(),
        "window": lambda: (to <= at) & (to > at - 1 - columns // 4),
        "documents": lambda: ((documents[:, :rows, None] == documents[:, None, :columns]) & (to <= at))[:, None],
        "heads": lambda: numbers(heads, 1, columns),
    }.get(p["kind"], lambda: None)()
    q = numbers(batch, heads, rows, p["size"])
    k, v = numbers(batch, p["kv"], columns, p["size"]), numbers(batch, p["kv"], columns, p["value_size"])
    return [q, k, v], mask, p["kind"] == "causal"


def solve_problem(p, mesh):
    """The largest of the errors of the value and of gradients, in the norm of each, and what one device's are."""
    pin(engine_mesh(mesh), 0, p["way"])
    tensors, mask, causal = made(p)
    options = {"is_causal": causal, "scale": p["scale"], "enable_gqa": p["heads"] != p["kv"]}
    seed = torch.randn((*tensors[0].shape[:-1], p["value_size"]), generator=torch.Generator().manual_seed(1)).double()
    found = []
    for dtype, is_sharded in ((torch.float64, False), (p["dtype"], False), (p["dtype"], True)):
        given = [t.detach().to(dtype) for t in tensors]
        if mask is not None:
            given.append(mask.detach() if mask.dtype == torch.bool else mask.detach().to(dtype))
        differentiable = [i for i in range(len(given)) if i < 3 or mask.requires_grad]
        if is_sharded:
            places = [(p["layout"](mesh.size()),)] * 3 + [(Replicate(),)]
            given = [spread(t, mesh, place) for t, place in zip(given, places)]
        for i in differentiable:
            given[i] = given[i].detach().requires_grad_()
        out = SDPA(*given, **options)
        out.backward(seed.to(dtype))
        results = [out, *(given[i].grad for i in differentiable)]
        found.append([(r.full_tensor() if is_sharded else r).detach().double() for r in results])
    exact, one, many = found
    least = max(float(e.norm()) for e in exact) / 10  # a gradient may be nothing but rounding
    return max(
        tuple(float((each - e).norm() / max(float(e.norm()), least)) for each in (m, o))
        for e, o, m in zip(exact, one, many)
    )


BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_problems(ranks):
    """A third of 300 each, all with VESCALE_GRID=full."""

    def check():
        mesh = mesh_of(ranks)
        for seed in slice_of(range(ranks, 300 + ranks, 3), 6):
            p = problem(seed)
            ours, theirs = solve_problem(p, mesh)
            assert ours <= 1.5 * theirs + BOUND[p["dtype"]], (ours, theirs, p)

    run_ranks(ranks, check)


# --- what travels ------------------------------------------------------------------


def test_traffic_is_the_formulas():
    def check():
        ranks, batch, heads, kv, length, size = 4, 2, 8, 4, 32, 4
        mesh = mesh_of(ranks)
        rank, part = torch.distributed.get_rank(), length // ranks
        key = 2 * batch * kv * part * size * 4  # bytes of a rank's keys and values
        query = 2 * batch * heads * part * size * 4  # of its queries and result
        expected = {
            (RING, False): ((ranks - 1) * key, ranks - 1, 2 * (ranks - 1) * key, 2 * (ranks - 1)),
            # backward: the blocks before this rank's come, and gradients of its own from the ranks after it
            (RING, True): (rank * key, rank, rank * key + (ranks - 1 - rank) * key, ranks - 1),
            (HEADS, False): ((ranks - 1) * (query + key) // ranks, 2, (ranks - 1) * (query + key) // ranks, 2),
            (GATHER, False): ((ranks - 1) * key, 2, (ranks - 1) * key, 2),
        }
        for (way, causal), wanted in expected.items():
            pin(engine_mesh(mesh), 0, way)
            shapes = (batch, heads, length, size), (batch, kv, length, size), (batch, kv, length, size)
            given = [distribute_tensor(torch.randn(shape), mesh, [Shard(2)]).requires_grad_() for shape in shapes]
            with comm_trace() as forward:
                out = SDPA(*given, is_causal=causal, enable_gqa=True)
            with comm_trace() as backward:
                out.sum().backward()
            found = [sum(e.received for e in forward.events), sum(e.count for e in forward.events)]
            moves = [event for event in backward.events if event.cause.function == "scaled_dot_product_attention"]
            found += [sum(e.received for e in moves), sum(e.count for e in moves)]
            assert tuple(found) == wanted, (way, causal, found, wanted)

    run_ranks(4, check)


def test_blocks_that_a_mask_leaves_empty_are_not_sent():
    """A window of a block's length: each rank needs the block before its own, and no other; asked once per mask."""

    def check():
        ranks, length, size = 4, 32, 4
        mesh = mesh_of(ranks)
        pin(engine_mesh(mesh), 0, RING)
        at, to = torch.arange(length)[:, None], torch.arange(length)
        mask = distribute_tensor((to <= at) & (to > at - length // ranks), mesh, [Shard(0)])
        given = [distribute_tensor(torch.randn(1, 2, length, size), mesh, [Shard(2)]) for _ in range(3)]
        with comm_trace() as trace:
            for _ in range(3):
                SDPA(*given, attn_mask=mask)
        blocks = [event.received for event in trace.events if event.kind == "ring"]
        assert sum(blocks) == 3 * (2 * 2 * length // ranks * size * 4) * (torch.distributed.get_rank() > 0)
        assert sum(event.kind == "blocks_seen" for event in trace.events) == 1

    run_ranks(4, check)


# --- the choice, and what a ring cannot --------------------------------------------


def test_choice_says_why():
    long = Problem(ranks=4, rows=4096, columns=4096, heads=32, key_heads=8, query_bytes=1024, key_bytes=1024)
    assert chosen(long, AUTO, True).way == RING and "hide" in chosen(long, AUTO, True).reason
    short = Problem(ranks=4, rows=8, columns=8, heads=4, key_heads=4, query_bytes=64, key_bytes=64)
    assert chosen(short, AUTO, True).way == GATHER and "one message" in chosen(short, AUTO, True).reason
    many = Problem(ranks=8, rows=512, columns=512, heads=32, key_heads=32, query_bytes=1024, key_bytes=1024)
    assert chosen(many, AUTO, True).way == HEADS
    assert chosen(many, AUTO, False).way == RING
    assert chosen(many, HEADS, False).way == RING and "do not divide" in chosen(many, HEADS, False).reason
    assert [kv_heads(8, kv, 4) for kv in (8, 4, 2, 1)] == [8, 4, 4, 4]
    assert kv_heads(6, 2, 4) is None and kv_heads(6, 2, 3) == 6


def test_a_second_derivative_of_a_ring_raises():
    def check():
        mesh = mesh_of(2)
        pin(engine_mesh(mesh), 0, RING)
        given = [distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_() for _ in range(3)]
        with pytest.raises(GradientError, match="second derivative"):
            torch.autograd.grad(SDPA(*given).sum(), given, create_graph=True)

    run_ranks(2, check)
