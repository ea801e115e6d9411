"""The split backward against autograd's own: the same gradients, to the last bit, each computed once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_pipeline._runtime.backward import Split, both
from vescale_pipeline._runtime.recomputed import Halves
from vescale_pipeline._trace.placeholder import current

WIDTH = 6


class Square(torch.autograd.Function):
    """A user's own; counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        Square.runs += 1
        return gradient * 2 * ctx.saved_tensors[0]


class Product(torch.autograd.Function):
    """A user's own, with a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def make():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    scale, unused = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(2))
    table = nn.Parameter(torch.randn(9, WIDTH))
    a, b = torch.randn(2, 3, WIDTH).unbind()
    leaves = [a.requires_grad_(), b.requires_grad_()]
    return leaves, [*layers.parameters(), scale, unused, table], layers, scale, table


def chain(a, b, layers, scale, table):
    for layer in layers:
        a = F.gelu(layer(a)) * scale
    return [a + b]


def tied(a, b, layers, scale, table):
    """One weight on the way three times, and once beside it."""
    for _ in range(3):
        a = torch.tanh(layers[0](a))
    return [a @ layers[1].weight, layers[0](table[:3]), b * 2]


def passed_on(a, b, layers, scale, table):
    """An output that is what arrived, and one that depends on weights alone."""
    return [a, table * scale, layers[2](b)]


def skips(a, b, layers, scale, table):
    first, second = layers[0](a), layers[1](b)
    joined = torch.cat([first, second, first * second])
    return [Square.apply(joined), joined.view(-1)[:4], first.clone().mul_(scale)]


def lookup(a, b, layers, scale, table):
    rows = table[torch.tensor([1, 1, 4])]
    return [layers[0](a + rows), (rows * scale).sum(0)]


def nothing_flows(a, b, layers, scale, table):
    return [layers[3](b.detach())]


def only_weights(a, b, layers, scale, table):
    return [layers[1](layers[0](table)) * scale]


FORWARDS = [chain, tied, passed_on, skips, lookup, nothing_flows, only_weights]


@pytest.mark.parametrize("forward", FORWARDS)
def test_the_two_halves_are_the_whole(forward):
    found = []
    for _ in range(3):
        leaves, weights, *rest = make()
        outputs = forward(*leaves, *rest)
        seeds = [torch.sin(torch.arange(o.numel(), dtype=o.dtype)).view(o.shape) for o in outputs]
        Square.runs = 0
        if not found:
            gradients = torch.autograd.grad(outputs, [*leaves, *weights], seeds, allow_unused=True)
        elif len(found) == 1:
            of_leaves, of_weights = both(outputs, seeds, leaves, weights)
            gradients = of_leaves + of_weights
        else:
            split = Split(outputs, seeds, leaves, weights)
            gradients = [*split.leaves, *split.weights()]
        assert Square.runs <= 1
        found.append(list(gradients))
    for other in found[1:]:
        assert [g is None for g in other] == [g is None for g in found[0]]
        for gradient, wanted in zip(other, found[0]):
            assert gradient is None or torch.equal(gradient, wanted)


def again(function, *given):
    return checkpoint(function, *given, use_reentrant=False)


def dropped(a, b, layers, scale, table):
    """A norm and a product, whose nodes need what they saved in both halves; a draw."""
    return [F.layer_norm(layers[0](F.dropout(a, 0.3)), (WIDTH,), scale) * layers[1](b)]


HOW = {  # ways to compute again; each computes the function's innermost part once more per checkpoint around it
    "alone": lambda run, *given: again(run, *given),
    "one in another": lambda run, *given: again(lambda *inner: [x.sin() for x in again(run, *inner)], *given),
    "two": lambda run, *given: again(run, *(again(torch.tanh, x) for x in given)),
    "in part": lambda run, *given: [x * 2 for x in again(run, *given)],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("forward", [*FORWARDS, dropped])
def test_what_is_computed_again_serves_both_halves(forward, how):
    wanted, times = gradients_by(forward, how, None)
    found, other_times = gradients_by(forward, how, Halves())
    assert times == other_times
    for gradient, one in zip(found, wanted):
        assert (gradient is None) == (one is None)
        assert gradient is None or torch.equal(gradient, one)


def gradients_by(forward, how, halves):
    """Whole, or by halves; and how often the forward was computed."""
    leaves, weights, *rest = make()
    ran = []

    def run(a, b):
        ran.append(None)
        return forward(a, b, *rest)

    current.halves = halves
    try:
        roots = [output for output in HOW[how](run, *leaves) if output.requires_grad]
    finally:
        current.halves = None
    seeds = [torch.sin(torch.arange(o.numel(), dtype=o.dtype)).view(o.shape) for o in roots]
    if halves is None:
        return torch.autograd.grad(roots, [*leaves, *weights], seeds, allow_unused=True), len(ran)
    halves.are_apart = True
    split = Split(roots, seeds, leaves, weights)
    gradients = [*split.leaves, *split.weights()]
    halves.end()
    return gradients, len(ran)


def test_the_input_half_computes_no_weight_but_those_used_twice():
    leaves, weights, layers, scale, table = make()
    computed = []
    for index, weight in enumerate(weights):
        weight.register_hook(lambda _, index=index: computed.append(index))
    outputs = chain(*leaves, layers, scale, table)
    split = Split(outputs, [torch.ones_like(outputs[0])], leaves, weights)
    assert [type(gradient) for gradient in split.leaves] == [torch.Tensor] * 2
    assert computed == [8]  # the scale
    split.weights()
    assert sorted(computed) == list(range(9))


def test_without_a_root_nothing_is_computed():
    leaves, weights, *_ = make()
    split = Split([], [], leaves, weights)
    assert split.leaves == [None, None] and split.weights() == [None] * len(weights)
    assert both([], [], leaves, weights) == ([None, None], [None] * len(weights))


@pytest.mark.parametrize("above", [lambda y: y, lambda y: y * 2, Square.apply], ids=["itself", "torch's", "another"])
def test_a_users_function_with_a_weight_outlives_the_stages_outputs(above):
    torch.manual_seed(0)
    leaf, weight, seed = torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)

    def ran():
        return [above(Product.apply(leaf * 1, weight))]

    wanted = torch.autograd.grad(ran(), [leaf, weight], [seed])
    split = Split(ran(), [seed], [leaf], [weight])  # nobody holds what the stage gave
    assert torch.equal(split.leaves[0], wanted[0])
    assert torch.equal(split.weights()[0], wanted[1])
    assert not split._owners
