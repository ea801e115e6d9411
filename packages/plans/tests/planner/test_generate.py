"""generate_plan: what it chooses, that it chooses the same again, and what it says when nothing fits."""

import pytest
import torch
from torch import nn

from vescale_dtensor import InterleavedShard, Replicate, Shard
from vescale_plans import PlanError, Precision
from vescale_plans.search import (
    Candidate,
    Hardware,
    InfeasibleError,
    Link,
    Request,
    cost_of,
    generate_plan,
    hardware_of,
    memory_of,
    plan_of,
    rank,
    sample_of,
    sizes_of,
    structure_of,
)
from vescale_testkit import in_turns

GIB = 2**30


def ranked(structure, world_size, batch, seq, hardware, *, memory=None, **asked):
    """The best candidates that fit in a device, or in so much memory."""
    return rank(Request(structure, world_size, batch, seq, hardware, memory or 0.94 * hardware.memory, **asked))


class Encoder(nn.Module):
    """torch's own layers: one packed weight for queries, keys and values, that no module of its own calls."""

    def __init__(self, layers=4, width=64, heads=8, inner=256, words=101, *, tied=False):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, inner, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


IDS = torch.arange(6)[None]
LARGE = {"layers": 80, "width": 8192, "heads": 64, "inner": 28672, "words": 32000}


@pytest.fixture(scope="module")
def small():
    return structure_of(Encoder(), sample_of(Encoder(), IDS))


@pytest.fixture(scope="module")
def large():
    with torch.device("meta"):
        model = Encoder(**LARGE)
    return structure_of(model, sample_of(model, IDS))


def generated(**asked):
    return generate_plan(Encoder(), {"world_size": 8, "batch": 16, "hardware": "h100", "sample": IDS, **asked})


# --------------------------------------------------------------------- choices


def test_torch_layers_are_seen_through(small):
    attention, wide = small.groups[:2]
    assert (attention.sink, attention.degrees) == ("layers.0.self_attn.out_proj.weight", (2, 4, 8))
    assert attention.split(4)["layers.0.self_attn.in_proj_weight"][1] == InterleavedShard(0, 3)
    assert attention.positions_meet
    assert not wide.positions_meet
    assert small.cut_points == ("layers.1", "layers.2", "layers.3")


def test_a_plan_is_a_plan():
    plan = generated(pin={"tp": 2, "dp": 4, "sp": True, "zero": 1})
    assert plan.mesh == {"dp": 4, "tp": 2}
    assert plan.data_axis == "dp"
    assert plan.zero == 1
    assert plan.parameters["layers.*.self_attn.in_proj_weight"] == {"tp": InterleavedShard(0, 3)}
    assert plan.parameters["*"] == {}
    assert plan.boundaries["layers.*.linear2"].output == {"tp": Shard(1)}
    assert plan.boundaries["layers.*.linear1"].input == {"tp": Replicate()}


class Recurrent(nn.Module):
    """A table, recurrent layers and a head; with `packed`, the rows are packed first."""

    def __init__(self, kind, packed=False):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(64, 50)
        self.layers, self.packed = kind(32, 64, num_layers=2, batch_first=True), packed

    def forward(self, ids):
        x = self.table(ids)
        if not self.packed:
            return self.head(self.layers(x)[0])
        rows = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[0],), x.shape[1]), batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layers(rows)[0], batch_first=True)[0])


@in_turns(3)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_probed_step_by_step(kind, packed):
    model = Recurrent(kind, packed)
    found = structure_of(model, sample_of(model, IDS))
    assert {"layers.weight_ih_l0", "layers.weight_hh_l1", "head.weight"} <= {one.parameter for one in found.matrices}
    assert not found.coupled
    plan = generate_plan(model, world_size=2, batch=4, sample=IDS, hardware="h100")
    assert plan.mesh == {"dp": 2}


def test_a_batch_that_does_not_fit_is_accumulated(large):
    asked = (large, 64, 1024, 4096, hardware_of("h100"))
    best = ranked(*asked, pin={"pp": 1, "checkpointing": False})[0]
    assert best.candidate.microbatches > 1
    plan = plan_of(large, best)
    assert (plan.pipeline, plan.accumulation) == (None, best.candidate.microbatches)
    assert f"accumulation={plan.accumulation}" in str(best.candidate)
    with pytest.raises(InfeasibleError):
        ranked(*asked, pin={"pp": 1, "checkpointing": False, "microbatches": 1})


