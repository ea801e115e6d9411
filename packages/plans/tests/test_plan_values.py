"""Every field of a plan: what it takes, and what it says to values that make no sense. Nothing here needs a process."""

import pickle

import pytest
import torch

from vescale_dtensor import Replicate, Shard
from vescale_plans import Boundary, Pipeline, Plan, PlanError, Precision

PARAMETERS = {"*": {}}
SCHEDULE = {"name": "mine", "ranks": 2, "microbatches": 4, "stages": 4}

FULL = Plan(
    mesh={"pp": 2, "dpr": 2, "dp": 2, "tp": 2},
    parameters={"*.up.weight": {"tp": Shard(0)}, "*": {}},
    boundaries={"*.mlp": Boundary(input={"tp": Replicate()})},
    data_axis=("dpr", "dp"),
    zero=3,
    pipeline=Pipeline(cuts=["layers.1", "layers.2", "layers.3"], schedule=SCHEDULE, microbatches=4, virtual=2),
    checkpointing={"layers.0": False, "layers.*": True},
    regather={"*.mlp": True},
    precision=Precision(),
    offload=True,
    blocks={"*.up.weight": 128},
    expert_axis="tp",
)


def test_all_fields_together():
    assert FULL.world_size == 16
    assert FULL.data_axes == ("dpr", "dp")
    assert FULL.batch_placements == (Replicate(), Shard(0), Shard(0), Replicate())
    assert FULL.pipeline.stages == 4 and FULL.pipeline.cuts == ("layers.1", "layers.2", "layers.3")
    assert FULL.precision == Precision(compute=torch.bfloat16, reduce=torch.float32)
    assert pickle.loads(pickle.dumps(FULL)) == FULL


@pytest.mark.parametrize(("written", "kept"), [("dp", "dp"), (("dp",), "dp"), (["dp"], "dp"), ((), None), (None, None)])
def test_one_way_to_say_one_data_axis(written, kept):
    assert Plan({"dp": 2}, PARAMETERS, data_axis=written).data_axis == kept


STAGES = {"mesh": {"pp": 2, "dp": 2}}
WRONG = {
    "data axes out of order": ({"mesh": {"a": 2, "b": 2}, "data_axis": ("b", "a")}, "order of the mesh"),
    "a data axis twice": ({"mesh": {"a": 2}, "data_axis": ("a", "a")}, "names an axis twice"),
    "an unknown data axis of two": ({"data_axis": ("dp", "dq")}, "names 'dq', which is not an axis"),
    "no such stage of ZeRO": ({"zero": 4}, "zero is 4, which is not a stage"),
    "ZeRO as a flag": ({"zero": True}, "zero is True, which is not a stage"),
    "ZeRO without a data axis": ({"mesh": {"tp": 2}, "zero": 1}, "the plan has none"),
    "a pipeline's name": ({"pipeline": "1f1b"}, "not a Pipeline"),
    "an unknown pipeline axis": ({"pipeline": Pipeline(cuts=("a",))}, "pipeline names axis 'pp'"),
    "a pipeline over the data axis": ({"pipeline": Pipeline(axis="dp", cuts=("a",))}, "both the pipeline's and a data"),
    "too few cuts": (STAGES | {"pipeline": Pipeline()}, "0 cuts make 1 stages, and 2 ranks of axis 'pp'"),
    "stages of a tensor": (
        STAGES | {"pipeline": Pipeline(cuts=("a",)), "parameters": {"*": {"pp": Shard(0)}}},
        "whose ranks hold different stages",
    ),
    "a schedule of other numbers": (
        STAGES | {"pipeline": Pipeline(cuts=("a",), schedule=SCHEDULE, microbatches=2)},
        "the schedule is written for microbatches=4, and the plan has 2",
    ),
    "checkpointing as a flag": ({"checkpointing": True}, "checkpointing is True, not a mapping from globs"),
    "checkpointing by number": ({"checkpointing": {"*": 2}}, "checkpointing['*'] is 2, neither True nor False"),
    "regather by number": ({"regather": {"*": 1}}, "regather['*'] is 1"),
    "blocks of nothing": ({"blocks": {"*": 0}}, "blocks['*'] is 0, not a positive number"),
    "precision as a dtype": ({"precision": torch.bfloat16}, "precision is torch.bfloat16, not a Precision"),
    "offload to a device": ({"offload": "cpu"}, "offload is 'cpu', neither True nor False"),
    "an unknown expert axis": ({"expert_axis": "ep"}, "expert_axis names axis 'ep'"),
    "a boundary that is a placement": ({"boundaries": {"mlp": {"tp": Shard(0)}}}, "not a Boundary"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_make_no_sense(case):
    given, expected = WRONG[case]
    with pytest.raises(PlanError) as caught:
        Plan(**{"mesh": {"dp": 2}, "parameters": PARAMETERS} | given)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Pipeline(cuts="layers.1"), "cuts is 'layers.1', not names\nfix: cuts=('layers.1',)"),
        (lambda: Pipeline(cuts=("a", "a")), "two stages begin with the module 'a'"),
        (lambda: Pipeline(cuts=(1,)), "cuts holds 1, which is not the name of a module"),
        (lambda: Pipeline(schedule=None), "schedule is None, neither a name nor"),
        (lambda: Pipeline(microbatches=0), "microbatches is 0, not a positive number"),
        (lambda: Pipeline(virtual=True), "virtual is True, not a positive number"),
        (lambda: Precision(compute="bf16"), "compute is 'bf16', which is not a floating dtype"),
        (lambda: Precision(reduce=torch.int8), "reduce is torch.int8, which is not a floating dtype"),
    ],
)
def test_parts_that_make_no_sense(make, expected):
    with pytest.raises(PlanError) as caught:
        make()
    assert expected in str(caught.value)
