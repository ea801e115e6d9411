"""Experts in a ModuleList, looped over by the block's own forward, against one device."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_dtensor import Replicate, Shard
from vescale_plans import Plan, PlanError, expert_load
from vescale_testkit import raises_on_all, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

VOCABULARY, HIDDEN, INNER, LAYERS, EXPERTS, CHOSEN = 64, 32, 24, 2, 8, 2
BATCH, POSITIONS, STEPS = 8, 6, 10
LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11

# The first: functions of one argument without a rule, as `torch.where`. The second: experts compute one by one.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no rule", "ignore:vescale_plans. the block of")


class Expert(nn.Module):
    def __init__(self, width=INNER):
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, width, bias=False)
        self.w2 = nn.Linear(width, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, width, bias=False)

    def forward(self, rows):
        return self.w2(F.silu(self.w1(rows)) * self.w3(rows))


class Jittered(nn.Module):
    """As transformers wrote Mixtral's block before experts were stacked: a mask, the experts hit, jitter in place."""

    def __init__(self, skewed=False):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        if skewed:
            nn.init.zeros_(self.gate.weight)

    def forward(self, hidden):
        batch, length, width = hidden.shape
        if self.training:
            hidden *= torch.empty_like(hidden).uniform_(0.9, 1.1)
        hidden = hidden.view(-1, width)
        logits = self.gate(hidden)
        weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), CHOSEN, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        final = torch.zeros((batch * length, width), dtype=hidden.dtype, device=hidden.device)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for index in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = self.experts[index]
            slot, token = torch.where(mask[index].squeeze(0))
            rows = expert(hidden[None, token].reshape(-1, width)) * weights[token, slot, None]
            final.index_add_(0, token, rows.to(hidden.dtype))
        return final.reshape(batch, length, width), logits


class Shared(nn.Module):
    """As DeepSeek's: sigmoid scores with a correction, experts one by one, a shared expert with dropout beside them."""

    def __init__(self, skewed=False):
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * (0.0 if skewed else 0.3))
        self.register_buffer("correction", torch.linspace(0, 0.1, EXPERTS))
        self.routed = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = Expert(2 * INNER)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        scores = F.linear(x.flatten(0, 1), self.router).sigmoid()
        _, chosen = torch.topk(scores + self.correction, CHOSEN, dim=-1)
        weights = scores.gather(1, chosen)
        rows, final = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        mask = F.one_hot(chosen, num_classes=len(self.routed)).permute(2, 0, 1)
        for i in range(len(self.routed)):
            token, slot = torch.where(mask[i])
            if token.numel() > 0:
                final.index_add_(0, token, self.routed[i](rows[token]) * weights[token, slot].unsqueeze(-1))
        return final.view(x.shape) + self.drop(self.shared(x)), scores


class Everyone(nn.Module):
    """A user's: every expert is called, with rows or without; slot by slot, so that each is called twice."""

    def __init__(self, skewed=False):
        super().__init__()
        self.choose = nn.Linear(HIDDEN, EXPERTS)
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
                                     for _ in range(EXPERTS))  # fmt: skip
        if skewed:
            nn.init.zeros_(self.choose.weight)

    def forward(self, x):
        scores = self.choose(x)
        weights, chosen = scores.softmax(-1).topk(CHOSEN, dim=-1)
        out = torch.zeros_like(x)
        for slot in range(CHOSEN):
            for i, member in enumerate(self.members):
                here = chosen[..., slot] == i
                out[here] = out[here] + weights[..., slot][here][:, None] * member(x[here])
        return out, scores


BLOCKS = {"jittered": Jittered, "shared": Shared, "everyone": Everyone}


class Layer(nn.Module):
    def __init__(self, block, skewed):
        super().__init__()
        self.norm, self.mixer, self.after = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.mlp = block(skewed)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.mixer(self.norm(x)))
        out, logits = self.mlp(self.after(x))
        return x + out, logits


