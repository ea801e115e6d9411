"""Numbers in fewer bits: how far they may move, what must come through exactly, and sums of them over ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_dtensor import comm_trace
from vescale_dtensor._communication.compressed import BLOCK, compress, expand, sent_numel
from vescale_dtensor._layouts.mesh import mesh_of as engine_mesh
from vescale_dtensor.engine import ReductionInFlight
from vescale_testkit import mesh_of, run_ranks


def rows_of(count, numbers, seed=0, spread=20):
    """Magnitudes over many powers of two, so that blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-spread, spread, (count, numbers), generator=generator).float())
    return torch.randn(count, numbers, generator=generator) * scale


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 4), numbers=st.integers(1, 3 * BLOCK + 1), seed=st.integers(0, 1000))
def test_an_int8_number_moves_by_half_a_step_of_its_block(count, numbers, seed):
    rows = rows_of(count, numbers, seed)
    sent = compress(rows, torch.int8)
    assert sent.shape == (count, sent_numel(numbers, torch.int8)) and sent.dtype is torch.int8
    back = expand(sent, numbers, torch.float32)
    for start in range(0, numbers, BLOCK):
        part = slice(start, start + BLOCK)
        step = rows[:, part].abs().amax(1, keepdim=True) / 127
        assert ((back - rows)[:, part].abs() <= step * (0.5 + 1e-5)).all()


def test_zeros_keep_their_sign_and_the_largest_its_value():
    rows = torch.tensor([[0.0, -0.0, 3.5, -3.5, 1e-9, -0.0]])
    for dtype in (torch.int8, torch.bfloat16):
        back = expand(compress(rows, dtype), 6, torch.float32)
        assert back[0, 2:4].tolist() == pytest.approx([3.5, -3.5], rel=1e-6)
        assert back.signbit().tolist()[0][:4] == [False, True, False, True] and back[0, 5].signbit()
    zeros = torch.full((1, 300), -0.0)
    assert expand(compress(zeros, torch.int8), 300, torch.float32).signbit().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_as_such(bad):
    rows = rows_of(1, 2 * BLOCK, spread=1)
    rows[0, 5] = bad
    back = expand(compress(rows, torch.int8), 2 * BLOCK, torch.float32)
    assert not back[0, 5].isfinite() and back[0, BLOCK:].isfinite().all()


def reduced(numbers, sent, keep):
    """A sum over the mesh's inner axis, then its outer: what came, what ought to, bytes received."""
    device_mesh = mesh_of(2, 2, names=("outer", "inner"))
    mesh = engine_mesh(device_mesh)
    parts = [rows_of(1, numbers, seed).view(-1) for seed in range(4)]
    with comm_trace() as trace:
        found = ReductionInFlight(parts[torch.distributed.get_rank()].clone(), mesh, (1,), (0,), keep, sent).finish()
    if sent is not None:
        parts = [expand(compress(part.view(2, -1), sent), numbers // 2, torch.float32).view(-1) for part in parts]
    wanted = (parts[0] + parts[1]) + (parts[2] + parts[3])
    if keep == "part":
        wanted = wanted.view(2, -1)[mesh.coordinate[1]]
    return torch.equal(found, wanted), trace.received()


@pytest.mark.parametrize("keep", ["part", "whole"])
@pytest.mark.parametrize("sent", [torch.int8, torch.bfloat16])
def test_a_sum_is_that_of_what_was_sent(sent, keep):
    numbers = 8 * BLOCK
    saved = numbers // 2 * 4 - sent_numel(numbers // 2, sent) * sent.itemsize
    exact = run_ranks(4, reduced, numbers, None, keep)
    for (equal, received), (exactly, whole) in zip(run_ranks(4, reduced, numbers, sent, keep), exact):
        assert equal and exactly and received == whole - saved
