"""Functions that hand back the tensor itself, a view of it or a copy: the same of the three as on one device."""

import pytest
import torch

from vescale_dtensor import DTensor, Shard, ViewError
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import placements_for, spread

SHAPES = {(2,): [(4,), (1,), (4, 6), (1, 2, 3, 1), (2, 2, 3, 1)], (2, 2): [(2, 1, 4, 2)]}
BASES = {
    "itself": lambda w: w,
    "transposed": lambda w: w.transpose(0, -1) if w.ndim else w,
    "neighbours transposed": lambda w: w.transpose(1, 2) if w.ndim > 2 else w,
    "channels last": lambda w: w.movedim(-1, 1) if w.ndim > 2 else w,
    "steps": lambda w: w[..., ::2] if w.ndim else w,
    "a column": lambda w: w[..., 0] if w.ndim > 1 else w,
    "expanded": lambda w: w.unsqueeze(-1).expand(*w.shape, 2),
}
CUT_OUT = {"steps", "a column"}


def laid(memory_format, ndim):
    return lambda x: x.contiguous(memory_format=memory_format) if x.ndim == ndim else x


FUNCTIONS = {
    "ravel": lambda x: x.ravel(),
    "torch.ravel": torch.ravel,
    "contiguous": lambda x: x.contiguous(),
    "channels_last": laid(torch.channels_last, 4),
    "channels_last_3d": laid(torch.channels_last_3d, 5),
    # Of one channel `to` goes by the stride of that dim, which means nothing.
    "channels_last, to": lambda x: x.to(memory_format=torch.channels_last) if x.ndim == 4 and x.shape[1] > 1 else x,
    "flatten": lambda x: x.flatten(),
    "flatten of one dim": lambda x: x.flatten(-1, -1),
    "flatten of two": lambda x: x.flatten(-2, -1) if x.ndim > 1 else x.flatten(0),
    "torch.flatten": lambda x: torch.flatten(x, start_dim=-1),
    "nn.Flatten": torch.nn.Flatten(0),
    "reshape": lambda x: x.reshape(x.shape),
    "reshape to one dim": lambda x: x.reshape(-1),
    "reshape_as": lambda x: x.reshape_as(x),
    "view_as": lambda x: x.view_as(x),
    "expand": lambda x: x.expand(x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, x.shape),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x)[0],
    "broadcast_tensors of two": lambda x: torch.broadcast_tensors(torch.ones(()), x)[1],
    "cartesian_prod": lambda x: torch.cartesian_prod(x) if x.ndim == 1 else x,
    "to_dense": lambda x: x.to_dense(),
    "sum_to_size": lambda x: x.sum_to_size(x.shape) if x.ndim else x,
    "squeeze": lambda x: x.squeeze(),
    "transpose": lambda x: x.transpose(-1, -1) if x.ndim else x,
    "to": lambda x: x.to(x.dtype),
    "float": lambda x: x.float(),
    "conj": lambda x: x.conj(),
    "positive": lambda x: +x,
    "atleast_1d": torch.atleast_1d,
}


def plain(shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def write(function, base, w):
    """What w holds after a write to the result, and the result; "refused" where it may not be written."""
    try:
        with torch.no_grad():
            out = function(base(w))
            out += 100
    except ViewError:
        return "refused", None
    return full(w), full(out)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def tracked(function, base, w):
    """Whether the result is the tensor itself and a leaf, and the gradient of w and of the result, if it has one."""
    x = base(w.requires_grad_())
    out = function(x)
    (out * 2).sum().backward()
    return out is x, out.is_leaf, out.requires_grad, full(w.grad), full(out.grad) if out.is_leaf else None


def same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is other is None or type(one) is type(other) and one == other


def on_rank(name, sizes):
    mesh, function, wrong = mesh_of(*sizes), FUNCTIONS[name], []
    for shape in SHAPES[sizes]:
        for placements in placements_for(shape, len(sizes)):
            for base_name, base in BASES.items():
                try:
                    wanted = write(function, base, plain(shape))
                except RuntimeError:  # an expanded tensor is not written
                    wanted = None
                if wanted is not None:
                    found = write(function, base, spread(plain(shape), mesh, placements))
                    moved = isinstance(found[0], str) and any(isinstance(one, Shard) for one in placements)
                    if not moved and not all(map(same, wanted, found)):
                        wrong.append((shape, placements, base_name, "write", found))
                if base_name in CUT_OUT and any(isinstance(one, Shard) for one in placements):
                    continue  # a part that had to move is a fresh tensor, which lies in order
                wanted = tracked(function, base, plain(shape))
                found = tracked(function, base, spread(plain(shape), mesh, placements))
                if not all(map(same, wanted, found)):
                    wrong.append((shape, placements, base_name, wanted[:3], found[:3]))
    return wrong


@in_turns(3)
@pytest.mark.parametrize("sizes", list(SHAPES), ids=str)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_self_view_or_copy_as_on_one_device(name, sizes):
    count = torch.Size(sizes).numel()
    assert run_ranks(count, on_rank, name, sizes) == [[]] * count
