"""Rows that one rank holds, written in place: every rank's autograd hears of it, for each raises or none."""

import pytest
import torch

from vescale_dtensor import Replicate, Shard, ViewError, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

WRITES = {
    "row, number": lambda x: x.__setitem__(0, 5.0),
    "last row, number": lambda x: x.__setitem__(-1, 5.0),
    "row, tensor": lambda x: x.__setitem__(0, torch.ones(4)),
    "row, with a gradient": lambda x: x.__setitem__(3, x[0] * 2),
    "slice": lambda x: x.__setitem__(slice(0, 1), 5.0),
    "element": lambda x: x.__setitem__((1, 2), 5.0),
    "column": lambda x: x.__setitem__((slice(None), 3), 5.0),
    "index": lambda x: x.__setitem__(torch.tensor([0]), 5.0),
    "index, tensor": lambda x: x.__setitem__(torch.tensor([3]), torch.ones(1, 4)),
    "mask": lambda x: x.__setitem__(torch.tensor([True, False, False, False]), 5.0),
    "mask of elements": lambda x: x.__setitem__(torch.eye(4) > 2, 5.0),
    "list": lambda x: x.__setitem__([0], 5.0),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 5.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([3]), torch.ones(1, 4)),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 4)),
    "masked_fill_": lambda x: x.masked_fill_(torch.eye(4) > 2, 5.0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 5.0),
    "fill_diagonal_": lambda x: x.fill_diagonal_(5.0),
}
PLACEMENTS = [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(0), Shard(1)), (Shard(0), Shard(0))]


def written(placements):
    """For each write to a result that its own backward needs, and to a leaf, what came of it."""
    found = {}
    for name, write in WRITES.items():
        for kind in ("saved", "leaf"):
            x = torch.linspace(0, 1, 16).view(4, 4)
            if placements is not None:
                x = distribute_tensor(x, mesh_of(*[2] * len(placements)), placements)
            x.requires_grad_()
            try:
                y = x.exp() if kind == "saved" else x
                write(y)
                y.sum().backward()
                found[name, kind] = "a gradient"
            except RuntimeError as error:
                text = str(error)
                found[name, kind] = "saved" if "modified by an inplace" in text else "leaf" if "leaf" in text else text
    return found


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_all_ranks_hear_of_a_write(placements):
    wanted = written(None)
    assert set(wanted.values()) == {"saved", "leaf"}
    for found in run_ranks(2 ** len(placements), written, placements, timeout=60):
        assert found == wanted


INDICES = [0, -1, slice(1, 3), slice(0, 4, 2), (slice(None), 1), (1, 2), (slice(1, 9), slice(0, 2)), (..., 0), [0, 3]]


def augmented(placements):
    """Values and gradients where parts of a result are written, in each form; two of them in turn; one that is kept."""
    found = []
    for index in INDICES:
        x = torch.linspace(0, 1, 16).view(4, 4)
        factor = torch.linspace(1, 2, 4).requires_grad_()
        if placements is not None:
            x = distribute_tensor(x, mesh_of(*[2] * len(placements)), placements)
        x.requires_grad_()
        y = x * 3
        y[index] += 1
        y[index] *= factor[1]
        y[0] -= y.detach().sum() * 0.1
        row = y[2]
        row.mul_(factor)
        y[2] = row
        row /= 2
        y.square().sum().backward()
        found += [values(y), values(row), values(x.grad), factor.grad]
    return found


def values(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_part_is_written_where_it_is(placements):
    wanted = augmented(None)
    for found in run_ranks(2 ** len(placements), augmented, placements, timeout=60):
        torch.testing.assert_close(found, wanted)


def beside():
    """What else was taken, of the tensor or of the part, would not hear of it; a copy on one device is one here."""
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh_of(2), [Shard(0)])
    row, other = x[0], x[0:2]
    for write in (lambda: row.add_(1), lambda: x[1].add_(1), lambda: other[0].add_(1), lambda: x.add_(1)):
        with pytest.raises(ViewError):
            write()
    other = None
    row.add_(1)
    columns = distribute_tensor(torch.arange(16.0).view(4, 4), mesh_of(2), [Shard(1)])
    apart = columns[:, 1].contiguous()
    with pytest.raises(ViewError):
        apart.add_(1)
    return values(x), values(columns)


def test_what_else_was_taken_is_not_left_behind():
    for one, other in run_ranks(2, beside):
        expected = torch.arange(16.0).view(4, 4)
        assert torch.equal(other, expected)
        expected[0] += 1
        assert torch.equal(one, expected)
