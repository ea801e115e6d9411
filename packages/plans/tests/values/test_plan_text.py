"""A plan as JSON and as a table, two plans compared, a plan overridden. Nothing here needs a process."""

import json

import pytest
import torch

from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_plans import Boundary, Pipeline, Plan, PlanError, Precision, library

SCHEDULE = {"name": "mine", "ranks": 2, "microbatches": 4, "stages": 4}

FULL = Plan(
    mesh={"pp": 2, "dpr": 2, "dp": 2, "tp": 2},
    parameters={"*.up.weight": {"tp": Shard(0)}, "*": {}},
    boundaries={"*.mlp": Boundary(input={"tp": Replicate()})},
    data_axis=("dpr", "dp"),
    zero=3,
    pipeline=Pipeline(
        cuts=["layers.1", "layers.2", "layers.3"], schedule=SCHEDULE, microbatches=4, virtual=2, loss="sum"
    ),
    checkpointing={"layers.0": False, "layers.*": True},
    regather={"*.mlp": True},
    precision=Precision(sent=torch.int8),
    offload=True,
    blocks={"*.up.weight": 128},
    expert_axis="tp",
    capacity_factor=1.25,
    offload_activations={"layers.*": True},
    experts={"*.moe": "counts"},
)
SMALL = Plan(
    mesh={"dp": 2, "tp": 4},
    parameters={"*.up.weight": {"tp": InterleavedShard(0, 2)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    boundaries={"*.mlp": Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)}, arguments={"mask": {}})},
)
PLACED = [
    Shard(0), Shard(-1), Replicate(), Partial(), Partial("avg"), InterleavedShard(1, 3), RaggedShard((0,), (3, 0, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [FULL, SMALL, SMALL.override(sums="all_reduce"), library.gpt({"tp": 2}), library.llama({"dp": 2, "tp": 2})],
)
def test_json_there_and_back(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert Plan.from_json(json.loads(text)) == plan
    for glob in ("parameters", "boundaries", "checkpointing", "offload_activations"):
        assert list(getattr(again, glob)) == list(getattr(plan, glob))  # the order decides
    assert list(again.mesh) == list(plan.mesh)


@pytest.mark.parametrize("placement", PLACED, ids=repr)
def test_json_of_every_placement(placement):
    plan = Plan({"tp": 3}, {"*": {}}, {"head": Boundary(output={"tp": placement})})
    assert Plan.from_json(plan.to_json()).boundaries["head"].output["tp"] == placement


def test_json_does_not_depend_on_the_order_of_objects():
    """A tool that sorts keys must not change what a plan means."""
    assert Plan.from_json(json.dumps(json.loads(FULL.to_json()), sort_keys=True)) == FULL


def broken(**changes):
    return json.dumps(json.loads(SMALL.to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "the text is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ("[]", "the text holds a list, not an object"),
        (broken(version=2), "the plan has format version 2, but this veScale reads 1"),
        (broken(checkpoint=[]), "a plan has no field 'checkpoint'\nfix: use 'checkpointing'"),
        (broken(parameters=[["*", {"tp": "Shard"}]]), "'Shard' is not a placement"),
        (broken(parameters=[["*", {"tp": "Shard(0, 1, 2)"}]]), "'Shard(0, 1, 2)' is not a placement"),
        (broken(parameters=[["*", {"tp": "__import__('os')"}]]), "is not a placement"),
        (broken(mesh={"dp": 2}), "the field 'mesh' cannot be read"),
        (broken(boundaries=[["*.mlp", {"inputs": {}}]]), "Boundary: got an unexpected keyword argument 'inputs'"),
        (broken(precision={"compute": "bf16"}), "the field 'precision' cannot be read"),
        (broken(zero=7), "zero is 7, which is not a stage"),
        ('{"version": 1, "mesh": []}', "the field 'parameters' is missing"),
    ],
)
def test_json_that_is_no_plan(text, expected):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert expected in str(caught.value)


def test_a_plan_prints_as_a_table():
    assert str(FULL) == (
        "Plan on pp 2 x dpr 2 x dp 2 x tp 2 = 16 ranks\n"
        "batch          sharded over dpr, dp\n"
        "zero           3: optimizer states, gradients, parameters sharded over dp\n"
        "pipeline       4 stages over pp, 2 per rank, 4 microbatches, losses' sum, mine; "
        "stages begin at the model, layers.1, layers.2, layers.3\n"
        "precision      computes in bfloat16, reduces in float32, sends int8\n"
        "offload        optimizer states in host memory, activations of layers.* yes\n"
        "experts        spread over tp, capacity factor 1.25, *.moe told by counts\n"
        "checkpointing  layers.0 no, layers.* yes\n"
        "regather       *.mlp yes\n"
        "blocks         *.up.weight 128\n"
        "parameters     pp  dpr  dp  tp\n"
        "  *.up.weight  .   .    .   Shard(0)\n"
        "  *            .   .    .   .\n"
        "boundaries     pp  dpr  dp  tp\n"
        "  *.mlp input               Replicate()"
    )


def test_repr_stays_a_value():
    scope = {
        "Plan": Plan, "Boundary": Boundary, "Pipeline": Pipeline, "Precision": Precision, "torch": torch,
        "Shard": Shard, "Replicate": Replicate, "InterleavedShard": InterleavedShard,
    }  # fmt: skip
    for plan in (FULL, SMALL):
        assert eval(repr(plan), scope) == plan


def test_a_diff_says_what_changed():
    changed = SMALL.override(zero=2, data_axis="tp", parameters={"*.down.weight": {"dp": Shard(0)}, "*.up.*": {}})
    assert str(SMALL.diff(changed)) == (
        "parameters['*.up.weight']    tp: InterleavedShard(0, 2)  -> absent\n"
        "parameters['*.down.weight']  tp: Shard(1)                -> dp: Shard(0)\n"
        "parameters['*.up.*']         absent                      -> Replicate()\n"
        "data_axis                    dp                          -> tp\n"
        "zero                         0                           -> 2"
    )
    assert SMALL.diff(changed)[-1].before == 0


def test_a_diff_tells_order():
    names = ["*.down.weight", "*", "*.up.weight"]
    moved = Plan(SMALL.mesh, {name: SMALL.parameters[name] for name in names}, SMALL.boundaries)
    assert moved != SMALL and moved.parameters == SMALL.parameters  # as mappings compare; but the first match decides
    assert hash(moved) != hash(SMALL)
    places = [(change.where, change.before, change.after) for change in SMALL.diff(moved)]
    assert places == [("parameters['*.up.weight'] (place)", 1, 3)]


def test_no_difference():
    diff = FULL.diff(Plan.from_json(FULL.to_json()))
    assert not diff and str(diff) == "no difference"


def test_an_override_comes_first():
    plan = SMALL.override(
        parameters={"layers.0.up.weight": {}, "*.down.weight": {"tp": Shard(0)}},
        boundaries={"*.mlp": None},
        checkpointing={"layers.*": True},
        zero=1,
    )
    assert list(plan.parameters) == ["layers.0.up.weight", "*.down.weight", "*.up.weight", "*"]
    assert plan.parameters["*.down.weight"] == {"tp": Shard(0)}
    assert plan.boundaries == {} and plan.zero == 1 and plan.checkpointing == {"layers.*": True}
    assert SMALL.zero == 0 and next(iter(SMALL.parameters)) == "*.up.weight"


def test_an_override_that_covers_what_was_there():
    assert SMALL.override(parameters={"*": {}}).parameters == {"*": {}}
    assert (
        list(SMALL.override(parameters={"*.u?.weight": {}}).parameters)[1] == "*.up.weight"
    )  # kept: not surely covered


def test_an_override_of_an_unknown_field():
    with pytest.raises(PlanError) as caught:
        SMALL.override(zeros=1)
    assert str(caught.value) == "Plan.override: a plan has no field 'zeros'\nfix: use 'zero'"
