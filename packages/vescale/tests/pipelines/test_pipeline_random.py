"""Random models over random cuts: bitwise one device's accumulation, or refused before anything has run.

A program is a list of steps that the model's forward interprets: so every step is user code between modules, over
modules of several kinds. Whatever one device does, a pipeline does to the bit, or every rank raises the same typed
error in its first call.
"""

import collections
import copy
import gc
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_pipeline import PipelineError, PipelineFailure
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS, STEPS = 8, 2, 3  # rows of a microbatch
COUNT = 500
SCHEDULES = {2: ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv"], 3: ["1f1b", "zb-h1"], 4: ["1f1b", "interleaved"]}
VIRTUAL = {"interleaved": 2, "zbv": 2}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        return x + torch.tanh(self.linear(x)) * scale


class Drops(Plain):
    def forward(self, x, scale=1.0):
        return super().forward(F.dropout(x, 0.2, self.training), scale)


class Normed(Plain):
    """Keeps an average of what passes, and divides by it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x, scale=1.0):
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.abs().mean(0) * 0.1)
        return super().forward(x / self.average, scale)


class Routed(Plain):
    """Leaves a loss beside its result, as experts do. (One product of x alone: DTensor adds up the gradients of several
    products before the others.)"""

    def forward(self, x, scale=1.0):
        self.extra = x.square().mean()
        return super().forward(x, scale)


class Two(Plain):
    def forward(self, x, scale=1.0):
        return {"x": super().forward(x, scale), "side": (x * 2,)}


class Counts(Plain):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return super().forward(x, scale)


class Placed(Plain):
    """Adds a weight of a microbatch's shape, whose gradient autograd hands on in one memory with that of the rest."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(ROWS, WIDTH) * 0.1)

    def forward(self, x, scale=1.0):
        return super().forward(x, scale) + self.place


class Viewed(Plain):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(ROWS * WIDTH) * 0.1)

    def forward(self, x, scale=1.0):
        return self.place.view(ROWS, WIDTH) + super().forward(x + self.place.view(ROWS, WIDTH), scale)


BLOCKS = [Plain, Plain, Drops, Normed, Routed, Two, Counts, Placed, Viewed]


