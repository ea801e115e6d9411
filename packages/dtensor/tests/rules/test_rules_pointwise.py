"""Everything that works element by element, on a grid of layouts."""

# ruff: noqa: B023  every function that closes over a loop variable runs within that turn of the loop

import itertools
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import DTensor, FallbackWarning, InterleavedShard, Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._rules.elements import pointwise
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for, spread

R, P, S = Replicate(), Partial(), Shard
LAYOUTS = [(R, R), (S(0), R), (S(0), S(1)), (S(1), S(1)), (P, S(0)), (R, P)]


def strictly(function, *args):
    def on_ranks():
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            function(*args)

    run_ranks(4, on_ranks)


def value(*shape, grad=True, low=0.1, high=0.9):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return (torch.rand(shape, generator=generator) * (high - low) + low).requires_grad_(grad)


def _arguments(name):
    """Arguments beside the first tensor that a function needs, or None when it cannot be called on floats."""
    second = value(5, 3, grad=False) + 0.25
    return {
        "clamp": (0.3, 0.6), "clip": (0.3, 0.6), "clamp_min": (0.3,), "clamp_max": (0.6,), "polygamma": None,
        "mvlgamma": (1,), "special_multigammaln": (1,), "special_polygamma": None, "threshold": (0.5, 2.0),
        "threshold_": (0.5, 2.0), "addcdiv": (second, second), "nan_to_num": (), "logit": (),
        "special_logit": (), "round": (), "special_round": (), "polar": (second,),
    }.get(name.removesuffix("_") if name not in ("threshold_",) else name, ())  # fmt: skip


_INTEGERS = {"bitwise", "gcd", "lcm"}


def _callable(function, x, y):
    """The extra arguments with which `function` takes x, or None."""
    name = function.__name__
    given = _arguments(name)
    if given is None:
        return None
    for extra in [given] if given else [(), (y,), (2,)]:
        try:
            if function(x.clone(), *extra) is not NotImplemented:
                return extra
        except Exception:
            continue
    return None


def _registered(rule):
    from vescale_dtensor._rules.registry import TABLE  # not a global: that would travel to the ranks by value

    return [function for function, entry in TABLE.items() if entry.rule is rule]


@in_turns(3)
def test_every_nonlinear_function():
    functions = len(_registered(pointwise.nonlinear))
    assert functions > 350

    def check():
        mesh = mesh_of(2, 2)
        run = 0
        for function in _registered(pointwise.nonlinear):
            x = value(5, 3, grad=False)
            y = value(5, 3, grad=False) + 0.25
            extra = _callable(function, x, y)
            if extra is None:
                x, y = torch.arange(15).reshape(5, 3) + 1, torch.arange(15).reshape(5, 3) % 3 + 1
                extra = _callable(function, x, y)
            if extra is None:
                continue
            run += 1
            tensors = [x, *[e for e in extra if isinstance(e, torch.Tensor)]]
            rest = [e for e in extra if not isinstance(e, torch.Tensor)]
            for places in (
                [(S(0), S(1)), (S(0), R), (R, R)],
                [(P, S(1)), (R, P), (R, R)],
                [(S(1), S(1)), (S(0), R), (P, R)],
            ):
                compare(
                    lambda *t: function(t[0].clone(), *t[1:], *rest), tensors, places[: len(tensors)], mesh,
                    rtol=1e-4, atol=1e-4,
                )  # fmt: skip
        assert run > 330, run

    strictly(check)


