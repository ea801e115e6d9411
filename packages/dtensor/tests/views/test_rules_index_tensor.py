"""Indices with tensors, lists and masks: reading and writing."""

from __future__ import annotations

import warnings

import pytest
import torch

from vescale_dtensor import FallbackWarning, Partial, Replicate, Shard, distribute_tensor
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
ALL = slice(None)
I3, J3 = torch.tensor([0, -1, 3]), torch.tensor([1, 2, 0])
MANY = torch.tensor([[1, 2, 0], [0, 4, -2]])
MASK = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]]).bool()


def real(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def on_ranks(work, strict=True):
    def run():
        warnings.simplefilter("error" if strict else "ignore", FallbackWarning)
        work()

    run_ranks(4, run, timeout=120)


def checked(function, tensors, placements, mesh):
    try:
        return compare(function, tensors, placements, mesh)
    except Exception as error:
        error.add_note(f"{placements}")
        raise


READ = {
    "first": (lambda i: (i,), [I3]),
    "second": (lambda i: (ALL, i), [J3]),
    "beside an integer": (lambda i: (i, ALL, 1), [I3]),
    "two together": (lambda i, j: (i, j), [I3, J3]),
    "two broadcast": (lambda i, j: (i, j), [MANY, J3[:1]]),
    "two apart": (lambda i, j: (i, ALL, j), [MANY, J3 % 2]),
    "slice, new dim": (lambda i: (slice(1, None), None, i), [J3]),
    "list": (lambda i: (ALL, [0, 2], i), [I3[:2] * 0]),
    "0-dim": (lambda i: (ALL, i), [torch.tensor(2)]),
    "int32": (lambda i: (..., i), [J3.int() % 2]),
    "empty": (lambda i: (i,), [I3[:0]]),
    "mask": (lambda i: i, [MASK]),
    "mask of rows": (lambda i: (i,), [MASK[:, 2]]),
    "mask of columns": (lambda i: (ALL, i), [MASK[2]]),
    "mask of all": (lambda i: i, [torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1)) > 0]),
    "mask, new dim": (lambda i: (i, None), [MASK]),
}


@pytest.mark.parametrize("name", READ)
def test_reading(name):
    index, tensors = READ[name]

    def work():
        x = real(5, 3, 2)
        others = [list(placements_for(t.shape, 2, partial=False)) for t in tensors]
        for step, given in enumerate(placements_for(x.shape, 2)):
            rest = [every[(3 * step) % len(every)] for every in others] if step % 3 else [None] * len(tensors)
            checked(lambda x, *i: x[index(*i)], [x, *tensors], [given, *rest], mesh_of(2, 2))

    on_ranks(work)


def test_embedding_like_on_a_sharded_dim():
    """A small result is partial, from each rank's rows; a large one reads the whole tensor."""

    def work():
        few = checked(lambda x, i: x[i], [real(40, 3), torch.tensor([3, -1, 17])], [(S0, R), (R, R)], mesh_of(2, 2))
        assert few == []
        both = checked(lambda x, i: x[i], [real(40, 4), MANY + 2], [(S0, S1), (R, R)], mesh_of(2, 2))
        assert both == []
        split = checked(lambda x, i: x[i], [real(40, 4), MANY + 2], [(S0, R), (R, S1)], mesh_of(2, 2))
        assert split == []
        pairs = checked(lambda x, i, j: x[i, j], [real(8, 9), I3, J3], [(S0, S1), (R, R), (R, R)], mesh_of(2, 2))
        assert pairs == []
        assert checked(lambda x, i: x[:, i], [real(4, 5, 4), I3], [(S0, S2), None], mesh_of(2, 2)) == []
        assert checked(lambda x, i: x[i], [real(5, 4), torch.arange(4)], [(P, S1), (R, R)], mesh_of(2, 2)) == []
        x = distribute_tensor(torch.randn(5, 4), mesh_of(2, 2), [R, S1])
        assert x[distribute_tensor(torch.arange(4), mesh_of(2, 2), [S0, R])].placements == (S0, S1)
        big = checked(lambda x, i: x[i], [real(5, 3), torch.tensor([3, -1, 0])], [(S0, R), (R, R)], mesh_of(2, 2))
        assert [event.kind for event in big] == ["all_to_all"]  # to the other dim: cheaper than whole

    on_ranks(work)


