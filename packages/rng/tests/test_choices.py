"""multinomial and randperm, bitwise one device's, sharded."""

import pytest
import torch

import vescale_rng
from vescale_dtensor import Replicate, Shard, comm_trace, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks

R, S = Replicate(), Shard


@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (64, 1000), (1, 3), (3, 9000)])
def test_multinomial(shape, dtype):
    def run():
        import warnings

        warnings.simplefilter("ignore")
        assert vescale_rng.current_stream() == "torch"  # and so the package is imported on this rank
        p = torch.rand(shape).to(dtype)
        for samples, replacement in ((1, False), (1, True), (3, False), (4, True)):
            if samples > shape[1] and not replacement:
                continue
            torch.manual_seed(4)
            wanted = torch.multinomial(p, samples, replacement)
            state = torch.get_rng_state()
            for placements in ((S(0), R), (S(0), S(0)), (R, R), (R, S(1))):
                d = distribute_tensor(p, mesh_of(2, 2), placements)
                torch.manual_seed(4)
                with comm_trace() as trace:
                    found = torch.multinomial(d, samples, replacement)
                assert torch.equal(torch.get_rng_state(), state)
                assert torch.equal(found.full_tensor(), wanted)
                if placements[1] != S(1):
                    assert len(trace) == 0 and found.placements == placements

    run_ranks(4, run)


def test_multinomial_of_negative_numbers():
    def run():
        vescale_rng.get_state()
        torch.multinomial(distribute_tensor(-torch.ones(8, 3), mesh_of(4), [S(0)]), 1)

    raises_on_all(4, RuntimeError, run, match="probability tensor contains")


def test_randperm():
    def run():
        torch.manual_seed(4)
        wanted = torch.randperm(1001)
        state = torch.get_rng_state()
        torch.manual_seed(4)
        found = vescale_rng.randperm(1001, device_mesh=mesh_of(2, 2), placements=(S(0), S(0)))
        assert torch.equal(found.full_tensor(), wanted) and torch.equal(torch.get_rng_state(), state)

    run_ranks(4, run)
