"""Pipelines of plain models over plain gloo, against the same microbatches on one device: this package and torch alone.

Two processes run every case, one after another, once for the module; the tests read what each of them found.
"""

import functools
import itertools
import os
import queue
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from vescale_pipeline import PipelineError, PipelineFailure, generate, verify
from vescale_pipeline._runtime.call_exchange import greet
from vescale_pipeline._transport.messages import Tags
from vescale_pipeline.engine import Runtime, ownership
from vescale_pipeline.schedules.generate import GENERATORS

RANKS, MICROBATCHES, ROWS, WIDTH = 2, 4, 8, 6
SCHEDULES = sorted(GENERATORS)


class Net(nn.Module):
    """Residual blocks, the first one's input read again by the last, a weight used at both ends."""

    def __init__(self, *, tied=False, dropout=0.0, normed=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)) for _ in range(8))
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x, y):
        start = x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.mse_loss(self.last(self.norm(x) + start), y)


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def made(**options):
    torch.manual_seed(0)
    return Net(**options)


@pytest.fixture(autouse=True)
def one_thread():
    """As the ranks compute: kernels round by how many threads they have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(model, rows=ROWS):
    """One device: the microbatches' mean losses, accumulated."""
    torch.manual_seed(2)
    total = 0.0
    for x, y in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch(rows)), strict=True):
        loss = model(x, y) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def piped(model, kind="1f1b", microbatches=MICROBATCHES, **more):
    """The model as this rank of a pipeline has it."""
    schedule = generate(kind, RANKS, microbatches)
    stages = schedule.stages
    verify(schedule, transport="buffered")
    owned = ownership(model, tuple(f"blocks.{8 * stage // stages}" for stage in range(1, stages)))
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    return Runtime(model, schedule, owned, list(range(RANKS)), group, store, timeout=timedelta(seconds=60), **more)


def trained(kind="1f1b", rows=ROWS, calls=1, in_order=False, **options):
    model = made(**options)
    piped(model, kind, in_order=lambda: in_order)
    for _ in range(calls):
        model.zero_grad()
        torch.manual_seed(2)
        loss = model(*batch(rows))
        loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def sending(kind, microbatches):
    """The most messages that a rank kept for another."""
    model, most = made(), 0
    link = piped(model, kind, microbatches).link
    send = link.send

    def sent(*given):
        nonlocal most
        send(*given)
        most = max(most, len(link._sent))

    for _ in range(2):  # with the first, forms of messages are told
        most, link.send = 0, sent
        model(*batch(microbatches)).backward()
    return most


def evaluated():
    model = made().eval()
    piped(model)
    with torch.no_grad():
        return model(*batch())


class Counting(Net):
    """A number comes along with the activations, which every stage adds to, as routers' losses do."""

    def forward(self, x, y):
        x = self.first(x)
        extra = x.new_zeros(())
        for block in self.blocks:
            x, extra = x + torch.tanh(block(x)), extra + x.square().mean()
        return F.mse_loss(self.last(x), y) + extra / 100


def counting(kind):
    torch.manual_seed(0)
    model = Counting()
    piped(model, kind)
    loss = model(*batch())
    loss.backward()
    with torch.no_grad():
        told = model(*batch())
    assert not told.requires_grad
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


class Handing(nn.Module):
    """Blocks that add weights of a microbatch's own shape, one row, where autograd hands one gradient on to all
    operands: to what comes from another stage and what goes there, in one object or as a view."""

    def __init__(self, way):
        super().__init__()
        self.line, self.way = nn.Linear(WIDTH, WIDTH), way
        self.one, self.two = (nn.Parameter(torch.randn(1, WIDTH)) for _ in range(2))
        self.flat = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.way(self, x, torch.tanh(self.line(x)), self.flat.view(1, WIDTH))


WAYS = {
    "last": lambda block, x, made, flat: x + made + block.one,
    "first": lambda block, x, made, flat: block.one + (x + made),
    "two": lambda block, x, made, flat: block.one + block.two + made + x,
    "view": lambda block, x, made, flat: made + (x + block.two) + flat,
    "all": lambda block, x, made, flat: flat + block.one + block.two + x + made,
}


