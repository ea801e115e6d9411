"""Random functions: one device's values, for every layout, and one state of the generator on all ranks."""

import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from vescale_dtensor import DTensor, FallbackWarning, Partial, Replicate, Shard, distribute_tensor
from vescale_testkit import assert_ranks_agree, mesh_of, run_ranks
from vescale_testkit.oracle import STRIDED_VIEWS, compare, spread

R, P, S = Replicate(), Partial(), Shard
LAYOUTS = [(R, R), (S(0), R), (S(0), S(1)), (S(1), S(1)), (P, S(0)), (R, P)]

FILLS = {
    "normal_": lambda x: x.normal_(1, 2),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "exponential_": lambda x: x.exponential_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(),
    "random_": lambda x: x.random_(0, 100),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of itself": lambda x: x.bernoulli_(x.abs().clamp(0, 1)),
    "init.normal_": lambda x: nn.init.normal_(x, 0, 0.02),
    "init.uniform_": lambda x: nn.init.uniform_(x),
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, 0, 1, -1, 1),
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "init.kaiming_normal_": lambda x: nn.init.kaiming_normal_(x),
    "init.xavier_uniform_": lambda x: nn.init.xavier_uniform_(x),
    "init.xavier_normal_": lambda x: nn.init.xavier_normal_(x),
    "init.constant_": lambda x: nn.init.constant_(x, 3.0),
    "init.ones_": lambda x: nn.init.ones_(x),
    "init.zeros_": lambda x: nn.init.zeros_(x),
    "init.eye_": lambda x: nn.init.eye_(x),
    "init.orthogonal_": lambda x: nn.init.orthogonal_(x),
    "init.sparse_": lambda x: nn.init.sparse_(x, 0.3),
}


@pytest.mark.parametrize("name", FILLS)
def test_fills_equal_one_device(name):
    function = FILLS[name]

    def on_ranks():
        mesh = mesh_of(2, 2)
        for shape in ((5, 7), (2, 3)):
            for places in LAYOUTS:
                value = torch.rand(shape, generator=torch.Generator().manual_seed(1))
                torch.manual_seed(3)
                expected = value.clone()
                with torch.no_grad():
                    function(expected)
                after = torch.rand(3)
                parameter = spread(value, mesh, places).requires_grad_()
                torch.manual_seed(3)
                with torch.no_grad():
                    out = function(parameter)
                assert out is parameter and parameter.placements == places and parameter.is_leaf
                assert torch.equal(torch.rand(3), after), (name, places)
                torch.testing.assert_close(
                    parameter.detach().full_tensor(), expected, rtol=1e-6, atol=1e-6, msg=f"{name} {places}"
                )
        return parameter.detach().full_tensor()

    assert_ranks_agree(run_ranks(4, on_ranks))


def test_fills_of_transposed_and_sliced_tensors():
    def on_ranks():
        mesh = mesh_of(2, 2)
        for view in (lambda x: x.t(), lambda x: x[:, :4], lambda x: x):
            torch.manual_seed(5)
            expected = view(torch.zeros(6, 8)).normal_()
            torch.manual_seed(5)
            found = view(distribute_tensor(torch.zeros(6, 8), mesh, (S(0), R))).normal_()
            assert torch.equal(found.full_tensor(), expected)

    run_ranks(4, on_ranks)


def test_fills_move_nothing():
    def on_ranks():
        from vescale_dtensor.debug import comm_trace

        with warnings.catch_warnings(action="error", category=FallbackWarning):
            x = distribute_tensor(torch.zeros(5, 3), mesh_of(2, 2), (S(0), S(1)))
            with comm_trace() as trace:
                nn.init.kaiming_uniform_(x.normal_())
                torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 5)
                nn.init.constant_(x, 1.0)
            assert len(trace) == 0

    run_ranks(4, on_ranks)


def test_a_fill_of_a_leaf_needs_no_grad():
    def on_ranks():
        x = distribute_tensor(torch.zeros(5, 3), mesh_of(2, 2), (S(0), S(1))).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf"):
            x.normal_()
        y = x * 2
        y.normal_()
        y.sum().backward()
        assert not x.grad.full_tensor().any()

    run_ranks(4, on_ranks)