class Model(nn.Module):
    def __init__(self, block, skewed):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(block, skewed) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x, extra = self.embed(tokens), 0.0
        for layer in self.layers:
            x, logits = layer(x)
            shares = logits.reshape(-1, EXPERTS).softmax(-1).mean(0)
            extra = extra + (shares * shares).sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + 0.02 * extra


SPLIT = {
    "*.w1.weight": {"tp": Shard(0)}, "*.w3.weight": {"tp": Shard(0)}, "*.w2.weight": {"tp": Shard(1)}, "*": {}
}  # fmt: skip
PLANS = {
    "ep4": partial(Plan, {"ep": 4}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    "ep4, the batch whole": partial(Plan, {"ep": 4}, {"*": {}}, data_axis=None, expert_axis="ep"),
    "ep2 tp2": partial(Plan, {"ep": 2, "tp": 2}, SPLIT, data_axis="ep", expert_axis="ep"),
    "dp2 ep2, zero 1": partial(Plan, {"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep", zero=1),
    "dp2 ep2, zero 3": partial(Plan, {"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep", zero=3),
    "ep2 dp2, zero 3": partial(Plan, {"ep": 2, "dp": 2}, {"*": {}}, data_axis=("ep", "dp"), expert_axis="ep", zero=3),
}
adamw = partial(torch.optim.AdamW, lr=1e-3)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def build(block, skewed=False, dtype=torch.float32):
    torch.manual_seed(0)
    return Model(BLOCKS[block], skewed).train().to(dtype)


def batches(batch=BATCH, positions=POSITIONS, steps=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (batch, positions), generator=generator) for _ in range(steps)]


def train(model, optimizer, data, clipped=False):
    losses = []
    torch.manual_seed(11)
    for tokens in data:
        loss = model(tokens)
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(block, plan, skewed=False, clipped=False, optimizer=adamw, dtype=torch.float32, **sizes):
    """Relative errors of losses and of parameters. Runs on every rank."""
    alone, data = build(block, skewed, dtype), batches(**sizes)
    names = list(alone.state_dict())
    expected = train(alone, optimizer(alone.parameters()), data, clipped)
    model, optimizer = vescale.parallelize(plan(), build(block, skewed, dtype), optimizer)
    assert list(model.state_dict()) == names
    losses = train(model, optimizer, data, clipped)
    whole = {key: value.detach().full_tensor() for key, value in model.named_parameters()}
    errors = {
        key: ((whole[key] - value).norm() / value.norm().clamp_min(1e-12)).item()
        for key, value in alone.named_parameters()
    }
    held = sum(p.to_local().numel() for key, p in model.named_parameters() if "mlp" in key and p.ndim == 2)
    return [abs(a - b) / abs(b) for a, b in zip(losses, expected)], errors, held


def check(found, loss=LOSS, parameter=PARAMETER):
    for losses, errors, _ in found:
        assert max(losses) < loss, losses
        assert {key: error for key, error in errors.items() if error > parameter} == {}


GRID = [(block, plan) for plan in PLANS for block in BLOCKS if block != "everyone" or "tp" not in plan]


@pytest.mark.parametrize("block, plan", slice_of(GRID, 6))
def test_training_equals_one_device(block, plan):
    check(run_ranks(4, compared, block, PLANS[plan]))


@pytest.mark.parametrize("block, optimizer", slice_of([("shared", adamw), ("everyone", adamw), ("jittered", sgd)], 3))
def test_all_tokens_to_the_same_experts(block, optimizer):
    """Three of four ranks compute no row, and take part in every exchange all the same. In double precision: routers
    get next to no gradient, and AdamW makes steps of rounding errors.

    The block that normalises its weights under SGD: of experts that nobody chose the gradient of its router comes from
    the load's square alone, which an even load makes zero.
    """
    found = run_ranks(4, compared, block, PLANS["ep4"], skewed=True, optimizer=optimizer, dtype=torch.float64)
    check(found, loss=1e-12, parameter=1e-9)


@pytest.mark.parametrize("block", slice_of(["jittered", "shared"], 2))
@pytest.mark.parametrize("plan", slice_of(["ep4", "dp2 ep2, zero 3"], 2))
def test_fewer_tokens_than_ranks(block, plan):
    check(run_ranks(4, compared, block, PLANS[plan], batch=3, positions=1, steps=3))


def test_norms_are_those_of_one_device():
    """Ranks hold gradients of different experts, some experts have none: `clip_grad_norm_` must not notice."""
    check(run_ranks(4, compared, "jittered", PLANS["dp2 ep2, zero 1"], clipped=True, batch=4, positions=1, steps=4))


def test_a_rank_holds_its_experts_alone():
    found = run_ranks(4, compared, "jittered", PLANS["ep4"], steps=1)
    gates = LAYERS * EXPERTS * HIDDEN
    assert [held - gates for *_, held in found] == [LAYERS * EXPERTS // 4 * 3 * HIDDEN * INNER] * 4


def traced():
    model, _ = vescale.parallelize(PLANS["ep4"](), build("jittered"))
    tokens = batches()[0]
    with vescale.comm_trace(model) as trace:
        model(tokens).backward()
    ours = [event for event in trace.events if event.cause.function == "layers.0.mlp.experts (experts)"]
    return len(ours), expert_load(model)


def test_load_is_that_of_the_batch():
    for sent, load in run_ranks(4, traced):
        assert sent > 0
        assert [sum(rows) for rows in load.values()] == [BATCH * POSITIONS * CHOSEN] * LAYERS


def saved(path):
    model, optimizer = vescale.parallelize(PLANS["ep4"](), build("jittered"), adamw)
    train(model, optimizer, batches(batch=4, positions=1, steps=2))
    vescale.save(path, {"model": model, "optimizer": optimizer}, step=1)


def loaded(path, plan):
    torch.manual_seed(99)
    model, optimizer = vescale.parallelize(plan, build("jittered"), adamw)
    vescale.load(path, {"model": model, "optimizer": optimizer}, missing="keep")  # who was never chosen has no state
    return whole_state(model, optimizer)


def whole_state(model, optimizer):
    whole = {name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")}
    for name, states in optimizer.sharded_state_dict()["state"].items():
        for key, value in states.items():
            whole[name, key] = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
    return whole


def test_checkpoints_load_under_any_spread_bitwise(tmp_path):
    """Some experts were never chosen: what the file says of their state is what one device would."""
    run_ranks(4, saved, str(tmp_path))
    (alone,) = run_ranks(1, loaded, str(tmp_path), Plan({"dp": 1}, {"*": {}}))
    assert len(alone) > 100
    for plan in slice_of(["ep4", "ep2 tp2", "dp2 ep2, zero 3"], 3):
        for one in run_ranks(4, loaded, str(tmp_path), PLANS[plan]()):
            assert one.keys() == alone.keys()
            assert all(torch.equal(one[key], alone[key]) for key in alone)


class Mixing(Jittered):
    """Tokens compete for places: what one gets depends on the others."""

    def forward(self, hidden):
        out, logits = super().forward(hidden)
        return out * logits.mean(), logits


class Drawing(Expert):
    def forward(self, rows):
        return F.dropout(super().forward(rows), 0.5, self.training)


class DrawingBlock(Jittered):
    def __init__(self, skewed=False):
        super().__init__(skewed)
        self.experts = nn.ModuleList(Drawing() for _ in range(EXPERTS))


class Narrow(Expert):
    def forward(self, rows):
        return super().forward(rows)[:, :4]


class NarrowBlock(Jittered):
    def __init__(self, skewed=False):
        super().__init__(skewed)
        self.experts = nn.ModuleList(Narrow() for _ in range(EXPERTS))


class Chained(Jittered):
    """What the second expert is given is what the first made."""

    def forward(self, hidden):
        rows = hidden
        for expert in self.experts:
            rows = rows + expert(rows)
        return rows, self.gate(hidden)


class Apart(Jittered):
    def forward(self, hidden):
        return self.experts[0].w1(hidden), self.gate(hidden)


class Capped(Everyone):
    """An expert takes the first tokens that choose it."""

    def forward(self, x):
        rows = x.flatten(0, 1)
        scores = self.choose(rows)
        share, chosen = scores.softmax(-1).max(-1)
        hits = F.one_hot(chosen, EXPERTS)
        place = ((hits.cumsum(0) - 1) * hits).sum(-1)
        out = torch.zeros_like(rows)
        for i, member in enumerate(self.members):
            token = torch.where((chosen == i) & (place < len(rows) // EXPERTS))[0]
            out.index_add_(0, token, member(rows[token]) * share[token, None])
        return out.view_as(x), scores.view(*x.shape[:-1], EXPERTS)


BLOCKS |= {"mixing": Mixing, "capped": Capped, "chained": Chained}


@pytest.mark.parametrize("block", ["mixing", "capped", "chained"])
def test_blocks_whose_tokens_meet(block):
    check(run_ranks(4, compared, block, PLANS["dp2 ep2, zero 3"], steps=3))


def refused(block):
    torch.manual_seed(0)
    model, _ = vescale.parallelize(PLANS["ep4"](), Model(block, False))
    model(batches()[0])


REFUSED = {
    DrawingBlock: "expert 0 of this list draws random numbers",
    NarrowBlock: r"expert 0 of this list makes \[18, 4\] of rows \[18, 32\]",
    Apart: "expert 0 of 'layers.0.mlp.experts' is asked for 'w1', which is on one rank only",
}


@pytest.mark.parametrize("block", REFUSED)
def test_what_cannot_be_spread_says_why(block):
    raises_on_all(4, PlanError, refused, block, match=REFUSED[block])


def with_capacity():
    vescale.parallelize(PLANS["ep4"]().override(capacity_factor=1.0), build("jittered"))


def test_a_list_has_no_capacity():
    raises_on_all(4, PlanError, with_capacity, match="capacity_factor=1.0 counts rows in the order of tokens")


class Normed(nn.Module):
    """Lists as long as there are experts, and a head as wide, around a block of experts: they are none."""

    def __init__(self, block):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCABULARY, HIDDEN), block, nn.Linear(HIDDEN, EXPERTS)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(EXPERTS))
        self.mixers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        out, _ = self.block(x)
        return F.cross_entropy(self.head(out).flatten(0, 1), tokens.flatten() % EXPERTS)


class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * 0.2)

    def forward(self, rows, chosen, weights):
        out = torch.zeros_like(rows)
        for i in range(len(self.up)):
            token, slot = torch.where(chosen == i)
            out = out.index_add(0, token, F.silu(rows[token] @ self.up[i]) @ self.down[i] * weights[token, slot, None])
        return out


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), Stacks()

    def forward(self, x):
        logits = self.gate(x.flatten(0, 1))
        weights, chosen = logits.softmax(-1).topk(CHOSEN)
        return self.experts(x.flatten(0, 1), chosen, weights).view_as(x), logits


def around(kind):
    def make():
        torch.manual_seed(0)
        return Normed(kind())

    alone, data = make(), batches(steps=3)
    expected = train(alone, adamw(alone.parameters()), data)
    model, optimizer = vescale.parallelize(PLANS["ep4"](), make(), adamw)
    losses = train(model, optimizer, data)
    assert max(abs(a - b) / b for a, b in zip(losses, expected)) < LOSS
    return list(expert_load(model))


@pytest.mark.parametrize("kind", [Everyone, Stacked])
def test_other_lists_of_a_model_are_no_experts(kind):
    name = "block.members" if kind is Everyone else "block.experts"
    assert run_ranks(4, around, kind) == [[name]] * 4


def kept_whole():
    plan = Plan({"dp": 2, "ep": 2}, {"*.experts.*": {"ep": Replicate()}, "*": {}}, expert_axis="ep")
    model, _ = vescale.parallelize(plan, build("jittered"))
    return expert_load(model)


def test_experts_that_a_plan_keeps_whole_are_any_modules():
    assert run_ranks(4, kept_whole) == [{}] * 4
