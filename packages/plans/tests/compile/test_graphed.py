"""Whole steps from a graph, on the second device, whose graphs keep addresses and numbers as CUDA's do."""

import contextlib
import math
import random
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import vescale_plans as plans
from vescale_dtensor import Replicate, Shard
from vescale_plans import Boundary, GraphWarning, Plan, PlanError
from vescale_testkit import run_ranks

LENGTH, WIDTH, WORDS = 6, 8, 20
ONE = Plan(mesh={"dp": 1}, parameters={"*": {}})
LEFT, RIGHT = {"tp": Shard(0)}, {"tp": Shard(1)}
SEQUENCE = Boundary(input={"tp": Replicate()}, output={"tp": Shard(1)})
CUT = {"*.up.*": LEFT, "*.down.weight": RIGHT, "words.weight": LEFT, "*": {}}
PLANS = {
    "ddp": Plan(mesh={"dp": 2}, data_axis="dp", zero=0, parameters={"*": {}}),
    "zero3": Plan(mesh={"dp": 2}, data_axis="dp", zero=3, parameters={"*": {}}),
    "tp": Plan(mesh={"tp": 2}, parameters=CUT),
    "dp x tp sp, zero3, recomputed": Plan(
        mesh={"dp": 2, "tp": 2}, data_axis="dp", zero=3, parameters=CUT, boundaries={"blocks.*.down": SEQUENCE},
        checkpointing={"blocks.*": True},
    ),
}  # fmt: skip

pytestmark = pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no graphs of any device")


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Not all of its sizes are multiples of two ranks'; a buffer counts its calls on the device."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS + 1, WIDTH), nn.Linear(WIDTH, WORDS + 1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.calls.add_(1)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.out(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model, its optimizer, and a step of them; `tokens` of a number of its own for each call."""

    def __init__(self, plan=ONE, dropout=0.0, lr=1e-2, parts=1, kind=torch.optim.AdamW, **options):
        if kind is torch.optim.AdamW:
            options = {"capturable": True, **options}
        self.model, self.optimizer = plans.parallelize(
            plan, Model(dropout).to("second"), lambda parameters: kind(parameters, lr=lr, **options)
        )
        self.parts = parts
        torch.manual_seed(5)

    def step(self, tokens):
        for part in tokens.chunk(self.parts):
            loss = self.model(part) / self.parts
            loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.detach(), "norm": norm}

    def graphed(self):
        return plans.graphed(self.step, self.model, self.optimizer)

    def bits(self):
        """Everything that a step leaves."""
        held = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            held |= {f"{number}.{name}": value for name, value in state.items()}
        found = {name: whole(value) for name, value in held.items()}
        return found | {"generator": torch.second.get_rng_state().tolist()}


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.cpu().tolist() if isinstance(value, torch.Tensor) else value


def tokens_of(number, length=LENGTH, rows=4):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (rows, length), generator=generator).to("second")


def told(step, calls):
    """What each call returned, and why it was eager."""
    found = [(step(tokens_of(number)), getattr(step, "why", None)) for number in calls]
    return [{name: whole(value) for name, value in out.items()} for out, _ in found], [why for _, why in found]


def same(training, calls, between=lambda training, number: None, lengths=(LENGTH,)):
    """Runs eager steps and graphed ones, `between` after each; why each call of the latter was eager."""
    left, right = training(), training()
    run = right.graphed()
    whys = []
    for side, step in ((left, left.step), (right, run)):
        torch.manual_seed(5)
        outs = []
        for number in range(calls):
            out = step(tokens_of(number, lengths[number % len(lengths)]))
            outs.append({name: whole(value) for name, value in out.items()})
            whys += [run.why] if side is right else []
            between(side, number)
        side.found = outs, side.bits()
    assert left.found == right.found
    return whys


def on_ranks(world, function, *args):
    return run_ranks(world, function, *args, device="second", timeout=120)


def fifty_steps():
    rate = lambda: torch.tensor(1e-2, device="second")
    return same(lambda: Training(dropout=0.2, lr=rate(), parts=2), 50, scheduled)


