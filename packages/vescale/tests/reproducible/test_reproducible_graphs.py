"""Random graphs in the reproducible mode: values with many uses, bitwise one device's on every mesh.

A program is a list of steps over values [batch, positions, width]; every step takes earlier values, of which some are
taken again and again (hubs: two to six branches), and modules and parameters from pools that are smaller than the
number of steps. Plans shard the modules at random, and convert at their borders.
"""

import math
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_dtensor import Replicate, Shard, comm_trace
from vescale_plans.plan import Boundary
from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

BATCH, POSITIONS, WIDTH, HEADS, CLASSES, STEPS = 8, 8, 16, 4, 32, 3
SPLITS = {"batch": 8, "seq": 4, "hidden": 8}
COUNT, PART = 200, 10
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "tp4": {"tp": 4}}

# --- steps: (number of values taken, function of the model, a number for choices, and the values) ----------


def dims_of(n):
    return [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (-1,)][n % 8]


def linear(m, n, a):
    return m.linears[n % len(m.linears)](a)


def functional_linear(m, n, a):
    module = m.linears[n % len(m.linears)]
    return F.linear(a, module.weight, module.bias)


def raw_product(m, n, a):
    return a @ m.square


def merged(m, n, a, b):
    return m.wide(torch.cat([a, b], -1))


def attention(m, n, a, b, c):
    q, k, v = (x.view(BATCH, POSITIONS, HEADS, -1).transpose(1, 2) for x in (a, b, c))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=n % 2 == 0)
    return out.transpose(1, 2).reshape(BATCH, POSITIONS, WIDTH)


def self_attention(m, n, a):
    q, k, v = m.qkv(a).chunk(3, -1)
    return attention(m, n, q, k, v)


def attention_by_hand(m, n, a, b):
    scores = torch.einsum("bti,bsi->bts", a, b) / 4
    return scores.softmax(-1) @ b


def outer(m, n, a, b):
    return a @ torch.einsum("bti,btj->ij", a, b) * 0.01


def einsums(m, n, a, b):
    return [
        lambda: torch.einsum("bti,ij->btj", a, m.square),
        lambda: torch.einsum("bti,bti->bt", a, b).unsqueeze(-1) * a * 0.1,
        lambda: torch.einsum("bti,bsi->ts", a, b).softmax(-1) @ a,
        lambda: torch.einsum("bti,bi->bt", a, b[:, 0]).unsqueeze(-1) * b * 0.1,
        lambda: a * torch.einsum("bti->i", b) * 0.1,
        lambda: torch.einsum("bti,btj->bij", a, b).tanh().matmul(a.transpose(1, 2)).transpose(1, 2) * 0.1,
    ][n % 6]()


def cosine(m, n, a, b):
    return a * F.cosine_similarity(a, b, dim=(-1, 1, 2, 0)[n % 4]).unsqueeze((-1, 1, 2, 0)[n % 4])


def centered(m, n, a):
    return a - a.mean(dims_of(n), keepdim=True)


def scaled_by_sum(m, n, a):
    return a / (1 + a.square().sum(dims_of(n), keepdim=True))


def spread_mean(m, n, a, b):
    return a + b.mean(dims_of(n), keepdim=True).expand_as(a)


def extremes(m, n, a):
    d = n % 3
    return a - (a.amax(d, keepdim=True) if n % 2 else a.max(d, keepdim=True).values)


def spreads(m, n, a):
    d = n % 3
    return [
        lambda: a / (1 + a.std(d, keepdim=True)),
        lambda: a / (1 + a.var(d, keepdim=True, unbiased=False)),
        lambda: a - torch.logsumexp(a, d, keepdim=True) * 0.1,
        lambda: a / (1 + a.norm(dim=d, keepdim=True)),
        lambda: a / (1 + torch.linalg.vector_norm(a)),
        lambda: F.normalize(a, dim=d),
        lambda: a * a.prod(2, keepdim=True).tanh(),
    ][n % 7]()


def pointwise(m, n, a):
    fs = [F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.relu, torch.sin, lambda x: x.pow(2) * 0.3,
          lambda x: x.abs().sqrt(), lambda x: x.exp().clamp(max=2.0), F.leaky_relu, lambda x: -x]  # fmt: skip
    return fs[n % len(fs)](a)


