"""Programs that look at several rows of a batch, or at the number of one: under a pipeline as on one device, which has
the whole batch, or refused before anything has run."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, ROWS = 8, 8


def written(write):
    def program(x):
        x = x.clone()
        write(x)
        return x

    return program


def put(*index):
    return written(lambda x: x.__setitem__(index[0] if len(index) == 1 else index, 0.5))


def numbers(x):
    return torch.arange(x.shape[0])


def halves(x):
    """A second view of each row behind all, and both again."""
    first, second = torch.tanh(torch.cat([x, x * 0.5])).chunk(2)
    return first + second


def halves_by_slices(x):
    both = torch.cat([x, -x])
    return both[: len(x)] * both[len(x) :]


def repeated(x):
    return x.repeat_interleave(2, 0).view(-1, 2, WIDTH).sum(1)


def two_orders(x):
    return (x.repeat(2, 1) * x.repeat_interleave(2, 0)).view(2, -1, WIDTH).sum(0)


def routed(x):
    """Each row for each of two experts, as llama4 has it: the experts' rows lie one after another."""
    scores = x[:, :2].transpose(0, 1).reshape(-1, 1)
    return (x.repeat(2, 1) * scores).view(2, -1, WIDTH).sum(0)


def torn(x):
    """Three times the batch, in pieces of three rows."""
    return x.expand(3, -1, -1).reshape(-1, 3 * WIDTH).softmax(-1).view(3, -1, WIDTH).sum(0)


class Table(nn.Module):
    """A unit that computes with its weights and the batch, and with no other unit's values."""

    def __init__(self, taken):
        super().__init__()
        self.weight, self.taken = nn.Parameter(torch.randn(4, WIDTH)), taken

    def forward(self, x):
        return self.taken(self.weight, (4 * x[:, 0]).long() % 4)


