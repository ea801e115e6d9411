"""A stage that raises, dies or goes silent ends all ranks with the first cause; bad input is a typed error."""

import json
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError, PipelineFailure
from vescale_testkit import RankError, run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

PROMPT_S = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def parallel(model, ranks=4, count=8, kind="1f1b", cuts=None):
    cuts = cuts or tuple(f"blocks.{8 * stage // ranks}" for stage in range(1, ranks))
    pipeline = vescale.Pipeline(cuts=cuts, microbatches=count, schedule=kind)
    plan = vescale.Plan(mesh={"pp": ranks}, parameters={"*": {}}, pipeline=pipeline)
    return vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def batch(rows=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def outcome(function):
    """The error's type and text, its cause's type, and how long it took."""
    began = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        return type(error), str(error), type(error.__cause__), time.monotonic() - began
    return None, "", None, time.monotonic() - began


def raising_in_a_forward(microbatch):
    torch.manual_seed(0)
    model, _ = parallel(Net())
    seen = 0

    def hook(module, args):
        nonlocal seen
        seen += 1
        if seen == microbatch + 1:
            raise ValueError("a bad row")

    model.blocks[4].register_forward_pre_hook(hook)
    model(*batch())


@pytest.mark.parametrize("microbatch", [0, 5])
def test_an_exception_in_a_forward_ends_all_ranks_with_its_place(microbatch):
    outcomes = run_ranks(4, lambda: outcome(lambda: raising_in_a_forward(microbatch)))
    texts = {text for _, text, _, _ in outcomes}
    assert len(texts) == 1
    assert f"rank 2 raised in stage 2, F of microbatch {microbatch}: ValueError: a bad row" in texts.pop()
    assert all(kind is PipelineFailure and seconds < PROMPT_S for kind, _, _, seconds in outcomes)
    assert [cause is ValueError for _, _, cause, _ in outcomes] == [False, False, True, False]


class Mute(ValueError):
    def __str__(self):
        raise RuntimeError("no text")


# What a stage raises, and what is told of it.
ERRORS = {
    "a long text": (ValueError("x" * 20_000_000), "ValueError: xxx", "(20,000,000 characters)"),
    "no text": (Mute(), "Mute: (its text cannot be told: __str__ raised RuntimeError)", ""),
    "an interrupt": (KeyboardInterrupt("ctrl-c"), "KeyboardInterrupt: ctrl-c", ""),
    "an exit": (SystemExit(3), "SystemExit: 3", ""),
}


def raising(name):
    torch.manual_seed(0)
    model, _ = parallel(Net(), ranks=2)

    def hook(module, args):
        raise ERRORS[name][0]

    model.blocks[4].register_forward_pre_hook(hook)
    began = time.monotonic()
    try:
        model(*batch())
    except BaseException as error:
        text = "" if type(error) is Mute else str(error)
        return type(error).__name__, text[:10_000], type(error.__cause__).__name__, time.monotonic() - began


@pytest.mark.parametrize("name", list(ERRORS))
def test_whatever_is_raised_is_the_first_cause(name):
    first, second = run_ranks(2, raising, name)
    error, *told = ERRORS[name]
    assert first[0] == "PipelineFailure" and first[3] < PROMPT_S
    assert "rank 1 raised in stage 1, F of microbatch 0: " in first[1] and all(part in first[1] for part in told)
    if isinstance(error, Exception):
        assert second[:3] == ("PipelineFailure", first[1], type(error).__name__)
    else:
        assert second[0] == type(error).__name__ and second[1] == str(error)


def nan_in_a_backward():
    torch.manual_seed(0)
    model, _ = parallel(Net(), kind="zb-h1")

    def check(gradient):
        if not gradient.to_local().isfinite().all():
            raise FloatingPointError("the gradient is not finite")

    def poison(module, args, output):
        output.register_hook(lambda gradient: gradient * float("nan"))
        args[0].register_hook(check)

    model.blocks[3].register_forward_hook(poison)
    model(*batch())


def test_a_nan_check_that_trips_ends_all_ranks_with_its_place():
    outcomes = run_ranks(4, lambda: outcome(nan_in_a_backward))
    assert len({text for _, text, _, _ in outcomes}) == 1
    assert "rank 1 raised in stage 1, I of microbatch 0: FloatingPointError" in outcomes[0][1]
    assert all(seconds < PROMPT_S for *_, seconds in outcomes)


def killed_in_mid_schedule(victim, folder):
    from torch import distributed as dist

    torch.manual_seed(0)
    model, _ = parallel(Net())
    seen = 0

    def hook(module, args):
        nonlocal seen
        seen += 1
        if seen == 4 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[2 * victim].register_forward_pre_hook(hook)
    kind, text, _, seconds = outcome(lambda: model(*batch()))
    path = folder / f"{dist.get_rank()}.json"
    path.write_text(json.dumps([kind.__name__, text, seconds]))


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_killed_rank_ends_the_others(victim, tmp_path):
    with pytest.raises(RankError) as raised:
        run_ranks(4, killed_in_mid_schedule, victim, tmp_path)
    assert raised.value.exit_code == -signal.SIGKILL and raised.value.rank == victim
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4) if rank != victim]
    assert len({text for _, text, _ in outcomes}) == 1
    place = rf"rank \d, in stage \d, (F|B|(SEND|RECV)_[FB]) of microbatch \d, lost rank {victim}: .*[Cc]onnection"
    assert re.search(place, outcomes[0][1]), outcomes[0][1]
    assert all(kind == "PipelineFailure" and seconds < PROMPT_S for kind, _, seconds in outcomes)


