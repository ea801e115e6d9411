"""The context axis of a plan: its values, and how what enters the model is cut."""

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import Replicate, Shard
from vescale_plans import Plan, PlanError
from vescale_testkit import run_ranks

PLAN = {"mesh": {"dp": 2, "cp": 2}, "parameters": {"*": {}}, "context_axis": "cp"}


def test_a_context_axis_is_a_part_of_the_plan():
    plan = Plan(**PLAN, context="ring")
    assert Plan.from_json(plan.to_json()) == plan
    assert "cut over cp, ring" in str(plan) and "cut over cp" in str(Plan(**PLAN))
    assert [change.where for change in plan.diff(plan.override(context="auto"))] == ["context"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"context_axis": "sp"}, "names axis 'sp', which the mesh does not have"),
        ({"context": "spiral"}, "no way of attention"),
        ({"context_axis": None, "context": "ring"}, "without a context axis"),
        ({"context_axis": "dp"}, "both context_axis and data_axis"),
        ({"expert_axis": "cp"}, "both context_axis and expert_axis"),
    ],
)
def test_values_that_fit_nothing(fields, said):
    with pytest.raises(PlanError, match=said):
        Plan(**{**PLAN, **fields})


def test_sequences_are_cut():
    def check():
        plan = Plan(**PLAN)
        row, part = divmod(dist.get_rank(), 2)
        batch = {
            "input_ids": torch.arange(4 * 7).view(4, 7),
            "inputs_embeds": torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0)),
            "mask": torch.ones(4, 1, 7, 7),
            "images": torch.zeros(4, 3, 5, 5),
            "weights": torch.arange(4.0),
        }
        wanted = {"input_ids": Shard(1), "inputs_embeds": Shard(1), "mask": Shard(2)}
        rows = {name: tensor[2 * row : 2 * row + 2] for name, tensor in batch.items()}
        places = plan.local_sequence(7)
        assert places == (range(4), range(4, 7))[part]

        def own(name, tensor):
            dim = {"input_ids": 1, "inputs_embeds": 1, "mask": 2}.get(name)
            return tensor if dim is None else tensor.narrow(dim, places.start, len(places))

        parts = {name: own(name, tensor) for name, tensor in rows.items()}
        ways = plan.shard_batch(batch), plan.local_batch(rows), plan.local_batch(parts, whole_sequences=False)
        for made in ways:
            for name, tensor in batch.items():
                assert made[name].placements == (Shard(0), wanted.get(name, Replicate())), name
                assert torch.equal(made[name].full_tensor(), tensor), name

    run_ranks(4, check)
