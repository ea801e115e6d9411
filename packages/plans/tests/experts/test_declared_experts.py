"""Experts that a plan declares: TorchTitan's form, whose forward is told how many rows each expert has."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import Replicate
from vescale_plans import Plan, PlanError, expert_drops, expert_load, parallelize
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, INNER, EXPERTS, CHOSEN = 6, 10, 5, 2
pytestmark = pytest.mark.filterwarnings("ignore:.* has no rule")


class GroupedExperts(nn.Module):
    """As TorchTitan's, by the loop; w1, w3 [E, inner, width], w2 [E, width, inner]."""

    def __init__(self, count=EXPERTS):
        super().__init__()
        self.num_experts = count
        self.w1 = nn.Parameter(torch.randn(count, INNER, WIDTH) / 3)
        self.w2 = nn.Parameter(torch.randn(count, WIDTH, INNER) / 3)
        self.w3 = nn.Parameter(torch.randn(count, INNER, WIDTH) / 3)

    def forward(self, x, num_tokens_per_expert):
        sizes = [int(size) for size in num_tokens_per_expert.tolist()]
        padding, parts = x.shape[0] - sum(sizes), []
        for expert, rows in enumerate(torch.split(x[: sum(sizes)], sizes, dim=0)):
            h = F.silu(rows @ self.w1[expert].transpose(-2, -1)) * (rows @ self.w3[expert].transpose(-2, -1))
            parts.append(h @ self.w2[expert].transpose(-2, -1))
        out = torch.cat(parts)
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))


class Batched(GroupedExperts):
    """By grouped products, as one call."""

    def forward(self, x, num_tokens_per_expert):
        ids = torch.arange(len(self.w1)).repeat_interleave(num_tokens_per_expert.long())
        h = F.silu(torch.einsum("nw,niw->ni", x, self.w1[ids])) * torch.einsum("nw,niw->ni", x, self.w3[ids])
        return torch.einsum("ni,nwi->nw", h, self.w2[ids])


class Listed(GroupedExperts):
    """Told by a list, as JetMoe's; it counts its experts by an attribute that is named for nothing."""

    def __init__(self, count=EXPERTS):
        super().__init__(count)
        self.E = count
        del self.num_experts, self.w3

    def forward(self, x, sizes):
        parts = x.split(sizes)
        return torch.cat([F.silu(parts[i] @ self.w1[i].T) @ self.w2[i].T for i in range(self.E)])