class Ways(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Handing(WAYS[way]) for _ in range(8))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def handed_on(kind, way):
    """And whether anything changed later that hooks of the user's kept."""
    model, kept = Ways(way), []
    piped(model, kind)

    def keep(tensor):
        if tensor is not None and not tensor.is_meta:
            kept.append((tensor, tensor.detach().clone()))

    def after(module, args, out):
        keep(args[0])
        keep(out)
        if out.requires_grad:
            out.register_hook(keep)

    for block in model.blocks:
        block.register_forward_hook(after)
        block.register_full_backward_hook(lambda module, ins, outs: [keep(one) for one in (*ins, *outs)] and None)
    for _ in range(3):
        model.zero_grad()
        loss = model(*batch(MICROBATCHES))
        loss.backward()
    same = [torch.equal(now, then) for now, then in kept]
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return loss.detach(), gradients, len(same), same.count(False)


THAWED = [("last",), ("first", "last"), ("blocks.2", "last"), ("first",), ("blocks.6",), ("first", "blocks", "last")]
"""What is trained at each call, by how names begin."""


def thawing(model, call):
    """Freezes and thaws, as a loop that unfreezes layer by layer does."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(THAWED[call]))
    model.zero_grad()


def thawed(kind):
    model = made()
    thawing(model, 0)
    piped(model, kind)
    grads = []
    for call in range(len(THAWED)):
        thawing(model, call)
        loss = model(*batch())
        loss.backward()
        grads.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    return loss.detach(), grads


def _fivefold(parameter):
    parameter.grad.mul_(5)


def named(model):
    """What a loop does to parameters by their names, whichever stage has them."""
    for block in model.blocks:
        block[0].bias.requires_grad_(False)
    model.last.bias.requires_grad = False
    model.first.bias.grad = None
    for block in (model.blocks[1], model.blocks[6]):
        block[0].weight.register_hook(lambda gradient: gradient * 2)
    taken = model.first.weight.register_hook(lambda gradient: gradient * 3)
    model.blocks[7][0].weight.register_post_accumulate_grad_hook(_fivefold)
    taken.remove()


def by_name():
    model = made()
    piped(model)
    named(model)
    loss = model(*batch())
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def reading():
    """Another stage's parameter, on each rank."""
    model = made()
    piped(model)
    theirs = model.blocks[(6, 1)[dist.get_rank()]][0].weight
    return theirs.detach().norm()


class Until(torch.autograd.Function):
    """A backward that waits for a word in the store."""

    @staticmethod
    def forward(ctx, x, word):
        ctx.word = word
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.word is not None:
            dist.distributed_c10d._get_default_store().wait([ctx.word], timedelta(seconds=30))
        return gradient, None


def ended_first(kind):
    """The first stage ends its last backward when the last stage's rank has its loss, and has gone on."""
    model, word, seen = made(), f"gone on with {kind}", []
    piped(model, kind)
    last, losses = dist.get_rank() == RANKS - 1, []

    def after(module, args, out):
        seen.append(out)
        return Until.apply(out, word if len(seen) == 2 * MICROBATCHES else None)

    model.blocks[0].register_forward_hook(after)
    for call in range(2):  # with the first, forms of messages are told
        losses.append(model(*batch()))
        losses[-1].backward()
        if last and call:
            dist.distributed_c10d._get_default_store().set(word, "")
    assert last or len(seen) == 2 * MICROBATCHES, len(seen)
    return losses[0].detach(), losses[1].detach()


def failing():
    """A stage's module raises at its third microbatch."""
    model, seen = made(), []

    def hook(module, args):
        seen.append(args)
        if len(seen) == 3:
            raise ValueError("a bad row")

    piped(model)
    model.blocks[6].register_forward_pre_hook(hook)
    model(*batch())


def looking(original, looks):
    def method(*args):
        looks.append(args)
        return original(*args)

    return method


def looked_at(library):
    """A library has put a look at their arguments before the methods by which groups send."""
    kind, looks = torch._C._distributed_c10d.Backend, []
    kept = {name: getattr(kind, name) for name in ("send", "recv")}
    make = types.FunctionType(looking.__code__, {**globals(), "__name__": library})
    try:
        for name, original in kept.items():
            setattr(kind, name, functools.wraps(original)(make(original, looks)))
        return *trained(calls=2), len(looks)
    finally:
        for name, method in kept.items():
            setattr(kind, name, method)


