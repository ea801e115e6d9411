"""Strides, offsets and contiguity of views of cut tensors: one device's, or a typed error; and draws into what a
conversion has moved: by one device's order in memory."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vescale_dtensor import DTensor, OperatorError, Replicate, Shard
from vescale_dtensor._test_kit.oracle import STRIDED_VIEWS, spread
from vescale_dtensor.testing import run_ranks

# Of a [8, 7] tensor, which two ranks cut unevenly along its columns.
SLICES = {
    "steps of rows": lambda x: x[::2],
    "steps of columns": lambda x: x[:, ::2],
    "long steps": lambda x: x[:, ::4],
    "both": lambda x: x[::2, ::3],
    "both, transposed": lambda x: x[::2, ::3].t(),
    "rows from the second": lambda x: x[1:],
    "columns from the second": lambda x: x[:, 1:],
    "columns to the fifth": lambda x: x[:, :5],
    "columns within": lambda x: x[:, 2:5],
    "columns within, transposed": lambda x: x[:, 2:5].t(),
    "steps of a slice": lambda x: x[:, 1:][:, ::2],
    "a row": lambda x: x[3],
    "a column": lambda x: x[:, 3],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "split": lambda x: x.split([2, 5], 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "added to": lambda x: x[:, ::2] + 1,
    "of a copy": lambda x: x[:, ::2].clone()[::2],
}  # fmt: skip
ASKED = {
    "stride": lambda t: t.stride(),
    "storage_offset": lambda t: t.storage_offset(),
    "is_contiguous": lambda t: t.is_contiguous(),
    "dim_order": lambda t: t.dim_order(),
}
PLACES = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}


def answers():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    views = [(name, view, (8, 7)) for name, view in SLICES.items()]
    views += [(name, view, (8, 8)) for name, view in STRIDED_VIEWS.items()]
    right, refused, wrong = 0, 0, []
    for name, view, shape in views:
        for place, placement in PLACES.items():
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
            one, ours = view(whole), view(spread(whole, mesh, [placement]))
            for asked, ask in ASKED.items():
                try:
                    expected = ask(one)
                except RuntimeError:  # of an expanded tensor there is no order of dims
                    continue
                try:
                    found = ask(ours)
                except OperatorError:
                    refused += 1
                    continue
                if found == expected:
                    right += 1
                else:
                    wrong.append((name, place, asked, found, expected))
    return wrong, right / (right + refused)


def test_a_view_answers_as_on_one_device_or_refuses():
    for wrong, share in run_ranks(2, answers):
        assert wrong == []
        assert share > 0.75


def moved(placement):
    return lambda x: x.redistribute([placement]) if type(x) is DTensor else x


MOVED = {
    "gathered": ((4, 6, 8), Shard(1), lambda x: moved(Replicate())(x.permute(2, 0, 1))),
    "gathered, unevenly": ((4, 5, 8), Shard(1), lambda x: moved(Replicate())(x.permute(2, 0, 1))),
    "to another dim": ((4, 6, 8), Shard(1), lambda x: moved(Shard(0))(x.permute(2, 0, 1))),
    "to another dim, unevenly": ((3, 5, 7), Shard(1), lambda x: moved(Shard(0))(x.permute(2, 0, 1))),
    "cut": ((4, 6, 8), Replicate(), lambda x: moved(Shard(1))(x.permute(2, 0, 1))),
    "gathered by a function": ((4, 6, 8), Shard(1), lambda x: x.permute(2, 0, 1).flip(2).cumsum(2)),
    "back and forth": ((4, 6, 8), Shard(1), lambda x: moved(Shard(2))(moved(Replicate())(x.permute(2, 0, 1)))),
}
DRAWS = {
    "dropout": lambda y: F.dropout(y, 0.5),
    "dropout of a function": lambda y: F.dropout(y.relu() * 2, 0.5),
    "rand_like": torch.rand_like,
    "normal_": lambda y: y.clone().normal_(),
}


def drawn(name):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shape, placement, view = MOVED[name]
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    wrong = []
    for draw in DRAWS:
        results = []
        for x in (whole.clone().requires_grad_(), spread(whole.clone(), mesh, [placement]).requires_grad_()):
            torch.manual_seed(3)
            out = DRAWS[draw](view(x))
            gradient = torch.autograd.grad(out.sum(), x)[0] if out.requires_grad and out.grad_fn is not None else x
            results.append([one.detach().full_tensor() if type(one) is DTensor else one for one in (out, gradient)])
        wrong += [(draw, i) for i, (a, b) in enumerate(zip(*results)) if not torch.equal(a, b)]
    return wrong


@pytest.mark.parametrize("name", MOVED)
def test_draws_into_what_was_moved_are_one_devices(name):
    assert run_ranks(2, drawn, name) == [[], []]
