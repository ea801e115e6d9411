"""What one CUDA device draws: the formula against values that others recorded on GPUs, against torch's loops spelt
out, on shards, as a Triton kernel under its interpreter, and, where there is a GPU, against torch itself.

Where the recorded values come from (all with torch.manual_seed(0)):
    rand      torch.rand((11, 4)), the reference in tests/model/redrafter/test_unpack_gen_data.py of
              NVIDIA/TensorRT-LLM; a second rand(10) after rand(10), in public notes on Triton's compiler
    randn     randn((M, 8)) as printed in a public write-up of fused kernels, torch 2.2.0
    rand + rand of 98,432   what Triton's first tutorial prints: in its documentation, from a device that holds as many
              threads; and in two public notes, from GPUs that they do not name. 272 and 168 blocks give those numbers
              (an RTX 2080 Ti has 68 multiprocessors of 4 blocks, an RTX 3060 has 28 of 6); no other number of 1 to 199
              multiprocessors of 4, 6 or 8 blocks does.
    randn @ randn, half, 512 x 512   what Triton's third tutorial prints; a public note names the GPU, an A100-SXM4, and
              torch 1.13.1: 262,144 numbers each, from 221,184 threads, some of which give two
"""

import importlib.util
import os
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_rng import Geometry
from vescale_rng._cuda import fill
from vescale_rng._cuda.launch import dropout, fills
from vescale_rng._cuda.numbers import fused, fused_dropout_, recipe, told, words
from vescale_rng._cuda.recorded import Recorded, recorded
from vescale_rng._philox.philox import words_at
from vescale_rng._region import Region

A100, RTX_2080_TI, RTX_3060 = Geometry(108), Geometry(68, 1024), Geometry(28, 1536)
SMALL = Geometry(2, 512)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
CASES = [
    ("uniform_", (-1, 2), FLOATS),
    ("uniform_", (), FLOATS),
    ("normal_", (1, 2), FLOATS),
    ("log_normal_", (0.1, 0.5), FLOATS),
    ("exponential_", (0.7,), FLOATS),
    ("cauchy_", (1, 2), FLOATS),
    ("geometric_", (0.3,), (*FLOATS, torch.int64)),
    ("bernoulli_", (0.3,), (*FLOATS, *INTEGERS, torch.bool)),
    ("random_", (), (*FLOATS, *INTEGERS, torch.bool)),
    ("random_", (100,), (*FLOATS, *INTEGERS)),
    ("random_", (-20, 100), (*FLOATS, torch.int64)),
    ("random_", (0, 2**40), (torch.int64,)),
    ("random_", (-(2**63), None), (torch.int64,)),
    ("dropout", (0.3,), FLOATS),
]
ALL = [(name, args, dtype) for name, args, dtypes in CASES for dtype in dtypes]


def function_of(name):
    return fused_dropout_ if name == "dropout" else getattr(Tensor, name)


def drawn(name, args, shape, dtype, geometry, offset=0, seed=0, region=None, target=None):
    """The fill of a region, by default of all: and the offset after it."""
    count = torch.Size(shape).numel()
    region = region or Region(tuple(shape), tuple(((0, size),) for size in shape))
    target = torch.zeros(region.shape, dtype=dtype) if target is None else target
    after = fill.fill_from([(target, region)], count, dtype, function_of(name), args, {}, geometry, seed, offset)
    return target, after


def close(found, wanted):
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), atol=6e-5, rtol=0)


def test_recorded_uniform():
    found, after = drawn("uniform_", (), (10,), torch.float32, A100)
    close(found, [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096])
    assert after == 4
    second, _ = drawn("uniform_", (), (4,), torch.float32, A100, after)
    close(second, [0.9722, 0.7910, 0.4690, 0.3300])
    more, _ = drawn("uniform_", (), (11, 4), torch.float32, A100)
    close(
        more[3:6],
        [[0.4092, 0.9601, 0.2093, 0.1940], [0.8909, 0.4387, 0.3570, 0.5454], [0.8299, 0.2099, 0.7684, 0.4290]],
    )


def test_recorded_normal():
    found, _ = drawn("normal_", (), (4, 8), torch.float32, A100)
    close(found[0], [-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284])
    close(found[1], [-1.0745, -0.3631, -1.6711, 2.2655, 0.3117, -0.1842, 1.2866, 1.1820])
    close(found[2], [-0.1271, 1.2169, 1.4353, 1.0605, -0.4941, -1.4244, -0.7244, -1.2973])
    close(found[3, :2], [0.0697, -0.0074])


