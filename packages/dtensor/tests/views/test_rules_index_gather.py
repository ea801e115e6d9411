"""gather, scatter, index_* along one dim: values, gradients, and where nothing is communicated."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


def grid(function, tensors, kinds=(), strict=True, **options):
    """Every placement of the first tensor, with several of the others, on (2, 2)."""

    def work():
        warnings.simplefilter("error" if strict else "ignore", FallbackWarning)
        mesh = mesh_of(2, 2)
        others = [list(placements_for(t.shape, 2, partial=t.is_floating_point())) for t in tensors[1:]]
        for step, first in enumerate(placements_for(tensors[0].shape, 2, kinds=kinds)):
            rest = [every[(7 * step + 3 * i) % len(every)] for i, every in enumerate(others)]
            for given in (True, False):
                placements = [first, *([(R, R)] * len(rest) if given else rest)]
                try:
                    compare(function, tensors, placements, mesh, **options)
                except Exception as error:
                    error.add_note(f"{placements}")
                    raise

    run_ranks(4, work)


def real(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def below(bound, *shape):
    return torch.randint(0, bound, shape, generator=torch.Generator().manual_seed(3))


def clone_then(change):
    """`change` in place on a copy; the copy is what is differentiated."""

    def run(x, *rest):
        y = x * 1
        change(y, *rest)
        return y

    return run


READING = {
    "gather": (lambda x, i: x.gather(1, i), [real(3, 5, 2), below(5, 3, 4, 2)]),
    "gather last": (lambda x, i: torch.gather(x, -1, i), [real(4, 6), below(6, 4, 1)]),
    "gather smaller": (lambda x, i: x.gather(0, i), [real(5, 4), below(5, 3, 2)]),
    "gather keywords": (lambda x, i: torch.gather(index=i, dim=0, input=x), [real(5, 4), below(5, 3, 4)]),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), [real(3, 5, 2), below(5, 3, 4, 1)]),
    "take_along_dim stretched": (lambda x, i: torch.take_along_dim(x, i, dim=0), [real(5, 1), below(5, 2, 3)]),
    "take_along_dim flat": (lambda x, i: torch.take_along_dim(x, i), [real(5, 3), below(15, 4)]),
    "take": (lambda x, i: x.take(i), [real(5, 3), below(15, 4, 3)]),
    "index_select": (lambda x, i: x.index_select(1, i), [real(5, 6, 2), below(6, 3)]),
    "index_select small": (lambda x, i: torch.index_select(x, dim=0, index=i), [real(9, 2), below(9, 2)]),
}


@pytest.mark.parametrize("name", READING)
def test_reading(name):
    grid(*READING[name])


WRITING = {
    "scatter": lambda x, i, s: x.scatter(1, i, s),
    "scatter reduce add": lambda x, i, s: torch.scatter(x.detach(), 1, i, s.detach(), reduce="add"),
    "scatter_add": lambda x, i, s: x.scatter_add(1, i, s),
    "scatter sum": lambda x, i, s: x.scatter_reduce(1, i, s, "sum"),
    "scatter amax": lambda x, i, s: x.scatter_reduce(1, i, s, reduce="amax", include_self=False),
    "scatter mean": lambda x, i, s: x.scatter_reduce(1, i, s, reduce="mean"),
}


@pytest.mark.parametrize("name", WRITING)
def test_writing(name):
    index = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(s))[:3] for s in range(8)])
    index = index.view(4, 2, 3).transpose(1, 2).contiguous()  # no duplicates along dim 1
    grid(WRITING[name], [real(4, 5, 2), index, real(4, 3, 2)])


ROWS = {
    "index_add": lambda x, i, s: x.index_add(1, i, s, alpha=0.5),
    "index_copy": lambda x, i, s: x.index_copy(1, i, s),
    "index_copy keywords": lambda x, i, s: torch.index_copy(input=x, dim=1, index=i, source=s),
    "index_add_": clone_then(lambda x, i, s: x.index_add_(1, i, s)),
    "index_copy_": clone_then(lambda x, i, s: x.index_copy_(1, i, s)),
    "index_fill": lambda x, i, s: x.index_fill(1, i, 2.5) + s.sum(),
    "index_reduce": lambda x, i, s: x.detach().index_reduce(1, i, s.detach(), "prod"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name):
    grid(ROWS[name], [real(3, 5, 2), torch.tensor([4, 1, 2]), real(3, 3, 2)])


IN_PLACE = {
    "scatter_": clone_then(lambda x, i, s: x.scatter_(1, i, s)),
    "scatter_ number": clone_then(lambda x, i, s: x.scatter_(1, i, 2.5)),
    "scatter_add_": clone_then(lambda x, i, s: x.scatter_add_(1, i, s)),
    "index_fill_": clone_then(lambda x, i, s: x.index_fill_(1, i[0, :, 0], 1.5)),
    "masked_scatter_": clone_then(lambda x, i, s: x.masked_scatter_(i[:, :1] > 2, s)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    index = torch.tensor([[4, 1, 2], [0, 3, 1], [2, 4, 0]])[:, :, None].repeat(1, 1, 2)
    grid(IN_PLACE[name], [real(3, 5, 2), index, real(3, 3, 2)], strict=False)


def test_other_forms():
    grid(lambda x, m, s: x.masked_scatter(m, s), [real(3, 4), torch.randn(3, 1) > 0, real(3, 4)])
    grid(lambda x, s: x.select_scatter(s, 1, 2), [real(3, 4, 2), real(3, 2)])
    grid(lambda x, s: torch.slice_scatter(x, s, 1, 1, None, 2), [real(3, 5), real(3, 2)])


def test_searches():
    grid(lambda i: F.one_hot(i, 7), [below(7, 5, 3)])
    grid(lambda i: F.one_hot(i), [below(7, 5, 3)])
    grid(lambda x, b: torch.bucketize(x.detach(), b), [real(5, 3), torch.arange(-1.0, 1.0, 0.5)])
    grid(lambda b, x: torch.searchsorted(b, x.detach()), [torch.randn(3, 4).sort().values, real(3, 5)])
    grid(lambda i, j: torch.isin(i, j), [below(7, 5, 3), below(7, 2)])
    grid(lambda i: torch.unravel_index(i, (3, 7)), [below(21, 5)])


def test_vocabulary_parallel_pick_is_free():
    """The logits stay sharded by vocabulary, the picked ones are partial: nothing moves."""

    def work():
        mesh = mesh_of(2, 2)
        warnings.simplefilter("error", FallbackWarning)
        logits, labels = real(6, 10), below(10, 6, 1)
        pick = lambda x, i: x.gather(-1, i)
        for shards in [(R, S1), (S0, S1), (S1, S1), (S0, S0), (R, InterleavedShard(1, 2))]:
            rows = tuple(S0 if s == S0 else R for s in shards)
            events = compare(pick, [logits, labels], [shards, rows], mesh)
            assert bool(events) == isinstance(shards[1], InterleavedShard), (shards, events)
        one = mesh_of(4)
        assert compare(pick, [real(6, 3), below(3, 6, 1)], [(S1,), (R,)], one) == []

    run_ranks(4, work)


def test_free_where_the_dim_is_whole():
    def work():
        mesh = mesh_of(2, 2)
        warnings.simplefilter("error", FallbackWarning)
        x, index, source = real(5, 4, 6), below(5, 3, 4, 6), real(3, 4, 6)
        assert compare(lambda x, i: x.gather(0, i), [x, index], [(S1, S2), (S1, S2)], mesh) == []
        assert compare(lambda x, i: x.gather(0, i), [x, index], [(R, S2), (S0, S2)], mesh) == []
        given = [(S1, S2)] * 3
        assert compare(lambda x, i, s: x.scatter_add(0, i, s), [x, index, source], given, mesh) == []
        given = [(R, P), (R, R), (R, P)]
        assert compare(lambda x, i, s: x.scatter_add(0, i, s), [x, index, source], given, mesh) == []
        rows = below(5, 3)
        for call in (lambda x, i, s: x.index_add(0, i, s), lambda x, i, s: x.index_copy(0, i, s)):
            where = torch.tensor([4, 0, 3])
            assert compare(call, [x, where, source], [(S1, S2), (R, R), (S1, S2)], mesh) == []
            assert compare(call, [x, where, source], [(S0, S2), (R, R), (R, S2)], mesh) == []  # writes its own rows
        # what every rank adds from its part of the source is partial, and the base enters once
        assert compare(lambda x, i, s: x.index_add(0, i, s), [x, rows, source], [(R, R), (S0, R), (S0, R)], mesh) == []

    run_ranks(4, work)


def test_out_of_range_raises_on_a_sharded_dim():
    def work():
        from vescale_dtensor import distribute_tensor

        x = distribute_tensor(torch.randn(4, 8), mesh_of(4), [S1])
        for call in (lambda: x.gather(1, torch.full((4, 1), 8)), lambda: x.index_select(1, torch.tensor([-1]))):
            with pytest.raises(IndexError, match="out of bounds"):
                call()

    run_ranks(4, work)