def scheduled(side, number):
    """A scheduler writes to the learning rate, which is a tensor."""
    if not hasattr(side, "scheduler"):
        side.scheduler = torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda epoch: 1 / (1 + epoch))
    side.scheduler.step()


def test_fifty_steps_of_one_rank_draw_clip_schedule_and_accumulate_as_eager_ones_do():
    (whys,) = on_ranks(1, fifty_steps)
    assert whys[4:] == [""] * 46 and "" not in whys[:3], whys[:6]


def with_plan(name):
    return same(partial(Training, PLANS[name]), 9)


@pytest.mark.parametrize("name", PLANS)
def test_collectives_are_in_the_graph(name):
    for whys in on_ranks(PLANS[name].world_size, with_plan, name):
        assert whys[-4:] == [""] * 4, whys


def eager_once_in_a_hundred():
    whys = same(partial(Training, PLANS["zero3"]), 104)
    return [number for number, why in enumerate(whys) if why]


def test_ranks_are_compared_as_often_as_by_eager_steps():
    for eager in on_ranks(2, eager_once_in_a_hundred):
        assert eager == [0, 1, 2, 3, 100]


# ------------------------------------------------------------ gradients between calls


class ZeroedFirst(Training):
    def step(self, tokens):
        self.optimizer.zero_grad()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}


class UpdatedFirst(Training):
    """Its optimizer steps with the gradients of the call before."""

    def step(self, tokens):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model(tokens).backward()
        return {}


class UpdatedOutside(Training):
    def step(self, tokens):
        self.model(tokens).backward()
        return {}

    def between(self, number):
        if number % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif number == 8:
            self.model(tokens_of(number)).backward()


class Accumulated(Training):
    """Every third call is of other sizes, and updates."""

    def step(self, tokens):
        self.model(tokens).backward()
        if tokens.shape[1] < LENGTH:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {}


class NotReduced(Training):
    """Every third call reduces, and updates."""

    def step(self, tokens):
        with plans.no_sync(self.model) if tokens.shape[1] == LENGTH else contextlib.nullcontext():
            return Accumulated.step(self, tokens)


def with_gradients(kind, name):
    def between(side, number):
        getattr(side, "between", lambda number: None)(number)

    return same(partial(kind, PLANS[name]), 24, between, (LENGTH, LENGTH, LENGTH - 1))


@pytest.mark.parametrize("kind", [ZeroedFirst, UpdatedFirst, UpdatedOutside, Accumulated])
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_gradients_that_stay_are_where_the_graph_reads_them(kind, name):
    for whys in on_ranks(2, with_gradients, kind, name):
        assert whys[-6:] == [""] * 6, whys


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_gradients_that_are_not_reduced_stay_apart_under_zero3(name):
    for whys in on_ranks(2, with_gradients, NotReduced, name):
        refused = ["not reduced yet under ZeRO-3" in why for why in whys[-6:]]
        assert refused == [True] * 6 if name == "zero3" else whys[-6:] == [""] * 6, whys


# ------------------------------------------------------------ what is another step


def warned(function):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        whys = function()
    return whys, [str(one.message) for one in said if isinstance(one.message, GraphWarning)]


def lengths():
    return warned(lambda: same(partial(Training, PLANS["zero3"]), 22, lengths=(LENGTH, LENGTH - 1)))


def test_other_sizes_have_a_graph_of_their_own():
    for whys, said in on_ranks(2, lengths):
        assert whys[-8:] == [""] * 8 and not said


def told_apart():
    training, number = Training(), iter(range(100))

    def step(tokens, other, factor):
        loss = training.step(tokens)["loss"]
        return loss, other is tokens, math.copysign(1, factor), type(factor).__name__

    run = plans.graphed(step, training.model, training.optimizer)
    for _ in range(8):
        for factor, is_one in ((0.0, True), (-0.0, True), (0.0, False), (1, True), (True, True)):
            tokens = tokens_of(next(number))
            _, *said = run(tokens, tokens if is_one else tokens.clone(), factor)
            assert said == [is_one, math.copysign(1, factor), type(factor).__name__]
    return run.graphs, run.why


def test_arguments_that_only_compare_as_equal_have_graphs_of_their_own():
    assert on_ranks(1, told_apart) == [(5, "")]


