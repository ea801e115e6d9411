"""Numbers and 0-dim plain tensors beside a partial tensor: each counts once, not once per rank."""

import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, Partial, Replicate, Shard, ViewError, distribute_tensor
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for, spread

R, P, S = Replicate(), Partial(), Shard
NUMBERS = {
    "int": 7,
    "float": -0.5,
    "bool": True,
    "numpy": numpy.float64(3.0),
    "tensor": torch.tensor(7.0),
    "double": torch.tensor(0.25, dtype=torch.float64),
}
MASK = (torch.arange(16) % 3 == 1).view(4, 4)
AT = torch.tensor([0, 2])
COLUMNS = torch.tensor([[0, 1, 2, 3]])


def written(*path):
    """`x`, after a write of the number to the part of it that `path` gives."""
    *index, write = path

    def run(x, number):
        write(x[index[0]] if index else x, number)
        return x

    return run


IN_PLACE = {
    "copy_": written(lambda x, n: x.copy_(n)),
    "copy_ by name": written(lambda x, n: x.copy_(n, non_blocking=True)),
    "copy_ into rows": written(slice(1, 3), lambda x, n: x.copy_(n)),
    "copy_ into a column": written((..., 1), lambda x, n: x.copy_(n)),
    "copy_ into a view": written(lambda x, n: x.view(2, 8).copy_(n)),
    "fill_": written(lambda x, n: x.fill_(n)),
    "add_": written(lambda x, n: x.add_(n)),
    "add_ alpha": written(lambda x, n: x.add_(n, alpha=2)),
    "sub_": written(lambda x, n: x.sub_(n)),
    "mul_": written(lambda x, n: x.mul_(n)),
    "div_": written(lambda x, n: x.div_(n)),
    "lerp_": written(lambda x, n: x.lerp_(torch.ones(4, 4), float(n))),
    "lerp_ to one": written(lambda x, n: x.lerp_(torch.tensor(3.0), float(n))),
    "clamp_": written(lambda x, n: x.clamp_(n, n)),
    "clamp_min_": written(lambda x, n: x.clamp_min_(n)),
    "masked_fill_": written(lambda x, n: x.masked_fill_(MASK, n)),
    "masked_fill_ into rows": written(slice(1, 3), lambda x, n: x.masked_fill_(MASK[1:3], n)),
    "index_fill_": written(lambda x, n: x.index_fill_(1, AT, n)),
    "scatter_": written(lambda x, n: x.scatter_(0, COLUMNS, float(n))),
    "index_put_": written(lambda x, n: x.index_put_((AT,), torch.as_tensor(n, dtype=x.dtype))),
    "index_put_, added": written(lambda x, n: x.index_put_((AT,), torch.as_tensor(n, dtype=x.dtype), accumulate=True)),
    "addcmul_": written(lambda x, n: x.addcmul_(torch.tensor(2.0), torch.tensor(3.0), value=float(n))),
    "addcdiv_": written(lambda x, n: x.addcdiv_(torch.tensor(2.0), torch.tensor(4.0), value=float(n))),
    "fill_diagonal_": written(lambda x, n: x.fill_diagonal_(float(n))),
    "[row] =": written(lambda x, n: x.__setitem__(1, n)),
    "[mask] =": written(lambda x, n: x.__setitem__(MASK, n)),
    "[indices] =": written(lambda x, n: x.__setitem__((AT, AT), n)),
    "[...] =": written(lambda x, n: x.__setitem__(..., n)),
    "-=": written(lambda x, n: x.__isub__(n)),
}
OUT_OF_PLACE = {
    "+": lambda x, n: x + n,
    "n -": lambda x, n: n - x,
    "rsub": torch.rsub,
    "sub by name": lambda x, n: torch.sub(input=x, other=n),
    "where": lambda x, n: torch.where(MASK, x, n),
    "where, turned": lambda x, n: torch.where(MASK, n, x),
    "lerp": lambda x, n: x.lerp(torch.ones(4, 4), float(n)),
    "masked_fill": lambda x, n: x.masked_fill(MASK, n),
    "index_fill": lambda x, n: x.index_fill(0, AT, n),
    "scatter": lambda x, n: x.scatter(0, COLUMNS, float(n)),
    "pad": lambda x, n: F.pad(x, (1, 1), value=float(n)),
    "select_scatter": lambda x, n: x.select_scatter(torch.full((4,), float(n)), 0, 1),
    "addmm": lambda x, n: torch.addmm(torch.tensor(float(n)), x, torch.ones(4, 4)),
}


def on_rank(sizes, function, own):
    warnings.simplefilter("ignore", FallbackWarning)
    mesh = mesh_of(*sizes)
    x = (torch.arange(16.0).view(4, 4) - 5).requires_grad_()
    for name, number in NUMBERS.items():
        try:
            function(x.detach().clone(), number)
        except RuntimeError:
            continue  # torch does not subtract a bool, nor put a double at indices
        for placements in placements_for((4, 4), len(sizes)):
            try:
                compare(lambda x, number=number: function(x * 1 if own else x, number), [x], [placements], mesh)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            except ViewError:
                assert any(isinstance(placement, Shard) for placement in placements)  # a part that had to move


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", [*IN_PLACE, *OUT_OF_PLACE])
def test_a_number_counts_once(name, sizes):
    run_ranks(4 if len(sizes) == 2 else 2, on_rank, sizes, IN_PLACE.get(name) or OUT_OF_PLACE[name], name in IN_PLACE)


def copied_into_a_sum():
    """copy_ as the first write to a sum, one of a single element too; self stays partial, as under any write."""
    mesh = mesh_of(2)
    for dims in ((0,), (0, 1)):
        for number in (7, 2.5, True):
            x = distribute_tensor(torch.ones(4, 4), mesh, [S(0)]).sum(dims)
            assert x.copy_(number) is x and x.placements == (P,)
            assert (x.full_tensor() == float(number)).all()
    with torch.no_grad():
        x = spread(torch.ones(4, 4), mesh, [P])
        x.data.copy_(3)
        assert (x.full_tensor() == 3).all()


def test_copy_of_a_number_into_a_sum():
    run_ranks(2, copied_into_a_sum)
