"""Memory by formula of pipelines, against dry runs of the plans that are chosen by it."""

import pytest
import torch

import vescale
from vescale import Precision
from vescale_testkit import slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

MARGIN = 0.08
POSITIONS, VOCABULARY = 64, 512
PLAIN = {"tp": 1, "dp": 1, "virtual": 1, "checkpointing": False, "zero": 0}
PINNED = {
    "two stages": {"pp": 2, "microbatches": 4},
    "as many microbatches as stages": {"pp": 4, "microbatches": 4},
    "four stages": {"pp": 4, "microbatches": 8},
    "interleaved": {"pp": 2, "microbatches": 4, "virtual": 2},
    "four interleaved": {"pp": 4, "microbatches": 8, "virtual": 2},
    "interleaved in one round": {"pp": 4, "microbatches": 4, "virtual": 2},
    "recomputed": {"pp": 2, "microbatches": 4, "checkpointing": True},
    "interleaved and recomputed": {"pp": 2, "microbatches": 4, "virtual": 2, "checkpointing": True},
    "tensor": {"pp": 2, "tp": 2, "microbatches": 4},
    "positions": {"pp": 2, "tp": 2, "sp": True, "microbatches": 4},
    "data": {"pp": 2, "dp": 2, "microbatches": 4},
    "summed shards": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 2},
    "gathered": {"pp": 2, "dp": 2, "microbatches": 4, "zero": 3},
}


def gpt():
    from nanogpt.model import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, n_layer=8, n_head=4, n_embd=64))


def llama():
    from llama.model import build

    torch.manual_seed(0)
    return build(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=8)


def off(build, pin, **more):
    """How far the formula is above the dry run, as a part of it."""
    pin = PLAIN | pin
    rows = 2 * pin["microbatches"] * pin["dp"]
    ids = torch.randint(VOCABULARY, (rows, POSITIONS), generator=torch.Generator().manual_seed(0))
    batch = (ids, ids) if build is gpt else {"input_ids": ids, "labels": ids}
    world = pin["pp"] * pin["tp"] * pin["dp"]
    asked = {"world_size": world, "batch": rows, "hardware": "cpu", "pin": pin, "sample": batch, "verify": batch}
    explained = vescale.generate_plan(build(), **asked, **more).explain()
    return explained.chosen.memory.total / explained.peak - 1


@pytest.mark.parametrize("name", slice_of(list(PINNED), 5))
@pytest.mark.parametrize("build", [gpt, llama])
def test_the_formula_is_near_the_fullest_stage(build, name):
    assert abs(off(build, PINNED[name])) <= MARGIN


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_of_narrow_parameters_are_wide(zero):
    narrow = {"precision": Precision(torch.bfloat16)}
    assert abs(off(gpt, {"pp": 2, "dp": 2, "microbatches": 4, "zero": zero}, **narrow)) <= MARGIN