def killed_before_clipping(victim, folder):
    from torch import distributed as dist

    torch.manual_seed(0)
    model, _ = parallel(Net())
    model(*batch()).backward()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    found = [outcome(clip), outcome(clip), outcome(lambda: model(*batch()))]  # and what it leaves behind
    path = folder / f"{dist.get_rank()}.json"
    path.write_text(json.dumps([(kind.__name__, text, seconds) for kind, text, _, seconds in found]))


def test_a_rank_that_is_killed_before_clipping_ends_the_others(tmp_path):
    with pytest.raises(RankError):
        run_ranks(4, killed_before_clipping, 1, tmp_path)
    outcomes = [one for rank in (0, 2, 3) for one in json.loads((tmp_path / f"{rank}.json").read_text())]
    assert len({text for _, text, _ in outcomes}) == 1
    lost = r"rank \d, in the exchange of norms, lost rank 1: .*, of norms of gradients, part 0, from rank 1 to rank \d"
    assert re.search(rf"{lost} in call 1|rank 1 .*SIGKILL", outcomes[0][1]), outcomes[0][1]
    assert all(kind == "PipelineFailure" and seconds < PROMPT_S for kind, _, seconds in outcomes)


def going_on_alone(way, ranks):
    """One rank leaves out a clipping, or evaluates alone, while the others clip."""
    from torch import distributed as dist

    torch.manual_seed(0)
    model, _ = parallel(Net(), ranks)
    model(*batch()).backward()
    model._vescale.runtime.link.timeout = timedelta(seconds=3)
    if dist.get_rank():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.set_grad_enabled(way == "trains"):
        model(*batch())


@pytest.mark.parametrize(("way", "ranks"), [("trains", 2), ("evaluates", 4)])
def test_a_wait_for_a_rank_that_does_something_else_ends_and_says_what_it_was_for(way, ranks):
    outcomes = run_ranks(ranks, lambda: outcome(lambda: going_on_alone(way, ranks)), timeout=60)
    assert {kind for kind, *_ in outcomes} == {PipelineFailure} and len({text for _, text, _, _ in outcomes}) == 1
    assert re.search(r"lost rank \d: .*, of (the greeting|norms of gradients), part 0, from rank", outcomes[0][1])
    assert all(seconds < PROMPT_S for *_, seconds in outcomes)


def test_a_wait_is_as_long_as_those_of_the_worlds_collectives():
    def timeouts():
        from torch import distributed as dist

        link = parallel(Net(), ranks=2)[0]._vescale.runtime.link
        of_world = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        return link.timeout == of_world == link._group._get_backend(torch.device("cpu")).options._timeout

    assert run_ranks(2, timeouts) == [True, True]


def unequal_numbers_of_batches():
    from torch import distributed as dist

    model, _ = parallel(Net(), ranks=2)
    model._vescale.runtime.link.timeout = timedelta(seconds=3)
    for _ in range(2 if dist.get_rank() == 0 else 3):
        model(*batch()).backward()


def test_a_rank_with_fewer_batches_is_named_in_bounded_time():
    fewer, more = run_ranks(2, lambda: outcome(unequal_numbers_of_batches))
    assert fewer[0] is None
    assert more[0] is PipelineFailure and more[3] < PROMPT_S
    assert "the beginning of call 3" in more[1] and "Timed out" in more[1]