LINEAR = {
    "neg": lambda x: -x,
    "positive": lambda x: +x,
    "times": lambda x: x * 3.0,
    "over": lambda x: x / 3,
    "of an array": lambda x: x * numpy.float32(2),
    "into an array's": lambda x: numpy.float64(2) * x,
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64),
    "float": lambda x: x.double().float(),
    "type": lambda x: x.type(torch.float64),
    "contiguous": lambda x: x.contiguous(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu", torch.float64),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "deg2rad": torch.deg2rad,
    "complex": lambda x: torch.view_as_real(torch.complex(x, x * 2)),
    "conj": lambda x: torch.complex(x, x).conj().real,
    "sum of two": lambda x: x + x * 2 - x / 4,
    "alpha": lambda x: torch.add(x, x, alpha=2),
    "rsub": lambda x: torch.rsub(x, x * 3),
    "where": lambda x: torch.where(torch.tensor([True, False, True]), x, x * 2),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, torch.full((3,), 2.0)),
}
OTHER = {
    "rsub": lambda x: 1 - x,
    "rdiv": lambda x: 1 / x,
    "rpow": lambda x: 2**x,
    "pow": lambda x: x**2,
    "rfloordiv": lambda x: (7 // x).detach(),
    "rmod": lambda x: 7 % x.detach(),
    "array minus": lambda x: numpy.float64(2) - x,
    "array power": lambda x: numpy.float32(2) ** x,
    "clamp bounds": lambda x: torch.clamp(x, min=torch.tensor([0.2, 0.3, 0.4]), max=torch.tensor(0.7)),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
    "masked_fill tensor": lambda x: x.masked_fill(x > 0.5, torch.tensor(2.0)),
    "where scalars": lambda x: torch.where(x > 0.5, 1.0, 0.0),
    "where scalar": lambda x: torch.where(x > 0.5, x, 0.0),
    "where keyword": lambda x: x.where(x > 0.5, torch.tensor(0.0)),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 1, value=2),
    "add number": lambda x: x + 1,
    "product": lambda x: x * x.exp(),
    "rounding_mode": lambda x: torch.div(x, 0.3, rounding_mode="floor").detach(),
    "frexp": lambda x: torch.frexp(x),
    "polar": lambda x: torch.view_as_real(torch.polar(x, x)),
    "angle": lambda x: torch.complex(x, x).angle(),
    "type by class": lambda x: x.type(torch.DoubleTensor),
    "int": lambda x: (x * 100).int(),
    "bool": lambda x: x.bool(),
    "long": lambda x: (x * 10).to(torch.int64),
    "polygamma": lambda x: torch.polygamma(1, x),
    "special": lambda x: torch.special.xlog1py(x, 0.5) + torch.special.erfcx(x) + torch.special.i0e(x),
    "hermite": lambda x: torch.special.hermite_polynomial_h(x, 3).detach(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x * 2, inplace=True),
    "relu": lambda x: F.relu(x * 2 - 1, inplace=True),
    "elu_": lambda x: F.elu_(x * 2 - 1),
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "rrelu": lambda x: F.rrelu(x - 0.5),
    "hardtanh": lambda x: F.hardtanh(x, 0.3, 0.6),
    "softplus": lambda x: F.softplus(x, 2, 0.7),
    "logsigmoid": F.logsigmoid,
    "isclose": lambda x: torch.isclose(x, x + 1e-9),
    "logical": lambda x: torch.logical_and(x > 0.3, x < 0.7) | (x == 0.1) ^ ~(x > 0.2),
    "nan_to_num": lambda x: torch.nan_to_num((x - 0.5).log()),
    "in place": lambda x: (x * 1).add_(1).mul_(2).clamp_(0, 2).pow_(2).sub_(x),
    "in place operators": lambda x: _operators(x * 1),
}


def _operators(x):
    x += 1
    x *= 2
    x -= 0.5
    x /= 3
    x **= 2
    return x


@pytest.mark.parametrize("name", [*LINEAR, *[f"other {name}" for name in OTHER]])
def test_function(name):
    function = OTHER[name.removeprefix("other ")] if name.startswith("other") else LINEAR[name]

    def check():
        mesh = mesh_of(2, 2)
        x = value(5, 3)
        for places in LAYOUTS:
            events = compare(function, [x], [places], mesh, rtol=1e-4, atol=1e-4)
            if not name.startswith("other") or P not in places:
                assert not events, places

    strictly(check)


def test_two_tensors_on_the_whole_grid():
    def check():
        mesh = mesh_of(2, 2)
        x, y, row = value(5, 3), value(5, 3), value(3)
        for mine, theirs in itertools.product(
            placements_for((5, 3), 2), [(R, R), (S(0), S(1)), (P, S(0)), (S(1), P), (S(1), S(1))]
        ):
            compare(lambda a, b: a * b + a, [x, y], [mine, theirs], mesh)
        for mine, theirs in itertools.product(placements_for((5, 3), 2), placements_for((3,), 2)):
            compare(lambda a, b: a + b, [x, row], [mine, theirs], mesh)
        compare(torch.mul, [value(4, 6), value(4, 6)], [(InterleavedShard(1, 3), S(0)), (R, S(0))], mesh)
        compare(torch.add, [value(4, 1), value(1, 6)], [(S(0), S(1)), (S(1), S(0))], mesh)

    strictly(check)


