"""Experts that no axis spreads, in a plan with a data axis: every rank computes the rows that it has, and no others."""

import pytest
import torch

import vescale
from vescale_plans.search import Candidate, plan_of, sample_of, structure_of
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

BATCH, POSITIONS, WORDS, STEPS = 8, 16, 64, 3
CASES = {
    "dp2": Candidate(dp=2),
    "dp2 zero 3": Candidate(dp=2, zero=3),
    "dp2 tp2 sp zero 2": Candidate(dp=2, tp=2, sp=True, zero=2),
}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    return MixtralForCausalLM(config).train()


def batch():
    ids = torch.randint(WORDS, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plan_for(name):
    model = mixtral()
    return plan_of(structure_of(model, sample_of(model, batch())), CASES[name])


def trained(name):
    """Losses and parameters after STEPS steps; of one device where no plan is named."""
    model, optimizer = mixtral(), None
    if name is not None:
        model, optimizer = vescale.parallelize(plan_for(name), model, torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach() for k, v in model.named_parameters()}
    return losses, whole


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_share_the_operations(name):
    """Of a batch that is spread over dp a rank has its part, also behind the first experts."""
    plan, alone = plan_for(name), vescale.Plan(mesh={"dp": 1}, parameters={"*": {}})
    one, each = (vescale.dry_run(of, mixtral(), batch(), backend="gloo").flops for of in (alone, plan))
    assert each * plan.world_size == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("name", list(CASES))
def test_three_steps_are_one_devices(name):
    losses, expected = trained(None)
    for found, parameters in run_ranks(plan_for(name).world_size, trained, name):
        assert found == pytest.approx(losses, rel=1e-5)
        for one, value in expected.items():
            assert (parameters[one] - value).norm() <= 1e-4 * value.norm(), one