class MoE(nn.Module):
    def __init__(self, kind=GroupedExperts, skewed=False):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), kind()
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("bias", torch.tensor([2.0, 0.1, 0.0, -9.0, 0.1] if skewed else [0.0] * EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))

    def forward(self, x):
        batch, length, width = x.shape
        x = x.view(-1, width)
        scores = self.gate(x).sigmoid()
        _, chosen = torch.topk(scores + self.bias, k=CHOSEN, dim=1)
        top = scores.gather(1, chosen)
        counts = torch.bincount(chosen.view(-1), minlength=EXPERTS).to(x.dtype)  # TorchTitan's histc gives floats
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(chosen.view(-1), stable=True)
        top, index = top.view(-1)[order], (order // CHOSEN).reshape(-1, 1).expand(-1, width)
        rows = torch.gather(x, dim=0, index=index) * top.reshape(-1, 1)
        sizes = [int(one) for one in counts.tolist()] if isinstance(self.experts, Listed) else counts
        out = self.shared(x).scatter_add(0, index, self.experts(rows, sizes))
        return self.head(out.reshape(batch, length, width))


def plan(mesh, **more):
    data = tuple(axis for axis in mesh if axis in ("dp", "ep"))
    return Plan(mesh, {"*": {}}, data_axis=data, expert_axis="ep", experts={"*experts": "counts"}, **more)


PLANS = {
    "ep2": plan({"ep": 2}),
    "ep2, zero 3": plan({"ep": 2}, zero=3),
    "ep2, the batch whole": plan({"ep": 2}).override(data_axis=None),
    "dp2 ep2, zero 1": plan({"dp": 2, "ep": 2}, zero=1),
    "dp2 ep2, zero 3": plan({"dp": 2, "ep": 2}, zero=3),
    "ep2 dp2, zero 2": plan({"ep": 2, "dp": 2}, zero=2),
    "ep2, kept whole": plan({"ep": 2}).override(parameters={"experts.*": {"ep": Replicate()}}),
}


def build(kind, skewed):
    torch.manual_seed(0)
    return MoE(kind, skewed).double()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def trained(model, optimizer):
    """Losses, gradients, parameters and buffers of every step, by name; batches of other sizes."""
    seen = {}
    for step, batch in enumerate((5, 8, 3)):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(batch, 3, WIDTH, generator=generator, dtype=torch.float64)
        loss = model(x).square().mean()
        loss.backward()
        seen[f"loss {step}"] = whole(loss)
        seen |= {f"gradient {step} {name}": whole(one.grad) for name, one in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        seen |= {f"{step} {name}": whole(one) for name, one in [*model.named_parameters(), *model.named_buffers()]}
    return seen


def compared(plan, kind, skewed):
    alone = build(kind, skewed)
    expected = trained(alone, adam(alone.parameters()))
    model, optimizer = parallelize(plan, build(kind, skewed), adam)
    got = trained(model, optimizer)
    wrong = [name for name in expected if not torch.allclose(got[name], expected[name], rtol=1e-9, atol=1e-11)]
    return wrong, expert_load(model)["experts"], sum(one.to_local().numel() for one in model.experts.parameters())


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind, skewed", [(GroupedExperts, True), (Batched, False), (Listed, True)])
def test_training_equals_one_device(name, kind, skewed):
    """With `skewed`, one expert has most rows and another none."""
    ranks = PLANS[name].world_size
    for wrong, load, held in run_ranks(ranks, compared, PLANS[name], kind, skewed):
        assert wrong == []
        assert sum(load) == 3 * 3 * CHOSEN and (load[3] == 0) == skewed
        if "kept whole" not in name:
            assert held <= 3 * 3 * INNER * WIDTH


def dropped():
    """With a capacity, the first rows of each expert are taken, on every mesh."""
    found = []
    for mesh in ({"ep": 1, "out": 2}, {"ep": 2}):
        model, _ = parallelize(plan(mesh, capacity_factor=0.8), build(GroupedExperts, True))
        loss = model(torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).sum()
        loss.backward()
        counted = expert_load(model)["experts"], expert_drops(model)["experts"]
        found.append([whole(loss), *counted, whole(model.experts.w2.grad)])
    torch.testing.assert_close(found[0], found[1])
    return found[0][1:3]


def test_a_capacity_drops_the_same_rows():
    for load, drops in run_ranks(2, dropped):
        assert max(load) == 4 and sum(load) + sum(drops) == 6 * 2 * CHOSEN and sum(drops) > 0


class InOne(nn.Module):
    """Router and stacks in one module, which is given tokens alone."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)

    def forward(self, x):
        shares = (x @ self.router.T).softmax(-1)
        return torch.einsum("tei,eiw,te->tw", torch.einsum("tw,ewi->tei", x, self.w1).relu(), self.w2, shares)


class Miscounting(MoE):
    def forward(self, x):
        return self.experts(x.view(-1, WIDTH), torch.ones(EXPERTS))


class Untold(MoE):
    def forward(self, x):
        return self.experts(x, torch.ones(EXPERTS))


def refused(make, experts):
    model = make()
    model, _ = parallelize(Plan({"ep": 2}, {"*": {}}, data_axis="ep", expert_axis="ep", experts=experts), model)
    model(torch.randn(4, 3, WIDTH))


REFUSED = {
    "none is declared": (MoE, {}, r"experts=\{'\*.experts': 'counts'\}"),
    "a router inside": (
        lambda: nn.Sequential(InOne()), {"0": "counts"},
        r"InOne takes \(x\): it chooses experts itself[\s\S]*experts=\{\"0.experts\": \"counts\"\}",
    ),
    "the block": (MoE, {"*": "counts"}, "experts names 'gate' as experts told by counts, .* Linear holds no weights"),
    "no such module": (MoE, {"expert": "counts"}, "the pattern 'expert' matches no module of the model"),
    "another form": (MoE, {"experts": "indices"}, "which cannot be spread: GroupedExperts takes .x, num_tokens"),
    "counts of other rows": (Miscounting, {"experts": "counts"}, "must add up to its rows, but they add up to 5"),
    "rows of three dims": (Untold, {"experts": "counts"}, r"called with rows \[N, hidden\] and counts \[5\]"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_divided_names_the_declaration(why):
    make, experts, words = REFUSED[why]
    raises_on_all(2, PlanError, refused, make, experts, match=words)
