"""An axis of one rank: what is sharded over it, or summed, has the bits of one device, in values and in gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor, from_local
from vescale_testkit import run_ranks

ROWS, WIDTH = 13, 37
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(2, ROWS, WIDTH, generator=GENERATOR)
TARGET = torch.randint(WIDTH, (ROWS,), generator=GENERATOR)

FUNCTIONS = {
    "cross entropy": lambda x: F.cross_entropy(x, TARGET),
    "cross entropy, summed": lambda x: F.cross_entropy(x, TARGET, reduction="sum"),
    "cross entropy, ignored": lambda x: F.cross_entropy(x, TARGET, ignore_index=3),
    "cross entropy, smoothed": lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), TARGET),
    "mse": lambda x: F.mse_loss(x, Y),
    "kl": lambda x: F.kl_div(x, Y.sigmoid(), reduction="batchmean"),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "var": lambda x: x.var(),
    "var of rows": lambda x: x.var(0),
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax of rows": lambda x: x.softmax(0),
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "layer norm of all": lambda x: F.layer_norm(x, (ROWS, WIDTH)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "prod": lambda x: x.prod(0),
    "cumsum": lambda x: x.cumsum(0),
    "product with itself": lambda x: x.t() @ x,
    "cosine": lambda x: F.cosine_similarity(x, Y, 0),
    "median": lambda x: x.median(0).values,
}


def other_bits(sizes, axis):
    """The functions that differ where X is sharded, or a sum, over the axis of one rank."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    found = []
    for placement in (Shard(0), Shard(1), Partial()):
        placements = [placement if at == axis else Replicate() for at in range(len(sizes))]
        for name, function in FUNCTIONS.items():
            plain = X.clone().requires_grad_()
            if placement == Partial():
                given = from_local(X.clone(), mesh, placements, shape=X.shape).requires_grad_()
            else:
                given = distribute_tensor(X.clone(), mesh, placements).requires_grad_()
            wanted, out = function(plain), function(given)
            wanted.square().sum().backward()
            out.square().sum().backward()
            same = torch.equal(wanted, out.full_tensor()) and torch.equal(plain.grad, given.grad.full_tensor())
            found += [] if same else [(name, placement)]
    return found


@pytest.mark.parametrize(("sizes", "axis"), [((1,), 0), ((1, 2), 0), ((2, 1), 1)])
def test_functions_have_the_bits_of_one_device(sizes, axis):
    for found in run_ranks(max(sizes), other_bits, sizes, axis):
        assert not found


def described():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    sharded = distribute_tensor(X, mesh, [Shard(0), Shard(1)])
    return sharded.placements, sharded.redistribute(placements=[Shard(1), Replicate()]).placements


def test_what_is_cut_among_one_rank_is_whole():
    assert run_ranks(2, described)[0] == ((Replicate(), Shard(1)), (Replicate(), Replicate()))
