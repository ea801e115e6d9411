"""Selective recomputation: modules that are computed again in place of whole blocks, searched, priced, trained."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn

from vescale_plans import Precision, dry_run, generate_plan, parallelize
from vescale_plans.search import (
    Candidate,
    InfeasibleError,
    Request,
    hardware_of,
    memory_of,
    plan_of,
    rank,
    sample_of,
    sizes_of,
    structure_of,
)
from vescale_plans.search.pricer import Pricer
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans", "transformers.models.llama.modeling_llama")

ROWS, POSITIONS, WORDS, LAYERS = 8, 128, 512, 4
NORMS = ("input_layernorm", "post_attention_layernorm")


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=LAYERS, use_cache=False, **sizes))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=WORDS, num_hidden_layers=LAYERS, num_local_experts=4, use_cache=False, **sizes)
    )


MODELS = {"llama": llama, "mixtral": mixtral}


def batch(rows=ROWS):
    ids = torch.randint(WORDS, (rows, POSITIONS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def structures():
    return {name: structure_of(build(), sample_of(build(), batch())) for name, build in MODELS.items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_modules_that_keep_enough_are_found_with_their_matrices(structures):
    found = structures["llama"].inside
    assert set(found) == {*NORMS, "self_attn", "mlp"}
    assert all(not found[name] for name in NORMS)
    assert (len(found["self_attn"]), len(found["mlp"])) == (4 * LAYERS, 3 * LAYERS)
    assert structures["llama"].selections == (NORMS, (*NORMS, "mlp"), (*NORMS, "self_attn"))


def test_a_module_that_is_called_twice_or_keeps_nothing_is_none():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.twice, self.act = nn.Linear(8, 64), nn.Linear(64, 8), nn.Tanh(), nn.ReLU()

        def forward(self, x):
            return x + self.down(self.act(self.twice(self.twice(self.up(x)))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    # What ReLU keeps, its result, `down` keeps as well; what the linears keep they are called with.
    assert not structure_of(Net(), sample_of(Net(), torch.randn(2, 4, 8))).inside


# -------------------------------------------------------------------------------------- memory and time


DEGREES = ({}, {"dp": 2, "zero": 3}, {"tp": 2, "sp": True}, {"dp": 2, "microbatches": 2})
EXACT = 0.01
"""Of the peak: of a saving no more is made up."""


@pytest.mark.parametrize("degrees", slice_of(list(DEGREES), 2))
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_modules_save_is_what_a_dry_run_saves(structures, name, narrow, degrees):
    """And the closed form is not farther off than it is without."""
    structure, model = structures[name], MODELS[name]()
    hardware = hardware_of("cpu").computing(2 if narrow else 4)
    precision = Precision(torch.bfloat16) if narrow else None
    sizes = sizes_of(structure, degrees.get("tp", 1))

    def peaks(candidate):
        plan = plan_of(structure, candidate).override(precision=precision)
        closed = memory_of(sizes, candidate, hardware, ROWS, POSITIONS).total
        return closed, dry_run(plan, model, batch(), adamw, backend="gloo").peak

    closed, dry = peaks(Candidate(**degrees))
    for inside in structure.selections:
        less = peaks(Candidate(**degrees, checkpointing=True, inside=inside))
        assert less[1] < dry
        assert closed - less[0] <= dry - less[1] + EXACT * dry
        assert abs(less[0] - less[1]) <= max(0.10 * less[1], abs(closed - dry))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_again_is_no_less_than_a_dry_run_counts(structures, name):
    """Of the products: those of the modules, of which a recomputation leaves out each last one."""
    structure, model = structures[name], MODELS[name]()
    alone = Pricer(Request(structure, 1, ROWS, POSITIONS, hardware_of("h100"), 1e12))

    def operations(candidate):
        return dry_run(plan_of(structure, candidate), model, batch(), adamw).flops

    plain = operations(Candidate())
    for inside in structure.selections:
        candidate = Candidate(checkpointing=True, inside=inside)
        more = operations(candidate) - plain
        again, one = alone._anew(candidate)[0], alone._pass(candidate)[0]
        assert (more > 0) == (again.compute > 0)
        assert 0 < again.busy < one.busy
        rows = ROWS * POSITIONS
        matrices = {each.parameter: each for each in structure.matrices}
        chosen = {name: one.chosen for one in structure.experts for name in one.parameters}
        products = [matrices[each] for name in inside for each in structure.inside[name]]
        counted = sum(2 * rows * each.inward * each.outward * chosen.get(each.parameter, 1) for each in products)
        meet = 4 * rows * POSITIONS * 128 * LAYERS * ("self_attn" in inside)
        assert more <= counted + meet


# -------------------------------------------------------------------------------------- the choice


def limits(structure, **degrees):
    """Memory of one rank with nothing computed again, with each selection, and with whole blocks."""
    ways = [{}, *({"checkpointing": True, "inside": one} for one in structure.selections), {"checkpointing": True}]
    sizes, hardware = sizes_of(structure, 1), hardware_of("h100").computing(4)
    return [memory_of(sizes, Candidate(**degrees, **way), hardware, ROWS, POSITIONS).total for way in ways]


def asked(structure, memory, **more):
    pin = {"dp": 1, "microbatches": 1, **more.pop("pin", {})}
    return Request(structure, 1, ROWS, POSITIONS, hardware_of("h100").computing(4), memory, pin=pin, **more)


def test_the_fastest_that_fits_is_chosen_and_none_that_is_not_needed(structures):
    structure = structures["llama"]
    none, norms, mlp, attention, whole = limits(structure)
    assert none > norms > attention > mlp > whole
    assert not rank(asked(structure, none))[0].candidate.checkpointing
    ways = [Candidate(checkpointing=True, inside=one) for one in ((), *structure.selections)]
    chosen = set()
    for memory in (norms, norms * 1.02, (norms + attention) / 2, attention, (attention + mlp) / 2, mlp):
        best, pricer = rank(asked(structure, memory))[0], Pricer(asked(structure, memory))
        fits = [one for way in ways if (one := pricer._cut(way, False, inf)) is not None]
        assert best.cost.total == min(one.cost.total for one in fits)
        assert best.memory.total <= memory
        chosen.add(best.candidate.inside)
    assert len(chosen) > 1
    assert rank(asked(structure, whole))[0].candidate.inside == ()
    assert rank(asked(structure, whole * 0.9))[0].candidate.offload  # nothing else fits
    with pytest.raises(InfeasibleError):
        rank(asked(structure, whole * 0.9, forbid=["offload"]))


def test_selections_are_pinned_and_forbidden(structures):
    structure = structures["llama"]
    none, norms, mlp, *_ = limits(structure)
    pinned = rank(asked(structure, none, pin={"inside": ["mlp"]}))[0]
    assert pinned.candidate.inside == ("mlp",)
    assert len(pinned.again) == LAYERS
    assert rank(asked(structure, none, pin={"checkpointing": True}))[0].candidate.inside == ()
    assert rank(asked(structure, norms, forbid=("inside",)))[0].candidate.inside == ()
    assert rank(asked(structure, mlp, forbid=({"inside": (*NORMS, "mlp")},)))[0].candidate.inside != (*NORMS, "mlp")
    with pytest.raises(InfeasibleError, match="nearest"):
        rank(asked(structure, none, pin={"inside": ("nothing",)}))


def test_a_plan_names_the_modules_of_the_blocks_that_need_it(structures):
    structure = structures["llama"]
    whole = plan_of(structure, Candidate(checkpointing=True, inside=("mlp",)))
    assert whole.checkpointing == {"model.layers.*.mlp": True}
    whole.validate(llama())
    estimate = rank(asked(structure, limits(structure)[1]))[0]
    some = replace(estimate, again=("model.layers.1",), candidate=replace(estimate.candidate, inside=("mlp",)))
    assert plan_of(structure, some).checkpointing == {"model.layers.1.mlp": True}


def test_the_explanation_names_them(structures):
    plan = generate_plan(
        llama(), world_size=1, batch=ROWS, seq=POSITIONS, hardware="h100", sample=batch(),
        pin={"inside": ("mlp",), "microbatches": 1},
    )  # fmt: skip
    assert plan.checkpointing == {"model.layers.*.mlp": True}
    text = str(plan.explain())
    assert "checkpointing=mlp" in text
    assert "computed again, mlp alone" in text
    against = plan.explain(against={"checkpointing": True, "inside": ()})
    assert against.other.candidate.inside == ()
    assert against.other.cost.total > against.chosen.cost.total


# -------------------------------------------------------------------------------------- training


def gradients(model, rows):
    loss = model(**rows).loss
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    return loss.item(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


DEGREES_TRAINED = {
    "dp": {"dp": 2, "zero": 3},
    "tp": {"tp": 2, "sp": True},
    "both": {"dp": 2, "tp": 2, "sp": True, "zero": 2},
}


@pytest.mark.parametrize("degrees", DEGREES_TRAINED)
@pytest.mark.parametrize("name", MODELS)
def test_training_has_one_devices_gradients_and_the_plans_own_bits(structures, name, degrees):
    """The same to the bit as the plan without recomputation, and one device's but for the order of sums."""
    structure, given = structures[name], DEGREES_TRAINED[degrees]
    spread = {"ep": 2} if name == "mixtral" and "dp" in given else {}
    plain = plan_of(structure, Candidate(**given, **spread))
    selected = [
        plan_of(structure, Candidate(**given, **spread, checkpointing=True, inside=one)) for one in structure.selections
    ]

    def run():
        def trained(plan):
            model, _ = parallelize(plan, MODELS[name](), adamw)
            return gradients(model, batch())

        loss, expected = trained(plain)
        for plan in selected:
            assert plan.checkpointing
            again, found = trained(plan)
            assert again == loss
            for each, gradient in expected.items():
                assert torch.equal(found[each], gradient), each
        return loss, expected

    loss, whole = gradients(MODELS[name](), batch())
    for each, found in run_ranks(plain.world_size, run):
        assert each == pytest.approx(loss, rel=1e-5)
        for parameter, gradient in whole.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)
