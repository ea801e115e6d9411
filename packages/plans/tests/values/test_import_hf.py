"""HuggingFace tp_plans as plans, by value: every style, every family's own plan, and what is said to unknown ones."""

import pytest
from torch import nn

from vescale_dtensor import InterleavedShard, Replicate, Shard
from vescale_plans import Boundary, Plan, PlanError
from vescale_plans.import_hf import STYLES

transformers = pytest.importorskip("transformers")

MESH = {"dp": 2, "tp": 2}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROWS, COLUMNS, WHOLE = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}


def build(name, **more):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**SIZES | more))


def ships_tables(model):
    """Whether its plan cuts the table of embeddings, as those of transformers 5.17 do not."""
    return any("embed" in name for name in model.tp_plan)


def test_llama():
    model = build("LlamaForCausalLM")
    plan = Plan.from_huggingface(model, mesh=MESH, zero=3)
    assert plan.parameters == {
        "lm_head.weight": ROWS,
        **({"model.embed_tokens.weight": ROWS} if ships_tables(model) else {}),
        **{f"model.layers.*.self_attn.{name}_proj.weight": ROWS for name in "qkv"},
        "model.layers.*.self_attn.o_proj.weight": COLUMNS,
        **{f"model.layers.*.mlp.{name}_proj.weight": ROWS for name in ("gate", "up")},
        "model.layers.*.mlp.down_proj.weight": COLUMNS,
        "*": {},
    }
    assert plan.boundaries["lm_head"] == Boundary(input=WHOLE, output=WHOLE)
    assert plan.boundaries["model.layers.*.mlp.down_proj"] == Boundary(output=WHOLE)
    assert plan.zero == 3


def test_experts_are_packed():
    plan = Plan.from_huggingface(build("MixtralForCausalLM", num_local_experts=4), mesh=MESH)
    assert plan.parameters["model.layers.*.mlp.experts.gate_up_proj"] == {"tp": InterleavedShard(1, 2)}
    assert plan.parameters["model.layers.*.mlp.experts.down_proj"] == {"tp": Shard(2)}
    assert plan.boundaries["model.layers.*.mlp.experts"] == Boundary(input=WHOLE, output=WHOLE)


FAMILIES = {
    "LlamaForCausalLM": {},
    "LlamaForCausalLM, tied": {"tie_word_embeddings": True},
    "LlamaForCausalLM, biases": {"attention_bias": True, "mlp_bias": True},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "MistralForCausalLM": {},
    "Phi3ForCausalLM": {},
    "GemmaForCausalLM": {"head_dim": 8},
    "Olmo2ForCausalLM": {},
    "CohereForCausalLM": {},
    "GraniteForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    "OlmoeForCausalLM": {"num_experts": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plans_of_families_fit_their_models(family):
    model = build(family.split(",")[0], **FAMILIES[family])
    plan = Plan.from_huggingface(model, mesh=MESH)
    plan.validate(model)
    assert Plan.from_json(plan.to_json()) == plan
    sharded = [name for name, places in plan.parameters.items() if places]
    assert len(sharded) >= 5 + ships_tables(model)


def test_every_style_of_transformers_is_known():
    styles = pytest.importorskip("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    # registered for ep_plan, which is another one; the last two for quantized experts, in transformers 5.17
    of_experts = {"ep_dispatch_experts", "ep_router", "grouped_gemm", "megamoe_experts", "megamoe_router"}
    assert {name for name in styles if name not in of_experts} - set(STYLES) == set()


class Shipped(nn.Module):
    """A model that ships any tp_plan."""

    def __init__(self, **tp_plan):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.tp_plan = {name.replace("__", ".*"): style for name, style in tp_plan.items()}


@pytest.mark.parametrize(
    ("style", "weight", "bias", "boundary"),
    [
        ("colwise", ROWS, ROWS, Boundary(input=WHOLE)),
        ("colwise_rep", ROWS, ROWS, Boundary(input=WHOLE, output=WHOLE)),
        ("rowwise", COLUMNS, None, Boundary(output=WHOLE)),
        ("rowwise_rep", COLUMNS, None, Boundary(output=WHOLE)),
        ("embedding_colwise", COLUMNS, None, Boundary(output=WHOLE)),
        (
            "packed_colwise",
            {"tp": InterleavedShard(0, 2)},
            {"tp": InterleavedShard(0, 2)},
            Boundary(input=WHOLE),
        ),
        ("packed_rowwise", {"tp": InterleavedShard(1, 2)}, None, None),
        ("grouped_gemm", ROWS, ROWS, None),
        ("sequence_parallel", None, None, Boundary(input=COLUMNS, output=COLUMNS)),
        ("replicated_with_grad_allreduce", None, None, None),
        ("all_reduce", None, None, Boundary(output=WHOLE)),
    ],
)
def test_every_style_of_a_linear(style, weight, bias, boundary):
    plan = Plan.from_huggingface(Shipped(layers__=style), mesh=MESH)
    assert plan.parameters.get("layers.*.weight") == weight
    assert plan.parameters.get("layers.*.bias") == bias
    assert plan.boundaries.get("layers.*") == boundary


def test_a_mesh_without_the_tensor_axis():
    plan = Plan.from_huggingface(build("LlamaForCausalLM"), mesh={"dp": 4}, zero=1)
    assert plan == Plan({"dp": 4}, {"*": {}}, zero=1)


def message(model):
    with pytest.raises(PlanError) as caught:
        Plan.from_huggingface(model, mesh=MESH)
    return str(caught.value)


def test_an_unknown_style_names_the_parameter():
    text = message(Shipped(layers__="colwize"))
    assert text.startswith(
        "Plan.from_huggingface: the tp_plan of Shipped gives 'layers.*' the style 'colwize', which this veScale does "
        "not know\n  known  colwise, "
    )
    assert text.endswith("\nfix: model.tp_plan = {..., 'layers.*': 'colwise'}  # another style")


def test_models_that_ship_none():
    assert message(Shipped()) == (
        "Plan.from_huggingface: Shipped ships no tp_plan\n"
        "fix one of: vescale_plans.library                 # has plans by hand for several families\n"
        '            Plan(mesh=..., parameters={"*": {}})  # data parallelism alone'
    )


def test_a_tp_plan_of_another_model():
    assert "names nothing that this model has\n  it names  blocks.*" in message(Shipped(blocks__="colwise"))
