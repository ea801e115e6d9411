"""Losses under a pipeline against one device's full batch: what weighs a microbatch, and what is refused."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_testkit import in_turns, raises_on_all, run_ranks, warm_up

warm_up("vescale")

ROWS, CLASSES = 8, 6


class Net(nn.Module):
    """Four linear layers; the loss is computed where `loss` says: by a function, or a module of its own."""

    def __init__(self, loss=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))
        self.loss = loss

    def forward(self, *batch):
        x, *rest = batch
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x if self.loss is None else self.loss(x, *rest)


class Penalized(nn.Module):
    """A loss that adds a penalty of weights of its own, which no row of the batch enters."""

    def __init__(self, loss_of):
        super().__init__()
        self.loss_of, self.weight = loss_of, nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x, y):
        apart = self.weight @ self.weight.T - torch.eye(CLASSES)
        return self.loss_of(x @ self.weight, y) + 0.1 * apart.square().mean() + 0.01 * self.weight.norm()


def batch():
    """Inputs, wanted outputs, a mask that keeps another number of rows in each microbatch, labels of the kept rows;
    and labels of which the second and the last microbatch, or the first, keep none."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, ROWS, CLASSES, generator=generator)
    mask = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 1])
    labels = torch.randint(CLASSES, (ROWS,), generator=generator).masked_fill(mask == 0, -100)
    gaps = [labels.index_fill(0, torch.tensor(rows), -100) for rows in ([2, 3, 6, 7], [0, 1])]
    return x, y, mask, labels, *gaps


def step(loss_of, *, outside=False, declared=None, pick=(0, 1), module=None, extra=(), microbatches=4):
    """The largest differences of the loss and of a gradient from one device's, relative."""
    given = tuple(batch()[i] for i in pick) + tuple(extra)
    torch.manual_seed(0)
    one = Net(module() if module else None if outside else loss_of)
    plan = vescale.Plan(
        mesh={"pp": 2, "dp": 1},
        parameters={"*": {}},
        pipeline=vescale.Pipeline(cuts=("blocks.2",), microbatches=microbatches, loss=declared),
    )
    loss_fn = (lambda output, x, target: loss_of(output, target)) if outside else None
    model, _ = vescale.parallelize(plan, copy.deepcopy(one), lambda p: torch.optim.SGD(p, lr=0.1), loss_fn=loss_fn)
    if outside:
        loss, wanted = model(given[0], target=given[1]), loss_of(one(given[0]), given[1])
    else:
        loss, wanted = model(*given), one(*given)
    loss.backward()
    wanted.backward()
    gradients = {name: p.grad for name, p in one.named_parameters()}
    with torch.no_grad():
        evaluated = model(given[0], target=given[1]) if outside else model(*given)
    errors = [((number - wanted) / wanted).abs().item() for number in (loss, evaluated)]
    for name, p in model.named_parameters():
        if name in gradients:
            got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            errors.append(((got - gradients[name]).norm() / gradients[name].norm()).item())
    return torch.tensor(errors).max().item()  # nan if any is


def plain_sum(x, y):
    return (x - y).square().sum()


def over_rows(x, y):
    return (x - y).square().sum() / x.shape[0]


def in_two_steps(x, y):
    return (x - y).abs().mean(-1).sum(0).div(len(x))


def with_an_auxiliary(x, y):
    return F.mse_loss(x, y) + 0.01 * x.float().square().mean()


def labelled(x, labels):
    return 0.5 * F.cross_entropy(x, labels) + 0.0


def smoothed(x, labels):
    return F.cross_entropy(x, labels, label_smoothing=0.1)


def by_class(x, labels):
    return F.cross_entropy(x, labels, weight=torch.arange(1.0, 1 + CLASSES))


def by_hand(x, y, mask):
    return ((x - y).square().mean(-1) * mask).sum() / mask.sum()


def over_a_number(x, y, mask, kept):
    return ((x - y).square().mean(-1) * mask).sum() / kept


def read_number(x, y, mask):
    return ((x - y).square().mean(-1) * mask).sum() / mask.sum().item()


def checked(x, y):
    """What is read of the batch is true or false, or stands in a text alone."""
    if not (y.abs() < 100).all().item():
        raise ValueError("too large")
    assert f"of which the largest is {y.argmax()}".startswith("of") and str(y.sum())
    return F.mse_loss(x, y)


def divided_before(x, y, mask):
    return ((x - y).square().mean(-1) * (mask / mask.sum())).sum()


def largest(x, y):
    return (x - y).abs().max()


