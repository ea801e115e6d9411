"""Every fill, bitwise: the shard is its part of what stock torch draws on one CPU device, and so is the generator.

The grid is ops x dtypes x layouts on meshes (4,), (2, 2) and (2, 4) x sizes; a part of it runs, all of it with
VESCALE_GRID=full. Beside it, shapes and layouts that hypothesis makes up.
"""

import itertools
import os
import warnings

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_rng
from vescale_dtensor import (
    DTensor,
    FallbackWarning,
    InterleavedShard,
    Partial,
    PlacementError,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
)
from vescale_rng._cpu import stream
from vescale_testkit import fake_world, in_turns, mesh_of, raises_on_all, run_ranks, slice_of
from vescale_testkit.oracle import shard_of

R, P, S = Replicate(), Partial(), Shard
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64,)
ALL = (*FLOATS, *INTEGERS)


def of_probabilities(dtype):
    """Probabilities of that dtype, broadcast over all dims but the last."""

    def fill(x):
        p = torch.linspace(0, 1, x.shape[-1]).to(dtype)
        return x.bernoulli_(p)

    return fill


FILLS = {
    "uniform_": (lambda x: x.uniform_(-1, 2), FLOATS),
    "normal_": (lambda x: x.normal_(1, 2), FLOATS),
    "exponential_": (lambda x: x.exponential_(0.7), FLOATS),
    "cauchy_": (lambda x: x.cauchy_(1, 2), FLOATS),
    "geometric_": (lambda x: x.geometric_(0.3), ALL),
    "log_normal_": (lambda x: x.log_normal_(0.1, 0.5), FLOATS),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), ALL),
    "bernoulli_ of f32": (of_probabilities(torch.float32), ALL),
    "bernoulli_ of f64": (of_probabilities(torch.float64), ALL),
    "bernoulli_ of f16": (of_probabilities(torch.float16), ALL),
    "random_": (lambda x: x.random_(), ALL),
    "random_ to": (lambda x: x.random_(100), ALL),
    "random_ from to": (lambda x: x.random_(-20, 100), ALL),
    "random_ 2^40": (lambda x: x.random_(0, 2**40), INTEGERS),
    "random_ all": (lambda x: x.random_(-(2**63), None), INTEGERS),
}
LIKES = {
    "rand_like": (torch.rand_like, FLOATS),
    "randn_like": (torch.randn_like, FLOATS),
    "randint_like": (lambda x: torch.randint_like(x, 2, 9), ALL),
    "rand_like f64": (lambda x: torch.rand_like(x, dtype=torch.float64), FLOATS),
    "bernoulli": (lambda x: torch.bernoulli(x.abs() / 9), FLOATS),
    "bernoulli of a number": (lambda x: torch.bernoulli(x, 0.3), ALL),
    "normal of mean": (lambda x: torch.normal(x, 2.0), FLOATS),
    "normal of std": (lambda x: torch.normal(1.0, x.abs()), FLOATS),
    "normal of both": (lambda x: torch.normal(x, x.abs()), FLOATS),
}
INITS = {
    "init.normal_": lambda x: nn.init.normal_(x, 0, 0.02),
    "init.uniform_": lambda x: nn.init.uniform_(x),
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, 0, 1, -1, 1),
    "init.trunc_normal_, rarely inside": lambda x: nn.init.trunc_normal_(x, 0, 1, 1.5, 1.6),
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "init.kaiming_normal_": lambda x: nn.init.kaiming_normal_(x),
    "init.xavier_uniform_": lambda x: nn.init.xavier_uniform_(x),
    "init.xavier_normal_": lambda x: nn.init.xavier_normal_(x),
}
EVERY = {
    **FILLS,
    **LIKES,
    **{name: (fill, FLOATS) for name, fill in INITS.items()},
    "init.orthogonal_": (nn.init.orthogonal_, FLOATS[:2]),
    "init.sparse_": (lambda x: nn.init.sparse_(x, 0.3), FLOATS),
}
NEEDS_TWO_DIMS = ("kaiming", "xavier", "orthogonal", "sparse")
GATHERS = ("orthogonal", "sparse")

LINE = [(R, R), (P, R), (R, P), (S(0), R), (R, S(0)), (S(0), S(0)), (P, S(0))]
PLANE = [*LINE, (S(0), S(1)), (S(1), S(0)), (S(1), S(1)), (S(1), P), (P, P)]
ODD = [
    (InterleavedShard(0, 2), R),
    (R, InterleavedShard(1, 3)),
    (S(0), InterleavedShard(1, 3)),
    (InterleavedShard(0, 2), S(0)),
    (RaggedShard((0,), (1, 3)), R),
    (RaggedShard((0,), (3, 1)), S(1)),
    (R, RaggedShard((1,), (0, 1))),
]