def many_lengths():
    training = Training()
    run = training.graphed()
    for length in range(2, 12):
        for _ in range(8):
            run(tokens_of(1, length))
    return run.graphs


def test_there_are_at_most_eight_graphs():
    assert on_ranks(1, many_lengths) == [8]


def changes(between, calls=14, training=Training):
    return warned(lambda: same(training, calls, between))


def rate_changes(side, number):
    if number == 6:
        side.optimizer.param_groups[0]["lr"] = 1e-3


def in_evaluation(side, number):
    side.model.train(number not in (6, 7))


def loaded_elsewhere(side, number):
    if number == 6:
        side.optimizer.load_state_dict(side.optimizer.state_dict())


def moved(side, number):
    if number == 6:
        parameter = next(side.model.parameters())
        parameter.data = parameter.data.clone()


def frozen(side, number):
    if number == 6:
        side.model.out.bias.requires_grad_(False)


def number_of_a_module(side, number):
    if number == 6:
        side.model.blocks[0].drop.p = 0.5


def number_of_the_step(side, number):
    if number == 6:
        side.parts = 2


def same_number_of_another_type(side, number):
    side.model.flag = 1 if number < 6 else True


def hooked(side, number):
    if number == 6:
        side.model.out.register_forward_hook(lambda module, given, out: out * 2)


def hooked_parameter(side, number):
    if number == 6:
        side.model.out.bias.register_hook(lambda gradient: gradient * 2)


CHANGES = {
    "lr of the optimizer went from 0.01 to 0.001": rate_changes, "train() or eval() was called": in_evaluation,
    "a state of the optimizer lies elsewhere": loaded_elsewhere, "a parameter lies elsewhere": moved,
    "a parameter lies elsewhere, or is trained otherwise": frozen,
    "blocks.0.drop.p went from 0.0 to 0.5": number_of_a_module, "self.parts went from 1 to 2": number_of_the_step,
    "flag went from 1 to True": same_number_of_another_type,
    "out has other entries": hooked, "a parameter has other hooks": hooked_parameter,
}  # fmt: skip


@pytest.mark.parametrize("why", CHANGES)
def test_a_change_leaves_the_graph_says_so_and_is_in_the_next_one(why):
    ((whys, said),) = on_ranks(1, changes, CHANGES[why], 16)
    assert any(why in one for one in said) and len(said) == 1, said
    assert why in whys[7] and not whys[-1], whys


# ------------------------------------------------------------------------ refused


def refused(make):
    """Steps of a training whose own step does something more."""
    training = Training()
    step, count = make(training), 7
    run = plans.graphed(step, training.model, training.optimizer)
    _, said = warned(lambda: [run(tokens_of(number)) for number in range(count)])
    return run.why, said


def reads(training):
    def step(tokens):
        return {"loss": training.step(tokens)["loss"].item()}

    return step


def counts(training):
    count = 0

    def step(tokens):
        nonlocal count
        count += 1
        return training.step(tokens)

    return step


def collects(training):
    losses = []

    def step(tokens):
        losses.append(training.step(tokens)["loss"])
        return losses[-1]

    return step


def counts_in_the_model(training):
    training.model.steps = 0

    def step(tokens):
        training.model.steps += 1
        return training.step(tokens)

    return step


def draws_on_the_host(training):
    def step(tokens):
        out = training.step(tokens)
        return out["loss"] * random.random()

    return step


def draws_of_torch_on_the_host(training):
    return lambda tokens: training.step(tokens)["loss"] * float(torch.rand(()))


def writes_to_its_batch(training):
    return lambda tokens: training.step(tokens.add_(0))


def schedules(training):
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)

    def step(tokens):
        out = training.step(tokens)
        scheduler.step()
        return out

    return step


def draws_from_its_own(training):
    generator = torch.Generator("second")
    return lambda tokens: training.step(tokens)["loss"] * torch.rand((), device="second", generator=generator)


def takes_from_an_iterator(training):
    numbers = iter(range(100))
    return lambda tokens: training.step(tokens)["loss"] * next(numbers)


def returns_an_object(training):
    return lambda tokens: iter([training.step(tokens)["loss"]])