@pytest.mark.parametrize(
    "geometry, tail",
    [
        (A100, [0.6724, 1.2141, 0.9733]),
        (RTX_2080_TI, [1.1495, 0.9265, 1.1323]),
        (RTX_3060, [1.3374, 1.4960, 0.9115]),
    ],
)
def test_recorded_beyond_the_threads_of_smaller_devices(geometry, tail):
    x, after = drawn("uniform_", (), (98432,), torch.float32, geometry)
    y, _ = drawn("uniform_", (), (98432,), torch.float32, geometry, after)
    total = x + y
    close(total[:3], [1.3713, 1.3076, 0.4940])
    close(total[-3:], tail)


def test_recorded_product_of_half_matrices():
    a, after = drawn("normal_", (), (512, 512), torch.float16, A100)
    b, _ = drawn("normal_", (), (512, 512), torch.float16, A100, after)
    found = a.float() @ b.float()
    wanted = torch.tensor(
        [
            [-10.9531, -4.7109, 15.6953, -28.4062, 4.3320, -26.4219],
            [26.8438, 10.0469, -5.4297, -11.2969, -8.5312, 30.7500],
            [-13.2578, 15.8516, 18.0781, -21.7656, -8.6406, 10.2031],
            [40.2812, 18.6094, -25.6094, -2.7598, -3.2441, 41.0000],
            [-6.1211, -16.8281, 4.4844, -21.0312, 24.7031, 15.0234],
            [-17.0938, -19.0000, -0.3831, 21.5469, -30.2344, -13.2188],
        ]
    )
    corner = found[[0, 1, 2, -3, -2, -1]][:, [0, 1, 2, -3, -2, -1]]
    torch.testing.assert_close(corner, wanted, rtol=1e-3, atol=2e-3)
    other, _ = drawn("normal_", (), (512, 512), torch.float16, Geometry(80))  # with other threads other numbers
    assert not torch.equal(a, other)


