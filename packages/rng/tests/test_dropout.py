"""Dropout in all forms: the noise is bitwise one CPU device's, for every layout, and so is the generator after it."""

import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import vescale_rng
from vescale_dtensor import FallbackWarning, Partial, RaggedShard, Replicate, Shard, distribute_tensor, from_local
from vescale_testkit import in_turns, mesh_of, run_ranks, slice_of
from vescale_testkit.oracle import STRIDED_VIEWS, compare

R, P, S = Replicate(), Partial(), Shard


def run(function, *args, timeout=120):
    """On four ranks, each with this package's rules; a fallback is an error."""

    def on_rank():
        assert vescale_rng.__version__
        warnings.simplefilter("error", FallbackWarning)
        return function(*args)

    return run_ranks(4, on_rank, timeout=timeout)


def seeded(function):
    """`function` from the same state each time; `after` collects the generator's states."""

    def call(*args):
        torch.manual_seed(4)
        out = function(*args)
        call.after.append(torch.get_rng_state())
        return out

    call.after = []
    return call


DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, True, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "torch.dropout_": lambda x: torch.dropout_(x * 1, 0.4, True),
    "module": nn.Dropout(0.3),
    "transposed": lambda x: F.dropout(x.transpose(0, 2), 0.4),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout1d of one": lambda x: F.dropout1d(x[0], 0.4),
    "dropout2d": lambda x: F.dropout2d(x[None], 0.4),
    "dropout3d": lambda x: F.dropout3d(x[None, None], 0.4),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4),
    "alpha_dropout in place": lambda x: F.alpha_dropout(x * 1, 0.4, True, True),
    "torch.alpha_dropout_": lambda x: torch.alpha_dropout_(x * 1, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "feature_alpha module": nn.FeatureAlphaDropout(0.3),
    "nothing": lambda x: F.dropout(x, 0.0),
    "everything": lambda x: F.dropout(x, 1.0),
    "evaluation": lambda x: F.dropout(x, 0.5, False),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_values_gradients_and_generator(name):
    every = [*itertools.product([R, P, S(0), S(1), S(2)], repeat=2), (RaggedShard((1,), (1, 2)), R)]
    places = slice_of(every, 3)

    def layouts():
        mesh = mesh_of(2, 2)
        for pair in places:
            value = torch.randint(-9, 9, (5, 6, 7), generator=torch.Generator().manual_seed(1))
            function = seeded(DROPOUTS[name])
            # Whole numbers, so that the parts of a partial sum add up without rounding but the products'.
            compare(function, [value.double().requires_grad_()], [pair], mesh, rtol=1e-12, atol=1e-12)
            assert torch.equal(*function.after), pair

    run(layouts)


@in_turns(3)
@pytest.mark.parametrize("name", STRIDED_VIEWS)
def test_masks_after_strided_views(name):
    """Of the view as it lies, of what is computed with it, of a copy; and numbers drawn like it."""
    view = STRIDED_VIEWS[name]
    draws = (
        lambda x: F.dropout(x, 0.4),
        lambda x: F.dropout(x * 2, 0.4, True, True),
        lambda x: F.dropout(x.contiguous(), 0.4),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: (x * 2).normal_(),
    )

    def masks():
        value = torch.rand(8, 8, generator=torch.Generator().manual_seed(2))
        every = itertools.product([R, S(0), S(1)], repeat=2)
        for mesh, places in [(mesh_of(2, 2), pair) for pair in every] + [(mesh_of(4), (S(d),)) for d in (0, 1)]:
            for i, draw in enumerate(draws):
                function = seeded(lambda x, draw=draw: draw(view(x)))
                expected = function(value)
                found = function(distribute_tensor(value, mesh, places)).full_tensor()
                assert torch.equal(found, expected) and torch.equal(*function.after), (places, i)

    run(masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_masks_bitwise(dtype):
    def masks():
        for mesh, pairs in (
            (mesh_of(2, 2), [(R, S(0)), (S(1), S(0)), (S(1), S(1))]),
            (mesh_of(4), [(R,), (S(0),), (S(1),)]),
        ):
            for shape in ((1, 1), (3, 5), (16, 1), (40, 25), (600, 1000)):
                for places in pairs:
                    function = seeded(lambda x: F.dropout(x, 0.1))
                    compare(function, [torch.ones(shape, dtype=dtype)], [places], mesh, bitwise=True)
                    assert torch.equal(*function.after)

    run(masks)


def test_a_mask_of_a_pending_input_is_equal_on_all_ranks_and_nothing_is_communicated():
    def masked():
        from vescale_dtensor.debug import comm_trace

        x = from_local(torch.ones(3, 8), mesh_of(2, 2), (P, S(0)), shape=(6, 8))
        with comm_trace() as trace:
            out = F.dropout(x, 0.5)
        assert len(trace) == 0 and out.placements == (P, S(0))
        return out.to_local()

    by_rank = run(masked)
    assert torch.equal(by_rank[0], by_rank[2]) and torch.equal(by_rank[1], by_rank[3])


def test_rrelu_tells_counts_and_moves_no_values():
    """Forward, backward and the generator bitwise; what is cut in parts or partial is gathered."""

    def leaky():
        from vescale_dtensor.debug import comm_trace

        warnings.simplefilter("ignore", FallbackWarning)
        mesh = mesh_of(2, 2)
        plain = [(S(0), S(1)), (S(1), S(0)), (S(0), S(0)), (R, S(2)), (S(1), S(1)), (R, R)]
        for places in (*plain, (P, R)):
            for shape in ((5, 6, 3), (2, 1, 7), (8, 4, 40)):
                for dtype in (torch.float32, torch.float64):
                    forms = (F.rrelu, lambda *a, **o: torch.rrelu_(a[0] * 1, *a[1:], **o))
                    for form in forms if places in plain else forms[:1]:
                        function = seeded(lambda x, f=form: f(x, 0.1, 0.4, training=True))
                        x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
                        compare(function, [x.requires_grad_()], [places], mesh)
                        assert torch.equal(*function.after)
        x = distribute_tensor(torch.randn(64, 64), mesh, (S(0), S(1)))
        with comm_trace() as trace:
            F.rrelu(x, training=True)
        assert 0 < trace.received() <= 64 * 2 * 8, str(trace)

    run(leaky)


# --- attention ------------------------------------------------------------------------

ATTENTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": -0.3},
    "grouped": {"enable_gqa": True},
    "everything dropped": {"dropout_p": 1.0},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    options = {"dropout_p": 0.3, **ATTENTIONS[name]}

    def attentions():
        mesh, kv_heads = mesh_of(2, 2), 2 if name == "grouped" else 4
        for places in [(R, R), (S(0), S(1)), (S(1), S(1)), (S(0), S(0)), (S(2), S(0)), (S(1), S(2)), (S(2), S(2))]:
            for dtype in (torch.float32, torch.float64):
                random = torch.Generator().manual_seed(2)
                sizes = (3, 4, 5, 8), (3, kv_heads, 7, 8), (3, kv_heads, 7, 6)
                tensors = [torch.randn(size, dtype=dtype, generator=random).requires_grad_() for size in sizes]
                rows_whole = tuple(R if place == S(2) else place for place in places)
                function = seeded(lambda *qkv: F.scaled_dot_product_attention(*qkv, **options))
                tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
                compare(function, tensors, [places, rows_whole, rows_whole], mesh, **tolerance)
                assert torch.equal(*function.after), places

    run(attentions)


def test_attention_with_masks_and_pending_values():
    def masked():
        mesh, random = mesh_of(2, 2), torch.Generator().manual_seed(2)
        q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64, generator=random).requires_grad_() for _ in range(3))
        added = torch.randn(4, 6, 6, dtype=torch.float64, generator=random)
        for mask in (added, added > 0, added.clone().requires_grad_()):
            function = seeded(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, 0.3))
            for places in ((S(0), S(1)), (S(1), S(2)), (R, S(0))):
                whole = tuple(R if place == S(2) else place for place in places)
                compare(function, [q, k, v, mask], [places, whole, whole, None], mesh, rtol=1e-12, atol=1e-12)
        function = seeded(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3))
        compare(function, [q, k, v], [(R, S(1)), (R, S(1)), (P, S(1))], mesh, rtol=1e-12, atol=1e-12)
        assert torch.equal(*function.after)

    run(masked)


