"""Linear layers of float8 numbers: numbers and scales of one device on every mesh, for all three products."""

from math import prod

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._rules.products.scaled import RECIPES
from vescale_dtensor._test_kit.scaled import operands_seen
from vescale_dtensor.testing import mesh_of, run_ranks

R, P, S = Replicate(), Partial(), Shard
ROWS, FEATURES, OUTPUTS = (7, 3), 50, 22
# mesh, placements of the input and of the weight: column and row parallel, sharded rows, cuts within cuts, sums of parts
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


def drawn(products, dtype):
    """Rows, columns and single numbers of sizes far apart, so that any other largest number gives other scales."""
    generator = torch.Generator().manual_seed(len(products))

    def one(*shape):
        sizes = [torch.randint(-9, 9, (*[1] * d, n, *[1] * (len(shape) - d - 1)), generator=generator).double().exp2()
                 for d, n in enumerate(shape)]  # fmt: skip
        made = torch.randn(shape, generator=generator).double()
        for size in sizes:
            made = made * size
        return made.to(dtype)

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


def run(mesh, places, products, dtype):
    """Returns what is quantised, in the order of the products, and results: the output and three gradients."""
    x, weight, bias, grad = drawn(products, dtype)
    whole = [R] * mesh.ndim
    x, weight, bias = (distribute_tensor(one.requires_grad_(), mesh, place) for one, place in
                       zip((x, weight, bias), (whole, places[1], whole)))  # fmt: skip
    weight._layout = weight._layout.with_products(products)
    with operands_seen() as noted:
        out = F.linear(x.redistribute(places[0]), weight, bias)
        out.backward(grad)
    return noted, [one.full_tensor().detach() for one in (out, x.grad, weight.grad, bias.grad)]


@pytest.mark.parametrize("products", RECIPES)
def test_numbers_and_scales_are_one_devices_on_every_mesh(products):
    dtype = torch.bfloat16

    def alone():
        return run(mesh_of(1), ([R], [R]), products, dtype)

    def on_ranks(size):
        for name, (sizes, *places) in PLACES.items():
            if prod(sizes) != size:
                continue
            noted, found = run(mesh_of(*sizes), places, products, dtype)
            assert len(noted) == len(numbers) and all(map(torch.equal, noted, numbers)), name
            # Where no sum of a product is cut, its bits are one device's.
            cut = {"features": {0}, "outputs": {1}, "rows": {2, 3}}
            loose = set().union(*(which for part, which in cut.items() if part in name))
            for place, (one, other) in enumerate(zip(found, results)):
                assert torch.equal(one, other) or place in loose and _is_near(one, other), (name, place)

    numbers, results = run_ranks(1, alone)[0]
    x, weight, bias, grad = drawn(products, dtype)
    wanted, exact = by_hand(x, weight, grad, products)
    made = list(zip(numbers[::2], numbers[1::2]))
    made.insert(4, made[2]) if products == "fp8_tensorwise" else None
    for (of, scale), (mine, unit) in zip(wanted, made, strict=True):
        mine = mine.view(of.dtype).float().flatten(0, -2)
        assert torch.equal(unit.flatten(), scale.flatten()) and torch.equal(mine.reshape(of.shape) if mine.shape == of.shape else mine.t(), of.float())
    for one, product in zip(results, exact):
        assert _is_near(one.flatten(0, -2) - (bias if one is results[0] else 0), product)
    run_ranks(4, on_ranks, 4)
    run_ranks(2, on_ranks, 2)


def _is_near(one, other):
    return (one.double() - other.double()).norm() <= 2**-7 * other.double().norm()
