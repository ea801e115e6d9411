"""transformers' DistributedConfig and accelerate's ParallelismConfig in place of a plan, against one device."""

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import vescale
from architectures import outcome, register
from vescale._planning import from_config
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

DENSE = ("llama", "qwen3", "gemma2", "phi3", "gpt2")
OF_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "granitemoe")
CONFIGS = {
    "tp 2": DistributedConfig(tp_size=2),
    "fsdp 2": DistributedConfig(fsdp_size=2),
    "ep 2": DistributedConfig(ep_size=2, fsdp_size=2),
    "dp 2 x tp 2": DistributedConfig(dp_replicate_size=2, tp_size=2),
}
MORE = {
    "fsdp 2 x tp 2, experts over both": DistributedConfig(fsdp_size=2, tp_size=2, ep_size=4),
    "fsdp 4, experts over 2": DistributedConfig(fsdp_size=4, ep_size=2),
    "two replicas of fsdp 2": DistributedConfig(dp_replicate_size=2, fsdp_size=2),
    "pp 2 x tp 2": DistributedConfig(pp_size=2, tp_size=2),
    "accelerate's, fsdp 2 x cp 2": ParallelismConfig(dp_shard_size=2, cp_size=2),
    "accelerate's, fsdp 2 x sp 2": ParallelismConfig(dp_shard_size=2, sp_size=2),
}


def judged(plans):
    return {case: outcome.judged(case[0], plan) for case, plan in plans.items()}


def check(plans):
    """Each plan of as many ranks, against one device."""
    for ranks in sorted({plan.world_size for plan in plans.values()}):
        some = {case: plan for case, plan in plans.items() if plan.world_size == ranks}
        for found in run_ranks(ranks, judged, some, timeout=600):
            assert not {case: wrong for case, one in found.items() if (wrong := outcome.wrong(one))}


def planned(name, configs, monkeypatch):
    """The plans; the model is probed once."""
    model = register.build(name)
    with outcome.quiet():
        structure = from_config.structure_of(model, from_config.sample_of(model))
        monkeypatch.setattr(from_config, "structure_of", lambda *given, **options: structure)
        return {(name, case): vescale.plan_from_config(config, model) for case, config in configs.items()}


@in_turns(5)
@pytest.mark.parametrize("name", (*DENSE, *OF_EXPERTS))
def test_it_equals_one_device(name, monkeypatch):
    plans = planned(name, {n: one for n, one in CONFIGS.items() if name in OF_EXPERTS or one.ep_size == 1}, monkeypatch)
    meshes = [dict(plan.mesh) for plan in plans.values()]
    assert meshes == [{"tp": 2}, {"dp": 2}, *[{"ep": 2}] * (name in OF_EXPERTS), {"dp": 2, "tp": 2}]
    check(plans)


@in_turns(2)
@pytest.mark.parametrize("name", ("llama", "mixtral"))
def test_further_sizes_equal_one_device(name, monkeypatch):
    configs = {case: one for case, one in MORE.items() if name == "mixtral" or getattr(one, "ep_size", 1) == 1}
    plans = planned(name, configs, monkeypatch)
    assert dict(plans[name, "two replicas of fsdp 2"].mesh) == {"replicas": 2, "dp": 2}
    check(plans)


def of_a_config(folder):
    model = register.build("llama")
    found = outcome.judged("llama", CONFIGS["fsdp 2"])
    sharded = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    said = []
    for config, one in ((CONFIGS["tp 2"], sharded), (DistributedConfig(tp_size=4), model), (DistributedConfig, model)):
        with pytest.raises(vescale.VescaleError) as error:
            vescale.parallelize(config, one)
        said.append(str(error.value))
    vescale.parallelize(CONFIGS["tp 2"], model)
    return outcome.wrong(found), said, model.lm_head.weight.to_local().shape[0]


def test_parallelize_takes_a_config_and_explains_a_model_that_transformers_sharded(tmp_path):
    whole = register.build("llama")
    whole.save_pretrained(tmp_path)
    for wrong, (sharded, ranks, kind), rows in run_ranks(2, of_a_config, tmp_path, timeout=120):
        assert not wrong and 2 * rows == whole.lm_head.weight.shape[0]
        assert "sharded by transformers" in sharded and "vescale.from_pretrained(folder, config)" in sharded
        assert "4 ranks" in ranks and "the class DistributedConfig, not a plan" in kind


def test_what_a_config_cannot_say_is_refused():
    model = register.build("llama")
    with pytest.raises(vescale.PlanError, match=r"ep_size=2 .* spread over \[\]"):
        vescale.plan_from_config(DistributedConfig(ep_size=2, fsdp_size=2), model)
    with pytest.raises(vescale.PlanError, match="pp_size=4 is more stages than the 2"):
        vescale.plan_from_config(DistributedConfig(pp_size=4), model)
    with pytest.raises(vescale.PlanError, match="tp_plan says how single modules"):
        vescale.plan_from_config(DistributedConfig(tp_size=2, tp_plan={"lm_head": "colwise"}), model)


def test_precision_offload_and_positions_are_the_plans():
    model = register.build("llama")
    config = DistributedConfig(tp_size=2, fsdp_size=2, fsdp_mixed_precision=True, fsdp_cpu_offload=True)
    plan = vescale.plan_from_config(config, model)
    assert plan.precision == vescale.Precision(torch.bfloat16, torch.float32) and plan.offload and plan.zero == 3
    sharded = vescale.plan_from_config(DistributedConfig(tp_size=2, enable_sequence_parallel=True), model)
    assert sharded.boundaries["model.layers.*.mlp.down_proj"].output == {"tp": vescale.Shard(1)}
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    assert vescale.dry_run(config, model, batch).plan == plan
    assert vescale.predict(config, model, batch, "h100").plan == plan


def test_a_dense_model_whose_batch_alone_is_divided_is_not_run():
    model = register.build("llama")
    plan = vescale.plan_from_config(CONFIGS["fsdp 2"], model)
    model.model.forward = None
    assert vescale.plan_from_config(CONFIGS["fsdp 2"], model) == plan
    assert dict(plan.parameters) == {"*": {}} and plan.zero == 3 and not plan.boundaries
    mixtral = vescale.plan_from_config(CONFIGS["fsdp 2"], register.build("mixtral"))
    assert mixtral.expert_axis == "dp"  # what is in stacks keeps its rows where they are


class Picture(torch.nn.Linear):
    def forward(self, picture):
        return super().forward(picture)


def test_a_model_of_unknown_inputs_needs_a_sample_only_where_it_is_split():
    model, sample = Picture(4, 6), torch.ones(2, 4)
    plan = vescale.plan_from_config(ParallelismConfig(dp_replicate_size=2, dp_shard_size=3), model)
    assert (dict(plan.mesh), plan.zero, plan.data_axis) == ({"replicas": 2, "dp": 3}, 3, ("replicas", "dp"))
    config = ParallelismConfig(tp_size=2)
    with pytest.raises(vescale.PlanError, match="picture"):
        vescale.plan_from_config(config, model)
    assert vescale.plan_from_config(config, model, sample).parameters["weight"] == {"tp": vescale.Shard(0)}
