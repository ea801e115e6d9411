"""ZeRO 0-3 on real ranks: against one device, and the stages bitwise against each other. What lies where, and when."""

import contextlib
import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, RaggedShard, Replicate, Shard, comm_trace
from vescale_dtensor.engine import local_only
from vescale_plans import Boundary, Plan, Precision, no_sync, parallelize
from vescale_plans._zero import units
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, WORDS = 12, 11


class Block(nn.Module):
    """A residual MLP with a gate that no other block has, and a parameter that takes part in training only."""

    def __init__(self, checkpointed):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(WIDTH, 3)
        self.checkpointed = checkpointed

    def inner(self, x):
        return self.down(F.gelu(self.up(self.norm(x)))) * self.scale

    def forward(self, x):
        if self.checkpointed is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.checkpointed)


class Net(nn.Module):
    """Three blocks, the second used twice, tied ends, one frozen parameter."""

    def __init__(self, checkpointed=None, outside=None):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(3))
        self.blocks[0].down.bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.outside = outside

    def forward(self, ids, targets):
        x = self.embed(ids)
        for i in (0, 1, 1, 2):
            block = self.blocks[i]
            x = block(x) if self.outside is None else checkpoint(block, x, use_reentrant=self.outside)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


TP = {
    "parameters": {
        "embed.weight": {"tp": Shard(0)},
        "head.weight": {"tp": Shard(0)},
        "*.up.*": {"tp": Shard(0)},
        "*.down.weight": {"tp": Shard(1)},
        "*": {},
    },
    "boundaries": {
        "embed": Boundary(output={"tp": Shard(1)}),
        "*.up": Boundary(input={"tp": Replicate()}),
        "*.down": Boundary(output={"tp": Shard(1)}),
        "head": Boundary(input={"tp": Replicate()}),
    },
}
MESHES = {
    "dp4": ({"dp": 4}, "dp", {"parameters": {"*": {}}}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, "dp", TP),
    "tp2 dp2": ({"tp": 2, "dp": 2}, "dp", TP),
    "hybrid": ({"dpr": 2, "dp": 2}, ("dpr", "dp"), {"parameters": {"*": {}}}),
}


def plan_of(mesh, zero, **more):
    sizes, axes, places = MESHES[mesh]
    return Plan(mesh=sizes, data_axis=axes, zero=zero, **places, **more)


def data(seed, batch=6, positions=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (2, batch, positions), generator=generator)


def train(plan, optimizer_fn, accumulate=1, pause=False, steps=4, **options):
    """Losses and norms, then whole parameters."""
    torch.manual_seed(0)
    model = Net(**options)
    if plan is None:
        optimizer = optimizer_fn(model.parameters())
    else:
        model, optimizer = parallelize(plan, model, optimizer_fn)
    numbers = []
    for step in range(steps):
        for part in range(accumulate):
            waits = pause and plan is not None and part < accumulate - 1
            with no_sync(model) if waits else contextlib.nullcontext():
                loss = model(*data(10 * step + part))
                loss.backward()
            numbers.append(loss.item())
        numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.detach() if plan is None else p.detach().full_tensor() for n, p in model.named_parameters()}
    return numbers, whole


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
WAYS = {
    "plain": {},
    "three backwards": {"accumulate": 3},
    "no_sync": {"accumulate": 3, "pause": True},
    "checkpoint inside": {"checkpointed": False},
    "reentrant checkpoint inside": {"checkpointed": True},
    "checkpointed blocks": {"outside": False},
    "reentrant checkpointed blocks": {"outside": True, "accumulate": 2},
}

BUCKETS = [units.BUCKET_BYTES, 256]
"""Bytes: a bucket for the model, and several for each block."""


@pytest.mark.parametrize(("mesh", "way", "most"), slice_of(list(itertools.product(MESHES, WAYS, BUCKETS)), 8))
def test_stages_equal_one_device_and_each_other(mesh, way, most):
    @mock.patch.object(units, "BUCKET_BYTES", most)
    def run():
        wanted, parameters = train(None, ADAMW, **WAYS[way])
        stages = [train(plan_of(mesh, zero), ADAMW, **WAYS[way]) for zero in range(4)]
        for numbers, whole in stages:
            assert max(abs(a - b) / abs(b) for a, b in zip(numbers, wanted)) <= 1e-5
            errors = {n: ((whole[n] - p).norm() / p.norm()).item() for n, p in parameters.items() if p.norm()}
            assert max(errors.values()) <= 1e-4, errors
            assert numbers == stages[0][0]
            assert all(torch.equal(whole[n], stages[0][1][n]) for n in whole)

    run_ranks(4, run, timeout=120)


