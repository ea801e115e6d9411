"""The hand-written blocks do the work of the single-device ones: same loss, same gradients.

Untimed and quick, so it belongs to the ordinary tests: a baseline that did less than its rival
would make every ratio against it worthless.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmarks.models._llama_blocks import Sizes, activations, blocks, rotary_table, shard_dim
from benchmarks.models._llama_by_hand import blocks_by_hand


def weighted_sum(out, weight):
    """A plain sum would give every token the same gradient and hide a swap of two of them."""
    return (out * weight).sum()


@pytest.fixture(scope="module")
def single():
    """Loss, gradient of the input, gradients of the parameters; and the blocks themselves."""
    sizes = Sizes()
    whole, x = blocks(sizes), activations(sizes).requires_grad_()
    loss = weighted_sum(whole(x, *rotary_table(sizes)), activations(sizes).cos())
    loss.backward()
    return sizes, whole, x, loss.detach()


def run_rank(rank, ranks, store, single):
    """One rank of the hand-written blocks, in a thread of its own, over a gloo group of its own."""
    sizes, whole, x, _ = single
    group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
    model = blocks_by_hand(whole, sizes, group, rank, ranks)
    tokens = x.detach().chunk(ranks, 1)[rank].clone().requires_grad_()
    weight = activations(sizes).cos().chunk(ranks, 1)[rank]
    loss = weighted_sum(model(tokens, *rotary_table(sizes)), weight)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), tokens.grad, gradients


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_by_hand_equals_single_device(single, ranks):
    _, whole, x, loss = single
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run_rank, rank, ranks, store, single) for rank in range(ranks)]
        losses, inputs, gradients = zip(*(future.result() for future in futures), strict=True)

    torch.testing.assert_close(torch.stack(losses).sum(), loss)
    torch.testing.assert_close(torch.cat(inputs, 1), x.grad, rtol=1e-5, atol=1e-5)
    for name, parameter in whole.named_parameters():
        parts, dim = [gradient[name] for gradient in gradients], shard_dim(name)
        gathered = torch.stack(parts).sum(0) if dim is None else torch.cat(parts, dim)
        error = (gathered - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-6, f"{name}: relative error {error:.1e}"