def test_in_place_keeps_the_layout_of_self():
    def check():
        mesh = mesh_of(2, 2)
        for mine, theirs in itertools.product(LAYOUTS, LAYOUTS):
            for function in (torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.copy_, torch.Tensor.lerp_):
                extra = (0.3,) if function is torch.Tensor.lerp_ else ()
                x, y = value(5, 3, grad=False), value(5, 3, grad=False) + 1
                mine_, theirs_ = spread(x, mesh, mine), spread(y, mesh, theirs, seed=1)
                assert function(mine_, theirs_, *extra) is mine_
                assert mine_.placements == mine
                torch.testing.assert_close(mine_.full_tensor(), function(x, y, *extra))

    strictly(check)


def test_like_another_tensor():
    def check():
        mesh = mesh_of(2, 2)
        for places in LAYOUTS:
            x, other = (
                spread(value(5, 3, grad=False), mesh, places),
                distribute_tensor(torch.zeros(2).double(), mesh, (S(0), P)),
            )
            assert x.to(other).dtype == torch.float64 and x.to(other).placements == places
            assert x.type_as(other).dtype == torch.float64
            assert x.type() == "torch.FloatTensor"
            assert type(torch.ones(2).to(x)) is torch.Tensor
            for fill, want in (
                (torch.zeros_like, 0.0),
                (torch.ones_like, 1.0),
                (lambda t: torch.full_like(t, 2.5), 2.5),
            ):
                made = fill(x)
                assert made.placements == tuple(R if p == P else p for p in places)
                assert (made.full_tensor() == want).all()
            assert torch.empty_like(x, dtype=torch.int32).dtype == torch.int32

    strictly(check)


def test_empty_shards_and_scalars():
    def check():
        mesh = mesh_of(4)
        compare(lambda x: (x.exp() + 1) * x, [value(2, 3)], [(S(0),)], mesh)
        compare(lambda x, y: x * y, [value(), value(2, 3)], [(R,), (S(0),)], mesh)
        compare(lambda x, y: x + y, [value(), value()], [(P,), (R,)], mesh)

    strictly(check)


def test_plain_operands_and_constants():
    def check():
        mesh = mesh_of(2, 2)
        x = value(5, 3)
        for places in LAYOUTS:
            compare(lambda a: a + torch.ones(5, 3), [x], [places], mesh)
            compare(lambda a: torch.ones(3) * a, [x], [places], mesh)
            compare(lambda a: a - numpy.float32(1), [x], [places], mesh)
            compare(lambda a, b: a * b, [x, value(5, 3)], [places, None], mesh)
        assert type(distribute_tensor(x.detach(), mesh, (S(0), R)) * torch.tensor(2.0)) is DTensor

    strictly(check)


def test_a_plain_tensor_divided_by_a_sharded_one_is_rounded_once():
    """Through a reciprocal it is rounded twice, and in float32 where the divisor is an integer."""

    def check():
        mesh = mesh_of(4)
        x, y = value(40, 3, grad=False), value(3, 40, grad=False).T.contiguous()
        whole = torch.arange(3, 123).view(40, 3)
        for one, other in ((x, y), (x.double(), whole)):
            found = one / distribute_tensor(other, mesh, (S(0),))
            assert torch.equal(found.full_tensor(), one / other)

    run_ranks(4, check)


def _centred(sizes):
    x = distribute_tensor(torch.full((8, 6), 1.0), mesh_of(*sizes), [S(0), S(1)][: len(sizes)])
    for mean in (x.mean(), x.mean(0), x.mean(1, keepdim=True)):
        for centred in (x - mean, mean - x, torch.lerp(x, mean, 1.0) - x):
            assert centred.placements == x.placements
            scaled = centred / 1e-6  # of partial parts, what is left of their sum's rounding
            assert (0.01 + scaled.mean()).item() == pytest.approx(0.01, rel=1e-6)


def test_a_sharded_tensor_and_a_smaller_pending_one_stay_sharded():
    for sizes in [(4,), (2, 2)]:
        run_ranks(4, _centred, sizes)