class Recycled(Net):
    """Its blocks run without gradients first, on what has some, as in models that refine their own output."""

    def forward(self, ids, targets):
        x = self.embed(ids)
        with torch.no_grad():
            y = x
            for block in self.blocks:
                y = block(y)
        for block in self.blocks:
            x = block(x + y)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("mesh", list(MESHES))
def test_what_nobody_used_keeps_no_gradient_and_is_not_decayed(mesh):
    def run(zero):
        torch.manual_seed(0)
        model, optimizer = parallelize(plan_of(mesh, zero), Net(), ADAMW)
        before = model.blocks[1].unused.weight.detach().full_tensor().clone()
        model(*data(0)).backward()
        assert model.blocks[1].unused.weight.grad is None and model.blocks[0].down.bias.grad is None
        assert model.blocks[1].scale.grad is not None
        optimizer.step()
        assert torch.equal(model.blocks[1].unused.weight.detach().full_tensor(), before)

    for zero in (0, 3):
        run_ranks(4, run, zero)


def test_a_parameter_that_one_rank_used_alone_has_its_gradient_everywhere():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

        def forward(self, x):
            local = x.to_local()  # what a rank does by itself, as a router does
            which = torch.distributed.get_rank() % 2
            y = self.layers[which](x)
            return (y.sum() + 0.0 * local.sum() * 0).sum()

    def run(zero):
        torch.manual_seed(0)
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
        model, _ = parallelize(plan, Chosen(), partial(torch.optim.SGD, lr=0.1))
        x = torch.arange(16.0).view(4, 4)
        model(x).backward()
        return [layer.weight.grad.full_tensor() for layer in model.layers]

    for zero in (0, 1, 2):
        results = run_ranks(2, run, zero)
        for rank in results:
            for which, gradient in enumerate(rank):
                rows = torch.arange(16.0).view(4, 4)[2 * which : 2 * which + 2]
                assert torch.equal(gradient, rows.sum(0).expand(4, 4))


def test_what_lies_where():
    """Layouts and memory of ZeRO-3 at rest, in forward, and after it."""

    def run():
        torch.manual_seed(0)
        model, optimizer = parallelize(plan_of("dp2 tp2", 3), Net(), ADAMW)
        weight = model.blocks[1].up.weight
        buffers = {b for unit in model._vescale.sync.units for b in unit.buckets}
        seen = []

        def look(module, *_):
            with local_only():
                seen.append((type(weight._layout.states[0].kind), tuple(weight.shape)))
            open_ = [b for b in buffers if b.full.untyped_storage().nbytes()]
            names = {param.name.rpartition(".")[0] for b in open_ for param in b.params}
            assert "blocks.1.up" in names and "blocks.0.up" not in names, names

        model.blocks[1].up.register_forward_hook(look)
        assert isinstance(weight.placements[0], RaggedShard) and weight.shape == (2 * WIDTH, WIDTH)
        assert isinstance(model.state_dict()["blocks.1.up.weight"].placements[0], RaggedShard)
        assert not any(b.full.untyped_storage().nbytes() for b in buffers)
        model(*data(0)).backward()
        assert len(seen) == 2 and seen[0][1] == (WIDTH, WIDTH)
        assert not any(b.full.untyped_storage().nbytes() for b in buffers)
        assert weight.grad.placements == weight.placements and weight.grad.mesh_layout.flat_axis == 0
        same = [p for p in model.parameters() if p is weight]
        optimizer.step()
        assert len(same) == 1 and model.blocks[1].up.weight is weight
        with torch.no_grad():
            model(*data(0))
        assert not any(b.full.untyped_storage().nbytes() for b in buffers)

    run_ranks(4, run)


