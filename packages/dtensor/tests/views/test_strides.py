"""Strides, offsets and contiguity of views of cut tensors: one device's, or a typed error; and draws into what a
conversion has moved: by one device's order in memory."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vescale_dtensor import DTensor, OperatorError, Replicate, Shard
from vescale_testkit import run_ranks
from vescale_testkit.oracle import STRIDED_VIEWS, spread

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


FEW = {
    "itself": lambda x: x,
    "transposed": lambda x: x.t(),
    "a dim more, expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "a dim more behind, expanded": lambda x: x.unsqueeze(-1).expand(*x.shape, 2),
    "expanded, transposed": lambda x: x.unsqueeze(0).expand(3, *x.shape).transpose(0, 2),
    "added to": lambda x: x + 1,
    "flattened and back": lambda x: x.reshape(1, *x.shape).squeeze(0),
}


def answers_where_few_are_left(shape):
    """By name, place and question: the answer, or that there is none; and one device's."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    whole, found = torch.arange(float(torch.Size(shape).numel())).view(shape), {}
    for (name, view), (place, placement) in itertools.product(FEW.items(), PLACES.items()):
        for asked in ("stride", "is_contiguous"):
            try:
                answer = ASKED[asked](view(spread(whole, mesh, [placement])))
            except OperatorError:
                answer = "refused"
            found[name, place, asked] = answer, ASKED[asked](view(whole))
    return found


@pytest.mark.parametrize("shape", [(6, 5), (5, 5), (3, 2), (2, 6), (4, 4), (2, 3)], ids=str)
def test_ranks_with_one_index_or_none_answer_as_the_others(shape):
    by_rank = run_ranks(4, answers_where_few_are_left, shape)
    wrong = {key: [one[key][0] for one in by_rank] for key in by_rank[0] if len({one[key][0] for one in by_rank}) > 1}
    assert not wrong
    assert not {key: both for key, both in by_rank[0].items() if both[0] not in ("refused", both[1])}


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


# Shapes and cuts by which ranks have one index of a dim, or none; the last two have two such dims on four ranks.
ONES = [
    ((2, 4, 3), (0,)), ((4, 2, 3), (1,)), ((3, 4, 2), (2,)), ((3, 4, 5), (0,)), ((5, 1, 4), (1,)),
    ((2, 2, 3), (0, 1)), ((2, 3, 2), (2, 0)),
]  # fmt: skip
ORDERS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "rotated": lambda x: x.permute(1, 2, 0),
    "matrices transposed": lambda x: x.mT,
}
MADE = {
    "relu": torch.relu, "gelu": F.gelu, "a sum with a row": lambda x: x + torch.ones(x.shape[-1]), "clone": torch.clone,
    "twice": lambda x: x * x, "with itself in rows": lambda x: x.contiguous() * x, "cast": lambda x: x.double(),
    "where": lambda x: torch.where(x > 3, x, 0 * x), "like it": lambda x: torch.ones_like(x),
    "softmax": lambda x: x.softmax(-1), "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)), "cumsum": lambda x: x.cumsum(0), "flip": lambda x: x.flip(-1),
    "padded": lambda x: F.pad(x, (1, 1)), "stacked": lambda x: torch.stack([x, x]), "roll": lambda x: x.roll(1, 0),
    "reshaped": lambda x: x.reshape(-1, x.shape[-1]), "flattened": lambda x: x.flatten(),
    "permuted again": lambda x: (x.relu().transpose(0, 2) + 1).transpose(0, 1),
    "gathered": lambda x: x.redistribute([Replicate()] * x.device_mesh.ndim) if type(x) is DTensor else x,
}  # fmt: skip


def drawn_into_ones(sizes):
    mesh = init_device_mesh("cpu", sizes)
    wrong = []
    for shape, cuts in [one for one in ONES if len(one[1]) == len(sizes)]:
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for (way, permuted), (name, made) in itertools.product(ORDERS.items(), MADE.items()):
            masks = []
            for x in (whole, spread(whole.clone(), mesh, [Shard(dim) for dim in cuts])):
                torch.manual_seed(3)
                y = made(permuted(x))
                mask = F.dropout(y * 0 + 1, 0.5)
                masks.append(mask.full_tensor() if type(mask) is DTensor else mask)
            if not torch.equal(*masks):
                wrong.append((shape, cuts, way, name))
    return wrong


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["one dim", "two dims"])
def test_draws_go_by_one_devices_order_where_ranks_have_one_index_of_a_dim(sizes):
    ranks = torch.Size(sizes).numel()
    assert run_ranks(ranks, drawn_into_ones, sizes) == [[]] * ranks