def pairwise(m, n, a, b):
    fs = [lambda: a + b, lambda: a * b.tanh(), lambda: (a - b) * 0.5, lambda: torch.lerp(a, b, 0.3),
          lambda: torch.where(a > 0, a, b), lambda: torch.addcmul(a, a, b, value=0.1), lambda: torch.maximum(a, b),
          lambda: a / (1 + b.square()), lambda: a.add(b, alpha=0.5), lambda: torch.stack([a, b, a]).mean(0),
          lambda: sum([a, b, a * b * 0.1]),
          lambda: torch.stack([a, b], 2).flatten(2).view(*a.shape, 2).sum(-1)]  # fmt: skip
    return fs[n % len(fs)]()


def triple(m, n, a, b, c):
    return a * b.sigmoid() + c * a.sigmoid()


def twice(m, n, a):
    """One value at both places of one call."""
    return [lambda: a * a * 0.3, lambda: a + a, lambda: torch.cat([a, a], -1)[..., ::2],
            lambda: torch.stack([a, a.flip(1)]).sum(0), lambda: torch.where(a > 0, a, a * 0.1),
            lambda: (a @ a.transpose(1, 2)).softmax(-1) @ a, lambda: attention(m, n, a, a, a),
            lambda: F.cosine_similarity(a, a.roll(1, 1), dim=-1).unsqueeze(-1) * a][n % 8]()  # fmt: skip


def norms(m, n, a):
    return [lambda: m.norm(a), lambda: F.rms_norm(a, (WIDTH,), m.gain), lambda: F.layer_norm(a, (WIDTH,)),
            lambda: m.group(a.transpose(1, 2)).transpose(1, 2), lambda: m.norm(a) * m.gain][n % 5]()  # fmt: skip


def softmaxes(m, n, a):
    return (F.softmax if n % 2 else F.log_softmax)(a, (n % 4 - 1))


def moved(m, n, a):
    return [
        lambda: a.roll(1, 1), lambda: a.flip(2), lambda: torch.cat([a[:, 1:], a[:, :1]], 1),
        lambda: a.view(BATCH, POSITIONS, 4, 4).transpose(2, 3).reshape(a.shape),
        lambda: torch.stack(a.unbind(1), 1), lambda: torch.cat(a.chunk(4, 2)[::-1], 2),
        lambda: F.pad(a[:, :-1], (0, 0, 1, 0)), lambda: a[:, :, torch.arange(WIDTH - 1, -1, -1)],
        lambda: a.reshape(BATCH * POSITIONS, WIDTH).view_as(a), lambda: a.transpose(0, 1).transpose(1, 0),
        lambda: a[:, 2:3].expand(-1, POSITIONS, -1) + a, lambda: a.gather(2, m.order.expand(BATCH, POSITIONS, WIDTH)),
        lambda: a.index_select(1, m.positions), lambda: a.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        lambda: a[:, :1] * a, lambda: a[0] * a, lambda: a.tril(1), lambda: a.unfold(2, 4, 4).flatten(2),
        lambda: torch.cat([a[..., :4], a], -1)[..., 4:], lambda: a.masked_fill(a > 1, 0.5),
    ][n % 20]()  # fmt: skip


def sums_along(m, n, a):
    return [lambda: a.cumsum(1) * 0.2, lambda: a.cumsum(2) * 0.2, lambda: a.diff(dim=1, prepend=a[:, :1])][n % 3]()


def written(m, n, a, b):
    y = a.clone() if n % 2 else a * 1.5
    kind = n // 2 % 7
    if kind == 0:
        y[:, ::2] = b[:, ::2] * 0.5
    elif kind == 1:
        y.add_(b)
    elif kind == 2:
        y[..., 0] *= 2
    elif kind == 3:
        y.mul_(b.sigmoid()).add_(a)
    elif kind == 4:
        y[:, 1].copy_(b[:, 0])
    elif kind == 5:
        out = torch.zeros_like(a)
        out[:, :4] = a[:, 4:]
        y = y + out
    else:
        y[0] = b[1]
    return y


def with_parameters(m, n, a):
    return [lambda: a + m.places, lambda: a * m.gain + m.places, lambda: a * m.scale, lambda: a + m.gain * m.scale,
            lambda: a * m.gain.sum(), lambda: a + m.places.mean(0), lambda: a + m.embed.weight.mean(0),
            lambda: a + m.square.diagonal(), lambda: a @ (m.square + m.square.T)][n % 9]()  # fmt: skip


def recomputed(m, n, a, b):
    return checkpoint(lambda x, y: m.linears[0](x * y.tanh()) + x, a, b, use_reentrant=False)


