"""Basic indices: reading and writing with integers, slices, None and Ellipsis."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._errors import ViewError
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
ALL = slice(None)

INDICES = [
    0, (ALL, -1), (..., 0), (..., slice(1, None)), (..., slice(None, 1)), (ALL, None, ALL, slice(None, 2)), None,
    (None, ..., None), (slice(1, 4, 2), ..., -2), (ALL, slice(None, 2)), (ALL, slice(1, 5, 3), None), slice(4, None),
    slice(2, 2), (slice(0, 5), slice(-6, 99)), (1, 2, 0), (slice(-2, None), slice(1, -1), slice(0, 1)), (), ...,
    (numpy.int64(3), slice(numpy.int64(1), None)),
]  # fmt: skip


def real(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def reader(index):
    return lambda x: x[index]


def writer(index):
    """Writes a number, or the value given, to a copy."""

    def write(x, value=2.5):
        y = x * 1
        y[index] = value
        return y

    return write


def on_ranks(work, ranks=4):
    def strict():
        warnings.simplefilter("error", FallbackWarning)
        work()

    run_ranks(ranks, strict, timeout=120)


def checked(function, tensors, placements, mesh, **options):
    try:
        return compare(function, tensors, placements, mesh, **options)
    except Exception as error:
        error.add_note(f"{placements}")
        raise


def test_every_placement():
    def work():
        x = real(5, 6, 3)
        for number, index in enumerate(INDICES):
            for given_ in list(placements_for(x.shape, 2))[number % 2 :: 2]:
                checked(reader(index), [x], [given_], mesh_of(2, 2))
            for given_ in placements_for(x.shape, 1):
                checked(reader(index), [x], [given_], mesh_of(4))

    on_ranks(work)


def test_interleaved():
    def work():
        x = real(8, 3)
        cuts = [InterleavedShard(0, 2), InterleavedShard(0, 4)]
        for index in (5, slice(1, 4), slice(1, 8, 3), (ALL, 1), (0, 1)):
            for cut in cuts:
                for given_ in [(cut, R), (R, cut), (P, cut), (S0, cut), (cut, S1)]:
                    try:
                        distribute_tensor(x.detach(), mesh_of(2, 2), given_)
                    except RuntimeError:
                        continue
                    checked(reader(index), [x], [given_], mesh_of(2, 2))

    on_ranks(work)


def test_no_communication():
    free = [
        ((ALL, -1), (S0, S1)), ((ALL, 0), (S0, S2)), ((ALL, 0), (S1, S1)), (0, (S0, S2)), (0, (P, S0)),
        ((..., slice(1, None)), (S0, S1)), ((..., slice(None, 2)), (S0, S2)), ((ALL, ALL, None), (S2, S1)),
        ((ALL, slice(None, 2)), (R, P)), ((slice(0, 8), slice(-4, None)), (S0, S1)),
    ]  # fmt: skip

    def work():
        for index, given_ in free:
            assert checked(reader(index), [real(8, 4, 4)], [given_], mesh_of(2, 2)) == [], (index, given_)
        x = distribute_tensor(torch.randn(8, 4, 4), mesh_of(2, 2), [S0, S1])
        assert x[:, 0].placements == (S0, P) and x[:, :, None, :2].placements == (S0, S1)
        assert x[:, :3].placements != (S0, P)  # a long slice of a sharded dim is made whole

    on_ranks(work)


def test_methods():
    calls = [
        lambda x: x.narrow(1, 1, 4), lambda x: x.narrow(0, 1, 1), lambda x: x.narrow(1, 0, 6),
        lambda x: x.narrow(0, -2, 2), lambda x: x.narrow(1, torch.tensor(1), 2), lambda x: x.select(-1, 1),
        lambda x: torch.select(x, dim=0, index=-1),
        lambda x: torch.narrow_copy(x.detach(), 1, 2, 2), lambda x: torch.select_copy(x, 0, 1),
        lambda x: torch.slice_copy(x, 1, 1, 3),
    ]  # fmt: skip

    def work():
        for number, call in enumerate(calls):
            for given_ in list(placements_for((5, 6, 3), 2))[number % 3 :: 3]:
                checked(call, [real(5, 6, 3)], [given_], mesh_of(2, 2))

    on_ranks(work)


def test_a_bool_a_list_and_an_integer_are_not_the_same_index():
    def work():
        warnings.simplefilter("ignore", FallbackWarning)
        x = real(3, 2, 2)
        for index in (1, True, False, [1], (1, 0), [1, 0], [[1, 0], [0, 1]], [True, False, True], numpy.array([0, 1])):
            for given_ in [(R, R), (S0, S1), (S1, P)]:
                checked(reader(index), [x], [given_], mesh_of(2, 2))

    on_ranks(work)


def test_errors_are_torchs():
    def work():
        warnings.simplefilter("ignore", FallbackWarning)
        x = distribute_tensor(torch.randn(5, 4), mesh_of(4), [S0])
        for index, kind in [
            (5, IndexError),
            ((0, -5), IndexError),
            ((0, 0, 0), IndexError),
            (slice(0, 1, -1), ValueError),
        ]:
            with pytest.raises(kind):
                x[index]
        assert len(list(zip(range(9), x))) == 5  # iteration ends by itself

    on_ranks(work)


def test_a_view_of_another_ranks_shard_is_written_by_an_index_alone():
    def work():
        x = distribute_tensor(torch.zeros(4, 4), mesh_of(4), [S0])
        with pytest.raises(ViewError):
            x.select(0, 1).fill_(1.0)
        x[1].fill_(1.0)
        assert x.full_tensor().sum() == x.full_tensor()[1].sum() == 4
        y = distribute_tensor(torch.zeros(4, 4), mesh_of(4), [S1])
        y[1].fill_(1.0)
        y[2:] += 1.0
        assert y.full_tensor().sum() == 12

    on_ranks(work)


def test_rows_of_other_ranks_are_copied_into_a_tensor_as_the_error_says():
    """`x[2] = x[0]` reads a view that is a copy here: the error's first remedy is what works."""

    def work():
        for spread in (S0, S1, R):
            refused, x = (
                distribute_tensor(torch.arange(16.0).view(4, 4), mesh_of(4), [spread]) for _ in range(2)
            )
            if spread == S0:
                with pytest.raises(ViewError) as caught:
                    refused[2] = refused[0]  # the traceback keeps the view
                assert caught.value.remedies[0][0] == "view.clone()"
            x[2] = x[0].clone()
            whole = torch.arange(16.0).view(4, 4)
            whole[2] = whole[0]
            assert torch.equal(x.full_tensor(), whole)

    on_ranks(work)


