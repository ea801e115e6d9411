"""Pipelines as the planner cuts them, of models whose modules are in no tidy order, against one device."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_plans import PlanError
from vescale_testkit import in_turns, raises_on_all, run_ranks, warm_up

warm_up("vescale")

ROWS, POSITIONS, WORDS, WIDTH = 4, 6, 32, 16


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    """Another kind of block: other modules, other shapes."""

    def __init__(self):
        super().__init__()
        self.mix, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.mix(x)) * self.gate


class Experts(nn.Module):
    """Tokens sorted by the expert that they are sent to, as grouped products want them."""

    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 8)

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        chosen, places = chosen.reshape(-1).sort()
        ends = torch.histc(chosen.float(), bins=len(self.weight), min=0, max=len(self.weight) - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        out = F.grouped_mm(tokens[places // 2], self.weight, offs=ends) * scores.reshape(-1)[places, None]
        return x + torch.zeros_like(tokens).index_add_(0, places // 2, out).view_as(x)


class Net(nn.Module):
    """What it calls last is registered first, and the other way round."""

    def __init__(self, kinds, tidy=False):
        super().__init__()
        if not tidy:
            self.head = nn.Linear(WIDTH, WORDS)
            self.last = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        if tidy:
            self.last = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten())


MODELS = {
    "a head that is registered first": [Dense] * 4,
    "a block of each kind": [Dense, Recurrent],
    "several kinds of blocks": [Dense, Recurrent, Experts, Recurrent, Experts],
    "tokens sorted by expert": [Experts] * 3,
}


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(WORDS, (2, ROWS, POSITIONS), generator=generator).unbind() for _ in range(count)]


def trained(model, optimizer):
    losses = []
    for ids, labels in batches(3):
        losses.append(model(ids, labels))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([loss.detach() for loss in losses])


def apart(kinds, pin):
    """How far losses, and this rank's parameters, are from one device's after three steps; and who owns the head."""
    torch.manual_seed(0)
    one = Net(kinds)
    ids, labels = batches(1)[0]
    plan = vescale.generate_plan(
        one, world_size=2, batch=ROWS, hardware="h100", sample={"ids": ids, "labels": labels},
        pin={"pp": 2, "dp": 1, "tp": 1, **pin},
    )  # fmt: skip
    plan = vescale.Plan.from_json(plan.to_json())
    model, optimizer = vescale.parallelize(plan, copy.deepcopy(one), lambda p: torch.optim.AdamW(p, lr=0.01))
    found, wanted = trained(model, optimizer), trained(one, torch.optim.AdamW(one.parameters(), lr=0.01))
    whole = dict(one.named_parameters())
    held = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    errors = {name: ((p - whole[name]).norm() / whole[name].norm()).item() for name, p in held.items()}
    return ((found - wanted) / wanted).abs().max().item(), errors, plan.pipeline.owners


@pytest.mark.parametrize("pin", [{"virtual": 2}, {"virtual": 2, "checkpointing": True}, {"virtual": 3}], ids=str)
def test_interleaved_stages_of_the_planner_train_as_one_device(pin):
    """Of six blocks; each rank holds as many runs of them as it has stages."""
    ranks = run_ranks(2, apart, [Dense] * 6, pin, timeout=120)
    held = []
    for loss, errors, owners in ranks:
        assert loss < 1e-5 and max(errors.values()) < 1e-4, (loss, errors)
        assert owners["head"] == owners["last"] == 2 * pin["virtual"] - 1 and owners["words"] == 0
        held.append({int(name.split(".")[1]) for name in errors if name.startswith("blocks.")})
    whole = set(range(6))
    assert held[0] | held[1] == whole and not held[0] & held[1]
    assert all(sum(at + 1 in whole - own for at in own) >= pin["virtual"] - 1 for own in held)


@in_turns(3)
@pytest.mark.parametrize("case", MODELS)
def test_the_planner_cuts_models_whose_modules_are_in_no_order(case):
    ranks = run_ranks(2, apart, MODELS[case], {"virtual": 1}, timeout=120)
    held = {}
    for loss, errors, owners in ranks:
        assert loss < 1e-5 and max(errors.values()) < 1e-4, (loss, errors)
        assert owners["head"] == owners["last"] == 1 and owners["words"] == owners["places"] == 0
        held |= errors
    assert held.keys() == {name for name, _ in Net(MODELS[case]).named_parameters()}


class Stage(nn.Sequential):
    """Half as many places, twice as wide."""

    def __init__(self, width):
        super().__init__(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(2, 2 * width), nn.GELU())


class Mixing(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=1), nn.GELU())


class Trunk(nn.Module):
    """Stages in one list, each of other sizes than the one before."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage(3 * 2**at) for at in range(3))
        self.head = nn.Linear(24, 5)

    def mixed(self, x):
        for stage in self.stages:
            x = stage(x)
        return x

    def forward(self, pixels, labels):
        return F.cross_entropy(self.head(self.mixed(pixels).mean((2, 3))), labels)


class Alternating(Trunk):
    """Two lists whose entries are called in turns."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixing(6 * 2**at) for at in range(3))

    def mixed(self, x):
        for stage, block in zip(self.stages, self.blocks):
            x = block(stage(x))
        return x


def pictures(model, optimizer):
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(3):
        losses.append(model(torch.randn(ROWS, 3, 16, 16, generator=generator), torch.arange(ROWS)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([loss.detach() for loss in losses])


def trunk_apart(kind):
    torch.manual_seed(0)
    one = kind()
    sample = {"pixels": torch.zeros(ROWS, 3, 16, 16), "labels": torch.arange(ROWS)}
    plan = vescale.generate_plan(
        one, world_size=2, batch=ROWS, hardware="h100", sample=sample, pin={"pp": 2, "dp": 1, "tp": 1}
    )
    model, optimizer = vescale.parallelize(plan, copy.deepcopy(one), lambda p: torch.optim.AdamW(p, lr=0.01))
    found, wanted = pictures(model, optimizer), pictures(one, torch.optim.AdamW(one.parameters(), lr=0.01))
    whole = dict(one.named_parameters())
    held = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    errors = {name: ((p - whole[name]).norm() / whole[name].norm()).item() for name, p in held.items()}
    return ((found - wanted) / wanted).abs().max().item(), errors


@pytest.mark.parametrize("kind", [Trunk, Alternating])
def test_a_trunk_whose_stages_differ_in_size_is_cut_between_them(kind):
    held = {}
    for loss, errors in run_ranks(2, trunk_apart, kind, timeout=120):
        assert errors and loss < 1e-5 and max(errors.values()) < 1e-4, (loss, errors)
        assert not held.keys() & errors.keys()
        held |= errors
    assert held.keys() == {name for name, _ in kind().named_parameters()}


def cut(owners, tidy=True):
    pipeline = vescale.Pipeline(cuts=("blocks.2",), microbatches=2, owners=owners)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(plan, Net([Dense] * 4, tidy), lambda p: torch.optim.SGD(p, lr=0.1))
    return trained(model, optimizer)


def test_owners_that_cannot_be_are_refused():
    text = raises_on_all(2, PipelineError, lambda: cut({}))
    assert "'words.weight' is owned by stage 1 and used by stage 0" in text
    assert "Pipeline(owners={'words': 0})" in text
    text = raises_on_all(2, PipelineError, lambda: cut({"word": 0}))
    assert "the owned module 'word' is not a module of the model" in text and "use 'words'" in text
    with pytest.raises(PlanError, match="owners gives 'head' to stage 2"):
        vescale.Pipeline(cuts=("blocks.2",), owners={"head": 2})