def dropped(m, n, a):
    return F.dropout(a, 0.2, True)


def encoder(m, n, a):
    return m.encoder(a)


def looked_up(m, n, a):
    return a + m.embed(m.ids) * 0.5


def convolved(m, n, a):
    return m.conv(a.transpose(1, 2)).transpose(1, 2)


TAKES = {
    linear: 1, functional_linear: 1, raw_product: 1, merged: 2, attention: 3, self_attention: 1, attention_by_hand: 2,
    outer: 2, einsums: 2, cosine: 2, centered: 1, scaled_by_sum: 1, spread_mean: 2, extremes: 1, spreads: 1,
    pointwise: 1, pairwise: 2, triple: 3, twice: 1, norms: 1, softmaxes: 1, moved: 1, sums_along: 1, written: 2,
    with_parameters: 1, recomputed: 2, dropped: 1, encoder: 1, looked_up: 1, convolved: 1,
}  # fmt: skip


def loss_of_classes(m, x, y):
    return F.cross_entropy(m.head(x).flatten(0, 1), y.flatten())


def loss_by_embedding(m, x, y):
    return F.cross_entropy(F.linear(x, m.embed.weight).transpose(1, 2), y)


def loss_of_squares(m, x, y):
    return F.mse_loss(x, x.detach().roll(1, 0)) + x.square().mean()


def loss_of_rows(m, x, y):
    return (x * x.roll(1, 1)).sum(-1).mean() + x.abs().mean() + F.smooth_l1_loss(x, torch.ones_like(x))


def loss_of_norms(m, x, y):
    return x.norm() * 0.1 + m.gain.square().sum() * 0.01 + sum(p.square().sum() for p in m.parameters()) * 1e-4


LOSSES = [loss_of_classes, loss_of_classes, loss_by_embedding, loss_of_squares, loss_of_rows, loss_of_norms]


class Graph(nn.Module):
    def __init__(self, steps, losses):
        super().__init__()
        self.steps, self.losses = steps, losses
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(4))
        self.wide, self.qkv = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head, self.norm, self.group = nn.Linear(WIDTH, CLASSES), nn.LayerNorm(WIDTH), nn.GroupNorm(4, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.1, batch_first=True)
        self.places = nn.Parameter(torch.randn(POSITIONS, WIDTH) * 0.1)
        self.gain, self.scale = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(()))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("positions", torch.randperm(POSITIONS))

    def forward(self, x, y):
        self.ids = x
        values = [self.norm(self.embed(x) + self.places)]
        for step, n, taken in self.steps:
            out = step(self, n, *[values[i] for i in taken])
            values.append(out)
        return sum(loss(self, values[i], y) * w for loss, i, w in self.losses)


# What was found by hand before there was a generator, and what the generator found.
NAMED = {
    "three branches": [(pointwise, 2, [0]), (linear, 0, [1]), (pairwise, 1, [2, 1]), (triple, 0, [0, 1, 3])],
    "an encoder layer": [(encoder, 0, [0])],
    "cosine similarity": [(linear, 0, [0]), (cosine, 0, [1, 0]), (pairwise, 1, [1, 2])],
    "einsum over batch and positions": [(linear, 0, [0]), (outer, 0, [1, 0]), (triple, 0, [0, 1, 2])],
    "one value at all places of attention": [(linear, 1, [0]), (attention, 0, [1, 1, 1]), (triple, 0, [1, 0, 2])],
    "one value at two places": [(linear, 0, [0]), (twice, 5, [1]), (twice, 0, [1]), (triple, 0, [0, 1, 2])],
    "a checkpoint that begins with a product": [(recomputed, 0, [0, 0]), (recomputed, 1, [1, 0])],
    "dropout of what one device has transposed": [(moved, 13, [0]), (dropped, 0, [1]), (pairwise, 0, [2, 1])],
    "a weight used inside and outside of its module": [(linear, 0, [0]), (functional_linear, 0, [1]), (linear, 0, [2])],
}