def test_the_same_request_gives_the_same_plan():
    assert generated().to_json() == generated().to_json()


def test_a_plan_is_priced_in_the_dtype_that_it_computes_in():
    plain, mixed = generated(), generated(precision=Precision(torch.bfloat16))
    assert (plain.precision, mixed.precision) == (None, Precision(torch.bfloat16))
    wide, narrow = (plan.explain().request.hardware for plan in (plain, mixed))
    assert (wide.itemsize, narrow.itemsize) == (4, 2)
    assert narrow.flops == hardware_of("h100").flops > 10 * wide.flops
    built = generate_plan(Encoder().bfloat16(), world_size=8, batch=16, hardware="h100", sample=IDS)
    assert built.explain().request.hardware == narrow
    with pytest.raises(PlanError, match="not a Precision"):
        generated(precision=torch.bfloat16)


def test_a_small_model_is_not_split(small):
    best = ranked(small, 8, 1024, 6, hardware_of("h100"))[0].candidate
    assert (best.dp, best.tp, best.pp) == (8, 1, 1)


def test_a_large_model_is_split_inside_a_node(large):
    best = ranked(large, 512, 128, 4096, hardware_of("h100"))[0]  # fewer rows than ranks
    assert 1 < best.candidate.tp <= 8
    assert best.memory.total <= 0.94 * 80 * GIB


def test_a_large_model_with_rows_for_each_rank_need_not_be_split(large):
    """MosaicML's llm-foundry trained 70B on 512 of these with sharded states alone, with 8 x 2048 positions on each.
    With 4096, sums and gathers take as long as the computation: a split inside a node sends less."""
    best = ranked(large, 512, 2048, 2048, hardware_of("h100"))[0]
    assert (best.candidate.tp, best.candidate.zero) == (1, 3)
    assert best.memory.total <= 0.94 * 80 * GIB
    assert 1 < ranked(large, 512, 512, 4096, hardware_of("h100"))[0].candidate.tp <= 8


def memory(structure, candidate, batch=8, seq=64):
    return memory_of(sizes_of(structure, candidate.tp), candidate, hardware_of("h100"), batch, seq)


def cost(structure, candidate, batch=64, seq=512):
    return cost_of(sizes_of(structure, candidate.tp), candidate, hardware_of("h100"), batch, seq)


def test_memory_falls_with_each_stage_and_axis(small):
    totals = [memory(small, Candidate(dp=4, zero=zero), 4, 1) for zero in (0, 1, 2, 3)]  # worst in the optimizer
    assert totals[0].states > totals[1].states
    assert totals[1].gradients > totals[2].gradients
    assert totals[2].parameters > totals[3].parameters
    assert memory(small, Candidate(tp=4)).parameters < totals[0].parameters
    assert memory(small, Candidate(pp=4)).parameters < totals[0].parameters
    kept, free = (memory(small, Candidate(dp=4, checkpointing=again)) for again in (True, False))
    assert kept.activations < free.activations


def test_parameters_are_counted_as_torch_counts_them(small):
    model = Encoder()
    count = sum(one.numel() for one in model.parameters())
    assert small.parameters == count
    assert memory(small, Candidate()).parameters == (4 + 2) * count  # and their copies in bfloat16


def test_cost_grows_with_the_work(small):
    costs = [cost(small, Candidate(), batch).total for batch in (1, 8, 64)]
    assert costs == sorted(costs)
    assert cost(small, Candidate(dp=8)).compute < cost(small, Candidate()).compute
    assert cost(small, Candidate(checkpointing=True)).total > costs[2]


def test_the_bubble_shrinks_with_microbatches(large):
    few, many = (cost(large, Candidate(pp=4, microbatches=m), 64, 2048) for m in (4, 16))
    assert few.pipeline > many.pipeline


def test_a_pipeline_is_cut_between_blocks(small):
    plan = plan_of(small, Candidate(pp=2, dp=2, microbatches=4))
    assert plan.pipeline.cuts == ("layers.2",)
    assert (plan.pipeline.microbatches, dict(plan.mesh)) == (4, {"pp": 2, "dp": 2})


def test_overrides_come_first():
    plan = generated(pin={"tp": 2}, overrides={"head.weight": {}})
    assert next(iter(plan.parameters)) == "head.weight"
    assert plan.parameters["head.weight"] == {}