def test_attention_of_reduced_precision_is_that_of_one_device():
    def replicated():
        mesh, random = mesh_of(4), torch.Generator().manual_seed(2)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            q, k, v = (torch.randn(4, 4, 6, 8, generator=random).to(dtype) for _ in range(3))
            for options in ({"is_causal": True}, {"scale": 0.2}):
                function = seeded(partial(F.scaled_dot_product_attention, dropout_p=0.3, **options))
                compare(function, [q, k, v], [(R,)] * 3, mesh, bitwise=True)
                compare(function, [q, k, v], [(S(0),)] * 3, mesh, bitwise=True)

    run(replicated)


def test_attention_weights_that_are_dropped_are_those_of_one_device():
    """Uniform weights and an identity as values show the mask itself."""

    def shown():
        mesh, size = mesh_of(2, 2), 6
        zeros, eye = torch.zeros(2, 4, size, 8), torch.eye(size).expand(2, 4, size, size).contiguous()
        torch.manual_seed(1)
        wanted = F.scaled_dot_product_attention(zeros, zeros, eye, dropout_p=0.4) != 0
        for places in ((S(0), S(1)), (S(1), S(1)), (S(2), S(1))):
            whole = tuple(R if place == S(2) else place for place in places)
            q, k, v = (distribute_tensor(t, mesh, p) for t, p in ((zeros, places), (zeros, whole), (eye, whole)))
            torch.manual_seed(1)
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
            assert torch.equal(found.full_tensor() != 0, wanted)

    run(shown)


def test_multi_head_attention_module():
    def module():
        warnings.simplefilter("ignore", FallbackWarning)
        mesh = mesh_of(2, 2)
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 4, dropout=0.3, batch_first=True)
        for weights in (False, True):
            function = seeded(lambda x, weights=weights: attention(x, x, x, need_weights=weights)[0])
            x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
            compare(function, [x], [(S(0), R)], mesh, rtol=1e-5, atol=1e-6)
            assert torch.equal(*function.after)

    run(module)


# --- checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_draws_the_same_masks(reentrant):
    def recomputed():
        mesh = mesh_of(2, 2)

        def body(x):
            y = F.dropout(x.sin(), 0.3)
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)
            return F.dropout2d(y, 0.3)

        plain = seeded(body)
        kept = seeded(lambda x: checkpoint(body, x, use_reentrant=reentrant))
        for places in ((S(0), S(1)), (S(1), R), (P, R)):
            for function in (plain, kept):
                x = torch.randn(4, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
                compare(function, [x.requires_grad_()], [places], mesh, rtol=1e-11, atol=1e-11)
        assert all(torch.equal(plain.after[0], state) for state in [*plain.after, *kept.after[:2]])

    run(recomputed)
