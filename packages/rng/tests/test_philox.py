"""The philox stream: numpy's words, the stated numbers of them, the same on every mesh."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import vescale_rng
from vescale_dtensor import InterleavedShard, Partial, PlacementError, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_rng import RandomStreamError
from vescale_rng._cpu import stream
from vescale_rng._philox import fill as _philox_fill
from vescale_rng._philox import philox, transforms
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import shard_of

R, P, S = Replicate(), Partial(), Shard
KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FILLS = {
    "uniform_": (lambda x: x.uniform_(-1, 2), FLOATS),
    "normal_": (lambda x: x.normal_(1, 2), FLOATS),
    "exponential_": (lambda x: x.exponential_(0.7), FLOATS),
    "cauchy_": (lambda x: x.cauchy_(1, 2), FLOATS),
    "geometric_": (lambda x: x.geometric_(0.3), (*FLOATS, torch.int64)),
    "log_normal_": (lambda x: x.log_normal_(0.1, 0.5), FLOATS),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), (*FLOATS, torch.int64, torch.bool)),
    "random_": (lambda x: x.random_(), (*FLOATS, torch.int64, torch.uint8, torch.bool)),
    "random_ to": (lambda x: x.random_(100), (*FLOATS, torch.int32)),
    "random_ from to": (lambda x: x.random_(-20, 100), (*FLOATS, torch.int64)),
    "dropout": (lambda x: F.dropout(x.fill_(1), 0.3), FLOATS),
    "dropout2d": (lambda x: F.dropout2d(x.fill_(1).unsqueeze(0), 0.3), FLOATS),
    "trunc_normal_": (lambda x: torch.nn.init.trunc_normal_(x, 0, 1, -1, 1), FLOATS),
    "randn_like": (torch.randn_like, FLOATS),
}


def unsigned(words):
    return words.numpy().view(np.uint64)


def raw(count):
    return np.random.Philox(key=np.array(KEY, np.uint64)).random_raw(count)


def test_words_are_those_of_numpy():
    wanted = raw(3000)
    runs = philox.Runs(KEY)
    for start, stop in ((0, 7), (7, 8), (8, 900), (902, 906), (907, 911), (1001, 2999), (2, 5), (2999, 3000)):
        assert (unsigned(runs.words([start], stop - start)) == wanted[start:stop]).all()
    starts = [5, 9, 801, 800]
    assert (unsigned(runs.words(starts, 77)) == np.stack([wanted[start : start + 77] for start in starts])).all()
    places = torch.randperm(3000).view(30, 100)
    assert torch.equal(philox.words_at(places, KEY), torch.from_numpy(wanted.view(np.int64))[places])
    far = 2**61 + 5
    found = philox.words_at(torch.tensor([far]), KEY).item()
    assert found == philox.Runs(KEY).words([far], 1).item()


def placed(x, draw):
    return stream._place_philox(x, None, draw, KEY)


def test_numbers_are_as_stated():
    words = raw(64)
    halves = words.view(np.uint32)
    draw = stream.Draw
    uniform = placed(torch.empty(128), draw(torch.Tensor.uniform_)).tolist()
    assert uniform == [(int(half) >> 8) / 2**24 for half in halves]
    double = placed(torch.empty(64, dtype=torch.float64), draw(torch.Tensor.uniform_)).tolist()
    assert double == [(int(word) >> 11) / 2**53 for word in words]
    brain = placed(torch.empty(128, dtype=torch.bfloat16), draw(torch.Tensor.uniform_)).tolist()
    assert brain == [(int(half) >> 24) / 2**8 for half in halves]
    kept = placed(torch.empty(128), draw(torch.Tensor.bernoulli_, (0.25,))).tolist()
    assert kept == [float(int(half) >> 8 < 2**22) for half in halves]
    for dtype, bits, digits in ((torch.float32, halves, 31), (torch.float64, words, 53)):
        normal = placed(torch.empty(len(bits), dtype=dtype), draw(torch.Tensor.normal_, (1.0, 2.0)))
        width = 8 * bits.itemsize
        for pair in range(0, len(bits), 2):
            length = 2 * math.sqrt(-2 * math.log(((int(bits[pair]) >> (width - digits)) + 0.5) / 2**digits))
            angle = 2 * math.pi * (int(bits[pair + 1]) >> (width - (24 if digits == 31 else 53)))
            angle /= 2 ** (24 if digits == 31 else 53)
            wanted = torch.tensor([1 + length * math.cos(angle), 1 + length * math.sin(angle)], dtype=torch.float64)
            torch.testing.assert_close(normal[pair : pair + 2].double(), wanted, rtol=1e-5, atol=1e-5)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**64))
@settings(max_examples=200, deadline=None)
def test_integers_are_unsigned_remainders(start, count):
    stop = min(start + count, 2**63)
    words = torch.from_numpy(raw(200).view(np.int64).copy())
    found = transforms.numbers(torch.Tensor.random_, (start, None if stop == 2**63 else stop), {}, words, torch.int64)
    assert found.tolist() == [(start + int(word) % (stop - start) + 2**63) % 2**64 - 2**63 for word in raw(200)]


def places_of(shape, width):
    """The definition, element by element: panels of so many columns, each row by row."""
    *outside, columns = shape or (1,)
    rows, found, at = math.prod(outside), np.empty((math.prod(outside), columns), np.int64), 0
    for first in range(0, columns, width):
        panel = found[:, first : first + width]
        panel[:] = at + np.arange(panel.size).reshape(panel.shape)
        at += panel.size
    assert at == rows * columns
    return torch.from_numpy(found).view(shape)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (5, 37), (3, 9001), (4, 33, 40), (600, 520), (5, 130, 257)])
def test_places_and_what_torch_ops_make_of_them(shape):
    """Runs by numpy, and what runs on other devices than CPU: the formula in torch ops, for any places."""
    rows = math.prod(shape[:-1])
    places = places_of(shape, _philox_fill.panel_width(rows))
    assert _philox_fill.panel_width(rows) == (256 if rows > 512 else 2 ** (17 - max(rows - 1, 0).bit_length()))
    for name, args in (("uniform_", ()), ("normal_", ()), ("random_", (7,))):
        for dtype in (torch.float32, torch.float64):
            draw = stream.Draw(getattr(torch.Tensor, name), args)
            found = placed(torch.empty(shape, dtype=dtype), draw)
            numbers = _philox_fill._Numbers(draw.function, args, {}, dtype, KEY)
            assert torch.equal(found, numbers.at(places).to(dtype))


LAYOUTS = [(S(0), R), (R, S(1)), (S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (P, S(0)), (R, R)]
LAYOUTS += [(InterleavedShard(0, 2), S(1)), (RaggedShard((0, 1), (1, 3)), R), (S(0), RaggedShard((0, 1), (3, 1)))]


def compare(name, shape, panel=None):
    """On every mesh as on one rank; with panels of so many columns, whose borders cut the shards."""
    kept = _philox_fill.WIDTH, _philox_fill.AREA, _philox_fill.SHORT
    try:
        if panel:
            _philox_fill.WIDTH, _philox_fill.AREA, _philox_fill.SHORT = panel, 1, 8
        agree(*FILLS[name], name, shape)
    finally:
        _philox_fill.WIDTH, _philox_fill.AREA, _philox_fill.SHORT = kept


def agree(fill, dtypes, name, shape):
    for dtype in dtypes:
        with vescale_rng.use_stream("philox"):
            torch.manual_seed(3)
            wanted = fill(distribute_tensor(torch.zeros(shape, dtype=dtype), mesh_of(4), [R])).to_local()
            state = torch.get_rng_state()
        for placements in LAYOUTS:
            try:
                x = distribute_tensor(torch.zeros(shape, dtype=dtype), mesh_of(2, 2), placements)
            except PlacementError:
                continue
            torch.manual_seed(3)
            with vescale_rng.use_stream("philox"):
                found = fill(x)
            case = (name, dtype, shape, placements)
            assert torch.equal(torch.get_rng_state(), state), case
            if P in placements:
                assert torch.equal(found.full_tensor(), wanted), case
                continue
            layout = found.mesh_layout
            assert torch.equal(found.to_local(), shard_of(wanted, layout, layout.mesh.coordinate)), case


@in_turns(3)
@pytest.mark.parametrize("name", FILLS)
def test_the_same_on_every_mesh(name):
    for shape, panel in (((6, 10), 4), ((7, 129), 16), ((96, 1000), None), ((6, 4, 10), 4), ((530, 300), None)):
        if name in ("uniform_", "normal_") or panel or shape[0] < 100:
            run_ranks(4, compare, name, shape, panel)


def test_deferred():
    """A deferred model in the philox stream, whole and sharded."""

    def build():
        with vescale_rng.deferred_init():
            return torch.nn.Linear(40, 64).weight

    def both():
        vescale_rng.manual_seed(1, stream="philox")
        try:
            whole = vescale_rng.materialize(build())
            vescale_rng.manual_seed(1)
            shard = vescale_rng.distribute(build(), mesh_of(2, 2), (S(1), S(0))).detach()
            drawn = distribute_tensor(torch.empty(64, 40), mesh_of(2, 2), (S(0), S(1)))
            torch.manual_seed(1)
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
        finally:
            vescale_rng.use_stream("torch")
        assert vescale_rng.current_stream() == "torch"
        assert torch.equal(shard.full_tensor(), whole) and torch.equal(drawn.full_tensor(), whole)

    run_ranks(4, both)


def test_moments():
    """Of a million numbers: mean, deviation, and no two draws alike."""
    for name, mean, deviation in (("uniform_", 0.5, 12**-0.5), ("normal_", 0, 1), ("exponential_", 1, 1)):
        x = stream._place_philox(torch.empty(1000, 1000), None, stream.Draw(getattr(torch.Tensor, name)), KEY)
        assert abs(x.mean() - mean) < 4e-3 and abs(x.std() - deviation) < 4e-3 and x.isfinite().all()
        assert abs(torch.corrcoef(torch.stack([x.view(-1)[::2], x.view(-1)[1::2]]))[0, 1]) < 5e-3
    generator = torch.Generator().manual_seed(0)
    assert len({philox.next_key(generator) for _ in range(1000)}) == 1000


def test_no_such_stream():
    with pytest.raises(RandomStreamError, match="name is 'cuda', not 'torch' or 'philox'"):
        vescale_rng.use_stream("cuda")