def test_what_is_forbidden_is_not_used():
    assert "tp" not in generated(forbid=["tp"]).mesh
    assert generated(forbid=["zero", "pp"], pin={"dp": 4}).zero == 0
    assert generated(forbid=[{"zero": stage} for stage in (0, 1, 2)], pin={"dp": 8}).zero == 3


def test_the_least_memory_may_be_asked_for(small):
    fast, light = (ranked(small, 8, 16, 64, hardware_of("h100"), objective=one)[0] for one in ("time", "memory"))
    assert light.memory.total <= fast.memory.total
    assert light.cost.total >= fast.cost.total


def test_a_profile_of_ones_own():
    tiny = Hardware("tiny", 1e9, 8, 1e9, GIB, 1e-6, 2, Link(1e-6, 1e9), Link(1e-3, 1e6))
    assert generate_plan(Encoder(), world_size=2, batch=4, sample=IDS, hardware=tiny).world_size == 2


# ----------------------------------------------------------- odd requests, and refusals


@pytest.mark.parametrize("world", [7, 13])
def test_a_prime_world_is_all_data_parallel_or_pipeline(world):
    plan = generated(world_size=world, batch=26)
    assert plan.world_size == world


def test_a_batch_of_one_uses_the_other_axes():
    plan = generated(batch=1)
    assert plan.world_size == 8
    assert "dp" not in plan.mesh


def test_no_repeated_blocks_means_no_pipeline():
    plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    plan = generate_plan(plain, world_size=4, batch=4, sample=torch.randn(4, 8), hardware="h100")
    assert plan.pipeline is None
    assert plan.world_size == 4


def test_tied_weights_are_placed_alike():
    model = Encoder(tied=True)
    plan = generate_plan(model, world_size=2, batch=4, sample=IDS, hardware="h100", pin={"tp": 2})
    assert plan.parameters["table.weight"] == plan.parameters["head.weight"] == {"tp": Shard(0)}


def test_too_little_memory_names_what_would_be_enough(large):
    with pytest.raises(InfeasibleError, match="memory binds") as raised:
        ranked(large, 8, 8, 4096, hardware_of("l40s"), memory=24 * GIB)
    text = str(raised.value)
    assert "of which" in text
    world = int(text.split("world_size=")[1].split(",")[0])
    assert ranked(large, world, world, 4096, hardware_of("l40s"), memory=24 * GIB)
    enough = eval(text.split("memory=")[1].split("  #")[0])
    assert ranked(large, 8, 8, 4096, hardware_of("l40s"), memory=enough)


def test_a_pin_that_cannot_be_names_the_nearest_that_can():
    with pytest.raises(InfeasibleError, match="leave no plan for 6 ranks") as raised:
        generated(world_size=6, batch=12, pin={"tp": 6})
    assert "tensor parallelism splits by  [2, 4, 8]" in str(raised.value)
    assert "pin={'tp': 2}" in str(raised.value)


def test_ranks_that_cannot_all_be_used():
    plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    with pytest.raises(InfeasibleError, match="13 ranks cannot all be used with a batch of 4") as raised:
        generate_plan(plain, world_size=13, batch=4, sample=torch.randn(4, 8), hardware="h100")
    assert "world_size=12" in str(raised.value)


def test_rows_that_meet_forbid_data_parallelism():
    class Meeting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            h = torch.relu(self.up(x))
            return self.down(h - h.mean(0, keepdim=True))

    plan = generate_plan(Meeting(), world_size=2, batch=4, sample=torch.randn(4, 5, 8), hardware="h100")
    assert plan.mesh == {"tp": 2}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"world": 8}, r"'world' is no constraint\nfix: one of world_size"),
        ({"tp": 2}, r"'tp' is no constraint\nfix: pin=\{'tp': 2\}"),
        ({"world_size": 0}, "world_size is 0"),
        ({"batch": None}, "batch is None"),
        ({"hardware": "abacus"}, "no hardware profile is called 'abacus'"),
        ({"objective": "beauty"}, "objective is 'beauty'"),
        ({"pin": {"tensor": 2}}, "pin names 'tensor'"),
        ({"forbid": ["moe"]}, "forbid names 'moe'"),
    ],
)
def test_a_request_that_is_none(asked, said):
    with pytest.raises(PlanError, match=said):
        generated(**asked)