KEPT = {
    "a mask": written(lambda x: x.__setitem__(x > 0, 0.5)),
    "a column": put(slice(None), 0),
    "an ellipsis": put(..., 0),
    "each row's last": lambda x: x * x[numbers(x), x.argmax(-1)][:, None],
    "each row's last, written": written(lambda x: x.__setitem__((numbers(x), x.argmax(-1)), 0.5)),
    "rows by numbers from 0": lambda x: x[torch.arange(0, len(x))],
    "rows by their numbers": lambda x: x.index_select(0, numbers(x)),
    "gather": lambda x: x + x.gather(1, x.argmax(-1, keepdim=True)),
    "halves": halves,
    "halves by slices": halves_by_slices,
    "repeated": repeated,
    "routed": routed,
    "entries of a table": partial(Table, lambda weight, x: torch.tanh(weight[x])),
    "out=": written(lambda x: torch.mul(x, 2.0, out=x)),
    "flipped along columns": lambda x: x.flip(-1),
    "rolled along columns": lambda x: x.roll(1, -1),
    "softmax": lambda x: x.softmax(-1),
    "reshaped": lambda x: x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH),
    "sorted": lambda x: x.sort(-1).values,
    "cumsum": lambda x: x.cumsum(1),
    "windows": lambda x: F.unfold(x.view(-1, 1, 2, WIDTH // 2), kernel_size=1).reshape(-1, WIDTH),
    "windows of a column": lambda x: x.unfold(dimension=1, size=2, step=2).reshape(-1, WIDTH),
    "index_put": written(lambda x: x.index_put_((numbers(x), x.argmax(-1)), torch.tensor(0.5))),
}
MIXED = {
    "x + x[0]": lambda x: x + x[0],
    "a row": put(0),
    "rows": put(slice(0, 2)),
    "the last": put(-1),
    "index_put": written(lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(0.5))),
    "a view of a row": written(lambda x: x[0].zero_()),
    "a view of rows": written(lambda x: x[1:3].mul_(2)),
    "out= of a view": written(lambda x: torch.mul(x[:1], 2.0, out=x[:1])),
    "of unbind": written(lambda x: x.unbind(0)[1].zero_()),
    "of select": written(lambda x: x.select(0, 0).zero_()),
    "of a view's column": written(lambda x: x[1:][:, 0].zero_()),
    "index_fill": written(lambda x: x.index_fill_(0, torch.tensor([1]), 0.0)),
    "pairs": written(lambda x: x.__setitem__((torch.tensor([0, 1]), torch.tensor([2, 3])), 0.0)),
    "flip": lambda x: x.flip(0),
    "flip of both": lambda x: x.flip(1, 0),
    "roll": lambda x: x.roll(1, 0),
    "roll of all": lambda x: x.roll(1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "others by numbers": lambda x: x[torch.arange(1, len(x) + 1) % len(x)],
    "times numbers": lambda x: x * numbers(x)[:, None],
    "by numbers": lambda x: torch.where(numbers(x)[:, None] == 0, 0.0, x),
    "by a linspace": lambda x: x * torch.linspace(0, 1, len(x))[:, None],
    "an eye": lambda x: x + torch.eye(len(x))[:, :1],
    "tril": lambda x: x.tril(),
    "a diagonal": written(lambda x: x.fill_diagonal_(3.0)),
    "softmax": lambda x: x.softmax(0),
    "the length": lambda x: x * len(x),
    "turned by cat": lambda x: torch.cat([x[1:], x[:1]]),
    "index_select": lambda x: x.index_select(0, numbers(x).flip(0)),
    "by order": lambda x: x[x[:, 0].argsort()],
    "chunks": lambda x: torch.cat(x.chunk(2)[::-1]),
    "folded": lambda x: x.view(2, -1, WIDTH).flip(0).reshape(-1, WIDTH),
    "two orders": two_orders,
    "an expert's scores for a row": lambda x: (x.repeat(2, 1) * x[:, :2].reshape(-1, 1)).view(2, -1, WIDTH).sum(0),
    "torn": torn,
    "entries of a table by others": partial(Table, lambda weight, x: weight[x.flip(0)]),
    "entries of a table, turned": partial(Table, lambda weight, x: torch.tanh(weight[x]).flip(0)),
    "normalized": lambda x: F.normalize(x, dim=0),
    "diff": lambda x: x + torch.diff(x, dim=0, prepend=x[:1]),
    "a transform": lambda x: torch.fft.fft(x, dim=0).real,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


class Net(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, labels):
        x = self.program(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x - labels).square().mean()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def ran(program, plan):
    torch.manual_seed(0)
    model = Net(program() if isinstance(program, partial) else program)
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    x, labels = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    try:
        loss = model(x, labels)
    except vescale.PipelineError as error:
        return error.rule
    loss.backward()
    return loss.item(), {name: full(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def both(programs):
    plan = vescale.Plan(
        mesh={"pp": 2}, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=["blocks.2"], microbatches=2)
    )
    return {name: (ran(program, None), ran(program, plan)) for name, program in programs.items()}


def test_rows_by_themselves():
    for found in run_ranks(2, both, KEPT, timeout=300):
        for name, (wanted, ours) in found.items():
            assert not isinstance(ours, str), (name, ours)
            assert ours[0] == pytest.approx(wanted[0], rel=1e-5), name
            for parameter, gradient in ours[1].items():
                torch.testing.assert_close(gradient, wanted[1][parameter])


def test_rows_that_meet_are_refused():
    for found in run_ranks(2, both, MIXED, timeout=300):
        for name, (_, ours) in found.items():
            assert isinstance(ours, str), name
            assert "the loss comes from the batch by" in ours, (name, ours)


PICTURE, POSITIONS, EACH = 3, 5, 2


class Merge(nn.Module):
    """One stage's module, in which pictures are put among tokens."""

    def forward(self, x, mask, values):
        return x.masked_scatter(mask, values)


class Captions(nn.Module):
    """Features of pictures in place of the tokens that stand for them."""

    def __init__(self, put):
        super().__init__()
        self.embed, self.project, self.merge = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH), Merge()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.put = put

    def forward(self, ids, pictures, labels=None):
        x = self.put(self, self.embed(ids), (ids == PICTURE)[..., None], self.project(pictures))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x if labels is None else (x - labels).square().mean()


PUTS = {
    "method": lambda model, x, mask, values: x.masked_scatter(mask, values),
    "function": lambda model, x, mask, values: torch.masked_scatter(x, source=values, mask=mask.expand_as(x)),
    "in place": lambda model, x, mask, values: x.clone().masked_scatter_(mask, values.flatten(0, 1)),
    "in a module": lambda model, *given: model.merge(*given),
}
NOT_PUT = {
    "a mask that the model computes": lambda model, x, mask, values: x.masked_scatter(mask & (x == x), values),
    "values of all rows by turns": lambda model, x, mask, values: x.masked_scatter(mask, values.transpose(0, 1)),
    "values that lie there twice": lambda model, x, mask, values: x.masked_scatter(mask, torch.cat([values, values])),
    "the batch twice": lambda model, x, mask, values: (
        torch.cat([x, x]).masked_scatter(torch.cat([mask, mask]), torch.cat([values, values])).chunk(2)[0]
    ),
}
FULL, FEWER, OTHERS = [EACH] * ROWS, [2, 2, 1, 2, 2, 2, 2, 2], [2, 2, 2, 2, 3, 1, 2, 2]
"""How many places for pictures each row has: as many as it has pictures; one less; one of another's."""


def captions(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((ROWS, POSITIONS), 1)
    for row, count in enumerate(counts):
        ids[row, torch.randperm(POSITIONS, generator=generator)[:count]] = PICTURE
    return ids, *(torch.randn(ROWS, each, WIDTH, generator=generator) for each in (EACH, POSITIONS))


def captioned(put, plan, batches, trains=True):
    """Losses, what evaluations return, and gradients; or what was refused first."""
    torch.manual_seed(0)
    model, found = Captions(put), []
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
    try:
        for batch in batches if trains else ():
            found.append(model(*batch))
            found[-1].backward()
        with torch.no_grad():
            found += [full(model(*batch[:2])) for batch in batches]
    except vescale.PipelineError as error:
        return error.rule
    return found, {name: full(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def both_captioned(puts, batches, axes, trains=True):
    pipeline = vescale.Pipeline(cuts=["blocks.2"], microbatches=2)
    plan = vescale.Plan(mesh={"pp": 2, **axes}, parameters={"*": {}}, pipeline=pipeline)
    return {name: [captioned(put, one, batches, trains) for one in (None, plan)] for name, put in puts.items()}


@pytest.mark.parametrize("axes", [{}, {"dp": 2}])
def test_values_that_a_mask_of_the_batch_puts_among_its_rows(axes):
    for found in run_ranks(4 if axes else 2, both_captioned, PUTS, [captions(FULL), captions(FULL, 1)], axes):
        for name, (wanted, ours) in found.items():
            assert not isinstance(ours, str), (name, ours)
            torch.testing.assert_close(ours[0], wanted[0])
            for parameter, gradient in ours[1].items():
                torch.testing.assert_close(gradient, wanted[1][parameter])


@pytest.mark.parametrize("counts", [FEWER, OTHERS])
@pytest.mark.parametrize("trains", [True, False])
def test_a_mask_by_which_rows_take_values_of_others_is_told_on_all_ranks(counts, trains):
    """In a batch of sizes that were right before."""
    batches = [captions(FULL), captions(counts)]
    for found in run_ranks(2, both_captioned, {"method": PUTS["method"]}, batches, {}, trains):
        wanted, ours = found["method"]
        puts = f"the mask puts {min(counts) * WIDTH} to {max(counts) * WIDTH} values into a row"
        assert not isinstance(wanted, str) and puts in ours


def test_values_of_which_nobody_knows_the_rows_are_refused():
    for found in run_ranks(2, both_captioned, NOT_PUT, [captions(FULL)], {}):
        for name, (_, ours) in found.items():
            assert isinstance(ours, str) and "the loss comes from the batch by masked_scatter" in ours, (name, ours)