class Program(nn.Module):
    """Runs `steps` over its blocks."""

    def __init__(self, kinds, steps, tied):
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.steps, self.calls = steps, 0
        if tied:
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight

    def forward(self, x, y, mask=None):
        kept, losses = {}, []
        for what, *given in self.steps:
            x = getattr(self, f"do_{what}")(x, kept, losses, mask, *given)
        loss = F.mse_loss(x, y)
        for extra in losses:
            loss = loss + extra * 0.1
        return loss

    def do_block(self, x, kept, losses, mask, i):
        out = self.blocks[i](x)
        return out["x"] + out["side"][0] if isinstance(out, dict) else out

    def do_scaled(self, x, kept, losses, mask, i):
        out = self.blocks[i](x, scale=0.5)
        return out["x"] if isinstance(out, dict) else out

    def do_twice(self, x, kept, losses, mask, i):
        return self.do_block(self.do_block(x, kept, losses, mask, i), kept, losses, mask, i)

    def do_checkpoint(self, x, kept, losses, mask, i, reentrant):
        return checkpoint(self.do_block, x, kept, losses, mask, i, use_reentrant=reentrant)

    def do_module(self, x, kept, losses, mask, i, reentrant):
        out = checkpoint(self.blocks[i], x, use_reentrant=reentrant)
        return out["x"] if isinstance(out, dict) else out

    def do_nested(self, x, kept, losses, mask, i):
        def inner(x):
            return checkpoint(self.do_block, x, kept, losses, mask, i, use_reentrant=False).sin()

        return checkpoint(inner, x, use_reentrant=False)

    def do_across(self, x, kept, losses, mask, i):
        return checkpoint(lambda x: self.do_block(x * 2, kept, losses, mask, i), x, use_reentrant=False)

    def do_dropout(self, x, kept, losses, mask):
        return F.dropout(x, 0.1, self.training)

    def do_like(self, x, kept, losses, mask):
        return x + torch.randn_like(x) * 0.1

    def do_noise(self, x, kept, losses, mask):
        return x + torch.randn(x.shape[-1]) * 0.1

    def do_permuted(self, x, kept, losses, mask):
        return x + x[:, torch.randperm(WIDTH)] * torch.randint(1, 4, (1,))

    def do_keep(self, x, kept, losses, mask, name):
        kept[name] = x
        return x

    def do_skip(self, x, kept, losses, mask, name):
        return x + kept[name] * 0.5

    def do_masked(self, x, kept, losses, mask):
        return x.masked_fill(mask[:, None], 0.0) + torch.arange(WIDTH, device=x.device) * 0.01

    def do_write(self, x, kept, losses, mask):
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.mean(0) * 0.1)
        return x

    def do_assign(self, x, kept, losses, mask):
        self.running = (self.running * 0.5 + x.mean(0) * 0.5).detach()
        return x

    def do_read(self, x, kept, losses, mask):
        return x * (1 + self.running)

    def do_count(self, x, kept, losses, mask):
        self.count += 1
        return x

    def do_counted(self, x, kept, losses, mask):
        return x / (1 + self.count * 0.1)

    def do_python(self, x, kept, losses, mask):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)

    def do_extra(self, x, kept, losses, mask):
        losses.extend(block.extra for block in self.blocks if isinstance(block, Routed))
        return x

    def do_filled(self, x, kept, losses, mask):
        out = torch.zeros(x.shape, device=x.device)
        out[:, : WIDTH // 2] = x[:, : WIDTH // 2]
        return x + out

    def do_norm(self, x, kept, losses, mask):
        loss = x.square().mean()
        losses.append(loss)
        return x

    def do_split(self, x, kept, losses, mask):
        left, right = x.chunk(2, -1)
        return torch.cat([right, left], -1)


GLUE = ["dropout", "like", "noise", "permuted", "masked", "write", "assign", "read", "count", "counted", "python",
        "norm", "split", "filled"]  # fmt: skip
PASSING = ["block", "block", "block", "scaled", "twice", "checkpoint", "module", "nested"]


def named(*steps, kinds=(Plain, Plain), schedule="1f1b", cuts=("blocks.1",), count=4):
    return list(kinds), [(step,) if isinstance(step, str) else step for step in steps], False, 2, schedule, cuts, count


FIRST, SECOND = ("block", 0), ("block", 1)
# name -> (program, what the refusal says, or "ran")
NAMED = {
    "a buffer read in the stage after": (named(FIRST, "write", SECOND, "read"), "ran"),
    "a buffer assigned, and read after": (named(FIRST, "assign", SECOND, "read"), "ran"),
    "a buffer read in the stage before": (
        named(FIRST, "read", SECOND, "write"),
        "the buffer 'running' is written in stage 1, and read in stage 0",
    ),
    "a buffer written in two stages": (
        named(FIRST, "write", SECOND, "write"),
        "the buffer 'running' is written in stages 0 and 1",
    ),
    "a counter": (named(FIRST, "counted", SECOND, "count"), "ran"),
    "a number of Python's": (named("python", FIRST, SECOND, "python"), "ran"),
    "draws on both stages": (named(FIRST, "like", "noise", SECOND, "permuted", "dropout"), "ran"),
    "draws after modules that draw": (named(FIRST, "noise", SECOND, "like", kinds=(Drops, Drops)), "ran"),
    "a checkpoint around modules": (named(("module", 0, False), ("module", 1, False)), "ran"),
    "a reentrant checkpoint": (named(FIRST, ("module", 1, True), kinds=(Drops, Drops)), "ran"),
    "a checkpoint around user code": (named(FIRST, ("checkpoint", 1, False), kinds=(Two, Two)), "ran"),
    "a checkpoint under a split backward": (
        named(FIRST, ("module", 1, False), schedule="zb-h1", kinds=(Drops, Drops)),
        "ran",
    ),
    "checkpoints of both kinds, one in another, under a split backward": (
        named(
            *(("checkpoint", 0, False), ("nested", 1), ("module", 2, True), ("checkpoint", 3, True), "norm"),
            kinds=(Drops, Two, Drops, Plain), schedule="zbv", cuts=("blocks.1", "blocks.2", "blocks.3"),
        ),
        "ran",
    ),
    "a checkpoint over a cut": (
        named(FIRST, ("across", 1)),
        "a checkpoint begins in stage 0 and goes on in stage 1",
    ),
    "a buffer written in a checkpoint": (
        named(FIRST, ("module", 1, False), kinds=(Plain, Normed)),
        "the buffer 'blocks.1.average' is written inside a checkpoint",
    ),
    "losses left in attributes": (named(FIRST, SECOND, "extra", kinds=(Routed, Routed)), "ran"),
    "a tensor that is filled": (named(FIRST, "filled", SECOND, "filled"), "ran"),
    "values that only pass through": (
        named(
            *(FIRST, ("keep", "k"), SECOND, ("block", 2), ("block", 3), ("skip", "k")),
            kinds=[Plain] * 4, schedule="interleaved", cuts=("blocks.1", "blocks.2", "blocks.3"),
        ),
        "ran",
    ),
}  # fmt: skip


def number_of(seed):
    return seed if isinstance(seed, int) else 7


def drawn(seed):
    """(kinds of blocks, steps, tied, ranks, schedule, cuts, microbatches), of a number, or of a name."""
    if seed in NAMED:
        return NAMED[seed][0]
    chance = random.Random(seed)
    ranks = chance.choice([2, 2, 2, 3, 4])
    schedule = chance.choice(SCHEDULES[ranks])
    stages = ranks * VIRTUAL.get(schedule, 1)
    kinds = [chance.choice(BLOCKS) for _ in range(stages + chance.randint(0, 3))]
    steps, names = [], []
    for i in range(len(kinds)):
        how = chance.choice(PASSING)
        how = "block" if how == "twice" and kinds[i] is Normed else how  # autograd refuses that on one device, too
        how = "block" if how in PASSING[-3:] and kinds[i] is Normed and chance.random() < 0.9 else how  # refused
        reentrant = (
            i > 0 and chance.random() < 0.3 and (how, kinds[i]) != ("module", Two)
        )  # through a dict it gives no gradients
        steps.append((how, i, reentrant) if how in ("checkpoint", "module") else (how, i))
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            glue = chance.choice(GLUE)
            late = glue in ("write", "assign") and chance.random() < 0.7 and i < len(kinds) - 1  # most of these: once
            steps.append(("norm" if late else glue,))
        if chance.random() < 0.25:
            names.append(f"k{i}")
            steps.append(("keep", names[-1]))
        if names and chance.random() < 0.3:
            steps.append(("skip", chance.choice(names)))
    if Routed in kinds:
        steps.append(("extra",))
    tied = chance.random() < 0.2
    places = sorted(chance.sample(range(1, len(kinds)), stages - 1))
    return kinds, steps, tied, ranks, schedule, tuple(f"blocks.{i}" for i in places), chance.choice([1, 2, 4])


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(2, count * ROWS, WIDTH, generator=generator)
        yield x, y, torch.rand(count * ROWS, generator=generator) < 0.2


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def on_one_device(seed):
    """Losses, gradients by step, and what the model holds at the end; a tied weight's uses are added up apart."""
    kinds, steps, tied, *_, count = drawn(seed)
    torch.manual_seed(number_of(seed))
    model = Program(kinds, steps, tied)
    first, last = model.blocks[0].linear, model.blocks[-1].linear
    if tied:
        last.weight = copy.deepcopy(first.weight)
    optimizer = optimizer_of([p for p in model.parameters() if not tied or p is not last.weight])
    torch.manual_seed(number_of(seed) + 1)
    losses, gradients = [], []
    for batch in batches(count):
        total = 0
        for part in zip(*(tensor.chunk(count) for tensor in batch)):
            loss = model(*part) * (1 / count)
            loss.backward()
            total = total + loss.detach()
        if tied:
            first.weight.grad = first.weight.grad + last.weight.grad
        losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        model.zero_grad()
        if tied:
            last.weight.data.copy_(first.weight)
    return losses, gradients, model.state_dict(), torch.get_rng_state()


def pipelined(seed):
    kinds, steps, tied, ranks, schedule, cuts, count = drawn(seed)
    torch.manual_seed(number_of(seed))
    model = Program(kinds, steps, tied)
    pipeline = vescale.Pipeline(
        cuts=cuts, schedule=schedule, microbatches=count, virtual=VIRTUAL.get(schedule, 1), loss="mean"
    )
    plan = vescale.Plan(mesh={"pp": ranks}, parameters={"*": {}}, pipeline=pipeline)
    model, optimizer = vescale.parallelize(plan, model, optimizer_of)
    torch.manual_seed(number_of(seed) + 1)
    losses, gradients = [], []
    for batch in batches(count):
        loss = model(*batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {n: whole(t) for n, t in model.state_dict().items()}, torch.get_rng_state()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def same(a, b):
    """To the bit, and where a program has diverged both are no number."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def outcome(seed):
    """What is different from one device on this rank; or the refusal."""
    try:
        losses, gradients, held, state = pipelined(seed)
    except vescale.VescaleError as error:
        return "refused", str(error), sorted({})
    except RuntimeError as error:
        kind = (
            "failed" if isinstance(error, PipelineFailure) or "PipelineError" not in type(error).__name__ else "refused"
        )
        return kind, f"{type(error).__name__}: {error}", []
    wanted_losses, wanted_gradients, wanted, wanted_state = on_one_device(seed)
    different = [f"loss {i}" for i, (a, b) in enumerate(zip(losses, wanted_losses)) if not same(a, b)]
    for step, (found, all_of_them) in enumerate(zip(gradients, wanted_gradients)):
        strange = [n for n, g in found.items() if n not in all_of_them or not same(g, all_of_them[n])]
        different += [f"gradient {n} {step}" for n in strange]
    different += [n for n, value in held.items() if not same(value, wanted[n])]
    if not torch.equal(state, wanted_state):
        different.append("generator")
    return "ran", sorted(held), different


def outcomes(seeds):
    found = []
    for seed in seeds:
        found.append(outcome(seed))
        gc.collect()  # torch 2.11 takes the hooks of a checkpoint that raised away when its generator is collected
    return found


def judged(seeds):
    """Seed -> "ran", or the refusal's first line. Raises AssertionError for anything else."""
    verdicts, wrong = {}, {}
    for ranks in sorted({drawn(seed)[3] for seed in seeds}):
        mine = [seed for seed in seeds if drawn(seed)[3] == ranks]
        for seed, *of_ranks in zip(mine, *run_ranks(ranks, outcomes, mine, timeout=60 + 10 * len(mine))):
            kinds = {kind for kind, _, _ in of_ranks}
            if kinds == {"refused"} and len({text for _, text, _ in of_ranks}) == 1:
                verdicts[seed] = of_ranks[0][1].splitlines()[0]
            elif kinds != {"ran"} or any(different for *_, different in of_ranks):
                wrong[seed] = of_ranks
            elif {n for _, held, _ in of_ranks for n in held} != set(Program(*drawn(seed)[:3]).state_dict()):
                wrong[seed] = "lacks " + str({n for _, held, _ in of_ranks for n in held})
            else:
                verdicts[seed] = "ran"
    assert not wrong, {seed: (drawn(seed), what) for seed, what in wrong.items()}
    return verdicts


def test_random_models_are_one_devices_to_the_bit_or_refused():
    verdicts = judged(slice_of(range(COUNT), fraction=40))
    refusals = collections.Counter(text for text in verdicts.values() if text != "ran")
    print(*(f"{count} {text}" for text, count in refusals.most_common()), sep="\n")
    assert list(verdicts.values()).count("ran") > len(verdicts) / 2


def test_what_forwards_do_between_modules():
    verdicts = judged(list(NAMED))
    assert {name: verdict for name, verdict in verdicts.items() if NAMED[name][1] not in verdict} == {}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.1


class Strange(nn.Module):
    """What is refused, between two modules."""

    def __init__(self, what):
        super().__init__()
        self.blocks = nn.ModuleList([Plain(), Plain()])
        self.between = {"function": Scaled.apply, "python": lambda x: x * random.random()}[what]

    def forward(self, x, y):
        return F.mse_loss(self.blocks[1](self.between(self.blocks[0](x))), y)


def said(what):
    torch.manual_seed(0)
    model = Strange(what) if what != "generator" else Program([Drops, Drops], [FIRST, SECOND], False)
    pipeline = vescale.Pipeline(cuts=("blocks.1",), microbatches=2, loss="mean")
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    model, _ = vescale.parallelize(plan, model, optimizer_of)
    if what == "generator":
        torch.manual_seed(torch.distributed.get_rank())
    try:
        model(torch.ones(4, WIDTH), torch.ones(4, WIDTH)).backward()
    except PipelineError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("function", "the autograd Function Scaled is applied between modules"),
        ("python", "the forward draws from the generator of random"),
        ("generator", "another state of torch's generator"),
    ],
)
def test_what_no_stage_can_know_is_refused(what, text):
    first, second = run_ranks(2, said, what)
    assert first == second and text in first
