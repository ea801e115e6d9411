"""Batches that are sharded already, under a pipeline: every rank computes its own rows, and the losses are the same."""

import copy
from functools import partial

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

MESH = {"pp": 2, "dp": 2, "tp": 1}


def run(how, rows, zero=0):
    """Losses and those of one device; of the last call's forwards, bytes received beside what crosses the cut, and
    how often parameters were gathered; and the number of blocks."""
    from nanogpt.model import GPT, GPTConfig

    torch.manual_seed(0)
    one = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32))
    plan = library.gpt({"dp": 2, "tp": 1}).override(
        mesh=MESH, pipeline=vescale.Pipeline(cuts=["transformer.h.1"], microbatches=2), zero=zero
    )
    optimizer_fn = partial(torch.optim.SGD, lr=0.1)
    model, optimizer = vescale.parallelize(plan, copy.deepcopy(one), optimizer_fn)
    trained = optimizer_fn(one.parameters())
    losses = []
    for step in range(3):
        batch = tuple(torch.randint(64, (2, rows, 16), generator=torch.Generator().manual_seed(step)))
        first = torch.distributed.get_rank() % 2 == 0
        half = -(-rows // 2)
        mine = tuple(part[:half] if first else part[half:] for part in batch)
        given = plan.local_batch(mine) if how == "local" else plan.shard_batch(batch)
        with vescale.comm_trace(model) as trace:
            loss = model(*given)
            loss.backward()
        wanted = one(*batch)
        wanted.backward()
        for each in (optimizer, trained):
            each.step()
            each.zero_grad()
        losses.append((loss.item(), wanted.item()))
    events = [event for event in trace.events if event.cause.direction == "forward"]
    gathers = [event for event in events if event.cause.function == "parameter gather"]
    blocks = len(model._vescale.sync.units)
    return losses, [event.received for event in events if event not in gathers], len(gathers), blocks


@pytest.mark.parametrize(("how", "rows", "zero"), [("local", 8, 0), ("shard", 8, 2), ("shard", 8, 3), ("local", 6, 1)])
def test_every_rank_computes_its_own_rows(how, rows, zero):
    for losses, received, gathers, blocks in run_ranks(4, run, how, rows, zero, timeout=120):
        for loss, wanted in losses:
            assert abs(loss - wanted) <= 1e-5 * wanted
        if rows % 4 == 0:  # two microbatches of two ranks' rows: nothing but the loss is summed
            assert max(received, default=0) <= 16
        assert gathers <= (blocks if zero == 3 else 0)  # once a block and call, whatever the microbatches