def philox(counter, key):
    """Philox4x32-10, a call at a time."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = two >> 32 ^ b ^ first, two & 0xFFFFFFFF, one >> 32 ^ d ^ second, one & 0xFFFFFFFF
        first, second = first + 0x9E3779B9 & 0xFFFFFFFF, second + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d


def test_philox_gives_the_known_answers_of_its_authors():
    ones = (1 << 32) - 1
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        assert philox(counter, key) == answer
        low, high = (torch.tensor([int_of(counter[at] | counter[at + 1] << 32)]) for at in (0, 2))
        found = words(high, low, key[0] | key[1] << 32)
        assert tuple(word.item() for word in found) == answer


def int_of(word):
    return word - (1 << 64) if word >> 63 else word


def loops_of_a_fill(count, lanes, geometry, offset):
    """The kernel as it runs: per thread, call after call, until past the end: {place: (thread, counter, lane)}."""
    blocks = min(geometry.multiprocessors * (geometry.threads // 256), (count + 255) // 256)
    stride, found = blocks * 256, {}
    for thread in range(stride):
        call = offset // 4
        for first in range(thread, ((count - 1) // (stride * lanes) + 1) * stride * lanes, stride * lanes):
            for lane in range(lanes):
                if first + lane * stride < count:
                    found[first + lane * stride] = (thread, call, lane)
            call += 1
    return found, offset + ((count - 1) // (stride * lanes) + 1) * 4


def loops_of_dropout(count, itemsize, geometry, offset):
    vector = 16 // itemsize
    while count % vector:
        vector //= 2
    if vector == 1:
        return loops_of_a_fill(count, 4, geometry, offset)
    blocks = min(geometry.multiprocessors * (geometry.threads // 256), (count + 255) // 256)
    found = {}
    for thread in range(blocks * 256):
        call = offset // 4
        for first in range(thread * vector, count, blocks * 256 * vector):
            for inside in range(vector):
                found[first + inside] = (thread, call + inside // 4, inside % 4)
            call += (vector + 3) // 4
    return found, offset + ((count - 1) // (blocks * 1024) + 1) * 4


@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256, 257, 1000, 1024, 4096, 4100, 9000, 9006])
def test_places_are_those_of_the_loops(count):
    places = torch.arange(count)
    for lanes in (4, 2):
        (launch,), after = fills(count, 4, lanes, SMALL, 24)
        wanted, wanted_after = loops_of_a_fill(count, lanes, SMALL, 24)
        assert after == wanted_after
        assert list(zip(*(part.tolist() for part in launch.made_by(places)))) == [wanted[at] for at in range(count)]
    for itemsize in (8, 4, 2):
        (launch,), after = dropout(count, itemsize, SMALL, 24)
        wanted, wanted_after = loops_of_dropout(count, itemsize, SMALL, 24)
        assert after == wanted_after
        assert list(zip(*(part.tolist() for part in launch.made_by(places)))) == [wanted[at] for at in range(count)]


def test_what_32_bits_cannot_index_is_halved():
    launches, after = fills(2**31, 4, 4, A100, 0)  # 8 GiB of float32: halves of halves
    assert [(one.start, one.count) for one in launches] == [(at * 2**29, 2**29) for at in range(4)]
    assert launches[0].counter == (2**31 - 1) // (221184 * 4) + 1  # the whole's share is gone past first
    assert after == 4 * (launches[0].counter + 4 * ((2**29 - 1) // (221184 * 4) + 1))
    launches, _ = fills(2**31 + 7, 1, 4, A100, 0)
    assert sum(one.count for one in launches) == 2**31 + 7 and [one.start for one in launches] == [0, 2**30 + 3]
    assert len(fills((2**31 - 1) // 4, 4, 4, A100, 0)[0]) == 1
    (launch,), _ = dropout(2**33, 2, A100, 0)
    thread, counter, lane = launch.made_by(torch.tensor([2**33 - 1]))
    group = (2**33 - 1) // 8
    assert (thread.item(), counter.item(), lane.item()) == (group % 221184, group // 221184 * 2 + 1, 3)


@pytest.mark.parametrize("name, args, dtype", ALL, ids=lambda value: str(value))
def test_a_shard_is_its_part_of_the_whole(name, args, dtype):
    shape = (9, 11, 50)
    whole, after = drawn(name, args, shape, dtype, SMALL, 8, 123)
    for ranges in (
        (((2, 5),), ((0, 11),), ((0, 50),)),
        (((0, 9),), ((0, 11),), ((3, 17), (40, 49))),
        (((2, 3), (7, 9)), ((4, 11),), ((0, 50),)),
    ):
        region = Region(shape, ranges)
        indices = [torch.cat([torch.arange(*span) for span in held]) for held in ranges]
        wanted = whole[indices[0]][:, indices[1]][:, :, indices[2]]
        found, offset = drawn(name, args, shape, dtype, SMALL, 8, 123, region)
        assert torch.equal(found, wanted) and offset == after
        strided = torch.zeros(*region.shape[:2], region.shape[2] * 2, dtype=dtype)[:, :, ::2]
        found, _ = drawn(name, args, shape, dtype, SMALL, 8, 123, region, strided)
        assert torch.equal(found, wanted)
    assert len(whole.unique()) > 1


@pytest.mark.parametrize("seed", [5, (1 << 64) - 3])
def test_a_graph_reads_from_memory_where_the_generator_stands(seed):
    """Fifty runs, each of two draws, draw what as many eager steps do, and move the generator as far."""
    generator = SimpleNamespace(device=torch.device("cpu"), at=12, initial_seed=lambda: seed)
    generator.get_offset, generator.set_offset = lambda: generator.at, lambda at: setattr(generator, "at", at)
    graph, at = Recorded(generator), generator.at

    def step(seed, at):
        first, at = drawn("normal_", (), (70_001,), torch.float32, SMALL, at, seed)
        second, at = drawn("dropout", (0.3,), (5, 64), torch.float16, SMALL, at, seed)
        return first, second, at

    with graph.capture():
        assert recorded() is graph
        graph.moved = step(graph.start, 0)[2]
    assert recorded() is None and generator.at == at
    for _ in range(50):
        *wanted, at = step(seed, at)
        with graph.run():
            *found, _ = step(graph.start, 0)
        assert all(map(torch.equal, found, wanted)) and generator.at == at


def test_moments():
    for name, mean, deviation in (("uniform_", 0.5, 12**-0.5), ("normal_", 0, 1), ("exponential_", 1, 1)):
        for dtype in (torch.float32, torch.float64):
            x, _ = drawn(name, (), (300_000,), dtype, SMALL)
            assert abs(x.mean() - mean) < 8e-3 and abs(x.std() - deviation) < 8e-3 and x.isfinite().all()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3))
@settings(max_examples=300, deadline=None)
def test_fused_rounds_once(values):
    x, factor, summand = values
    found = fused(torch.tensor([x], dtype=torch.float32), factor, summand)
    exact = Fraction(x) * Fraction(factor) + Fraction(summand)
    here = abs(Fraction(found.item()) - exact)
    for direction in (-torch.inf, torch.inf):
        near = torch.nextafter(found, torch.tensor([direction], dtype=torch.float32)).item()
        assert here <= abs(Fraction(near) - exact)


def differences_of_the_kernel():
    """The cases in which the Triton kernel makes other numbers than torch ops do, as text."""
    from vescale_rng._cuda import triton

    shape = (9, 11, 50)
    region, found = Region(shape, (((2, 5), (7, 9)), ((0, 11),), ((3, 49),))), []
    for name, args, dtype in ALL:
        if dtype == torch.bfloat16:  # which the interpreter rounds otherwise than any device
            continue
        function = function_of(name)
        made = recipe(function, args, {}, dtype)
        if function is fused_dropout_:
            launches, _ = dropout(9 * 11 * 50, dtype.itemsize, SMALL, 8)
        else:
            launches, _ = fills(9 * 11 * 50, dtype.itemsize, made.lanes, SMALL, 8)
        wanted, _ = drawn(name, args, shape, dtype, SMALL, 8, 123, region)
        target = torch.zeros(region.shape, dtype=dtype)
        triton.fill_part(target, region, launches, 123, made)
        exact = made.kind in ("integers", "bernoulli", "geometric") or name == "uniform_" and not args
        if exact:
            same = torch.equal(target, wanted)
        else:  # numpy's logarithms and sines, and no fused multiply-add
            rtol = 2e-3 if dtype == torch.float16 else 5e-5
            same = torch.allclose(target.double(), wanted.double(), rtol=rtol, atol=5e-6)
        if not same:
            found.append(f"{name} {args} {dtype}")
        if dtype == torch.float32:  # where the generator stands in memory, as a graph reads it
            layout = dropout(4950, 4, SMALL, 0) if function is fused_dropout_ else fills(4950, 4, made.lanes, SMALL, 0)
            again = torch.zeros(region.shape, dtype=dtype)
            triton.fill_part(again, region, layout[0], torch.tensor([123, 2]), made)
            if not torch.equal(again, target):
                found.append(f"{name} {args}, recorded")
    places, key = torch.randperm(3000).view(30, 100) * 1234567891, (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    if not torch.equal(triton.words_at(places, key), words_at(places, key)):
        found.append("words of the philox stream")
    return found


def test_a_draws_numbers_are_copied_to_the_device_once():
    device = torch.device("cpu")
    for name, args, dtype in ALL:
        made = recipe(function_of(name), args, {}, dtype)
        numbers, integers = told(made, device)
        assert numbers.tolist() == list(made.numbers) and integers.tolist() == list(made.integers)
        assert told(made, device)[0] is numbers
    zeros = [told(recipe(Tensor.normal_, (mean, 1.0), {}, torch.float32), device)[0] for mean in (0.0, -0.0)]
    assert zeros[0].signbit().sum() != zeros[1].signbit().sum()  # equal numbers, but other bits


def test_the_triton_kernel_under_its_interpreter():
    """In a process of its own: Triton asks for its interpreter when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: its kernels are not run")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stdout + done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine: not held against torch.cuda")
@pytest.mark.parametrize("name, args, dtype", ALL, ids=str)
def test_torch_itself_on_a_gpu(name, args, dtype):
    """Values and the generator's offset, for sizes below and above one number per thread; by the kernel if there is
    Triton, else in torch ops. Were it not so, fills would be drawn whole: with the warning that this asks for."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert fill.is_followed(function_of(name), dtype, device)
    if name == "dropout":
        return
    geometry = Geometry.of(device)
    for count in (1, 15, 16, 17, 1000, (1 << 20) + 3, geometry.launched(1 << 40) * 9 + 77):
        generator = torch.Generator(device).manual_seed(5)
        wanted = function_of(name)(torch.empty(count, dtype=dtype, device=device), *args, generator=generator)
        target = torch.zeros(count, dtype=dtype, device=device)
        found, after = drawn(name, args, (count,), dtype, geometry, 0, 5, None, target)
        assert after == generator.get_offset() and torch.equal(found, wanted), (name, dtype, count)


if __name__ == "__main__":
    print(differences_of_the_kernel())