def test_a_mask_of_rows_keeps_the_columns():
    def work():
        x, mask = real(6, 4), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
        assert checked(lambda x, m: x[m], [x, mask], [(R, S1), (R, R)], mesh_of(2, 2)) == []
        assert distribute_tensor(x.detach(), mesh_of(2, 2), [R, S1])[mask].placements[1] == S1
        plain = real(6, 4).detach()
        checked(lambda m: plain[m], [mask], [(S0, R)], mesh_of(2, 2))
        checked(lambda i: plain[i, 1:], [torch.tensor([0, 2])], [(S0, R)], mesh_of(2, 2))

    on_ranks(work)


WRITE = {name: READ[name] for name in READ if name not in ("two broadcast", "list")} | {
    "integer on a dim": (lambda i: (1, i), [J3]),
}


@in_turns(3)
@pytest.mark.parametrize("name", WRITE)
def test_assignment(name):
    index, tensors = WRITE[name]

    def work():
        x = real(5, 3, 2)
        shape = x[index(*tensors)].shape

        def number(x):
            y = x * 1
            y[index(*tensors)] = 1.5
            return y

        def tensor(x, value, *given):
            y = x * 1
            y[index(*given)] = value
            return y

        values = [real(*shape), *([real(1, *shape[-1:])] if len(shape) > 1 else [])]
        for step, given in enumerate(placements_for(x.shape, 2)):
            checked(number, [x], [given], mesh_of(2, 2))
            value = values[step % len(values)]
            others = list(placements_for(value.shape, 2))
            rest = [others[(5 * step) % len(others)], *[(R, R) if step % 2 else None] * len(tensors)]
            checked(tensor, [x, value, *tensors], [given, *rest], mesh_of(2, 2))

    on_ranks(work, strict=name not in ("beside an integer", "integer on a dim", "slice, new dim", "0-dim"))


def test_assignment_is_local():
    """Rows of a sharded dim are written by who has them; a mask of a number is filled in place."""

    def work():
        def rows(x, value, i):
            y = x * 1
            y[i] = value
            return y

        def fill(x, mask):
            y = x * 1
            y[mask] = -1.0
            return y

        x = real(8, 4)
        assert checked(rows, [x, real(3, 4), I3], [(S0, S1), (R, S1), (R, R)], mesh_of(2, 2)) == []
        assert checked(fill, [x, torch.randn(8, 4) > 0], [(S0, S1), (S0, S1)], mesh_of(2, 2)) == []
        assert checked(fill, [x, torch.randn(8) > 0], [(S0, S1), (S0, R)], mesh_of(2, 2)) == []

    # the mask must be one for all ranks
    torch.manual_seed(0)
    on_ranks(lambda: (torch.manual_seed(0), work()))


def test_index_put():
    calls = [
        lambda x, i, v: x.index_put((i,), v), lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        lambda x, i, v: (x * 1).index_put_((i,), v), lambda x, i, v: (x * 1).index_put_((i,), v, True),
    ]  # fmt: skip

    def work():
        values = list(placements_for((3, 3, 2), 2))
        for number, call in enumerate(calls):
            for step, given in enumerate(placements_for((5, 3, 2), 2)):
                rest = [(R, R), values[(7 * step + number) % len(values)]]
                checked(call, [real(5, 3, 2), I3, real(3, 3, 2)], [given, *rest], mesh_of(2, 2))
        checked(lambda m, v: torch.zeros(5, 3).index_put((m,), v), [MASK, real(4)], [(S0, R), (R, S0)], mesh_of(2, 2))

    on_ranks(work)


def test_positions_are_read_whole():
    def work():
        for call in (torch.nonzero, torch.argwhere, lambda m: m.nonzero(as_tuple=True), lambda m: m.unique()):
            for given in placements_for(MASK.shape, 2, partial=False):
                checked(call, [MASK], [given], mesh_of(2, 2))
        checked(lambda x, m: x.masked_select(m), [real(5, 3), MASK], [(S0, S1), (S0, R)], mesh_of(2, 2))

    on_ranks(work, strict=False)


class Two:
    """An integer to Python by nothing but its `__index__`."""

    def __index__(self) -> int:
        return 2


def test_bounds_of_slices_are_whatever_python_takes_for_an_integer():
    def work():
        whole = real(4, 6).detach()
        x = distribute_tensor(whole, mesh_of(4), (S0,))
        for index in (slice(False, True), slice(None, None, True), (ALL, slice(Two(), None)), slice(Two(), Two())):
            torch.testing.assert_close(x[index].full_tensor(), whole[index], rtol=0, atol=0)
            into, expected = x.clone(), whole.clone()
            into[index], expected[index] = 1.0, 1.0
            torch.testing.assert_close(into.full_tensor(), expected, rtol=0, atol=0)
        with pytest.raises(TypeError):
            x[1.0:2.0]

    on_ranks(work, strict=False)