def test_collectives_of_each_stage():
    def run(zero):
        torch.manual_seed(0)
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
        model, optimizer = parallelize(plan, Net(), ADAMW)
        for step in range(2):
            with comm_trace() as trace:
                model(*data(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        kinds = ("all_reduce", "reduce_scatter", "all_gather")
        return tuple(
            trace.count(kind=kind, function=f) for f in ("gradient sync", "parameter gather") for kind in kinds
        )

    # Below ZeRO-3 all is one small bucket. From ZeRO-2 on ranks tell each other what they used: the one all-gather.
    assert run_ranks(2, run, 0)[0] == (1, 0, 0, 0, 0, 0)
    assert run_ranks(2, run, 1)[0] == (1, 0, 0, 0, 0, 1)
    assert run_ranks(2, run, 2)[0] == (0, 1, 1, 0, 0, 1)
    # Three blocks and the root. The root and the last block are gathered once, the others in forward (the second one
    # runs twice) and in backward. The frozen bias is the root's, in a buffer of its own.
    assert run_ranks(2, run, 3)[0] == (0, 4, 1, 0, 0, 2 + 1 + 3 + 2)


class Language(nn.Module):
    """An embedding, blocks and a head of their own, as most models have them, each large enough for a bucket."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1024, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 1024) for _ in range(4))
        self.norm = nn.LayerNorm(512)
        self.head = nn.Linear(512, 1024)

    def forward(self, ids):
        x = self.embed(ids)
        x.register_hook(lambda _: self.reached())
        for block in self.blocks:
            x = x + block(x).tanh()[..., :512]
        return self.head(self.norm(x)).sum()


def sums_under_way():
    """Per stage and backward the sums that have started when backward comes to the embedding, and all."""
    found = []
    for zero in range(4):
        torch.manual_seed(0)
        model, optimizer = parallelize(
            Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), Language(), torch.optim.SGD
        )
        for _ in range(2):
            loss = model(torch.arange(8).view(2, 4))
            with comm_trace() as trace:
                model.reached = lambda trace=trace: found.append([trace.count(function="gradient sync")])
                loss.backward()
                found[-1].append(trace.count(function="gradient sync"))
            optimizer.zero_grad()
    return found


def test_sums_start_while_backward_runs():
    for before, all_of_it in run_ranks(2, sums_under_way)[0]:
        assert before >= 3 and all_of_it > before


@mock.patch.object(units, "BUCKET_BYTES", 256)
def sums_inside_a_block(reentrant):
    """Per stage below ZeRO-3 the sums that have started when backward comes to the middle of its only block."""
    found = []
    for zero in range(3):
        torch.manual_seed(0)
        net = nn.Module()
        net.blocks = nn.ModuleList([Block(reentrant)])
        del net.blocks[0].unused
        net.first = nn.Linear(WIDTH, WIDTH)
        net.forward = lambda x, net=net: net.blocks[0](net.first(x)).sum()
        model, _ = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), net, ADAMW)
        x = torch.randn(4, WIDTH)
        model(x).backward()  # of which it is learned that it sends nothing itself
        with comm_trace() as trace:

            def watch(module, args, out, trace=trace):
                if out.requires_grad:
                    out.register_hook(lambda _: found.append(trace.count(function="gradient sync")))

            model.blocks[0].up.register_forward_hook(watch)
            model(x).backward()
            found[-1] = found[-1], trace.count(function="gradient sync")
    return found


@pytest.mark.parametrize("reentrant", [None, True])
def test_the_sums_of_a_large_block_start_while_it_runs(reentrant):
    """With what is used last, though its norm was registered in front; not where a checkpoint might run again."""
    for found in run_ranks(2, sums_inside_a_block, reentrant):
        assert len(found) == 3
        for before, all_of_it in found:
            assert all_of_it > before and (before >= 1 if reentrant is None else before == 0)


class Centred(nn.Module):
    """A block that takes a mean over the whole batch, and on one rank leaves a parameter out."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = F.gelu(self.first(x))
        y = self.last(F.normalize(y - y.mean(0, keepdim=True), dim=0))
        return x + y if dist.get_rank() else x + y + self.other(y)


def losses_where_a_block_communicates(most):
    found = []
    for zero in range(3):
        torch.manual_seed(0)
        net = nn.Module()
        net.blocks, net.head = nn.ModuleList([Centred()]), nn.Linear(WIDTH, WIDTH)
        net.forward = lambda x, net=net: net.head(net.blocks[0](x)).square().mean()
        with mock.patch.object(units, "BUCKET_BYTES", most):
            model, optimizer = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), net, ADAMW)
        for _ in range(3):
            found.append(model(torch.arange(8.0 * WIDTH).view(8, WIDTH).sin()))
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in found]


def test_sums_keep_their_place_among_the_collectives_of_a_block():
    """Though one rank comes to their gradients, and another does not."""
    one, several = (run_ranks(2, losses_where_a_block_communicates, most)[0] for most in BUCKETS)
    assert one == several and len(set(one)) == 3