def layouts(shape):
    """(mesh, placements) for a shape; those that do not divide it are left out on the ranks."""
    places = [*PLANE, *ODD] if len(shape) > 1 else [*LINE, (InterleavedShard(0, 2), R), (RaggedShard((0,), (1, 3)), R)]
    found = [((2, 2), one) for one in places]
    single = {one[0] for one in places} - {RaggedShard((0,), (1, 3)), RaggedShard((0,), (3, 1))}
    return found + [((4,), (one,)) for one in sorted(single, key=repr)]


SHAPES = [(1,), (15,), (16,), (17,), (1000,), (1, 1), (3, 5), (4, 4), (1, 17), (40, 25), (7, 12, 12)]


def same(function, value, device_mesh, placements, generator=False):
    """Checks one case; returns whether the layout fits the shape. A cached normal waits in the generator."""
    torch.manual_seed(5)
    torch.empty(1).normal_()
    start = torch.get_rng_state()
    wanted = function(value.clone())
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    try:
        sharded = distribute_tensor(value, device_mesh, placements)
    except PlacementError:
        return False
    found = function(sharded)
    case = f"{list(value.shape)} {value.dtype} {placements}"
    assert torch.equal(torch.get_rng_state(), after), f"the generator: {case}"
    assert type(found) is DTensor and found.dtype == wanted.dtype, case
    layout = found._layout.base
    mine = shard_of(wanted, layout, layout.mesh.coordinate)
    if layout.is_partial and any(at for at, p in zip(layout.mesh.coordinate, placements) if isinstance(p, Partial)):
        mine = torch.zeros_like(mine)
    local = found.to_local()
    assert bits(local).equal(bits(mine)), f"{case}\n{local}\n{mine}"
    return True


def bits(tensor):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(kind)


def value_of(shape, dtype):
    return torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(function, *args, timeout=120, ranks=4):
    """On four ranks, or eight, each with this package's rules."""

    def on_rank():
        assert vescale_rng.__version__
        return function(*args)

    return run_ranks(ranks, on_rank, timeout=timeout)


def on_ranks(name, cases):
    function, _ = EVERY[name]
    warnings.simplefilter("ignore")  # float16 cannot hold all of random_'s integers
    if not name.split(".")[-1].startswith(GATHERS):
        warnings.simplefilter("error", FallbackWarning)
    count = 0
    for (sizes, placements), dtype, shape in cases:
        count += same(function, value_of(shape, dtype), mesh_of(*sizes), placements)
    return count


def cases_of(name):
    """(mesh and placements, dtype, shape) of a fill's part of the grid."""
    shapes = [s for s in SHAPES if len(s) > 1] if any(word in name for word in NEEDS_TWO_DIMS) else SHAPES
    if any(word in name for word in GATHERS):
        shapes = [shape for shape in shapes if len(shape) == 2]
    return [(one, dtype, shape) for shape in shapes for one in layouts(shape) for dtype in EVERY[name][1]]


@in_turns(3)
@pytest.mark.parametrize("name", EVERY)
def test_every_fill(name):
    counts = run(on_ranks, name, slice_of(cases_of(name), 12), timeout=300)
    assert len(set(counts)) == 1 and counts[0] > 10


@pytest.mark.parametrize("name", EVERY)
def test_every_fill_on_eight_ranks(name):
    cases = [(((2, 4), one[1]), *rest) for one, *rest in cases_of(name) if one[0] == (2, 2)]
    counts = run(on_ranks, name, slice_of(cases, 60), ranks=8, timeout=300)
    assert len(set(counts)) == 1 and counts[0] > 0


