"""Linear layers of float8 numbers: numbers and scales of one device on every mesh, for all three products."""

from math import prod

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import OperatorError, Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._rules.products.scaled import RECIPES
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.scaled import operands_seen

R, P, S = Replicate(), Partial(), Shard
ROWS, FEATURES, OUTPUTS = (7, 3), 50, 22
# Mesh, placements of the input and of the weight.
PLACES = {
    "rows": ((2,), (S(0),), (R,)),
    "outputs": ((4,), (R,), (S(0),)),
    "features": ((4,), (S(2),), (S(1),)),
    "rows, outputs": ((2, 2), (S(0), R), (R, S(0))),
    "rows, features": ((2, 2), (S(0), S(2)), (R, S(1))),
    "features twice": ((2, 2), (S(2), S(2)), (S(1), S(1))),
    "rows of a sum": ((2, 2), (P, S(0)), (R, R)),
    "replicas": ((2, 2), (R, R), (R, R)),
}


def drawn(products):
    """Rows, columns and single numbers of sizes far apart, so that any other largest number gives other scales."""
    generator = torch.Generator().manual_seed(len(products))

    def one(*shape):
        sizes = [torch.randint(-9, 9, (*[1] * d, n, *[1] * (len(shape) - d - 1)), generator=generator).double().exp2()
                 for d, n in enumerate(shape)]  # fmt: skip
        made = torch.randn(shape, generator=generator).double()
        for size in sizes:
            made = made * size
        return made.bfloat16()

    return one(*ROWS, FEATURES), one(OUTPUTS, FEATURES), one(OUTPUTS), one(*ROWS, OUTPUTS)


def by_hand(x, weight, grad, products):
    """torchao's formulas on one device: (float8 numbers, scales) of each operand, and the three products in float64."""
    gradient = torch.float8_e5m2 if products == "fp8_tensorwise" else torch.float8_e4m3fn

    def quantised(tensor, dim, dtype):
        largest = tensor.abs().max() if products == "fp8_tensorwise" else tensor.abs().amax(dim, keepdim=True)
        scale = (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()
        if products == "fp8_rowwise":
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return (tensor.float() * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype), scale

    def product(a, b):
        return (a[0].double() / a[1].double()) @ (b[0].double() / b[1].double())

    e4m3, x, grad = torch.float8_e4m3fn, x.flatten(0, 1), grad.flatten(0, 1)
    found = [quantised(x, 1, e4m3), quantised(weight.t(), 0, e4m3), quantised(grad, 1, gradient)]
    found += [quantised(weight, 0, e4m3), quantised(grad.t(), 1, gradient), quantised(x, 0, e4m3)]
    return found, [product(*found[i : i + 2]) for i in (0, 2, 4)]


def run(mesh, places, products):
    """Returns what is quantised, in the order of the products, and results: the output and three gradients."""
    x, weight, bias, grad = drawn(products)
    whole = [R] * mesh.ndim
    x, weight, bias = (distribute_tensor(one.requires_grad_(), mesh, place) for one, place in
                       zip((x, weight, bias), (whole, places[1], whole)))  # fmt: skip
    weight._layout = weight._layout.with_products(products)
    with operands_seen() as seen:
        out = F.linear(x.redistribute(places[0]), weight, bias)
        out.backward(grad)
    return seen, [one.full_tensor().detach() for one in (out, x.grad, weight.grad, bias.grad)]


@pytest.mark.parametrize("products", RECIPES)
def test_numbers_and_scales_are_one_devices_on_every_mesh(products):
    def on_ranks(count):
        for name, (sizes, *places) in PLACES.items():
            if prod(sizes) != count:
                continue
            seen, found = run(mesh_of(*sizes), places, products)
            assert len(seen) == len(operands) and all(map(torch.equal, seen, operands)), name
            # Where no sum of a product is cut, its bits are one device's.
            cut = {"features": {0}, "outputs": {1}, "rows": {2, 3}}
            loose = set().union(*(which for part, which in cut.items() if part in name))
            for place, (one, other) in enumerate(zip(found, results)):
                assert torch.equal(one, other) or (place in loose and is_near(one, other)), (name, place)

    operands, results = run_ranks(1, lambda: run(mesh_of(1), ([R], [R]), products))[0]
    x, weight, bias, grad = drawn(products)
    wanted, exact = by_hand(x, weight, grad, products)
    made = list(zip(operands[::2], operands[1::2]))
    if products == "fp8_tensorwise":
        made.insert(4, made[2])  # the gradient, once for both products
    for (numbers, scale), (mine, own) in zip(wanted, made, strict=True):
        mine = mine.view(numbers.dtype).float().flatten(0, -2)
        assert torch.equal(mine if mine.shape == numbers.shape else mine.t(), numbers.float())
        assert torch.equal(own.flatten(), scale.flatten())
    for one, product in zip((results[0] - bias, *results[1:]), exact):
        assert is_near(one.flatten(0, -2), product)
    run_ranks(4, on_ranks, 4)
    run_ranks(2, on_ranks, 2)


def is_near(one, other):
    return (one.double() - other.double()).norm() <= 2**-7 * other.double().norm()


def odd_operands(products):
    """One rank: vectors, autocast, float16, what is no number, zeros, nothing, and what is refused."""
    mesh = mesh_of(1)

    def laid(tensor):
        return distribute_tensor(tensor, mesh, [R])

    def linear(x, weight):
        weight = laid(weight)
        weight._layout = weight._layout.with_products(products)
        return F.linear(laid(x), weight).full_tensor()

    x, weight, *_ = drawn(products)
    x = x[0]
    assert torch.equal(linear(x[1], weight), linear(x[1:2], weight)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x.float(), weight.float()), linear(x, weight))
    large = linear(torch.full((2, 512), 8.0).half(), torch.full((3, 512), 8.0).half())
    assert large.dtype is torch.float16 and torch.equal(large, torch.full((2, 3), 32768.0).half())
    assert torch.equal(linear(x * 0, weight), torch.zeros(3, OUTPUTS, dtype=x.dtype))
    assert linear(x[:0], weight).shape == (0, OUTPUTS)
    for odd in (float("nan"), float("inf")):
        assert linear(x.index_fill(1, torch.tensor(0), odd), weight).isnan().all()
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x.float(), weight)
    x.requires_grad_()
    with pytest.raises(OperatorError, match="no second derivative"):  # a penalty would lose what the weight does to it
        linear(x, weight).sum().backward(create_graph=True)


def test_odd_operands():
    for products in RECIPES:
        run_ranks(1, odd_operands, products)
