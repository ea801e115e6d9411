"""Plan as a value, and patterns against names: nothing here needs a process."""

import pytest
import torch
from torch import nn

from vescale_dtensor import InterleavedShard, Partial, Replicate, Shard
from vescale_plans import Boundary, Plan, PlanError, generate_plan, library
from vescale_plans._plan.match import match, nearest
from vescale_trace.values import map_first, map_tensors


def message(call, *args, **kwargs) -> str:
    with pytest.raises(PlanError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_placements_follow_the_mesh():
    plan = Plan(mesh={"dp": 2, "tp": 4}, parameters={"*": {}})
    assert plan.world_size == 8
    assert plan.placements({"tp": Shard(1)}) == (Replicate(), Shard(1))
    assert plan.data_axis == "dp"


def test_no_data_axis_where_the_mesh_has_none():
    assert Plan(mesh={"tp": 4}, parameters={"*": {}}).data_axis is None


def test_plans_compare_by_value():
    def make():
        boundaries = {"*.mlp": Boundary(input={"tp": Replicate()})}
        return Plan({"tp": 2}, {"*.up.weight": {"tp": Shard(0)}, "*": {}}, boundaries)

    assert make() == make()


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_sizes_are_positive_numbers(size):
    assert f"mesh axis 'tp' has size {size!r}" in message(Plan, mesh={"tp": size}, parameters={"*": {}})


NAMES = ["embed.weight", "layers.0.mlp.up.weight", "layers.1.mlp.up.weight", "head.weight"]


def test_the_first_pattern_decides():
    assert match({"layers.1.*": 1, "*.up.weight": 2, "*": 3}, NAMES, "parameter", complete=True) == {
        "embed.weight": 3,
        "layers.0.mlp.up.weight": 2,
        "layers.1.mlp.up.weight": 1,
        "head.weight": 3,
    }


def test_a_pattern_that_matches_nothing_names_the_nearest():
    assert message(match, {"*.mlp.upp.weight": 1, "*": 2}, NAMES, "parameter", complete=True) == (
        "Plan: the pattern '*.mlp.upp.weight' matches no parameter of the model\n"
        "  nearest  *.mlp.up.weight, embed.weight, head.weight\n"
        "fix: use '*.mlp.up.weight'"
    )


def test_an_undecided_name_names_the_nearest_pattern():
    assert message(match, {"*.up.weight": 1, "embed.*": 2}, NAMES, "parameter", complete=True) == (
        "Plan: no pattern decides the parameter 'head.weight'\n"
        "  nearest pattern  '*.up.weight'\n"
        'fix one of: add "head.weight": {...}  # places it\n'
        '            end with "*": {}          # replicates the rest'
    )


def test_boundaries_need_not_decide_everything():
    assert match({"head*": 1}, NAMES, "module", complete=False) == {"head.weight": 1}


def test_nearest_sees_through_numbers():
    assert nearest("layers.7.mlp.up.weight", NAMES)[0] == "layers.0.mlp.up.weight"
    assert nearest("layer.1.mlp.up.weight", NAMES)[0] == "layers.1.mlp.up.weight"


def test_library_plans_without_a_tensor_axis_replicate():
    for make in (library.gpt, library.llama):
        plan = make({"dp": 4})
        assert plan.parameters == {"*": {}} and plan.boundaries == {}


def test_the_gpt_plan_interleaves_the_merged_projection():
    plan = library.gpt({"dp": 2, "tp": 2})
    assert plan.parameters["*.attn.c_attn.*"] == {"tp": InterleavedShard(0, 3)}


def test_containers_keep_their_types_and_identity():
    class Output(dict):
        pass

    tensor = torch.ones(1)
    value = (Output(a=tensor, b=[None, 3]), {"c": tensor}, "text")
    assert map_tensors(value, lambda t: t) is value
    doubled = map_tensors(value, lambda t: t * 2)
    assert type(doubled[0]) is Output and doubled[0]["a"].item() == 2 and doubled[1]["c"].item() == 2
    assert value[0]["a"].item() == 1
    first = map_first(value, lambda t: t * 2)
    assert first[0]["a"].item() == 2 and first[1]["c"] is tensor


def test_containers_know_huggingface_outputs():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(loss=torch.ones(()), logits=torch.ones(2))
    changed = map_tensors(output, lambda t: t * 2)
    assert type(changed) is type(output)
    assert changed.loss.item() == changed["loss"].item() == 2 and changed.past_key_values is None


def test_partial_is_a_placement_for_boundaries():
    Plan(mesh={"tp": 2}, parameters={"*": {}}, boundaries={"": Boundary(output={"tp": Partial()})})


@pytest.mark.parametrize("name", ["\x1b[2J", "line\nfeed", "\x9b31m"], ids=ascii)
@pytest.mark.parametrize("what", ["module", "parameter"])
def test_names_with_control_characters_are_refused(name, what):
    model = nn.Sequential(nn.Linear(4, 4))
    if what == "module":
        model.add_module(name, nn.Linear(4, 4))
    else:
        model.register_parameter(name, nn.Parameter(torch.ones(4)))
    for act in (
        lambda: Plan(mesh={"dp": 1}, parameters={"*": {}}).validate(model),
        lambda: generate_plan(model, world_size=2, batch=4, sample=torch.ones(2, 4)),
        lambda: Plan(mesh={"dp": 1}, parameters={"0.*": {}}).complete(model, torch.ones(2, 4)),
    ):
        with pytest.raises(PlanError, match="control characters") as caught:
            act()
        assert all(line.isprintable() for line in str(caught.value).split("\n"))
