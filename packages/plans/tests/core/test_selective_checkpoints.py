"""torch's selective checkpoints around a parallelized model: the same functions in the first pass and in the second."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks, warm_up

warm_up("vescale_plans")

WIDTH, ROWS, STEPS = 6, 8, 5
KEPT = {"products": ("addmm", "mm"), "views and sums": ("view", "sum"), "everything": None}


def policy(kept, context, function, *args, **kwargs):
    must = kept is None or function.overloadpacket.__name__ in kept
    return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE


def trained(plan, kept):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if plan is not None:
        model, optimizer = parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, KEPT[kept]))
    for _ in range(STEPS):
        batch = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        loss = checkpoint(model, batch, use_reentrant=False, context_fn=contexts).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.full_tensor() if plan is not None else one.detach() for one in model.parameters()]


def apart(plan, kept):
    """The largest relative error of a parameter. Runs on every rank."""
    pairs = zip(trained(plan, kept), trained(None, kept))
    return max(((got - expected).norm() / expected.norm()).item() for got, expected in pairs)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kept", KEPT)
def test_the_model_trains_as_on_one_device(kept, zero):
    assert max(run_ranks(2, apart, Plan({"dp": 2}, {"*": {}}, zero=zero), kept)) < 1e-12