def of_other_shapes():
    """The ranks are called with batches of different lengths."""
    model = made()
    piped(model)
    model(*batch(ROWS * (1 + dist.get_rank())))


def uneven():
    model = made()
    piped(model)
    model(*batch(ROWS + 1))


CASES = {
    **{f"schedule {kind}": lambda kind=kind: trained(kind) for kind in SCHEDULES},
    "tied": lambda: trained(tied=True, in_order=True),
    "dropout": lambda: trained(dropout=0.5),
    "buffers": lambda: trained(normed=True),
    "two calls": lambda: trained(calls=2),
    "longer": lambda: trained(rows=2 * ROWS),
    **{f"counting {kind}": lambda kind=kind: counting(kind) for kind in SCHEDULES},
    **{f"thawed {kind}": lambda kind=kind: thawed(kind) for kind in SCHEDULES},
    **{f"sending {kind} {n}": lambda kind=kind, n=n: sending(kind, n) for kind in SCHEDULES for n in (8, 24)},
    **{f"handed on {k} {way}": lambda k=k, way=way: handed_on(k, way) for k in SCHEDULES for way in WAYS},
    **{f"ended first {kind}": lambda kind=kind: ended_first(kind) for kind in ("gpipe", "1f1b", "interleaved")},
    "by name": by_name,
    "reading": reading,
    "evaluated": evaluated,
    "failing": failing,
    "looked at by us": lambda: looked_at("vescale_dtensor._rules.doors.communication"),
    "looked at": lambda: looked_at("monitor"),
    "of other shapes": of_other_shapes,
    "uneven": uneven,
}


def run_cases(rank, folder):
    """One process; what each case gave, or the error that it ended in, as text."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except RuntimeError as error:
            found[name] = type(error).__name__, str(error)
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    # This file as a script: a test module has no name by which a process of its own could import it.
    commands = [[sys.executable, __file__, str(rank), folder] for rank in range(RANKS)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for rank in ranks:
            told = rank.communicate(timeout=300)[1]
            assert rank.returncode == 0, told
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(RANKS)]


def check(found, name, expected):
    """Each rank has the loss, and the gradients of its own stages, to the last bit; together they have all."""
    loss, gradients = expected
    seen = set()
    for rank in found:
        assert isinstance(rank[name][1], dict), rank[name]
        assert torch.equal(rank[name][0], loss)
        for parameter, gradient in rank[name][1].items():
            assert torch.equal(gradient, gradients[parameter]), parameter
        seen |= set(rank[name][1])
    assert seen == set(gradients)


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind not in ("gpipe", "looped-bfs")])
def test_what_was_sent_goes_when_the_other_rank_has_taken_it(found, kind):
    """However many microbatches there are, unless all forwards come first."""
    for rank in found:
        assert rank[f"sending {kind} 24"] == rank[f"sending {kind} 8"] <= 12


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_trains_as_one_device_does(found, kind):
    check(found, f"schedule {kind}", alone(made()))


@pytest.mark.parametrize(
    ("name", "options"), [("tied", {"tied": True}), ("dropout", {"dropout": 0.5}), ("buffers", {"normed": True})]
)
def test_what_stages_share_is_as_on_one_device(found, name, options):
    check(found, name, alone(made(**options)))


def test_a_second_call_and_one_of_another_shape(found):
    check(found, "two calls", alone(made()))
    check(found, "longer", alone(made(), rows=2 * ROWS))


def test_transfers_pass_the_looks_that_stand_there_for_users(found):
    """What travels is plain, and a look of ours costs as much Python as all else of a small transfer. A monitor of
    somebody else's sees every transfer."""
    check(found, "looked at by us", alone(made()))
    check(found, "looked at", alone(made()))
    assert [rank["looked at by us"][2] for rank in found] == [0] * RANKS
    assert all(rank["looked at"][2] >= 2 * 2 * MICROBATCHES for rank in found)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_numbers_that_cross_cuts_are_values_like_others(found, kind):
    torch.manual_seed(0)
    check(found, f"counting {kind}", alone(Counting()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_memory_that_autograd_hands_on_is_not_received_into(found, kind, way):
    """Nor added up in, whoever holds it: sums of weights, the next stage, hooks of the user's."""
    loss, gradients = alone(Ways(way), MICROBATCHES)
    check(found, f"handed on {kind} {way}", (loss, {name: one for name, one in gradients.items() if one is not None}))
    for rank in found:
        _, _, kept, changed = rank[f"handed on {kind} {way}"]
        assert kept >= 3 * 4 * MICROBATCHES * 4
        assert changed == 0


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_is_trained_may_change_from_call_to_call(found, kind):
    """Neither stages after a thawed one, nor those between two, know of it by themselves."""
    for call in range(len(THAWED)):
        model = made()
        thawing(model, call)
        _, expected = alone(model)
        gradients = {}
        for rank in found:
            assert isinstance(rank[f"thawed {kind}"][1], list), rank[f"thawed {kind}"]
            gradients |= rank[f"thawed {kind}"][1][call]
        expected = {name: gradient for name, gradient in expected.items() if gradient is not None}
        assert set(gradients) == set(expected), call
        assert all(torch.equal(gradients[name], expected[name]) for name in expected), call


def test_what_is_done_to_a_parameter_by_its_name_is_done_where_it_is(found):
    model = made()
    named(model)
    x, y = batch()
    total = 0.0
    for rows in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        total = total + model(*rows) / MICROBATCHES
    total.backward()
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    gradients = found[0]["by name"][1] | found[1]["by name"][1]
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)


def test_reading_a_parameter_of_another_stage_says_where_its_values_are(found):
    for rank, name in zip(found, ("blocks.6.0.weight", "blocks.1.0.weight")):
        kind, text = rank["reading"]
        assert kind == "PipelineError" and f"reads {name!r}, a parameter of another stage" in text
        assert "vescale.whole_state_dict(model)" in text


class Mail:
    """A link of a rank that is a thread."""

    def __init__(self, boxes, rank):
        self.boxes, self.rank = boxes, rank
        self.has_tags, self.backwards, self.device = True, 0, torch.device("cpu")

    def exchange(self, peers, tag, value):
        for peer in peers:
            self.boxes[self.rank, peer, tag].put(value)
        return [self.boxes[peer, self.rank, tag].get(timeout=60) for peer in peers]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 9, 10, 13, 28])
