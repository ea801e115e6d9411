"""What a rank holds of a long sequence, by the allocator: `benchmarks/runtime/context_ring.py memory`, but smaller."""

import sys
from pathlib import Path

import pytest

from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")
BENCHMARKS = str(Path(__file__).absolute().parents[4] / "benchmarks/runtime")
POSITIONS = 2048


def peak(*given):
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    from context_ring import peak

    return peak(*given)


@in_turns(3)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_of_four_holds_a_quarter(layout):
    (one,) = run_ranks(1, peak, 1, POSITIONS)
    many = run_ranks(4, peak, 4, POSITIONS, "ring", layout, timeout=240)
    assert max(many) <= 0.28 * one, (many, one)  # 0.27 of 4,096 positions: gradients of parameters weigh more here
