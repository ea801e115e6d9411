"""comm_trace(model).advice(): what a step sent beside what its cut weights need, and the boundary that saves it."""

import contextlib
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale_dtensor import Replicate, Shard, comm_trace
from vescale_dtensor._communication import events
from vescale_plans import Boundary, Plan, explain_calls, parallelize
from vescale_plans._calls.phases import PHASES
from vescale_plans._plan.least import open_sums
from vescale_testkit import run_ranks

COLUMN, ROW = {"tp": Shard(0)}, {"tp": Shard(1)}
NAMED = {"*.one.weight": COLUMN, "*.gate.weight": COLUMN, "*.two.weight": ROW, "table.weight": COLUMN, "*": {}}
IDS = torch.arange(24).reshape(2, 12)


class Norm(nn.Module):
    """Written out, so that it reads its input twice."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm(16)
        self.one, self.gate = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.two = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.two(F.silu(self.gate(x)) * self.one(x))


class Model(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.last = last or Norm(16)

    def forward(self, ids):
        x = self.table(ids)
        for part in self.parts:
            x = x + part(x)
        return self.last(x).square().mean()


class Cumulated(nn.Module):
    """Needs all features together, of what a weight cut in columns gives."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(16, 16)

    def forward(self, x):
        return self.one(x).cumsum(-1)  # over what is cut


def step(boundaries, last=None):
    torch.manual_seed(0)
    plan = Plan(mesh={"tp": 2}, parameters={"last.one.*": COLUMN, **NAMED} if last else NAMED, boundaries=boundaries)
    model, _ = parallelize(plan, Model(last and last()))
    with comm_trace(model) as trace:
        model(IDS).backward()
    said = trace.advice()
    assert str(pickle.loads(pickle.dumps(trace)).advice()) == str(said)  # as ranks send traces to one another
    return (
        said.sent,
        said.least,
        dict(said.boundaries),
        [(a.function, a.module, a.line, a.reason, a.remedy) for a in said.advice],
        str(said),
    )


def open_and_closed():
    bare = step({})
    closed = step({glob: Boundary(output=output) for glob, output in bare[2].items()})
    return bare, closed


def test_the_boundaries_that_it_names_leave_what_the_weights_need():
    for (sent, least, boundaries, advice, text), closed in run_ranks(2, open_and_closed):
        assert least == 1 + 2 * 3 and sent > 2 * least
        assert boundaries == {"table": {"tp": Replicate()}, "parts.*.two": {"tp": Replicate()}}
        assert advice and all(__file__ in line for _, _, line, _, _ in advice)
        assert "'parts.*.two': Boundary(output={'tp': Replicate()})" in text
        assert closed[:4] == (least, least, {}, [])
        assert closed[4] == f"{least} collectives; the plan's cut weights need {least}: nothing to save"


class Wrapped(nn.Module):
    """A projection in a module of its own, as adapters wrap it."""

    def __init__(self, *sizes):
        super().__init__()
        self.one = nn.Linear(*sizes, bias=False)

    def forward(self, x):
        return self.one(x)