def test_what_one_rank_says_in_the_greeting_all_ranks_hear(ranks):
    call = SimpleNamespace(digest=lambda schedule: 7, record=SimpleNamespace(draws_anything=False))
    for speaker in (0, ranks // 2, ranks - 1, None):
        pairs = itertools.product(range(ranks), repeat=2)
        tag = Tags(ranks, 1)("greet")
        boxes = {(*pair, tag + 2 * further): queue.Queue() for pair in pairs for further in range(4)}
        members = [
            SimpleNamespace(
                schedule=SimpleNamespace(ranks=ranks), link=Mail(boxes, rank), tags=Tags(ranks, 1), rank=rank
            )
            for rank in range(ranks)
        ]
        with ThreadPoolExecutor(ranks) as threads:
            heard = list(threads.map(lambda one, who=speaker: greet(one, 1, call, [], True, one.rank == who), members))
        assert heard == [speaker is not None] * ranks


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_the_rank_of_the_last_stage_goes_on_while_others_end_their_backwards(found, kind):
    loss, _ = alone(made())
    for rank in found:
        assert [torch.equal(one, loss) for one in rank[f"ended first {kind}"]] == [True, True]


def test_without_gradients_the_last_stage_gives_the_outputs(found):
    x, y = batch()
    for rank in found:
        torch.testing.assert_close(rank["evaluated"], made().eval()(x, y).detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("failing", PipelineFailure, "a bad row"),
        ("of other shapes", PipelineFailure, "rank"),
        ("uneven", PipelineError, "microbatches"),
    ],
)
def test_what_fails_on_one_rank_fails_on_both_with_one_text(found, name, error, said):
    first, second = (rank[name] for rank in found)
    assert first == second and first[0] == error.__name__ and said in first[1]


if __name__ == "__main__":
    run_cases(int(sys.argv[1]), sys.argv[2])