@st.composite
def made_up(draw):
    """A fill's name, and one case for it: up to three dims, none or few elements to each, any placement on any axis."""
    name = draw(st.sampled_from([name for name in EVERY if not any(word in name for word in NEEDS_TWO_DIMS)]))
    shape = tuple(draw(st.lists(st.integers(0, 19), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    place = st.one_of(
        st.just(R), st.just(P), st.builds(S, dims), st.builds(InterleavedShard, dims, st.integers(2, 3))
    )  # fmt: skip
    sizes = draw(st.sampled_from([(4,), (2, 2)]))
    places = tuple(draw(st.lists(place, min_size=len(sizes), max_size=len(sizes))))
    return name, [((sizes, places), draw(st.sampled_from(EVERY[name][1])), shape)]


@settings(max_examples=400 if os.environ.get("VESCALE_GRID") == "full" else 60, deadline=None)
@given(made_up())
def test_shapes_and_layouts_made_up(case):
    run(on_ranks, *case)


# More than a chunk: what is skipped, what a chunk's border cuts, the last chunk's remainder.
BIG = [(1 << 20) + 3, (1 << 20) + 17, (1 << 18) + 15]


@pytest.mark.parametrize("name", [*FILLS, "randn_like"])
def test_more_than_a_chunk(name):
    shapes = [*((size,) for size in BIG), (1021, 1027), (3, 600, 700)]
    cases = [
        (one, dtype, shape)
        for shape in shapes
        for one in (((4,), (S(0),)), ((2, 2), (S(0), S(0))), ((2, 2), (P, S(0))), ((2, 2), (S(1), S(0))))
        for dtype in EVERY[name][1]
        if len(shape) > 1 or S(1) not in one[1]
    ]
    run(on_ranks, name, slice_of(cases, 17), timeout=600)


class Allocations(TorchDispatchMode):
    """The largest memory that any operator's result lies in."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", ["uniform_", "normal_", "bernoulli_"])
def test_memory_beside_the_shard_is_bounded(name):
    with fake_world(64):
        for shape, place in (((1 << 22,), S(0)), ((1 << 11, 1 << 11), S(1))):
            x = empty(*shape, device_mesh=mesh_of(64), placements=[place], dtype=torch.float64)
            for own in (x, x.t() if x.ndim > 1 else x):
                with Allocations() as seen:
                    EVERY[name][0](own)
                assert seen.largest <= 8 << 20  # the whole is 32 MiB, the bound is 64


VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "rotated": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x[:, :, :4],
    "with gaps, transposed": lambda x: x[:, :, :4].transpose(0, 1),
    "channels last": lambda x: x.permute(0, 2, 1).contiguous().permute(0, 2, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_memory(view):
    """Numbers go by memory; normal draws otherwise where memory has gaps or another order of dims.

    Every shard here has two indices of a dim or more: from one index its order among the dims is not always known.
    """
    cut = VIEWS[view]
    cases = list(itertools.product([(R, R), (S(0), R), (S(0), S(1)), (S(1), S(1)), (P, S(0))], [(5, 8, 6), (4, 8, 5)]))

    def strided():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        for places, shape in cases:
            for name in ("uniform_", "normal_", "log_normal_", "bernoulli_ of f32", "randn_like", "normal of mean"):
                function = EVERY[name][0]
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    same(lambda x, f=function: f(cut(x)), value_of(shape, dtype), mesh, places)

    run(strided)


def test_a_kernel_that_cannot_be_drawn_in_chunks_is_drawn_whole():
    """As on Intel CPUs, where bernoulli_ seeds MKL's generator with one word; here it only takes that path."""

    def whole():
        mesh, known = mesh_of(2, 2), stream._takes_one_word
        stream._takes_one_word = lambda function, dtype: True
        try:
            for view in (lambda x: x, *VIEWS.values()):
                for places in ((S(0), S(1)), (S(1), S(1)), (P, S(0))):
                    for fill in (EVERY["bernoulli_"][0], EVERY["exponential_"][0]):
                        same(lambda x, f=fill, v=view: f(v(x)), value_of((5, 8, 6), torch.float32), mesh, places)
        finally:
            stream._takes_one_word = known

    run(whole)


def test_meta_tensors_draw_nothing():
    with fake_world(4):
        x = empty(8, 6, device_mesh=mesh_of(4), placements=[S(0)], device="meta")
        before = torch.get_rng_state()
        nn.init.kaiming_uniform_(x.normal_())
        assert torch.nn.functional.dropout(x, 0.5).shape == torch.rand_like(x).shape == (8, 6)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_user():
    def seeded():
        mesh, default = mesh_of(2, 2), torch.get_rng_state()
        for fill in (
            lambda x, g: x.normal_(generator=g),
            lambda x, g: x.bernoulli_(0.3, generator=g),
            lambda x, g: x.bernoulli_(torch.full((7,), 0.4), generator=g),
            lambda x, g: nn.init.kaiming_uniform_(x, generator=g),
            lambda x, g: torch.normal(x, 1.0, generator=g),
        ):
            one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
            wanted = fill(torch.zeros(5, 7), one)
            found = fill(distribute_tensor(torch.zeros(5, 7), mesh, (S(0), S(1))), other)
            assert torch.equal(found.full_tensor(), wanted)
            assert torch.equal(one.get_state(), other.get_state())
        assert torch.equal(torch.get_rng_state(), default)

    run(seeded)


def test_a_leaf_that_requires_grad_is_refused_and_history_ends_in_a_fill():
    def graded():
        x = distribute_tensor(torch.ones(5, 3), mesh_of(2, 2), (S(0), S(1))).requires_grad_()
        state = torch.get_rng_state()
        for fill in (lambda: x.normal_(), lambda: x.bernoulli_(0.5)):
            with pytest.raises(RuntimeError, match="leaf"):
                fill()
        assert torch.equal(torch.get_rng_state(), state)
        version = x._version
        with torch.no_grad():
            x.normal_()
        assert x._version > version
        y = x * 2
        y.uniform_()
        y.sum().backward()
        assert not x.grad.full_tensor().any()

    run(graded)


def test_nothing_is_communicated():
    def silent():
        from vescale_dtensor.debug import comm_trace

        x = distribute_tensor(torch.zeros(5, 3), mesh_of(2, 2), (S(0), S(1)))
        with comm_trace() as trace:
            nn.init.kaiming_uniform_(x.normal_())
            x.bernoulli_(torch.full((3,), 0.5))
            torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 5)
        assert len(trace) == 0, str(trace)

    run(silent)


def test_probabilities_may_be_sharded_otherwise_or_pending():
    def drawn():
        mesh = mesh_of(2, 2)
        p = torch.linspace(0, 1, 35).view(5, 7)
        torch.manual_seed(2)
        wanted = torch.zeros(5, 7).bernoulli_(p)
        after = torch.get_rng_state()
        for places in ((S(0), S(1)), (R, S(0)), (P, R)):
            for probabilities in ((S(0), S(1)), (S(1), S(0)), (P, S(0)), (R, R)):
                torch.manual_seed(2)
                x = distribute_tensor(torch.zeros(5, 7), mesh, places)
                assert x.bernoulli_(distribute_tensor(p, mesh, probabilities)) is x
                assert torch.equal(x.full_tensor(), wanted) and x.placements == places
                assert torch.equal(torch.get_rng_state(), after)
                torch.manual_seed(2)
                assert torch.equal(torch.bernoulli(distribute_tensor(p, mesh, probabilities)).full_tensor(), wanted)

    run(drawn)


def test_probabilities_out_of_range_are_refused():
    def wrong():
        assert vescale_rng.__version__
        distribute_tensor(torch.zeros(4), mesh_of(4), (R,)).bernoulli_(torch.full((4,), 1.5))

    raises_on_all(4, RuntimeError, wrong, match="at most 1")


FACTORIES = {
    "rand": (lambda **o: torch.rand(5, 7, **o), lambda **o: vescale_rng.rand(5, 7, **o)),
    "randn": (lambda **o: torch.randn((5, 7), **o), lambda **o: vescale_rng.randn((5, 7), **o)),
    "randn f64": (
        lambda **o: torch.randn(3, 4, dtype=torch.float64, **o),
        lambda **o: vescale_rng.randn(3, 4, dtype=torch.float64, **o),
    ),
    "randint": (lambda **o: torch.randint(9, (5, 7), **o), lambda **o: vescale_rng.randint(9, (5, 7), **o)),
    "randint low": (lambda **o: torch.randint(3, 9, (35,), **o), lambda **o: vescale_rng.randint(3, 9, (35,), **o)),
    "randint f32": (
        lambda **o: torch.randint(9, (35,), dtype=torch.float32, **o),
        lambda **o: vescale_rng.randint(9, (35,), dtype=torch.float32, **o),
    ),
    "randperm": (lambda **o: torch.randperm(35, **o), lambda **o: vescale_rng.randperm(35, **o)),
}


def test_factories():
    def made():
        mesh = mesh_of(2, 2)
        for whole, ours in FACTORIES.values():
            for places in ((R, R), (S(0), R), (S(0), S(0)), (P, S(0))):
                for generator in (None, torch.Generator()):
                    source = generator or torch.default_generator
                    source.manual_seed(2)
                    wanted, after = whole(generator=generator), source.get_state()
                    source.manual_seed(2)
                    found = ours(device_mesh=mesh, placements=places, generator=generator)
                    assert found.placements == places and found.dtype == wanted.dtype
                    assert torch.equal(found.full_tensor(), wanted)
                    assert torch.equal(source.get_state(), after)
        assert vescale_rng.randn(4, device_mesh=mesh, placements=(R, R), requires_grad=True).requires_grad

    run(made)


def test_flat_shards():
    """A shard flattened and cut, after another axis has cut a dim; the generators go along as on one device."""

    def run():
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        own = empty(6, 4, device_mesh=mesh, placements=(RaggedShard((0, 1), (5, 7)), Shard(1)))
        torch.manual_seed(3)
        nn.init.normal_(own)
        after = torch.rand(2)
        torch.manual_seed(3)
        assert torch.equal(own.full_tensor(), nn.init.normal_(torch.empty(6, 4)))
        assert torch.equal(after, torch.rand(2))

    run_ranks(4, run)
