"""Forwards that raise on what the planner calls them with, which no call of the user's gives them; and those that check
values, which need not."""

import re

import pytest
import torch
from torch import distributions, nn
from torch.distributions import Distribution

from vescale_plans import Plan, PlanError, dry_run, parallelize
from vescale_plans.search.generate import generate_plan
from vescale_plans.search.pricing.predict import predict
from vescale_testkit import run_ranks

SAMPLE = torch.arange(32.0).view(4, 8) / 8


def planned(model, sample=SAMPLE, **asked):
    return generate_plan(model, world_size=2, batch=4, sample=sample, hardware="cpu", **asked)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


def by_values(x):
    return {value: at for at, value in enumerate(SAMPLE.flatten().tolist())}[x.flatten()[0].item()]


FAILURES = {
    "index": lambda x: x[torch.tensor([3])],
    "assertion": lambda x: exec("assert False, 'no rows'"),
    "key": by_values,
    "division": lambda x: 1 / 0,
    "own": lambda x: (_ for _ in ()).throw(Unprintable()),
    "numbers": lambda x: int(x.flatten()[-1].sum() * float("nan")),
    "torch": lambda x: x @ x,
}
"""Raised by a forward of other rows than the sample's, or of other numbers."""


class Failing(nn.Module):
    def __init__(self, failure):
        super().__init__()
        self.up, self.down, self.failure = nn.Linear(8, 16), nn.Linear(16, 8), failure

    def forward(self, x):
        y = self.down(self.up(x).relu())
        if not torch.equal(x, SAMPLE):
            self.failure(y)
        return y


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_a_forward_raises_is_said_to_be_of_a_made_up_batch(failure):
    model = Failing(FAILURES[failure])
    model(SAMPLE)
    with pytest.raises(PlanError, match="forward raised on a batch that the planner made") as raised:
        planned(model)
    error = raised.value
    assert error.__cause__ is not None and not isinstance(error.__cause__, PlanError)
    assert type(error.__cause__).__name__ in str(error)
    assert re.search(rf"at +{re.escape(__file__)}:\d+", str(error)) and error.remedies


def test_an_interrupt_goes_through():
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(Failing(interrupt))


class Contrasting(nn.Module):
    """Negatives name places of the whole batch, one row after the other, as in wav2vec 2.0."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x, negatives):
        h = self.down(self.up(x).relu())
        others = h.reshape(-1, 8)[negatives.reshape(-1)].view(*negatives.shape, 8)
        return (h[:, :, None] * others).sum(-1).logsumexp(-1).mean()


def contrasted(rows):
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 5, 8), "negatives": torch.randint(5 * rows - 5, 5 * rows, (rows, 5, 3))}


def loss(plan):
    torch.manual_seed(0)
    model = Contrasting()
    alone = model(**contrasted(4)).item()
    model, _ = parallelize(plan, model)
    return alone, model(**contrasted(4)).item()


def test_what_the_error_advises_works():
    model = Contrasting()
    with pytest.raises(PlanError, match=r"IndexError: index \d+ is out of bounds") as raised:
        planned(model, contrasted(4))
    assert any("Plan(" in code for code, _ in raised.value.remedies)
    assert planned(model, contrasted(1)).world_size == 2
    for alone, apart in run_ranks(2, loss, Plan(mesh={"dp": 2}, parameters={"*": {}})):
        assert apart == pytest.approx(alone, rel=1e-5)


class Drawn(nn.Module):
    """Its latents are drawn from a distribution that it makes, or asked about; both look at values."""

    def __init__(self, made):
        super().__init__()
        self.enter, self.leave, self.made = nn.Linear(8, 12), nn.Linear(6, 8), made

    def forward(self, x):
        mean, scale = self.enter(x).chunk(2, -1)
        return (self.leave(self.made(mean, scale)) - x).square().mean()


def divergence(mean, scale):
    own = distributions.Independent(distributions.Laplace(mean, scale.exp()), 1)
    return own.rsample() * own.log_prob(mean).unsqueeze(-1)


MADE = {
    "normal": lambda mean, scale: distributions.Normal(mean, scale.exp()).rsample(),
    "uniform": lambda mean, scale: distributions.Uniform(mean, mean + scale.exp()).rsample(),
    "log_prob": divergence,
    "bernoulli": lambda mean, scale: distributions.Bernoulli(logits=mean).log_prob((scale > 0).float()),
    "kl": lambda mean, scale: (
        mean
        * distributions.kl_divergence(
            distributions.Normal(mean, scale.exp()), distributions.Normal(torch.zeros_like(mean), 1.0)
        )
    ),
}


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("made", MADE)
def test_distributions_check_nothing_while_a_model_is_planned(made, checks):
    model, before = Drawn(MADE[made]), Distribution._validate_args
    try:
        Distribution.set_default_validate_args(checks)
        model(SAMPLE)
        plan = planned(model)
        assert plan.world_size == 2
        assert Distribution._validate_args is checks
        dry_run(plan, model, SAMPLE)
        predict(plan, model, SAMPLE, "cpu")
        assert Distribution._validate_args is checks
    finally:
        Distribution.set_default_validate_args(before)


def test_a_distribution_that_is_told_to_check_is_told_of():
    model = Drawn(lambda mean, scale: distributions.Normal(mean, scale.exp(), validate_args=True).rsample())
    model(SAMPLE)
    with pytest.raises(PlanError, match="ValueError: Expected parameter loc"):
        planned(model)
    assert Distribution._validate_args
