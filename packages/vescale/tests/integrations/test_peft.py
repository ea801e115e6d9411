"""Adapters of PEFT under a plan: placed by what they adapt; trained, saved, loaded and merged as on one device."""

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, slice_of, warm_up

pytest.importorskip("peft", reason="these tests are of PEFT")
warm_up("vescale", "vescale.integrations.peft", "vescale.integrations.accelerate")
warm_up("transformers.models.llama.modeling_llama")

CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PLANS = {
    "dp2 zero 3": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp2": lambda: library.llama({"tp": 2}, sequence_parallel=False),
    "tp2 sp": lambda: library.llama({"tp": 2}, sequence_parallel=True),
    "dp2 tp2 zero 3": lambda: library.llama({"dp": 2, "tp": 2}, sequence_parallel=True).override(zero=3),
}
RANKS = {"dp2 zero 3": 2, "tp2": 2, "tp2 sp": 2, "dp2 tp2 zero 3": 4}
PIPELINE = vescale.Pipeline(axis="pp", cuts=("model.layers.1",), schedule="1f1b", microbatches=2)
OTHERS = {
    "pp2": lambda: vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, data_axis=None, pipeline=PIPELINE),
    "pp2 tp2": lambda: library.llama({"tp": 2}, sequence_parallel=False).override(
        mesh={"pp": 2, "tp": 2}, pipeline=PIPELINE
    ),
    "pp2 dp2 zero 3": lambda: vescale.Plan(mesh={"pp": 2, "dp": 2}, parameters={"*": {}}, zero=3, pipeline=PIPELINE),
    "ep2": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, expert_axis="dp"),
    "ep2 zero 3": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, expert_axis="dp", zero=3),
    "ep of one rank": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2),
    "ep2 tp2": lambda: library.mixtral({"dp": 2, "tp": 2}, sequence_parallel=False).override(expert_axis="dp"),
}
"""Pipelines, and Mixtral's experts over ranks."""
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "every projection": {"target_modules": EVERY, "lora_dropout": 0.1},
    "dora": {"target_modules": EVERY, "use_dora": True},
    "embedding and head": {"target_modules": [*EVERY, "embed_tokens", "lm_head"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "without dropout": {"target_modules": EVERY},
}
STACKS = {
    "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
}  # fmt: skip
"""Mixtral's stacked weights, which PEFT parametrizes for each call."""


def base(has_experts=False):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if has_experts:
        return MixtralForCausalLM(MixtralConfig(**CONFIG, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def build(adapter, has_experts=False):
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
    targets = STACKS if adapter == "stacks" else ADAPTERS[adapter]
    return get_peft_model(base(has_experts), LoraConfig(**options, **targets))


def trained(model, optimizer, steps=10, parts=1):
    torch.manual_seed(5)
    losses = []
    for step in range(steps):
        tokens = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(step))
        losses.append(0.0)
        for part in tokens.chunk(parts):
            loss = model(input_ids=part, labels=part).loss / parts
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model):
    return {n: getattr(p.detach(), "full_tensor", p.detach)() for n, p in model.named_parameters()}


def compared(plan, adapter, folder):
    from peft import PeftModel, set_peft_model_state_dict
    from peft.utils import load_peft_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    from vescale.integrations.peft import adapted

    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    one, model = build(adapter), build(adapter)
    fitted = adapted(PLANS[plan](), model)
    model, optimizer = vescale.parallelize(fitted, model, make)
    losses, wanted = trained(model, optimizer), trained(one, make(one.parameters()))
    found, expected = whole(model), whole(one)
    assert all(torch.equal(found[n], expected[n]) for n, p in one.named_parameters() if not p.requires_grad)
    error = max(((found[n] - expected[n]).norm() / expected[n].norm()).item() for n in found)
    # Saved by PEFT, and loaded by it into a model of one device and into another one of the plan.
    state = vescale.whole_state_dict(model)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    torch.distributed.barrier()
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**CONFIG)), folder)
    same = all(torch.equal(p, found[n]) for n, p in again.named_parameters() if "lora_" in n or "modules_to_save" in n)
    other = build(adapter)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    other, _ = vescale.parallelize(fitted, other)
    set_peft_model_state_dict(other, load_peft_weights(folder))
    loaded = whole(other)
    same = same and all(torch.equal(loaded[n], found[n]) for n in found if "lora_" in n)
    # Merged into the shards, against one device's merge of the same adapter.
    merged, wanted_merge = whole(other.merge_and_unload()), whole(again.merge_and_unload())
    apart = max(((merged[n] - p).norm() / p.norm()).item() for n, p in wanted_merge.items())
    return max(abs(a - b) / b for a, b in zip(losses, wanted)), error, same, apart


CASES = [(plan, adapter) for plan in PLANS for adapter in ADAPTERS if adapter != "without dropout"]


@pytest.mark.parametrize(("plan", "adapter"), slice_of(CASES, 8))
def test_trains_saves_loads_and_merges_as_one_device(plan, adapter, tmp_path):
    for loss, parameter, same, merged in run_ranks(RANKS[plan], compared, plan, adapter, str(tmp_path), timeout=200):
        assert loss <= 1e-5 and parameter <= 1e-4 and same and merged <= 1e-6