def other_shapes():
    from torch import distributed as dist

    model, _ = parallel(Net(), ranks=2)
    model(*batch(16 if dist.get_rank() else 24))


def test_ranks_with_other_batches_are_told():
    outcomes = run_ranks(2, lambda: outcome(other_shapes))
    assert len({text for _, text, _, _ in outcomes}) == 1
    assert "ranks 0 and 1 are about to run different things" in outcomes[0][1]


def other_values(departs):
    """Labels of another batch from a call on, on the rank of the last stage alone: its loss is of no batch."""
    from torch import distributed as dist

    model, _ = parallel(Net(), ranks=4)
    for number in range(departs + 11):
        rows, labels = batch()
        model(rows, labels + (number >= departs and dist.get_rank() == 3)).backward()


@pytest.mark.parametrize("departs", [0, 4])
def test_ranks_with_other_values_in_a_batch_are_told_within_ten_calls(departs):
    outcomes = run_ranks(4, lambda: outcome(lambda: other_values(departs)))
    assert all(issubclass(kind, PipelineError) for kind, _, _, _ in outcomes)
    assert all("are about to run different things (another batch" in text for _, text, _, _ in outcomes)


def left_out(way, ranks):
    """Steps in which the rank of the last stage alone runs the backward, as where stages are driven by hand."""
    from torch import distributed as dist

    torch.manual_seed(0)
    model, optimizer = parallel(Net(), ranks)
    for _ in range(2):
        loss = model(*batch())
        if dist.get_rank() == ranks - 1:
            loss.backward()
        if way == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif way == "by name":
            torch.nn.utils.clip_grad_norm_([p for _, p in model.named_parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if way == "evaluated":
            with torch.no_grad():
                model(*batch())


@pytest.mark.parametrize(("way", "ranks"), [("clipped", 4), ("by name", 2), ("called again", 4), ("evaluated", 2)])
def test_a_backward_that_some_ranks_leave_out_is_told(way, ranks):
    outcomes = run_ranks(ranks, lambda: outcome(lambda: left_out(way, ranks)), timeout=60)
    assert len({text for _, text, _, _ in outcomes}) == 1
    assert re.search(r"rank \d of the pipeline has run 0 backwards, another 1", outcomes[0][1]), outcomes[0][1]
    assert all(seconds < PROMPT_S for *_, seconds in outcomes)


def on_all_ranks():
    """Calls without a backward, and one backward of two calls, on all ranks alike; then what one device has, too."""
    found = []
    for chosen in (True, False):
        torch.manual_seed(0)
        model = Net()
        if chosen:
            model, optimizer = parallel(model, 2)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(*batch())  # a loss that is not finite: the batch is left out
            (model(*batch()) + (model(*batch(8)) if step else 0)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append({n: (p.full_tensor() if chosen else p).detach() for n, p in model.named_parameters()})
    here, alone = found
    for name, value in here.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)


def test_calls_whose_backward_all_ranks_leave_out_or_run_at_once_train_as_on_one_device():
    run_ranks(2, on_all_ranks, timeout=60)


class Skipping(Net):
    """Leaves out blocks at random, each microbatch others."""

    def forward(self, x, y):
        for block in self.blocks:
            if block is self.blocks[4] or torch.rand(()).item() > 0.3:  # the cut is always called
                x = block(x)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_a_microbatch_that_takes_another_path_is_told_as_that(kind):
    def call():
        torch.manual_seed(1)
        model, _ = parallel(Skipping(), 2, kind=kind)
        return outcome(lambda: [model(*batch()) for _ in range(3)])

    first, second = run_ranks(2, call, timeout=60)
    assert first[1] == second[1]
    assert re.search(r"took a different path than in its dry run: 'blocks\.\d' was called where 'blocks\.\d'", first[1])


class Penalized(Net):
    """Its forward walks over the model's parameters, of which a rank has those of its stages."""

    def forward(self, x, y):
        return super().forward(x, y) + sum(p.abs().sum() for p in self.parameters())


def refused_on_one_rank(kind):
    """A call that a part of the ranks refuses before it begins, and one more; none may wait for the other."""
    from torch import distributed as dist

    ranks = dist.get_world_size()
    model, _ = parallel(Net(), ranks)
    odd = dist.get_rank() == ranks - 1
    refused = batch(18) if kind == "rows" else (batch()[0].requires_grad_(), batch()[1])
    return [outcome(lambda: model(*(refused if odd else batch()))) for _ in range(2)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["rows", "gradient"])
def test_what_a_part_of_the_ranks_refuses_ends_the_others_too(kind, ranks):
    outcomes = run_ranks(ranks, refused_on_one_rank, kind, timeout=60)
    for call in range(2):
        texts = {text for _, text, _, _ in (told[call] for told in outcomes)}
        assert len(texts) == 1 and "raised in a call: PipelineError" in texts.pop()
        assert all(told[call][0] is PipelineFailure for told in outcomes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forward_that_walks_over_the_parameters_is_refused_alike(ranks):
    def twice():
        model, _ = parallel(Penalized(), ranks)
        return [outcome(lambda: model(*batch()))[:2] for _ in range(2)]

    first, *others = run_ranks(ranks, twice, timeout=60)
    assert all(other == first for other in others) and first[0] == first[1]
    assert first[0][0] is PipelineError and "'blocks.0.weight' is owned by stage 0 and used by stage" in first[0][1]


def test_what_all_ranks_refuse_leaves_the_pipeline_as_it_was():
    def twice():
        model, _ = parallel(Net(), ranks=2)
        return outcome(lambda: model(*batch(18)))[0], outcome(lambda: model(*batch()).backward())[0]

    assert run_ranks(2, twice, timeout=60) == [(PipelineError, None)] * 2


def an_encoder_outside():
    """One that computes the batch is not a part of the model, and would get no gradient."""
    model, _ = parallel(Net(), ranks=2)
    x, y = batch()
    model(nn.Linear(4, 4)(x), y=y)


def a_named_input_that_awaits_a_gradient():
    model, _ = parallel(Net(), ranks=2)
    x, y = batch()
    with torch.no_grad():
        model(x.requires_grad_(), y)  # evaluation gives no gradients
    model(x.detach(), y=y.requires_grad_())


# What is called, and what is said; on all ranks alike, and before anything has run.
MISTAKES = {
    "rows": (lambda: parallel(Net(), 2, 4)[0](*batch(18)), "18 rows does not divide into 4 microbatches"),
    "cut": (lambda: parallel(Net(), 2, cuts=("block.4",)), "'block.4', which is not a module of the model"),
    "order": (lambda: parallel(Net(), 3, cuts=("blocks.4", "blocks.2")), "'blocks.2' does not come after the cut"),
    "schedule": (lambda: parallel(Net(), 2, kind="1f2b"), "there is no schedule '1f2b'"),
    "encoder": (an_encoder_outside, "argument 0 requires a gradient ([16, 4]), and a pipeline gives gradients to"),
    "input": (a_named_input_that_awaits_a_gradient, "the argument 'y' requires a gradient ([16, 4])"),
    "no tensor": (lambda: parallel(Net(), 2)[0](None, None), "without a tensor that has rows"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_mistakes_are_typed_errors(mistake):
    call, text = MISTAKES[mistake]
    outcomes = run_ranks(3 if mistake == "order" else 2, lambda: outcome(call))
    assert len({said for _, said, _, _ in outcomes}) == 1
    assert text in outcomes[0][1]
    assert all(issubclass(kind, (PipelineError, vescale.VescaleError)) for kind, *_ in outcomes)


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Reads(Outputs):
    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
            if x.max() > 1e9:
                x = x / 2
        return F.mse_loss(x, y)


def test_a_loss_outside_of_the_model_names_loss_fn():
    def outside():
        model, _ = parallel(Outputs(), ranks=2)
        x, y = batch()
        F.mse_loss(model(x), y).backward()

    for kind, text, _, _ in run_ranks(2, lambda: outcome(outside)):
        assert kind is PipelineError and "loss_fn=" in text


def test_reading_a_value_in_the_forward_names_the_module():
    for kind, text, _, _ in run_ranks(2, lambda: outcome(lambda: parallel(Reads(), ranks=2)[0](*batch()))):
        assert kind is PipelineError and "reads a value that 'blocks.0' computes" in text


class Selecting(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x[x.sum(-1) > 0]


def test_a_shape_that_values_decide_within_a_stage_is_told_as_that():
    """No cut is near: another one would not help."""

    def selecting():
        model = Net()
        model.blocks[1] = Selecting(4, 4)
        parallel(model, ranks=2)[0](*batch())

    for kind, text, _, _ in run_ranks(2, lambda: outcome(selecting)):
        assert kind is PipelineError and "which is run without values first" in text and "a mask, multiplied" in text