DRAWS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "bernoulli": torch.bernoulli,
    "bernoulli method": lambda x: x.bernoulli(),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout2d": lambda x: F.dropout1d(x[None], 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, True, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "feature_dropout": lambda x: torch.feature_dropout(x[None], 0.4, True),
    "module": lambda x: nn.Dropout(0.3)(x),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_equal_one_device(name):
    function = DRAWS[name]

    def on_ranks():
        mesh = mesh_of(2, 2)
        value = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
        for places in LAYOUTS:
            torch.manual_seed(3)
            expected = function(value)
            after = torch.rand(2)
            torch.manual_seed(3)
            found = function(spread(value, mesh, places))
            assert torch.equal(torch.rand(2), after), places
            assert type(found) is DTensor
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-6, atol=2e-6)

    run_ranks(4, on_ranks)


def test_masks_follow_the_order_of_memory():
    def on_ranks():
        mesh = mesh_of(2, 2)
        value = torch.rand(8, 8)
        for places in LAYOUTS:
            torch.manual_seed(3)
            expected = F.dropout(value.t(), 0.4)
            torch.manual_seed(3)
            assert torch.equal(F.dropout(distribute_tensor(value, mesh, places).t(), 0.4).full_tensor(), expected)

    run_ranks(4, on_ranks)


@pytest.mark.parametrize("name", STRIDED_VIEWS)
def test_masks_after_strided_views_are_those_of_one_device(name):
    """Also of views for which a cut dim had to be put together, or cut in another way."""
    view = STRIDED_VIEWS[name]

    def on_ranks():
        mesh = mesh_of(2, 2)
        value = torch.rand(8, 8, generator=torch.Generator().manual_seed(2))
        draws = (lambda x: F.dropout(x, 0.4), lambda x: torch.rand_like(x), lambda x: F.dropout(x.contiguous(), 0.4))
        for places in LAYOUTS:
            for draw in draws:
                torch.manual_seed(3)
                expected = draw(view(value))
                after = torch.rand(2)
                torch.manual_seed(3)
                found = draw(view(distribute_tensor(value, mesh, places)))
                assert torch.equal(torch.rand(2), after), places
                assert torch.equal(found.full_tensor(), expected), places

    run_ranks(4, on_ranks)


def test_dropout_moves_no_activation():
    def on_ranks():
        mesh = mesh_of(2, 2)
        x = torch.randn(5, 3, 4).requires_grad_()

        def seeded(x):
            torch.manual_seed(7)
            return F.dropout(x, 0.3) + F.dropout2d(x * 2, 0.5)

        with warnings.catch_warnings(action="error", category=FallbackWarning):
            for places in ((S(0), S(1)), (P, S(0)), (R, P), (S(2), S(2)), (R, R)):
                assert not compare(seeded, [x], [places], mesh)

    run_ranks(4, on_ranks)


def test_dropout_that_drops_nothing_is_free():
    def on_ranks():
        mesh = mesh_of(2, 2)
        x = torch.randn(5, 3, 4).requires_grad_()
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            for places in ((S(0), S(1)), (P, S(0)), (R, P), (R, R)):
                for function in (
                    lambda x: F.dropout(x, 0.0),
                    lambda x: F.dropout(x, 0.5, training=False),
                    lambda x: F.dropout(x * 1, 0.5, False, True),
                    lambda x: torch.dropout(x, 0.5, False),
                    lambda x: nn.Dropout(0.5).eval()(x),
                    lambda x: F.dropout2d(x, 0.0),
                    lambda x: F.alpha_dropout(x, 0.5, False),
                    lambda x: F.feature_alpha_dropout(x, 0.0, True),
                    lambda x: F.dropout(x, 1.0),
                ):
                    assert not compare(function, [x], [places], mesh)
            compare(lambda x: F.rrelu(x), [x], [(S(0), P)], mesh)
        torch.manual_seed(1)
        y = distribute_tensor(x.detach(), mesh, (S(0), R))
        assert not torch.equal(F.dropout(y, 0.5).full_tensor(), x)  # p is part of the decision
        assert torch.equal(F.dropout(y, 0.0).full_tensor(), x)

    run_ranks(4, on_ranks)