def of_stages_and_experts(plan, adapter, folder):
    """Losses, parameters, and what PEFT makes of the files: the base with the adapter merged, against one device's."""
    from peft import PeftModel

    from vescale.integrations.peft import adapted

    has_experts = plan.startswith("ep")
    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    one, model = build(adapter, has_experts), build(adapter, has_experts)
    model, optimizer = vescale.parallelize(adapted(OTHERS[plan](), model), model, make)
    parts = 1 if has_experts else PIPELINE.microbatches  # a pipeline is one device's accumulation of its microbatches
    losses, wanted = trained(model, optimizer), trained(one, make(one.parameters()), parts=parts)
    expected = {name: p.detach() for name, p in one.named_parameters()}
    found = vescale.whole_state_dict(model)
    if torch.distributed.get_rank():
        assert not found
        return max(abs(a - b) / b for a, b in zip(losses, wanted)), 0.0, 0.0
    assert found.keys() == one.state_dict().keys()
    assert all(torch.equal(found[n], expected[n]) for n, p in one.named_parameters() if not p.requires_grad)
    error = max(((found[n] - p).norm() / p.norm()).item() for n, p in expected.items())
    if plan.startswith("pp") and adapter == "whole head":
        with pytest.raises(vescale.PlanError, match="another stage of the pipeline"):
            model.save_pretrained(folder, state_dict=found)
        return max(abs(a - b) / b for a, b in zip(losses, wanted)), error, 0.0
    model.save_pretrained(folder, state_dict=found)
    again = PeftModel.from_pretrained(base(has_experts), folder).merge_and_unload()
    merged = {n: p.detach() for n, p in one.merge_and_unload().named_parameters()}
    apart = max(((p - merged[n]).norm() / merged[n].norm()).item() for n, p in again.named_parameters())
    return max(abs(a - b) / b for a, b in zip(losses, wanted)), error, apart


STAGED = [(plan, adapter) for plan in OTHERS for adapter in ("lora", "without dropout", "whole head", "dora")
          if not (plan.startswith("ep") and adapter in ("without dropout", "dora"))]  # fmt: skip
STAGED += [(plan, "stacks") for plan in OTHERS if plan.startswith("ep")]
"""Of dropout a pipeline draws a mask per microbatch, as accumulation does; Mixtral's experts are no linears."""


@pytest.mark.parametrize(("plan", "adapter"), slice_of(STAGED, 4))
def test_stages_and_experts(plan, adapter, tmp_path):
    ranks = OTHERS[plan]().world_size
    for loss, parameter, merged in run_ranks(ranks, of_stages_and_experts, plan, adapter, str(tmp_path), timeout=200):
        assert loss <= 1e-5 and parameter <= (0.0 if plan == "pp2" else 1e-4) and merged <= 1e-4


def collectives(adapter):
    """Of a forward and backward under TP: with adapters, and of the base model alone."""
    from vescale.integrations.peft import adapted

    counts = []
    for is_adapted in (True, False):
        model = build(adapter)
        plan = PLANS["tp2"]()
        if is_adapted:
            plan = adapted(plan, model)
        else:
            model = model.unload()
        model, _ = vescale.parallelize(plan, model)
        tokens = torch.randint(61, (4, 12), generator=torch.Generator().manual_seed(1))
        model(input_ids=tokens, labels=tokens)
        with vescale.comm_trace(model) as trace, torch.no_grad():
            model(input_ids=tokens, labels=tokens)
        counts.append(trace.count())
    return counts


def test_adapters_of_columns_communicate_nothing_of_their_own():
    for with_adapters, alone in run_ranks(2, collectives, "lora", timeout=100):
        assert with_adapters == alone


# --- weights of several names, and virtual tokens ---------------------------------------

OF_PROMPTS = {"prompt": "PromptTuningConfig", "prefix": "PrefixTuningConfig", "encoder": "PromptEncoderConfig"}


def trained_beside(plan, kind):
    """The losses' and the trained parameters' distance from one device's."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    from vescale.integrations.peft import adapted

    def make():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=kind == "tied"))
        if kind in OF_PROMPTS:
            config = getattr(peft, OF_PROMPTS[kind])(task_type="CAUSAL_LM", num_virtual_tokens=3)
        else:  # VB-LoRA's layers share one bank of vectors
            config = peft.LoraConfig(init_lora_weights=False, target_modules=EVERY) if kind == "tied" else (
                peft.VBLoRAConfig(num_vectors=16, vector_length=8, target_modules=["q_proj", "v_proj"])
            )  # fmt: skip
        return peft.get_peft_model(model, config)

    def optimize(parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)

    one, model = make(), make()
    model, optimizer = vescale.parallelize(adapted(PLANS[plan](), model), model, optimize)
    losses, wanted = trained(model, optimizer, 4), trained(one, optimize(one.parameters()), 4)
    found = whole(model)
    learned = {name: p for name, p in one.named_parameters() if p.requires_grad}
    assert learned and found.keys() == dict(one.named_parameters()).keys()
    error = max(((found[n] - p).norm() / p.norm()).item() for n, p in learned.items())
    return max(abs(a - b) / b for a, b in zip(losses, wanted)), error


BESIDE = [(plan, kind) for plan in PLANS for kind in (*OF_PROMPTS, "tied", "shared")]


@pytest.mark.parametrize(("plan", "kind"), slice_of(BESIDE, 4))
def test_weights_of_several_names_and_virtual_tokens(plan, kind):
    for loss, parameter in run_ranks(RANKS[plan], trained_beside, plan, kind, timeout=200):
        assert loss <= 1e-5 and parameter <= 1e-4
