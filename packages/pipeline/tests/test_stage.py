"""A stage's sums of gradients: in the memory of the first where nobody else holds that, in a copy where anybody may."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from vescale_pipeline._runtime.stage import Codec, Stage

WIDTH, BACKWARDS = 6, 3


class Product(Function):
    """x @ weight, whose gradient of the weight is `what(product, kept)`."""

    @staticmethod
    def forward(ctx, x, weight, what, kept):
        ctx.save_for_backward(x, weight)
        ctx.what, ctx.kept = what, kept
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), ctx.what(x.t() @ gradient, ctx.kept), None, None


def viewed(product, kept):
    return product.view(WIDTH, WIDTH)


def saved(tensor):
    """What a node of a graph holds, in C++ alone."""
    with torch.enable_grad():
        return torch.ones((), requires_grad=True) * tensor


HELD = {
    "gradient": lambda product, kept: kept.append(product) or product,
    "base": lambda product, kept: kept.append(product) or viewed(product, kept),
    "another view": lambda product, kept: kept.append(product.view(-1)) or viewed(product, kept),
    "part": lambda product, kept: kept.append(product[0]) or viewed(product, kept),
    "alias": lambda product, kept: kept.append(product.detach()) or viewed(product, kept),
    "alias of the view": lambda product, kept: (view := viewed(product, kept), kept.append(view.detach()))[0],
    "memory": lambda product, kept: kept.append(product.untyped_storage()) or viewed(product, kept),
    "memory of the gradient": lambda product, kept: kept.append(product.untyped_storage()) or product,
    "numpy": lambda product, kept: kept.append(product.numpy()) or viewed(product, kept),
    "gradient in a graph": lambda product, kept: kept.append(saved(product)) or product,
    "base in a graph": lambda product, kept: kept.append(saved(product)) or viewed(product, kept),
    "view in a graph": lambda product, kept: kept.append(saved(product.view(-1))) or viewed(product, kept),
}
OWNED = {
    "Linear": F.linear,
    "matmul": torch.matmul,
    "addmm": lambda x, weight: torch.addmm(torch.zeros(WIDTH), x, weight),
    "Linear of three dims": lambda x, weight: F.linear(x.view(2, -1, WIDTH), weight),
    "transposed": lambda x, weight: F.linear(x, weight.t()),
    "view": lambda x, weight: Product.apply(x, weight, viewed, None),
    "embedding": lambda x, weight: F.embedding(torch.arange(WIDTH), weight) * x,
}
SHARED = {
    "one gradient": lambda x, one, two: x + one + two,
    "views of one": lambda x, one, two: x + one.view(-1).view(WIDTH, WIDTH) + two.view(-1).view(WIDTH, WIDTH),
    "parts of a product": lambda x, one, two: F.linear(x, torch.cat([one, two])),
    "rows": lambda x, one, two: F.linear(x, torch.stack([one, two]).flatten(0, 1)),
    "of a broadcast": lambda x, one, two: x[:1] + one + two.t(),
}


def summed(compute, count=1, each=lambda: None):
    """For each weight, whether its sum lies in the memory of its first gradient; checks the sums."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(count)]
    stage = Stage(0, {f"weight{i}": weight for i, weight in enumerate(weights)}, Codec())
    wanted, firsts = [torch.zeros(WIDTH, WIDTH) for _ in weights], None
    for _ in range(BACKWARDS):
        gradients = list(torch.autograd.grad(compute(torch.randn(WIDTH, WIDTH), *weights).square().sum(), weights))
        for sum_, gradient in zip(wanted, gradients, strict=True):
            sum_ += gradient
        firsts = firsts or [gradient.data_ptr() for gradient in gradients]
        gradient = None  # the list alone holds them
        each()
        stage._add(gradients)
        del gradients
    results = list(stage.sums().values())
    for result, sum_ in zip(results, wanted, strict=True):
        assert torch.equal(result, sum_)
    return [result.data_ptr() == first for result, first in zip(results, firsts, strict=True)]


@pytest.mark.parametrize("compute", OWNED.values(), ids=OWNED)
def test_what_a_backward_made_for_one_weight_is_added_up_in(compute):
    assert summed(compute) == [True]


@pytest.mark.parametrize("compute", SHARED.values(), ids=SHARED)
def test_weights_whose_gradients_have_one_memory_have_sums_of_their_own(compute):
    summed(compute, 2)


@pytest.mark.parametrize("what", HELD.values(), ids=HELD)
def test_what_anybody_keeps_of_a_gradient_does_not_change(what):
    kept, then = [], []

    def copy():
        then.append(values(kept[-1]).clone())

    assert summed(lambda x, weight: Product.apply(x, weight, what, kept), each=copy) == [False]
    assert all(torch.equal(values(one), before) for one, before in zip(kept, then, strict=True))


def values(kept):
    """The numbers in what a case keeps; of a graph those that it saved."""
    if isinstance(kept, torch.UntypedStorage):
        return torch.tensor(list(kept), dtype=torch.uint8)
    if not isinstance(kept, torch.Tensor):
        return torch.from_numpy(kept)
    return kept.grad_fn._saved_other if kept.grad_fn is not None else kept
