"""Batches whose memory lies otherwise: columns, steps, single elements, conjugates, and what else slicing gives."""

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import assert_ranks_agree, run_ranks, warm_up

warm_up("vescale")


def batches():
    base = torch.arange(48.0).reshape(4, 12)
    numbers = torch.complex(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3))
    return {
        "a column": base[:, :1],
        "a step": base[::2, ::3],
        "one row, one column": base[:1, :1],
        "one, of a step": base[::3][:1, ::12],
        "one, transposed": base[1:2, 3:4].T,
        "no columns": base[:, :0],
        "transposed": base.T,
        "expanded": torch.ones(4, 1).expand(4, 3),
        "integers": base.long()[:, 2:3],
        "booleans": base[:, ::2] > 3,
        "half": base.bfloat16()[:, 1:2],
        "eight bits": base.to(torch.float8_e4m3fn)[:, :1],
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "imaginary": numbers.imag[:, :1],
    }


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight * (x.abs() if x.is_complex() else x.float()).sum()


def summed(ranks):
    model, _ = vescale.parallelize(vescale.Plan(mesh={"tp": ranks}, data_axis=None, parameters={"*": {}}), Sums())
    found = {}
    for name, batch in batches().items():
        for _ in range(2):
            found[name] = model(batch).item()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_may_lie_in_any_way(ranks):
    wanted = {name: Sums()(batch).item() for name, batch in batches().items()}
    assert assert_ranks_agree(run_ranks(ranks, summed, ranks)) == pytest.approx(wanted)


@pytest.mark.parametrize("name", batches())
def test_results_are_compared_however_they_lie(name):
    one, other = batches()[name], batches()[name].clone()
    assert assert_ranks_agree([one, other]) is one
    if one.numel():
        other = other.resolve_conj().contiguous()
        last = other.view(-1)[-1:]
        last.copy_(last.to(torch.complex64) == 0)
        with pytest.raises(AssertionError, match=f"1 of {one.numel()} elements, first at flat index {one.numel() - 1}"):
            assert_ranks_agree([one, other])
