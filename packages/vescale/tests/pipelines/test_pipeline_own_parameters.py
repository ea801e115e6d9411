"""A forward that goes over the parameters of its own modules, whichever stages hold them: penalties by module and by
name, and encoders that follow another by momentum."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

COUNT, ROWS, WIDTH = 2, 4, 6
PENALTIES = {
    "all": lambda model: sum(p.square().sum() for p in model.parameters()),
    "a list": lambda model: sum(p.square().sum() for p in model.blocks.parameters()),
    "by name": lambda model: sum(p.abs().sum() for name, p in model.named_parameters() if "weight" in name),
    "of a list by name": lambda model: sum(p.norm() for name, p in model.blocks.named_parameters() if "bias" in name),
    "matrices": lambda model: sum(p.square().sum() for p in model.blocks.parameters() if p.ndim > 1),
    "of each module": lambda model: sum(
        p.square().sum() for one in model.modules() for p in one.parameters(recurse=False)
    ),
    "of modules by kind": lambda model: sum(
        one.weight.square().sum() for one in model.modules() if isinstance(one, nn.Linear)
    ),
    "one block": lambda model: sum(p.square().sum() for p in model.blocks[2].parameters()),
}


class Net(nn.Module):
    def __init__(self, penalty):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.penalty = penalty

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x).tanh()
        return F.mse_loss(self.head(x), y) + 0.1 * PENALTIES[self.penalty](self)


def plan(mesh, cut="blocks.2", **more):
    return vescale.Plan(
        mesh=mesh, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=(cut,), microbatches=COUNT), **more
    )


def penalised(chosen):
    """Of each penalty the losses of three steps, and the parameters that are here after them; or why it is refused."""
    found = {}
    for penalty in PENALTIES:
        torch.manual_seed(0)
        model = Net(penalty)
        if chosen is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            model, optimizer = vescale.parallelize(chosen, model, lambda ps: torch.optim.SGD(ps, lr=0.1))
        losses = []
        try:
            for _ in range(3):
                loss = model(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 3))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        except PipelineError as error:
            found[penalty] = str(error)
            continue
        whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
        found[penalty] = torch.tensor(losses), whole
    return found


@pytest.mark.parametrize("chosen", [plan({"pp": 2}), plan({"pp": 2, "dp": 2}, zero=3)], ids=["pp2", "pp2 dp2 zero3"])
def test_a_forwards_penalty_is_one_devices_or_refused(chosen):
    wanted = penalised(None)
    for found in run_ranks(chosen.world_size, penalised, chosen, timeout=120):
        for penalty, seen in found.items():
            if penalty != "one block":  # another stage has some of it
                assert "is owned by stage 0 and used by stage 1" in seen and "loss = model(batch) + penalty" in seen
                continue
            losses, whole = seen
            torch.testing.assert_close(losses, wanted[penalty][0], rtol=2e-6, atol=0)
            for name, value in whole.items():
                torch.testing.assert_close(value, wanted[penalty][1][name], rtol=2e-6, atol=2e-6)


class Momentum(nn.Module):
    """The keys' encoder follows the queries', inside of the forward."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)

    def forward(self, x, y):
        queries = self.queries(x)
        with torch.no_grad():
            for key, query in zip(self.keys.parameters(), self.queries.parameters()):
                key.mul_(0.5).add_(query, alpha=0.5)
            keys = self.keys(y)
        return F.mse_loss(queries, keys)


def followed(chosen):
    torch.manual_seed(0)
    model, _ = vescale.parallelize(
        chosen, Momentum(), lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1)
    )
    with pytest.raises(PipelineError, match="is owned by stage 0 and used by stage 1"):
        model(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)).backward()
    return True


def test_an_encoder_that_follows_one_of_another_stage_is_refused():
    assert run_ranks(2, followed, plan({"pp": 2}, "queries.2"), timeout=90) == [True, True]