def sums_before_the_embedding(kind, outside):
    """Under ZeRO-3, the sums that have started when backward comes to the embedding."""
    model, _ = parallelize(plan_of("dp4", 3), kind(outside=outside), ADAMW)
    found = []
    with comm_trace() as trace:

        def watch(module, args, out):
            out.register_hook(lambda _: found.append(trace.count(function="gradient sync")))

        model.embed.register_forward_hook(watch)
        model(*data(0)).backward()
    return found


@pytest.mark.parametrize(("kind", "outside"), [(Recycled, None), (Net, None), (Net, True)])
def test_blocks_are_summed_as_they_come(kind, outside):
    """Two of three at least; also with a reentrant checkpoint, whose first pass makes no graph, and beside a pass that
    makes none."""
    for found in run_ranks(4, sums_before_the_embedding, kind, outside, timeout=120):
        assert found[-1] >= 2, found


def test_gradients_read_and_cleared_between():
    def run(zero):
        torch.manual_seed(0)
        model, _ = parallelize(plan_of("dp2 tp2", zero), Net(), ADAMW)
        one = Net()
        one.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})

        def check():
            for (name, p), q in zip(one.named_parameters(), model.parameters()):
                if p.grad is not None:
                    torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6, msg=name)

        for net in (one, model):
            net(*data(0)).backward()
        with no_sync(model):
            model(*data(1)).backward()
        one(*data(1)).backward()
        check()
        for net in (one, model):
            net(*data(2)).backward()
        check()
        with no_sync(model):
            model(*data(3)).backward()
        for net in (one, model):
            net.zero_grad()
            net(*data(4)).backward()
        check()
        for net in (one, model):
            net.zero_grad(set_to_none=False)
            net(*data(5)).backward()
        check()

    for zero in (0, 2, 3):
        run_ranks(4, run, zero)


def test_parameters_stay_whole_objects():
    def run():
        torch.manual_seed(0)
        net = Net()
        model, _ = parallelize(plan_of("dp4", 3), net, ADAMW)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in Net().named_parameters()]
        assert model.head.weight is model.embed.weight and type(model.head.weight) is DTensor
        seen = []
        model.blocks[0].up.weight.register_hook(lambda g: seen.append(tuple(g.shape)))
        model(*data(0)).backward()
        assert seen == [(2 * WIDTH, WIDTH)]
        saved = {n: p.full_tensor().clone() for n, p in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2).add_(1)
        for n, p in model.state_dict().items():
            torch.testing.assert_close(p.full_tensor(), saved[n] * 2 + 1)
        model.load_state_dict(saved)
        assert all(torch.equal(p.full_tensor(), saved[n]) for n, p in model.state_dict().items())

    run_ranks(4, run)


# AdamW follows the sign of a gradient even where that is rounding.
SGD = partial(torch.optim.SGD, lr=0.1)


def trained_in_few_bits(mesh, sent):
    """Losses and parameters by ZeRO stage, and what the last stage's step received beside the exact one."""
    exact = Precision(torch.float32)
    found = [train(plan_of(mesh, zero, precision=replace(exact, sent=sent)), SGD) for zero in range(4)]
    received = []
    for precision in (exact, replace(exact, sent=sent)):
        model, _ = parallelize(plan_of(mesh, 2, precision=precision), Net(), SGD)
        with comm_trace(model) as trace:
            model(*data(0)).backward()
        received.append(trace.received(function="gradient sync"))
    return found, received


@pytest.mark.parametrize("sent", [torch.int8, torch.bfloat16])
def test_gradients_sent_in_few_bits(sent):
    wanted, parameters = train(None, SGD)
    for found, (exact, received) in run_ranks(4, trained_in_few_bits, "dp4", sent):
        for numbers, whole in found:
            losses = [abs(a - b) / abs(b) for a, b in zip(numbers, wanted)]
            assert 0 < max(losses) <= 1e-3
            moved = [(whole[n] - p).norm() / p.norm() for n, p in parameters.items() if p.norm()]
            assert max(moved) <= 2e-2  # what began at zero is nothing but gradients; int8 moves one by 1/254
        if sent is torch.bfloat16:  # element by element: no matter how buffers are cut
            assert all(numbers == found[0][0] for numbers, _ in found)
        assert received < 0.6 * exact
