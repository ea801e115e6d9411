"""A write at the end of a chain of views reaches the base as on one device, or raises: whatever lies between, held or
not."""

import random

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import Partial, Replicate, Shard, ViewError, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

SHAPE = (6, 4, 5)
CHAINS = 60


def select(dim):
    return lambda t: t.select(dim, 0)


def split(dim):
    return lambda t: t.split(1, dim)[0]


# name -> views of a shape, or None where there are none; each is drawn with its arguments
VIEWS = {
    "select": lambda draw, x: select(draw.randrange(x.ndim)) if x.ndim > 1 else None,
    "last": lambda draw, x: (lambda t: t[-1]) if x.ndim > 1 else None,
    "slice": lambda draw, x: (lambda t: t[:-1]) if x.shape[0] > 1 else None,
    "tail": lambda draw, x: (lambda t: t[..., 1:]) if x.shape[-1] > 1 else None,
    "flat": lambda draw, x: lambda t: t.flatten(),
    "view": lambda draw, x: (lambda t: t.view(2, -1)) if x.is_contiguous() and x.numel() % 2 == 0 else None,
    "transpose": lambda draw, x: (lambda t: t.transpose(0, -1)) if x.ndim > 1 else None,
    "unsqueeze": lambda draw, x: lambda t: t.unsqueeze(0),
    "chunk": lambda draw, x: (lambda t: t.chunk(2)[-1]) if x.shape[0] > 1 else None,
    "split": lambda draw, x: split(draw.randrange(x.ndim)),
    "unbind": lambda draw, x: (lambda t: t.unbind(-1)[0]) if x.ndim > 1 else None,
    "diagonal": lambda draw, x: (lambda t: t.diagonal(0, 0, 1)) if x.ndim > 1 else None,
    "unfold": lambda draw, x: (lambda t: t.unfold(0, 2, 2)) if x.shape[0] > 1 else None,
    "detach": lambda draw, x: lambda t: t.detach(),
    "data": lambda draw, x: lambda t: t.data,
}
WRITES = {
    "zero_": lambda t: t.zero_(),
    "mul_": lambda t: t.mul_(2),
    "add_": lambda t: t.add_(torch.ones(tuple(t.shape))),
    "fill_": lambda t: t.fill_(3.0),
    "[...] =": lambda t: t.__setitem__(..., 7.0),
    "copy_": lambda t: t.copy_(torch.full(tuple(t.shape), 5.0)),
}


def chain(seed):
    """Two to four views, a write, and whether what lies between is held."""
    draw = random.Random(seed)
    value, views = torch.zeros(SHAPE), []
    while len(views) < 2 + seed % 3:
        name = draw.choice(list(VIEWS))
        view = VIEWS[name](draw, value)
        if view is not None:
            value = view(value)
            views.append((name, view))
    return views, draw.choice(list(WRITES)), draw.random() < 0.5


def written(base, seed):
    views, write, holds = chain(seed)
    held, value = [], base
    for _, view in views:
        value = view(value)
        if holds:
            held.append(value)
    WRITES[write](value)
    return value


def on_rank(sizes, placements):
    """Seeds whose result is wrong, or that not all ranks refuse though somebody holds what lies between, and how many
    were refused. What nobody holds is gone when gloo's thread has let go of it, which may be later on one rank."""
    mesh, wrong, refused = mesh_of(*sizes), [], 0
    for seed in range(CHAINS):
        whole = torch.arange(120.0).view(SHAPE)
        base = distribute_tensor(whole, mesh, placements)
        try:
            end = written(base, seed)
        except ViewError:
            end = None
        refusals = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, end is None)
        refused += end is None
        if any(refusals):
            if not all(refusals) and chain(seed)[2]:
                wrong.append((seed, [name for name, _ in chain(seed)[0]], chain(seed)[1:], refusals))
            continue
        expected = whole.clone()
        value = written(expected, seed)
        if not (torch.equal(base.full_tensor(), expected) and torch.equal(end.full_tensor(), value)):
            wrong.append((seed, [name for name, _ in chain(seed)[0]], chain(seed)[1]))
    return wrong, refused


@pytest.mark.parametrize(
    "sizes, placements",
    [
        ((2,), [Shard(0)]),
        ((2,), [Shard(2)]),
        ((2,), [Replicate()]),
        ((2,), [Partial()]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Replicate(), Shard(2)]),
    ],
    ids=str,
)
def test_a_write_at_the_end_of_a_chain_reaches_the_base_or_raises(sizes, placements):
    for wrong, refused in run_ranks(2 ** len(sizes), on_rank, sizes, placements):
        assert not wrong
        assert refused < CHAINS if placements == [Replicate()] else refused <= CHAINS
