"""A folder of transformers' own -> a plan -> one step -> a folder that transformers loads: equal weights, ties kept."""

from functools import partial

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

VOCABULARY, BATCH, POSITIONS = 61, 6, 12


def config(tied):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)


def one_step(source, out, tied):
    """The weights, whole, after one step under a plan from the folder's weights; exported to `out`."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(99)  # the folder's values must replace these
    model = LlamaForCausalLM(config(tied))
    plan = library.llama(mesh={"dp": 2, "tp": 2})
    model, optimizer = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    vescale.load(source, {"model": model})
    tokens = torch.randint(VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(1))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    vescale.export_huggingface(out, model)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@in_turns(3)
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back(tmp_path, tied):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    start = LlamaForCausalLM(config(tied))
    start.save_pretrained(tmp_path / "source")
    for weights in run_ranks(4, one_step, tmp_path / "source", tmp_path / "out", tied, timeout=120):
        model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        found = model.state_dict()
        assert set(found) == set(weights) and all(torch.equal(found[name], weights[name]) for name in weights)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    moved = {name for name, value in start.state_dict().items() if not torch.equal(value, found[name])}
    assert len(moved) > 0.9 * len(found)
    tokens = torch.randint(VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    start(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for name, value in start.state_dict().items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm(), name
