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
    pipeline=Pipeline(
        cuts=["layers.1", "layers.2", "layers.3"], schedule=SCHEDULE, microbatches=4, virtual=2, loss="sum"
    ),
    checkpointing={"layers.0": False, "layers.*": True},
    regather={"*.mlp": True},
    precision=Precision(),
    offload=True,
    blocks={"*.up.weight": 128},
    expert_axis="tp",
    capacity_factor=1.25,
    offload_activations={"layers.*": True},
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


def test_parts_of_a_batch_are_views_that_make_it_up():
    plan = Plan(mesh={"dp": 1}, parameters={"*": {}}, accumulation=3)
    batch = {"ids": torch.arange(12).view(6, 2), "mask": (torch.ones(6), [torch.arange(6)])}
    parts = list(plan.parts(batch))
    assert len(parts) == 3
    assert torch.equal(torch.cat([part["ids"] for part in parts]), batch["ids"])
    assert parts[2]["mask"][1][0].tolist() == [4, 5]
    assert parts[1]["ids"].untyped_storage().data_ptr() == batch["ids"].untyped_storage().data_ptr()
    with pytest.raises(PlanError, match="a tensor of 8 rows has no 3 equal parts"):
        list(plan.parts(torch.zeros(8)))
    assert Plan.from_json(plan.to_json()) == plan
    assert "3 backwards a step" in str(plan)