WRITTEN = [
    0, (ALL, -1), (..., slice(1, None)), (None, slice(1, 4), 2), (slice(0, 5, 2), slice(1, 6, 3)), ..., (1, 2, 0),
    (slice(2, 2),), (ALL, slice(None, 2), None),
]  # fmt: skip


def test_assignment():
    """Self keeps its layout and is never gathered; the value is brought to it."""

    def work():
        x = real(5, 6, 3)

        for which, index in enumerate(WRITTEN):
            shape = x[index].shape
            values = [real(*shape), *([real(1, *shape[-1:])] if shape else [])]
            for step, given_ in enumerate(list(placements_for(x.shape, 2))):
                if (step + which) % 2 == 0:
                    checked(writer(index), [x], [given_], mesh_of(2, 2))
                for value in values:
                    others = list(placements_for(value.shape, 2))
                    if (step + which) % 3 == 0:
                        checked(writer(index), [x, value], [given_, others[(5 * step) % len(others)]], mesh_of(2, 2))

    on_ranks(work)


def test_assignment_without_communication():
    def work():
        for index, given_, other in [
            ((ALL, 0), (S0, S2), (S0, S1)), ((ALL, 0), (S0, S1), (S0, R)), (slice(1, 3), (S0, S1), (R, S1)),
            ((..., slice(1, None)), (P, S0), (P, S0)),
        ]:  # fmt: skip
            x = real(4, 4, 4)
            assert checked(writer(index), [x, real(*x[index].shape)], [given_, other], mesh_of(2, 2)) == [], index
            assert checked(writer(index), [x, real(1)], [given_, None], mesh_of(2, 2)) == [], index
        plain = torch.zeros(3, 2)
        plain[1] = distribute_tensor(torch.ones(2), mesh_of(4), [R])
        assert plain.sum() == 2

    on_ranks(work)


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    index = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-size - 1, size + 1)
        entry = st.integers(-size, size - 1) | st.builds(slice, bound, bound, st.none() | st.integers(1, 3))
        index += draw(st.lists(st.none(), max_size=1)) + [draw(entry)]
    if draw(st.booleans()) and len([i for i in index if i is not None]) == len(shape):
        index.insert(draw(st.integers(0, len(index))), ...)
    placement = st.sampled_from([R, P, *map(Shard, range(len(shape)))])
    return shape, tuple(index), (draw(placement), draw(placement))


@in_turns(3)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(cases(), min_size=15, max_size=30))
def test_random_indices(many):
    def work():
        for shape, index, given_ in many:
            try:
                checked(reader(index), [real(*shape)], [given_], mesh_of(2, 2))
                checked(writer(index), [real(*shape)], [given_], mesh_of(2, 2))
            except Exception as error:
                error.add_note(f"{shape} {index}")
                raise

    on_ranks(work)


def test_masks_and_labels():
    """Partial booleans and integers are summed exactly."""

    def work():
        mask = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) > 0
        for x in (mask, mask.int(), mask.long() * 7 - 3):
            for index in ((..., slice(1, None)), (ALL, 0), 3, (ALL, None, None, slice(None, 2))):
                for given_ in [(S0, S1), (S1, R), (R, S0)]:
                    checked(reader(index), [x], [given_], mesh_of(2, 2))
        for _ in range(3):  # the second time takes the short way through dispatch
            x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh_of(4), [S0])
            assert x[2].full_tensor().tolist() == [6.0, 7.0, 8.0]
            with torch.no_grad():
                assert x[2].placements == (P,)

    on_ranks(work)
