"""The peak that a dry run counts, against what the CPU's allocator gives out in a real run."""

import gc
import os
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, Precision, dry_run, parallelize
from vescale_plans.search import Candidate, plan_of, sample_of, structure_of
from vescale_testkit import allocations, in_turns, mesh_of, run_ranks

CASES = {
    "alone": ({}, {}),
    "recomputed": ({"checkpointing": True}, {}),
    "bfloat16": ({}, {"precision": Precision(torch.bfloat16)}),
    "accumulated": ({"microbatches": 2}, {}),
    "tensor": ({"tp": 2}, {}),
    "sequence": ({"tp": 2, "sp": True}, {}),
    "experts": ({}, {}),
}
ALONE = [case for case, (degrees, _) in CASES.items() if "tp" not in degrees]
"""Cases of one process. On a loaded machine gloo's threads keep buffers for longer than a dry run can know."""
OFF = 0.03
STEPS = 3


def built(experts=False):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False,
    }  # fmt: skip
    model = MixtralForCausalLM(MixtralConfig(**sizes)) if experts else LlamaForCausalLM(LlamaConfig(**sizes))
    ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def measured(text, experts):
    """Of warm steps, the lowest peak, and what it is by the phases that things were allocated in."""
    mesh_of(dist.get_world_size())
    plan = Plan.from_json(text)
    with allocations() as log:
        with log.phase("parameters"):
            model, batch = built(experts)
            model, optimizer = parallelize(plan, model, adamw)
        for _ in range(1 + STEPS):
            with log.phase("step"):
                for part in plan.parts(batch, model) if plan.accumulation > 1 else (batch,):
                    with log.phase("activations"):
                        loss = model(**part).loss
                    with log.phase("gradients"):
                        loss.backward()
                    del loss
                with log.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    least = min(range(1, 1 + STEPS), key=lambda step: log.total("step", step))
    return log.total("step", least), dict(log.peak("step", least))


@in_turns(3)
@pytest.mark.parametrize("case", CASES if os.environ.get("VESCALE_GRID") == "full" else ALONE)
def test_a_dry_run_counts_what_the_allocator_gives(case):
    degrees, more = CASES[case]
    experts = case == "experts"
    model, batch = built(experts)
    candidate = Candidate(**degrees)
    plan = plan_of(structure_of(model, sample_of(model, batch)), candidate).override(**more)
    peak, real = min(run_ranks(plan.world_size, measured, plan.to_json(), experts), key=lambda one: one[0])
    dry = dry_run(plan, model, batch, adamw, backend="gloo")
    assert dry.peak == pytest.approx(peak, rel=OFF)
    for kind in ("activations", "optimizer"):
        assert dry.memory.get(kind, 0) == pytest.approx(real.get(kind, 0), abs=2 * OFF * peak), kind


def test_optimizers_of_a_gpu_treat_all_parameters_at_once():
    """Without activations to speak of, the peak is that of the optimizer, with roots of all second moments."""
    model, batch = built()
    batch = {name: ids[:, :4] for name, ids in batch.items()}
    size = sum(parameter.nbytes for parameter in model.parameters())
    plan = plan_of(structure_of(model, sample_of(model, batch)), Candidate(dp=2))
    peak = {}
    for way in (None, False):
        peak[way] = dry_run(plan, model, batch, partial(torch.optim.AdamW, foreach=way)).peak
    assert peak[None] == pytest.approx(5 * size, rel=0.02)  # parameters, gradients, two moments, roots
    assert peak[False] < 4.6 * size


def test_gloo_takes_memory_to_gather():
    """Its all-gather makes a second result, which NCCL's does not."""
    model, batch = built()
    plan = plan_of(structure_of(model, sample_of(model, batch)), Candidate(tp=2, sp=True))
    peaks = {name: dry_run(plan, model, batch, adamw, backend=name).memory for name in ("gloo", "nccl")}
    assert peaks["gloo"]["activations"] >= peaks["nccl"]["activations"]


def test_phases_nest_and_the_innermost_counts():
    with allocations() as log, log.phase("outer"):
        kept = torch.empty(1000)
        with log.phase("inner"):
            gone = torch.empty(5000)
            del gone
            small = torch.empty(10)
    assert log.total("outer") == 4 * 6000
    assert dict(log.peak("outer")) == {"outer": 4000, "inner": 20000}
    assert kept.numel() + small.numel() == 1010


HELD = {
    "data": {"mesh": {"dp": 2}, "parameters": {"*": {}}},
    "zero 1": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 1},
    "zero 3": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
    "recomputed": {"mesh": {"dp": 2}, "parameters": {"*": {}}, "checkpointing": {"0": True}},
    "tensor": {"mesh": {"tp": 2}, "parameters": {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}}},
}


def left_behind(case):
    """What is still there of a model that trained and that nobody holds any more."""

    def train():
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        model, optimizer = parallelize(Plan(**HELD[case]), net, adamw)
        for _ in range(3):
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        held = {"model": model, "parameter": net[0].weight, "optimizer": optimizer}
        return {name: weakref.ref(one) for name, one in held.items()}

    held = train()
    gc.collect()
    return [name for name, one in held.items() if one() is not None]


@pytest.mark.parametrize("case", HELD)
def test_a_model_that_nobody_holds_is_gone(case):
    assert run_ranks(2, left_behind, case) == [[], []]


def kept_parameter():
    """The gradient of a parameter, all that is held of a model, is reduced as ever."""
    net = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    weight = parallelize(Plan(**HELD["data"]), net)[0].weight
    del net
    gc.collect()
    (weight * 2).sum().backward()
    return weight.grad.full_tensor()


def test_a_parameter_that_somebody_holds_keeps_what_its_gradient_needs():
    for gradient in run_ranks(2, kept_parameter):
        assert torch.equal(gradient, torch.full((4, 4), 2.0))
