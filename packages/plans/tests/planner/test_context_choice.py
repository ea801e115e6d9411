"""Context parallelism in the search: where it is a candidate, what it costs, and what is said of it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from vescale_plans import PlanError
from vescale_plans.search import (
    Candidate,
    InfeasibleError,
    Request,
    generate_plan,
    hardware_of,
    memory_of,
    plan_of,
    rank,
    sample_of,
    sizes_of,
    structure_of,
)
from vescale_plans.search.candidates import LEAST_POSITIONS
from vescale_plans.search.decision import against, places
from vescale_plans.search.pricer import Pricer
from vescale_plans.search.pricing.memory import Held
from vescale_plans.search.ranking import MARGIN

LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SMALL = LLAMA | {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@cache
def structure():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    return structure_of(model, sample_of(model))


def asked(ranks, batch, seq, **more):
    device = hardware_of("h100")
    return Request(structure(), ranks, batch, seq, device, MARGIN * device.memory, dtype=torch.bfloat16, **more)


def test_one_long_sequence_is_cut():
    """Where a batch has too few rows for the ranks, and nothing else takes as much."""
    request = asked(16, 1, 131072)
    best = rank(request)[0]
    assert best.candidate.cp > 1 and best.cost.context > 0
    without = against(request, best, {"cp": 1})
    assert without.other.cost.total > best.cost.total
    assert "axis cp" in dict(places(request, best.candidate))


@pytest.mark.parametrize(("batch", "seq"), [(64, 131072), (8, 2 * LEAST_POSITIONS - 1), (1, 4096)])
def test_where_rows_do_as_well_there_is_no_candidate(batch, seq):
    """Rows cost nothing to part; no candidate has a context axis that a data axis could take the place of."""
    found = asked(8, batch, seq).candidates()
    assert all(one.cp == 1 or one.microbatches * one.replicas > batch for one in found)
    assert any(one.cp > 1 for one in found) == (seq >= 2 * LEAST_POSITIONS)


@pytest.mark.parametrize("seq", [65536, 131072])
def test_no_candidate_that_was_left_out_is_better(seq):
    """What a data axis does as well is priced all the same where it is pinned."""
    free = rank(asked(8, 8, seq))[0]
    for degree in (2, 4, 8):
        assert rank(asked(8, 8, seq, pin={"cp": degree}))[0].cost.total >= free.cost.total * (1 - 1e-9)


def test_memory_and_work_of_a_rank_fall_with_the_axis():
    sizes, hardware = sizes_of(structure(), 1), hardware_of("h100")
    pricer = Pricer(asked(8, 1, 131072))
    held = [Held(sizes, Candidate(cp=cp, checkpointing=True), hardware, 1, 131072).kept() for cp in (1, 2, 8)]
    assert held[0] == 2 * held[1] == 8 * held[2] > 0
    costs = [pricer.evenly(Candidate(cp=cp, checkpointing=True)).cost for cp in (1, 2, 8)]
    assert costs[0].context == 0 < costs[1].context and costs[0].compute > 1.9 * costs[1].compute
    sharded, whole = (memory_of(sizes, Candidate(cp=8, zero=zero), hardware, 1, 131072) for zero in (3, 0))
    assert sharded.parameters * 7 < whole.parameters and sharded.states * 7 < whole.states


def test_slow_links_show():
    """What products do not hide is in the price; where they do, a twentieth is."""
    fast = asked(8, 1, 65536)
    link = replace(fast.hardware.inside, bandwidth=fast.hardware.inside.bandwidth / 100)
    slow = replace(fast, hardware=replace(fast.hardware, inside=link))
    quick, late = (Pricer(one).evenly(Candidate(cp=8)).cost.context for one in (fast, slow))
    assert late > 20 * quick > 0


def test_the_plan_has_the_axis():
    plan = plan_of(structure(), Candidate(dp=2, cp=4, tp=2, sp=True, zero=1))
    assert dict(plan.mesh) == {"dp": 2, "cp": 4, "tp": 2} and plan.context_axis == "cp" and plan.zero_axis == "dp"
    alone = plan_of(structure(), Candidate(cp=4, zero=3))
    assert alone.data_axes == () and alone.zero_axis == "cp" and "sharded over cp" in str(alone)


def test_the_decision_says_it():
    plan = generate_plan(
        _small(), world_size=4, batch=2, seq=64, hardware="h100", pin={"cp": 2}, memory=1 << 30
    )  # fmt: skip
    said = plan.explain()
    assert plan.context_axis == "cp" and "cp=2" in str(said) and "axis cp" in str(said)
    assert "cp=1" in str(said.against({"cp": 1})) or "instead" in str(said.against({"cp": 1}))


def test_positions_that_meet_elsewhere_are_not_cut():
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.mix = nn.Embedding(61, 32), nn.Conv1d(32, 32, 3, padding=1)
            self.layer, self.head = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), nn.Linear(32, 61)

        def forward(self, ids):
            x = self.table(ids)
            return self.head(self.layer(self.mix(x.transpose(1, 2)).transpose(1, 2)))

    ids = torch.arange(8)[None]
    with pytest.raises(InfeasibleError, match="positions meet elsewhere"):
        generate_plan(Convolved(), world_size=2, batch=2, hardware="h100", sample=ids, pin={"cp": 2})
    with pytest.raises(PlanError, match="shards over the data axis, and the plan has none"):
        plan_of(structure(), Candidate()).override(data_axis=None, zero=1)


def _small():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))
