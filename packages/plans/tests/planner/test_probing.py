"""How many forwards a probe takes, of models whose rows are hard to tell."""

import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale_plans.search import sample_of, structure_of
from vescale_plans.search.probing.digits import Digits
from vescale_plans.search.probing.find_structure import probe
from vescale_plans.search.progress import Bar


class Counted(Bar):
    """Counts the steps that it is told."""

    steps = 0

    def tick(self, what, total=None):
        self.steps += 1


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.inward = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.outward = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.inward)
        return self.outward(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """Two convolutions with norms, between which the step of a diffusion is added."""

    def __init__(self, width, stride):
        super().__init__()
        self.one, self.two = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.first, self.second = nn.Conv2d(width, width, 3, stride, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.step, self.short = nn.Linear(24, width), nn.Conv2d(width, width, 1, stride)

    def forward(self, x, steps):
        out = self.first(F.silu(self.one(x))) + self.step(steps)[:, :, None, None]
        return self.short(x) + self.second(F.silu(self.two(out)))


class Diffusion(nn.Module):
    """Residual blocks that halve the picture, after which its places attend to one another. The steps are integers, and
    no number of theirs comes out of a table."""

    def __init__(self, width=16, strides=(1, 2, 1, 2)):
        super().__init__()
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.steps = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24))
        self.blocks = nn.ModuleList(Residual(width, stride) for stride in strides)
        self.norm, self.attention = nn.GroupNorm(1, width), Attention(width)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, steps):
        angles = steps[:, None].float() * torch.arange(1, 5)
        steps = self.steps(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.begin(x)
        for block in self.blocks:
            x = block(x, steps)
        places = self.norm(x).flatten(2).transpose(1, 2)  # not contiguous: a linear layer adds its bias by itself
        return self.end(x + self.attention(places).transpose(1, 2).unflatten(2, x.shape[2:]))


class OneStep(Diffusion):
    """Of which all rows are at the same step."""

    def forward(self, x, steps):
        return super().forward(x, steps.expand(len(x)))


def test_a_diffusion_is_probed_in_few_forwards():
    """Strides, and steps that are integers or shared, hide no rows from the probe, so that its tests share forwards."""
    found = []
    for kind, steps in ((Diffusion, torch.tensor([7.0])), (Diffusion, torch.tensor([7])), (OneStep, torch.tensor(7))):
        bar, model = Counted(), kind()
        sample = sample_of(model, {"x": torch.randn(1, 3, 8, 8), "steps": steps})
        found.append(structure_of(model, sample, bar))
        assert bar.steps <= 50, (kind, steps, bar.steps)
    shown, *others = found  # numbers of their own are followed row by row
    assert all(other.groups == shown.groups for other in others)
    for at in range(4):  # with the step that is added between two convolutions, the norm behind it
        inward = {one.parameter for one in sources(shown, f"blocks.{at}.second.weight")}
        assert inward == {f"blocks.{at}.{name}" for name in ("step.weight", "two.weight", "two.bias")}
    asking = [one for one in sources(shown, "attention.outward.weight") if one.parameter.endswith("weight")]
    assert asking and all(one.bias == one.parameter.replace("weight", "bias") for one in asking)


def sources(found, sink):
    return next(group.sources for group in found.groups if group.sink == sink)


# ------------------------------------------------------------------------ digits


def told(reach, neighbours=1):
    """What digits tell of units that reach these features, bool [units, features], from what their tests meet."""
    digits = Digits(len(reach), neighbours)
    return digits.reach(torch.stack([reach[which].any(0) for which in digits.tests]))


@pytest.mark.parametrize("neighbours", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [*range(1, 40), 61, 64, 96, 144, 192, 256])
def test_digits_are_right_or_say_nothing(count, neighbours):
    generator = torch.Generator().manual_seed(count)
    for share in (0.0, 0.5 / count, 1 / count, 2 / count, 0.2, 1.0):
        reach = torch.rand(count, 40, generator=generator) < share
        found = told(reach, neighbours)
        assert found is None or torch.equal(found, reach), share
    alone = torch.eye(count, dtype=torch.bool)[torch.randperm(count, generator=generator)]
    assert torch.equal(told(alone, neighbours), alone)
    if count > 1:
        # no unit alone reaches the feature: two together do, as where a product of both is looked at
        digits = Digits(count, neighbours)
        both = [which[0] & which[-1] for which in digits.tests]
        assert digits.reach(torch.stack(both)[:, None]) is None or torch.stack(both).sum() == 0


@pytest.mark.parametrize("units", [12, 32, 64, 96, 192])
def test_digits_tell_parts_of_packed_weights_and_heads(units):
    for parts in (part for part in (2, 3) if units % part == 0):
        packed = torch.eye(units // parts, dtype=torch.bool).repeat(parts, 1)
        assert torch.equal(told(packed), packed)
    for size in (3, 4):
        heads = torch.block_diag(*[torch.ones(size, 5)] * (units // size)).bool()
        assert units % size or torch.equal(told(heads, size), heads)
    assert len(Digits(units).tests) <= 4 * units.bit_length()


# ----------------------------------------------------------------------- experts


class Experts(nn.Module):
    """Rows are sorted by the expert that a router chooses, as stock forwards over stacks do."""

    def __init__(self, width, inner, count=4):
        super().__init__()
        self.choose = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * inner))
        self.down = nn.Parameter(torch.randn(count, inner, width))

    def forward(self, x):
        flat = x.flatten(0, -2)
        weights, chosen = self.choose(flat).softmax(-1).topk(1)
        order = chosen[:, 0].argsort()
        ends = torch.bincount(chosen[:, 0], minlength=len(self.up)).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(flat[order], self.up, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        return (torch.empty_like(flat).index_copy(0, order, out) * weights).view_as(x)


class Block(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.mixing, self.experts = Attention(width), Experts(width, 128, count)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        x = x + self.mixing(self.first(x))
        return x + self.experts(self.second(x))


class Mixed(nn.Module):
    def __init__(self, width=64, counts=(4, 6, 4, 6, 4, 6), vocabulary=96):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(Block(width, count) for count in counts)

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_experts_are_probed_in_few_forwards():
    bar, model = Counted(), Mixed()
    found = structure_of(model, sample_of(model), bar)
    assert bar.steps <= 100, bar.steps
    places = (0, 2, 4, 1, 3, 5)  # each kind with its like
    assert found.routers == tuple(f"blocks.{at}.experts.choose.weight" for at in places)
    for at in places:
        (source,) = sources(found, f"blocks.{at}.experts.down")
        assert source.parameter == f"blocks.{at}.experts.up"
        unit = source.unit
        assert source.spans == tuple((start, start + unit) for start in range(0, 128, unit)) * 2
    sinks = ("experts.down", "mixing.outward.weight")
    assert {group.sink for group in found.groups} == {f"blocks.{at}.{sink}" for at in places for sink in sinks}


def test_what_norms_mix_reaches_experts_whole():
    """One feature is asked for all of a source that a norm mixes before experts."""
    model = Mixed()
    found = probe(model, sample_of(model), Bar())
    for source in ("table.weight", "blocks.0.mixing.outward.weight"):
        reached = found.influences[source, 0]
        assert all(reached[f"blocks.{at}.experts.up", 0].is_mixing for at in range(4))
    later = found.influences["blocks.1.mixing.outward.weight", 0]
    assert not any(name.startswith("blocks.0.") for name, _ in later)


# ------------------------------------------------------------------------ shifts


class Chosen(nn.Module):
    """What the first half of the features is decides which row of a table is taken: no NaN goes that way."""

    def __init__(self, width=16):
        super().__init__()
        self.begin, self.end = nn.Linear(8, width), nn.Linear(width, 8)
        self.register_buffer("table", torch.randn(11, width))

    def forward(self, x):
        half = self.begin(x)[..., : self.end.in_features // 2]
        return self.end(self.table[half.round().long().clamp(-1000, 1000).sum(-1) % len(self.table)])


def test_what_no_nan_shows_is_shown_by_shifts():
    """Together they show that there is more; which of the samples reach it, each shows for itself."""
    model = Chosen()
    found = probe(model, sample_of(model, torch.randn(2, 8)), Bar())
    reach = found.influences["begin.weight", 0]["end.weight", 0].reach
    assert reach.any(1).tolist() == [True, True, False]  # the features 0, 5 and 15


def cast(layer, dtype):
    return layer.to(dtype)


def data(layer, dtype):
    layer.weight.data = layer.weight.data.to(dtype)
    layer.bias.data = layer.bias.data.to(dtype)
    return layer


def others(layer, dtype):
    layer.weight, layer.bias = (nn.Parameter(one.detach().to(dtype)) for one in (layer.weight, layer.bias))
    return layer


def nothing(layer, dtype):
    return layer


class Casting(nn.Module):
    """Computes with one layer in other numbers, to which its forward brings it, as NLLB's routers do."""

    def __init__(self, change, dtype):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.change, self.dtype = change, dtype

    def forward(self, x):
        x = self.up(x)
        self.gate = self.change(self.gate, self.dtype)
        return self.down(x * self.gate(x.to(self.gate.weight.dtype)).to(x.dtype))


@pytest.mark.parametrize("change", [cast, data, others])
@pytest.mark.parametrize("own, other", [("bfloat16", "float32"), ("float64", "float32"), ("float32", "bfloat16")])
def test_a_layer_that_a_forward_casts_is_the_layer_that_it_was(own, other, change):
    """Alarmed, for a walk from copy to copy once did not end."""

    def late(*_):
        raise TimeoutError("probing does not end")

    own, other = getattr(torch, own), getattr(torch, other)
    before, found, steps = signal.signal(signal.SIGALRM, late), [], []
    signal.alarm(60)
    try:
        for each in (change, nothing):
            model, bar = Casting(each, other).to(own), Counted()
            found.append(structure_of(model, sample_of(model, torch.randn(2, 8, dtype=own)), bar))
            steps.append(bar.steps)
            assert {parameter.dtype for parameter in model.parameters()} == {own}
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert found[0].groups == found[1].groups and found[0].groups
    assert found[0].matrices == found[1].matrices and set(found[0].holding) == set(found[1].holding)
    assert steps[0] == steps[1]


class Collecting(nn.Module):
    """Collects what its layers return, by hooks that its first call registers, as transformers does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(2))
        self.is_hooked = False

    def forward(self, x):
        if not self.is_hooked:
            for layer in self.layers:
                layer.register_forward_hook(lambda layer, args, out: self.found.append(out))
            self.is_hooked = True
        self.found = []
        for layer in self.layers:
            x = x + layer(x)
        first, last = self.found
        return (first * last).sum()


def test_each_forward_meets_the_hooks_that_the_first_met():
    model = Collecting()
    found = structure_of(model, sample_of(model, torch.randn(4, 16)))
    assert found.groups and not model.layers[0]._forward_hooks and not model.is_hooked
