"""Selective activation checkpoints as TorchTitan writes them, around the blocks of a HuggingFace model on dp x tp."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "transformers.models.llama.modeling_llama")
STEPS = 3


def contexts():
    """Keeps attention and every second product, counted apart in the first pass and in the second."""
    seen = Counter()

    def policy(context, function, *args, **kwargs):
        name = function.overloadpacket.__name__
        if name == "mm":
            seen[context.is_recompute] += 1
        keeps = seen[context.is_recompute] % 2 if name == "mm" else name.startswith("_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def wrapped(model):
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=True)
    return model


def made():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def trained(plan, wraps):
    """Loss, gradients and parameters of each step. `wraps`: "before" or "after" `parallelize`, or not at all."""
    model = wrapped(made()) if wraps == "before" else made()
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer = vescale.parallelize(plan, model, optimizer) if plan else (model, optimizer(model.parameters()))
    model = wrapped(model) if wraps == "after" else model
    found = []
    for step in range(STEPS):
        tokens = torch.randint(61, (6, 9), generator=torch.Generator().manual_seed(step))
        logits = model(tokens, use_cache=False).logits  # the model's own loss is in float32
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters()]
    return [one.full_tensor() if isinstance(one, vescale.DTensor) else one for one in found]


@pytest.mark.parametrize("wraps", ["before", "after"])
@pytest.mark.parametrize("zero", [2, 3])
def test_training_is_one_devices(zero, wraps):
    wanted = trained(None, None)
    plan = dataclasses.replace(library.llama({"dp": 2, "tp": 2}, sequence_parallel=zero == 3), zero=zero)
    for found in run_ranks(4, trained, plan, wraps, timeout=240):
        assert len(found) == len(wanted)
        for one, expected in zip(found, wanted):
            torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11)