def product(x, y):
    return x.mean() * y.mean()


def root(x, y):
    return F.mse_loss(x, y).sqrt()


def contrastive(x, y):
    return F.cross_entropy(x @ y.T, torch.arange(len(x)))


def two_kinds(x, y):
    return F.mse_loss(x, y) + (x - y).square().sum()


def two_numbers_of_labels(x, labels):
    return F.cross_entropy(x, labels) + x.square().mean()


def keys_of(y, each=1):
    """Small numbers, `each` for every row, that do not come in order."""
    return (y[:, :each] * 2).long().abs().reshape(-1)


def sorted_and_put_back(x, y):
    keys, places = keys_of(y).sort()
    z = torch.tanh(x[places] * 2 + torch.arange(8.0)[keys, None])
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(places.size(0))
    return F.mse_loss(z[inverse], y)


def sorted_and_sorted_back(x, y):
    places = keys_of(y).argsort()
    z = torch.tanh(x[places]) * y[:, 0][places, None]
    return F.mse_loss(z[places.argsort()], y)


def sorted_and_written_back(x, y):
    places = keys_of(y).argsort()
    z = torch.zeros_like(x)
    z[places] = x[places].sin()
    return F.mse_loss(z, y)


def two_experts_for_each(x, y):
    places = keys_of(y, 2).argsort()
    z = torch.zeros_like(x).index_add(0, places // 2, x[places // 2].sin())
    return F.mse_loss(z, y)


def grouped(x, y):
    keys, places = keys_of(y, 2).sort()
    ends = torch.histc(keys.float(), bins=8, min=0, max=7).cumsum(0, dtype=torch.int32)
    table = torch.linspace(-1, 1, 8 * CLASSES * 8).view(8, CLASSES, 8)
    z = F.grouped_mm(F.pad(x, (0, 2))[places // 2], F.pad(table, (0, 0, 0, 2)), offs=ends)[:, :CLASSES]
    return F.mse_loss(torch.zeros_like(x).index_add_(0, places // 2, z), y)


def left_in_order(x, y):
    return F.mse_loss(x[keys_of(y).argsort()], y)


def back_by_a_descending_sort(x, y):
    places = keys_of(y).argsort()
    return F.mse_loss(x[places][places.argsort(descending=True)], y)


def neighbours_in_order(x, y):
    places = keys_of(y, 2).argsort()
    return F.mse_loss(x[places // 2].view(-1, 2, CLASSES).sum(1), y)


def keys_across_rows(x, y):
    keys, places = (y[:, :2] * 2).long().abs().t().reshape(-1).sort()
    z = x[places // 2] * torch.arange(8.0)[keys, None]
    return F.mse_loss(torch.zeros_like(x).index_add_(0, places // 2, z), y)


def groups_from_the_least(x, y):
    keys, places = keys_of(y, 2).sort()
    ends = torch.histc(keys.float(), bins=8).cumsum(0, dtype=torch.int32)
    table = torch.ones(8, CLASSES + 2, 8)
    z = F.grouped_mm(F.pad(x, (0, 2))[places // 2], table, offs=ends)[:, :CLASSES]
    return F.mse_loss(torch.zeros_like(x).index_add_(0, places // 2, z), y)


def filled(x, y):
    """Tables as large as the batch, filled with numbers that are not the batch's."""
    ones, scale = torch.full((x.shape[0], CLASSES), 1), x.new_full(x.shape, 2.0)
    return F.mse_loss(x * ones + torch.full([*x.shape], fill_value=0.5), y * scale)


def filled_with_the_count(x, y):
    return F.mse_loss(x * torch.full(x.shape, len(x)), y)


def filled_alike_with_the_count(x, y):
    return F.mse_loss(x * x.new_full(x.shape, len(x)), y)


def by_places(x, y):
    """A row of places for each row, as transformers repeats positions: not where there is one row."""
    places = torch.linspace(0, 1, CLASSES)[None]
    return F.mse_loss(x * (places if len(x) == 1 else places.expand(len(x), -1)), y)


def sum_of_repeated(x, y):
    weights = torch.ones(1, CLASSES)
    return F.mse_loss(x, y) + (weights if len(x) == 1 else weights.expand(len(x), -1)).sum() * x.mean()


def other_for_one_row(x, y):
    return F.mse_loss(x, y) * 2 if len(x) == 1 else F.mse_loss(x, y)


RIGHT = {
    "a sum": (plain_sum, {}),
    "tables that are filled": (filled, {}),
    "a sum outside the model": (plain_sum, {"outside": True}),
    "reduction=sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), {}),
    "a mean": (F.mse_loss, {}),
    "a mean of a batch that is looked at": (checked, {}),
    "a sum over the number of rows": (over_rows, {}),
    "in two steps": (in_two_steps, {}),
    "an auxiliary mean": (with_an_auxiliary, {}),
    "a mean over labels": (labelled, {"pick": (0, 3)}),
    "a mean over labels by a module": (None, {"pick": (0, 3), "module": nn.CrossEntropyLoss}),
    "a masked sum over a number": (over_a_number, {"pick": (0, 1, 2), "extra": (5,)}),
    "a masked sum over a 0-dim tensor": (over_a_number, {"pick": (0, 1, 2), "extra": (torch.tensor(5.0),)}),
    "a microbatch without labels": (labelled, {"pick": (0, 4)}),
    "the first without labels, by a module": (None, {"pick": (0, 5), "module": nn.CrossEntropyLoss}),
    "a microbatch without labels, smoothed": (smoothed, {"pick": (0, 4)}),
    "a microbatch without labels, weighed by class": (by_class, {"pick": (0, 5)}),
    "a mean over labels, and a number": (lambda x, labels: F.cross_entropy(x, labels) + 1.5, {"pick": (0, 3)}),
    "a mean, and a penalty": (None, {"module": partial(Penalized, F.mse_loss)}),
    "a mean over labels, and a penalty": (None, {"pick": (0, 3), "module": partial(Penalized, F.cross_entropy)}),
    "the same, a microbatch without labels": (None, {"pick": (0, 4), "module": partial(Penalized, by_class)}),
    "rows sorted, and put back": (sorted_and_put_back, {}),
    "rows sorted, and sorted back": (sorted_and_sorted_back, {}),
    "rows sorted, and written back": (sorted_and_written_back, {}),
    "two sorted for each row": (two_experts_for_each, {}),
    "products by groups of sorted rows": (grouped, {}),
    "a mean declared": (lambda x, y: torch.einsum("bi,bi->", x, y) / x.shape[0], {"declared": "mean"}),
    "microbatches of a row, of places that are repeated for more": (by_places, {"microbatches": ROWS}),
    "a sum declared": (lambda x, y: torch.einsum("bi,bi->", x, y), {"declared": "sum"}),
}
REFUSED = {
    "a masked mean by hand": (by_hand, {"pick": (0, 1, 2)}, "div"),
    "a masked mean over a read number": (read_number, {"pick": (0, 1, 2)}, "item"),
    "a masked mean, divided before": (divided_before, {"pick": (0, 1, 2)}, "div"),
    "the largest": (largest, {}, "max"),
    "a product of means": (product, {}, "mul"),
    "a root of a mean": (root, {}, "sqrt"),
    "contrastive": (contrastive, {}, "matmul"),
    "a mean and a sum": (two_kinds, {}, "sum"),
    "rows left in the order of a key": (left_in_order, {}, "mse_loss"),
    "rows put back by another sort": (back_by_a_descending_sort, {}, "argsort"),
    "neighbours of sorted rows": (neighbours_in_order, {}, "view"),
    "keys of other rows": (keys_across_rows, {}, "sort"),
    "groups counted from the least key": (groups_from_the_least, {}, "histc"),
    "a table filled with the number of rows": (filled_with_the_count, {}, "full, at "),
    "a table of the batch's filled with the number of rows": (filled_alike_with_the_count, {}, "new_full, at "),
    "a sum over repeated rows": (sum_of_repeated, {"microbatches": ROWS}, "mul"),
    "other functions for one row": (other_for_one_row, {"microbatches": ROWS}, "calls other functions"),
    "a sum, and a penalty": (None, {"module": partial(Penalized, plain_sum)}, "once in all"),
    "means over labels and over rows": (two_numbers_of_labels, {"pick": (0, 3)}, "different"),
}


def several(cases):
    return [step(loss_of, **options) for loss_of, options in cases]


def test_losses_are_those_of_the_whole_batch():
    for found in run_ranks(2, several, list(RIGHT.values()), timeout=120):
        assert dict(zip(RIGHT, found)) == {name: pytest.approx(0, abs=1e-5) for name in RIGHT}


@in_turns(3)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(case):
    loss_of, options, named = REFUSED[case]
    text = raises_on_all(2, PipelineError, lambda: step(loss_of, **options))
    assert named in text and "fix one of:" in text
    assert f"{__file__}:" in text or "the loss adds up parts that weigh" in text or "calls other functions" in named
