"""Every entry of torch's operator database equals one device on a 2x2 mesh with mixed placements, or says why not.

Some entries; all with VESCALE_GRID=full, or `python tools/sweeps/operator_sweep.py`.
"""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import SampleInput

from vescale_dtensor import _errors
from vescale_testkit import in_turns, operator_sweep, run_ranks, slice_of, worker_pool
from vescale_testkit.operator_sweep import RAISES, Outcome, check_entry, database, summary

SLICES = 16


@pytest.mark.core
@in_turns(3)
def test_every_entry_equals_one_device():
    outcomes = {name: check_entry(name) for name in slice_of(database(), SLICES)}
    wrong = [f"{name}: {one.text}" for name, one in outcomes.items() if one.kind == "wrong"]
    assert not wrong, "\n\n".join(wrong)
    assert not [name for name in RAISES.keys() & outcomes.keys() if outcomes[name].kind != "raise"]
    assert summary(outcomes)["pass"] >= 0.9 * len(outcomes)


def test_what_may_raise_is_in_the_database_with_an_error_of_ours():
    for name, (error, reason) in RAISES.items():
        assert name in database() and issubclass(getattr(_errors, error), _errors.VescaleError) and reason


@pytest.fixture
def broken(monkeypatch):
    """Runs an entry of which the ranks find something else than they should."""

    def run(outcomes):
        def instead(size, function, *args, timeout):
            return run_ranks(size, outcomes, timeout=timeout)

        monkeypatch.setattr(operator_sweep, "run_ranks", instead)
        monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 0.5)
        return check_entry("add", timeout=1.0)

    return run


def test_a_wrong_value_on_one_rank_is_wrong(broken):
    def outcomes():
        rank = torch.distributed.get_rank()
        return [Outcome("wrong", "0 for 1") if rank == 2 else Outcome("pass")]

    assert broken(outcomes) == Outcome("wrong", "0 for 1")


def test_an_error_on_one_rank_alone_is_wrong_and_does_not_hang(broken):
    def outcomes():
        if torch.distributed.get_rank() == 2:
            raise ValueError("alone")
        torch.distributed.barrier()

    found = broken(outcomes)
    assert found.kind == "wrong" and "ValueError: alone" in found.text


def test_ranks_that_do_not_answer_are_wrong(broken):
    def outcomes():
        if torch.distributed.get_rank():
            torch.distributed.barrier()
        return [Outcome("pass")]

    found = broken(outcomes)
    assert found.kind == "wrong" and "RankTimeout" in found.text


def test_an_error_that_is_not_listed_is_wrong(broken):
    found = broken(lambda: [Outcome("pass"), Outcome("raise", "no", "OperatorError")])
    assert found.kind == "wrong" and "RAISES does not list it" in found.text


@pytest.mark.parametrize("kind", ["pass", "wrong"])
def test_float64_decides_where_float32_differs(kind, monkeypatch):
    found = {torch.float32: Outcome("wrong", "a rounding?"), torch.float64: Outcome(kind, "decided")}
    monkeypatch.setattr(operator_sweep, "_agreed", lambda name, samples, dtype, timeout: [found[dtype]])
    assert check_entry("add") == Outcome(kind, "decided")


def test_an_entry_that_compares_nothing_is_wrong(broken):
    assert broken(lambda: [Outcome("none")]).kind == "wrong"


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.float64, 1e-7)])
def test_rounding_passes_and_more_does_not(dtype, error):
    want = torch.tensor([1.0, 100.0, float("nan"), float("inf")], dtype=dtype)
    off = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)
    assert operator_sweep._unlike(want, want + error * off, dtype, True) is None
    assert "1 of 4 elements" in operator_sweep._unlike(want, want + 100 * error * off, dtype, True)
    assert "2 of 4 elements" in operator_sweep._unlike(want, want.nan_to_num(), dtype, True)


class Entry:
    """Stands in for an entry of the database; its operator errs on DTensors, in the value or in the gradient."""

    name, supports_autograd = "stand-in", True

    def __init__(self, op):
        self.op = op

    def sample_inputs(self, device, dtype, requires_grad):
        yield SampleInput(torch.arange(1.0, 16.0, dtype=dtype).reshape(5, 3).requires_grad_(requires_grad))


@pytest.mark.parametrize(
    ("op", "found"),
    [
        (lambda x: x * 2, None),
        (lambda x: x * (2 if type(x) is torch.Tensor else 3), "output 0: 15 of 15 elements"),
        (lambda x: x * 2 if type(x) is torch.Tensor else x.detach() * 2 + x * 0, "gradient of input 0: 15 of 15"),
        (lambda x: x if type(x) is torch.Tensor else x[:4], "[4, 3] torch.strided for torch.float32[5, 3]"),
        (lambda x: (x, x) if type(x) is torch.Tensor else x, "1 outputs for 2"),
    ],
    ids=["right", "value", "gradient", "shape", "count"],
)
def test_an_operator_that_errs_on_dtensors_is_wrong(op, found):
    def outcomes():
        kept, operator_sweep.database = operator_sweep.database, lambda: {"stand-in": Entry(op)}
        try:
            return operator_sweep._outcomes("stand-in", 1, torch.float32)
        finally:
            operator_sweep.database = kept

    for rank in run_ranks(4, outcomes):
        assert len(rank) == len(operator_sweep.LAYOUTS)
        assert all(one == Outcome("pass") if found is None else found in one.text for one in rank)