def drawn(seed):
    """(steps, losses): steps take earlier values, and hubs over and over. Of a number, or of a name."""
    if seed in NAMED:
        steps = NAMED[seed]
        return steps, [(loss_of_classes, len(steps), 1.0), (loss_of_rows, len(steps) - 1, 0.3)]
    chance = random.Random(seed)
    kinds, steps, hub = list(TAKES), [], 0
    for i in range(chance.randint(6, 14)):
        kind = chance.choice(kinds)
        if i % 4 == 0:
            hub = i
        taken = [hub if chance.random() < 0.5 else chance.randint(max(0, i - 4), i) for _ in range(TAKES[kind])]
        steps.append((kind, chance.randrange(1000), taken))
    ends = [(chance.choice(LOSSES), chance.randint(len(steps) // 2, len(steps)), chance.choice([1.0, 0.5, 0.3]))
            for _ in range(chance.randint(1, 3))]  # fmt: skip
    return steps, [*ends, (loss_of_classes, len(steps), 1.0)]


def reaches_inside(seed):
    """Whether parameters are used outside of the module that has them, too, where ZeRO-3 holds parts."""
    steps, losses = drawn(seed)
    outside = [kind is functional_linear or (kind is with_parameters and n % 9 == 6) for kind, n, _ in steps]
    return any(outside) or any(loss in (loss_by_embedding, loss_of_norms) for loss, *_ in losses)


def plan_of(seed, mesh):
    chance = random.Random(f"plan {seed}")
    parameters, boundaries = {}, {}
    if "tp" in mesh:
        for name in ("linears.0", "linears.1", "linears.2", "linears.3", "wide", "qkv", "head", "encoder.linear1",
                     "encoder.linear2"):  # fmt: skip
            how = chance.choice([None, 0, 1])
            if how is not None:
                parameters[f"{name}.weight"] = {"tp": Shard(how)}
            if how == 0:
                parameters[f"{name}.bias"] = {"tp": Shard(0)}
            if chance.random() < 0.4 and "encoder" not in name:
                states = [{"tp": Replicate()}, {"tp": Shard(1)}, {"tp": Shard(2)}, {}]
                boundaries[name] = Boundary(input=chance.choice(states), output=chance.choice(states))
        if chance.random() < 0.7:
            parameters["embed.weight"] = {"tp": Shard(chance.choice([0, 1]))}
        if chance.random() < 0.5:
            boundaries["embed"] = Boundary(output={"tp": Shard(1)})
        if chance.random() < 0.3:
            boundaries["norm"] = Boundary(input={"tp": Shard(1)}, output={"tp": chance.choice([Shard(1), Replicate()])})
    without = ("linears.1.bias", "linears.3.bias", "qkv.bias")
    parameters = {n: p for n, p in parameters.items() if n not in without}
    zero = chance.choice([0, 0, 1, 2, 3]) if "dp" in mesh else 0
    if zero == 3 and reaches_inside(seed):
        zero = 2
    return vescale.Plan(mesh=mesh, parameters={**parameters, "*": {}}, boundaries=boundaries, zero=zero)


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randint(CLASSES, (2, BATCH, POSITIONS), generator=generator)


def train(seed, mesh=None):
    """Losses, the gradients of every step, and the parameters at the end."""
    number = list(NAMED).index(seed) if seed in NAMED else seed
    torch.manual_seed(number)
    model = Graph(*drawn(seed))

    def optimizer_of(parameters):
        return (torch.optim.AdamW if number % 2 else torch.optim.SGD)(parameters, lr=0.01)

    losses, gradients = [], []
    with vescale.reproducible(SPLITS):
        if mesh is None:
            optimizer = optimizer_of(model.parameters())
        else:
            model, optimizer = vescale.parallelize(plan_of(seed, mesh), model, optimizer_of)
        torch.manual_seed(number + 1)
        for x, y in batches(number):
            loss = model(x, y)
            loss.backward()
            losses.append(loss.item())
            gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        return losses, gradients, {n: whole(p.detach()) for n, p in model.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor).detach().clone()


def bits(tensor):
    """What is compared: the sign of a zero counts. nan is nan, whose sign and payload nobody promises."""
    return tensor.masked_fill(tensor.isnan(), float("nan")).contiguous().view(torch.int32)


def different(one, other):
    """The names of what differs in a bit."""
    odd = one.keys() ^ other.keys()
    return [*odd, *[n for n in one if n not in odd and not torch.equal(bits(one[n]), bits(other[n]))]]


def compare(seeds, mesh):
    """What became of each program: "equal", "differs ...", or the error that refused it."""
    found = []
    warnings.filterwarnings("ignore", ".*has no canonical form")
    for seed in seeds:
        wanted_losses, wanted_gradients, wanted_parameters = train(seed)
        try:
            losses, gradients, parameters = train(seed, mesh)
        except vescale.VescaleError as error:
            found.append(f"refused: {type(error).__name__}: {error}")
            continue
        odd = [f"loss of step {i}" for i in range(STEPS) if repr(losses[i]) != repr(wanted_losses[i])]
        odd += [f"{n} of step {i}" for i in range(STEPS) for n in different(gradients[i], wanted_gradients[i])]
        odd += different(parameters, wanted_parameters)
        found.append(f"differs: {', '.join(odd[:12])}" if odd else "equal")
    return found


GRID = [(mesh, part) for part in range(COUNT // PART) for mesh in MESHES]
# A step writes to a view of what had to be redistributed, which no mode allows.
REFUSED = "refused: ViewError: copy_: in-place write to a view that had to be redistributed"


@pytest.mark.parametrize("mesh, part", slice_of(GRID, 84))
def test_random_graphs_are_equal_to_the_bit(mesh, part):
    seeds = range(part * PART, (part + 1) * PART)
    sizes = MESHES[mesh]
    for verdicts in run_ranks(math.prod(sizes.values()), compare, list(seeds), sizes, timeout=300):
        found = dict(zip(seeds, verdicts))
        assert {s: v for s, v in found.items() if v != "equal" and not v.startswith(REFUSED)} == {}
        assert sum(v == "equal" for v in verdicts) >= PART - 2


@in_turns(3)
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_named_graphs_are_equal_to_the_bit(mesh):
    for verdicts in run_ranks(2, compare, list(NAMED), MESHES[mesh], timeout=300):
        assert {n: v for n, v in zip(NAMED, verdicts) if v != "equal"} == {}


def gradients_within(mesh):
    """What a hook on a converted tensor sees, and autograd.grad gives for it: of the value, which is used before."""

    class Block(nn.Module):
        def forward(self, x):
            self.x = x
            self.seen = []
            x.register_hook(lambda g: self.seen.append(whole(g)))
            return x * x.sum(-1, keepdim=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.block = nn.Linear(WIDTH, WIDTH), Block()

        def forward(self, x):
            h = self.linear(x)
            return (h * self.block(h) * h.tanh()).sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, POSITIONS, WIDTH)
    with vescale.reproducible(SPLITS):
        if mesh is not None:
            border = {"block": Boundary(input={"tp": Shard(1)}, output={"tp": Replicate()})}
            plan = vescale.Plan(mesh=mesh, parameters={"*": {}}, boundaries=border)
            model, _ = vescale.parallelize(plan, model, lambda p: torch.optim.SGD(p, lr=0.1))
        loss = model(x)
        (asked,) = torch.autograd.grad(loss, model.block.x, retain_graph=True)
        model.block.seen.clear()
        loss.backward()
        if mesh is not None:
            with pytest.raises(vescale.ReproducibleError, match="converted at a module's boundary"):
                model.block.x.retain_grad()
        return [whole(asked), *model.block.seen]


def test_gradients_of_what_a_border_converted_are_the_values():
    wanted = gradients_within(None)
    for found in run_ranks(2, gradients_within, MESHES["tp2"]):
        assert len(found) == len(wanted) == 2
        assert all(torch.equal(one, other) for one, other in zip(found, wanted))


def gradient_with_zeros(mesh):
    """The bits of the gradient of a value that a border converts for one use, and how often the backward gathered."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bounded = nn.Linear(WIDTH, WIDTH), nn.Identity()

        def forward(self, x):
            h = self.linear(x)
            h.register_hook(lambda g: seen.append(whole(g)))
            return (self.bounded(h) * (x > 0) * -1.0).sum()

    seen = []
    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, POSITIONS, WIDTH)
    with vescale.reproducible(SPLITS), comm_trace() as trace:
        if mesh is not None:
            border = {"bounded": Boundary(input={"tp": Shard(1)})}
            plan = vescale.Plan(mesh=mesh, parameters={"*": {}}, boundaries=border)
            model, _ = vescale.parallelize(plan, model, lambda p: torch.optim.SGD(p, lr=0.1))
        loss = model(x)
        trace.events.clear()
        loss.backward()
    return seen[0].view(torch.int32), trace.count(kind="all_gather")


def test_the_gradient_of_one_use_keeps_the_signs_of_zeros_and_is_sent_once():
    wanted, _ = gradient_with_zeros(None)
    assert (wanted == torch.tensor(-0.0).view(torch.int32)).any()
    for bits, sent in run_ranks(2, gradient_with_zeros, MESHES["tp2"]):
        assert torch.equal(bits, wanted) and sent == 1