def counts_in_the_optimizer(training):
    training.optimizer.count = 0

    def step(tokens):
        training.optimizer.count += 1
        return training.step(tokens)

    return step


REFUSED = {
    "it changes the generator generator": draws_from_its_own, "it takes from numbers": takes_from_an_iterator,
    "it returns a list_iterator": returns_an_object, "it changes AdamW.count": counts_in_the_optimizer,
    "the host waits for the device": reads, "it changes count on the host": counts, "it changes losses": collects,
    "it changes Model.steps": counts_in_the_model, "the generator of random": draws_on_the_host,
    "the host's generator": draws_of_torch_on_the_host, "scheduler": schedules,
    "it writes to what it is given": writes_to_its_batch,
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_graph_would_not_do_again_is_refused_and_said_once(why):
    ((last, said),) = on_ranks(1, refused, REFUSED[why])
    assert why in last and len(said) == 1 and why in said[0], (last, said)


def counts_on_the_host():
    return same(partial(Training, capturable=False), 8)


def test_an_optimizer_that_counts_on_the_host_is_refused_with_its_remedy():
    ((*_, last),) = on_ranks(1, counts_on_the_host)
    assert "AdamW.state[0].step on the host" in last and "capturable=True" in last


def on_the_host():
    training = Training()
    run = training.graphed()
    for _ in range(6):
        run(tokens_of(1).cpu())
    return run.why


def test_a_batch_on_the_host_is_refused():
    (why,) = on_ranks(1, on_the_host)
    assert "[4, 6] lies on the host" in why


def recomputed_dropout():
    plan = Plan(mesh={"dp": 1}, parameters={"*": {}}, checkpointing={"blocks.*": True})
    return same(partial(Training, plan, dropout=0.2), 8)


def test_dropout_that_is_computed_again_is_refused():
    (whys,) = on_ranks(1, recomputed_dropout)
    assert "computed again in its backward" in whys[-1]


def fails_in_its_capture():
    training, waits = Training(), []

    def step(tokens):
        training.model(tokens).backward()
        if waits:
            torch.second.synchronize()
        return training.optimizer.zero_grad()

    run = plans.graphed(step, training.model, training.optimizer)
    for number in range(4):
        run(tokens_of(number))
    waits.append(True)
    with pytest.raises(PlanError, match=r"cannot be captured.*\n.*operation not permitted when stream is capturing"):
        run(tokens_of(4))
    assert {parameter.grad for parameter in training.model.parameters()} == {None}


def test_a_wait_within_the_capture_alone_is_a_typed_error():
    on_ranks(1, fails_in_its_capture)


def one_in_another():
    training = Training()
    looks = plans.graphed(lambda tokens: training.model(tokens), training.model)

    def step(tokens):
        with torch.no_grad():
            loss = looks(tokens)
        return loss + training.step(tokens)["loss"]

    run = plans.graphed(step, training.model, training.optimizer)
    for number in range(8):
        run(tokens_of(number))
    return run.why


def test_a_graphed_step_in_another_is_a_part_of_its_graph():
    assert on_ranks(1, one_in_another) == [""]


def numbers_that_change():
    training = Training()
    run = plans.graphed(lambda tokens, number: training.step(tokens), training.model, training.optimizer)
    return warned(lambda: [run(tokens_of(number), float(number)) for number in range(12)])[1]


def test_a_number_that_is_another_in_every_call_is_said():
    ((said,),) = on_ranks(1, numbers_that_change)
    assert "over 8 kinds of calls" in said and "as a tensor" in said


def test_on_a_cpu_every_call_is_eager_and_nothing_is_said():
    model = nn.Linear(2, 2)
    step = plans.graphed(lambda x: model(x).sum(), model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [step(torch.ones(2)).item() for _ in range(6)] == [model(torch.ones(2)).sum().item()] * 6
    assert step.why == "cpu has no graphs" and step.graphs == 0


@pytest.mark.parametrize("given", [(), (nn.Linear(1, 1).weight,), ("model",)])
def test_other_state_is_a_typed_error(given):
    with pytest.raises(PlanError, match="the models and the optimizers"):
        plans.graphed(print, *given)
