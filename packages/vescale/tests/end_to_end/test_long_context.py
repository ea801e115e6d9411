"""`examples/long_context`: the losses of four ranks, each of which reads its own part of a text, are one device's."""

import pytest
import torch

from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")
STEPS, LENGTH, LOSS = 4, 512, 1e-5


@in_turns(3)
@pytest.mark.parametrize("context", ["ring", "all-to-all"])
def test_the_losses_are_one_devices(context):
    from long_context.train import train
    from long_context.train_parallel import train as train_parallel

    (wanted,) = run_ranks(1, train, STEPS, LENGTH)
    assert wanted[-1] < wanted[0]
    for found in run_ranks(4, train_parallel, STEPS, LENGTH, 4, context, timeout=240):
        torch.testing.assert_close(found, wanted, rtol=LOSS, atol=0)