class Beside(nn.Module):
    """Two parts that read one norm, one of which norms what is cut."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = Norm(16), nn.RMSNorm(32)
        self.left, self.right = Wrapped(16, 32), Wrapped(16, 32)
        self.two, self.other = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.two(self.inner(self.left(x))) + self.other(F.silu(self.right(x)))


def beside(ends):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), Beside(), Beside())
    whole = Boundary(output={"tp": Replicate()})
    parameters = {"*.one.weight": COLUMN, "*.two.weight": ROW, "*.other.weight": ROW, "*": {}}
    boundaries = dict.fromkeys({"modules": ("?.two", "?.other"), "sums": ("1", "2")}[ends], whole)
    model, _ = parallelize(Plan(mesh={"tp": 2}, parameters=parameters, boundaries=boundaries), model)
    with comm_trace(model) as trace:
        model(IDS).square().mean().backward()
    return trace.advice().sent, trace.least


@pytest.mark.parametrize(
    "ends, sent, least",
    (
        ("modules", 2 * (2 + 1 + 2) - 1, 2 * (2 + 1 + 2)),  # two sums, one value that both read, the norm's two
        ("sums", 2 * (1 + 1 + 2) - 1, 2 * (2 + 1 + 2)),  # added up before they are summed over ranks
    ),
)
def test_a_value_that_two_modules_read_is_summed_once_and_a_norm_of_what_is_cut_takes_two(ends, sent, least):
    """The first value's gradient needs no sum: it is the table's, which is whole, and added up with the gradients."""
    assert run_ranks(2, beside, ends) == [(sent, least)] * 2


def convolved():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1),
        nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 16, 8),
    )  # fmt: skip
    cut = {"tp": Shard(0)}
    parameters = {f"{i}.{name}": cut for i in (0, 2, 4) for name in ("weight", "bias")}
    parameters |= {"3.weight": {"tp": Shard(1)}, "5.weight": {"tp": Shard(1)}, "*": {}}
    whole = Boundary(output={"tp": Replicate()})
    model, _ = parallelize(Plan(mesh={"tp": 2}, parameters=parameters, boundaries={"3": whole, "5": whole}), model)
    x = torch.randn(2, 3, 8, 8)
    with comm_trace(model) as trace:
        model(x).square().mean().backward()
    return trace.advice().sent, trace.least


def test_convolutions_count_by_their_channels_and_groups_take_none():
    """Two sums, and the gradients of what two read that are cut along their out channels; of the images none is due."""
    assert run_ranks(2, convolved) == [(2 + 1, 2 + 2)] * 2


def whole_features():
    return step(
        {"table": Boundary(output={"tp": Replicate()}), "parts.*.two": Boundary(output={"tp": Replicate()})}, Cumulated
    )


def test_a_function_that_needs_what_is_cut_is_named_with_its_line():
    for sent, least, boundaries, advice, _ in run_ranks(2, whole_features):
        assert sent > least and not boundaries
        line = f"{__file__}:{Cumulated.forward.__code__.co_firstlineno + 1}"
        assert any(one[:3] == ("cumsum", "last", line) and "is needed otherwise" in one[3] for one in advice), advice


def without_a_plan():
    with comm_trace() as trace:
        pass
    return str(trace.advice()), trace.least


def test_without_traffic_there_is_nothing_to_save():
    assert without_a_plan() == ("0 collectives: nothing to save", None)


def first_steps(boundaries, backward, times=2):
    """What the log says in some steps, and the collectives of one more."""
    torch.manual_seed(0)
    lines = []
    heard = logging.Handler()
    heard.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("vescale").addHandler(heard)
    try:
        model, optimizer = parallelize(
            Plan(mesh={"tp": 2}, parameters=NAMED, boundaries=boundaries), Model(), lambda p: torch.optim.SGD(p, 0.1)
        )
        for _ in range(times):
            with contextlib.nullcontext() if backward else torch.no_grad():
                loss = model(IDS)
            if backward:
                loss.backward()
                optimizer.step()
    finally:
        logging.getLogger("vescale").removeHandler(heard)
    with comm_trace(model) as trace:
        loss = model(IDS)
        if backward:
            loss.backward()
    what = [step.what for step in explain_calls(model).steps[""]]
    left = [one for one in what if one in (PHASES["traffic"].before, PHASES["traffic"].after)] + events.listeners
    return lines, trace.advice().sent, trace.least, left


@pytest.mark.parametrize("backward", (True, False))
def test_a_plan_that_leaves_sums_open_is_told_once_what_it_costs(backward):
    (lines, sent, least, left), (others, *_) = run_ranks(2, first_steps, {}, backward)
    assert sent > least and not left and not others  # rank 0 says it, once, and nothing listens on
    assert len(lines) == 1, lines
    what = "step" if backward else "forward"
    assert f"first {what} sent {sent} collectives, and the plan's cut weights need {least}." in lines[0]
    assert "What table, parts.*.two give stays a sum of parts" in lines[0]
    assert f"plan.complete(model, batch), ...) saves up to {sent - least}" in lines[0]


def test_sequence_parallelism_scatters_and_gathers_and_is_told_nothing():
    stream, whole = Boundary(output={"tp": Shard(1)}), Boundary(output={"tp": Replicate()})
    plan = {"table": stream, "parts.*.two": stream, "parts.*.norm": whole}
    for lines, sent, least, _ in run_ranks(2, first_steps, plan, True):
        assert not lines and sent <= least + 1


def test_a_sum_that_the_model_itself_gives_has_no_boundary():
    plan = Plan(mesh={"tp": 2}, parameters={"*": ROW}, data_axis=None)
    assert open_sums(plan, nn.Linear(4, 4, bias=False)) == {}
    assert open_sums(plan, nn.Sequential(nn.Linear(4, 4, bias=False))) == {"0": ("tp",)}


def test_a_plan_that_sends_what_it_has_to_is_told_nothing():
    whole = {glob: Boundary(output={"tp": Replicate()}) for glob in ("table", "parts.*.two")}
    for lines, sent, least, left in run_ranks(2, first_steps, whole, True):
        assert not lines and sent == least and not left
