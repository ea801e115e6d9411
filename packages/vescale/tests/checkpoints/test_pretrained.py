"""vescale.from_pretrained: published weights in shards, each rank reading its own bytes, and published again."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed import DistributedConfig

import vescale
from architectures import register
from vescale.pretrained import places_of
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")


def whole(model):
    return {name: one.full_tensor() for name, one in model.state_dict().items()}


def read(folder, config, out):
    """The parameters, whole; and of each rank what it holds and read, in bytes."""
    model, _ = vescale.from_pretrained(folder, config)
    report = vescale.load(folder, {"model": model})
    vescale.export_huggingface(out, model)
    held = sum(one.to_local().nbytes for one in model.parameters() if isinstance(one, vescale.DTensor))
    return whole(model), held, report.bytes_read, model.training


CONFIGS = {
    "tp 2": DistributedConfig(tp_size=2),
    "fsdp 2": DistributedConfig(fsdp_size=2),
    "ep 2": DistributedConfig(fsdp_size=2, ep_size=2),
    "pp 2": DistributedConfig(pp_size=2),
}
NAMES, OF_EXPERTS = ("llama", "mixtral", "granitemoe", "bloom"), ("mixtral", "granitemoe")


@in_turns(3)
@pytest.mark.parametrize("name, case", [(n, c) for n in NAMES for c in CONFIGS if c != "ep 2" or n in OF_EXPERTS])
def test_each_rank_reads_its_own(name, case, tmp_path):
    """mixtral's experts are published one by one, granitemoe's under other names; bloom ties its head."""
    alone = register.build(name)
    alone.save_pretrained(tmp_path / "published", max_shard_size="100kB")
    assert bool(places_of(alone)) == (name in OF_EXPERTS)
    wanted = alone.state_dict()
    answers = run_ranks(2, read, tmp_path / "published", CONFIGS[case], tmp_path / "out", timeout=300)
    found = {key: value for values, *_ in answers for key, value in values.items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    published = {n: t for file in (tmp_path / "published").glob("*.safetensors") for n, t in load_file(file).items()}
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == published.keys() and all(torch.equal(exported[n], published[n]) for n in published)
    size = sum(one.nbytes for one in published.values())
    assert all(not training and got <= size for _, _, got, training in answers)


def test_no_byte_is_read_twice(tmp_path):
    """Of tensors so large that what lies between two parts is not read along."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
    alone = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes))
    alone.save_pretrained(tmp_path / "published")
    answers = run_ranks(2, read, tmp_path / "published", CONFIGS["fsdp 2"], tmp_path / "out")
    assert sum(got for _, _, got, _ in answers) <= 1.02 * sum(held for _, held, _, _ in answers)


def variants(folder, base):
    plan = lambda model: library.llama({"tp": 2}, sequence_parallel=False)
    half, optimizer = vescale.from_pretrained(folder, plan, torch.optim.AdamW, dtype=torch.bfloat16)
    narrow, _ = vescale.from_pretrained(folder, plan, config={"rms_norm_eps": 0.5})
    said = []
    for path in (base, f"{folder}/nothing"):
        with pytest.raises(vescale.VescaleError) as error:
            vescale.from_pretrained(path, plan, kind=LlamaForCausalLM)
        said.append(str(error.value))
    headless, _ = vescale.from_pretrained(base, plan, kind=LlamaForCausalLM, missing="keep")
    tokens = torch.arange(8)[None]
    half(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return whole(half), half.generation_config.max_new_tokens, narrow.config.rms_norm_eps, said, whole(headless)


def test_dtype_configuration_and_what_is_missing(tmp_path):
    alone = register.build("llama")
    alone.generation_config = GenerationConfig(max_new_tokens=7)
    alone.save_pretrained(tmp_path / "published")
    alone.model.save_pretrained(tmp_path / "base")
    optimizer = torch.optim.AdamW(alone.bfloat16().parameters())
    tokens = torch.arange(8)[None]
    alone(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    answers = run_ranks(2, variants, tmp_path / "published", tmp_path / "base")
    for half, most, epsilon, (missing, no_folder), headless in answers:
        assert most == 7 and epsilon == 0.5
        for name, one in alone.state_dict().items():
            torch.testing.assert_close(half[name], one, atol=4e-3, rtol=0)
        assert "lm_head.weight" in missing and "gives no model" in no_folder
        assert headless["lm_head.weight"].std() > 0


COMPUTED = {"inkling2_text"}
"""Types whose published tensors are no parts of a parameter: their numbers lie in turns."""


@pytest.mark.parametrize("name", slice_of([name for name in register.listed() if name not in COMPUTED], 20))
def test_places_are_those_that_transformers_publishes(name):
    """Names, and what each of them holds."""
    model = register.build(name)
    state, places = model.state_dict(), places_of(model)
    found = {}
    for key, one in state.items():
        for published, begin, shape in places.get(key, [(key, (0,) * one.ndim, one.shape)]):
            sizes = (*(1,) * (one.ndim - len(shape)), *shape)
            found[published] = one[tuple(slice(at, at + size) for at, size in zip(begin, sizes))].reshape(shape)
    wanted = revert_weight_conversion(model, dict(state))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
