"""Attention rules against one device."""

import itertools
import warnings
from functools import partial

import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

SDPA = F.scaled_dot_product_attention


def _attend(mesh_sizes, q, k, v, placements, mask=None, mask_at=None, free=None, **options):
    """q, k, v: shapes; placements: (q's, k's and v's). Returns the number of collectives per case."""
    warnings.simplefilter("error", FallbackWarning)
    mesh = mesh_of(*mesh_sizes)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (q, k, v)]
    if mask is not None:
        tensors.append(mask.detach().double().requires_grad_() if mask.is_floating_point() else mask)
    for q_at, kv_at in placements:
        at = [q_at, kv_at, kv_at, *([mask_at] if mask is not None else [])]
        events = compare(lambda *t: SDPA(*t, **options), tensors, at, mesh)
        if free is not None:
            assert not free(q_at, kv_at) or not events, (q_at, kv_at, events)


def _heads_or_batch(*placements):
    return all(p in (Replicate(), Shard(0), Shard(1)) for at in placements for p in at)


def test_all_placements_alike_on_two_axes():
    def check():
        shape = (3, 5, 7, 4)
        alike = [(at, at) for at in placements_for(shape, 2)]
        for causal in (False, True):
            _attend((2, 2), shape, shape, shape, alike, free=_heads_or_batch, is_causal=causal)

    run_ranks(4, check)


def test_all_pairs_on_one_axis():
    def check():
        q, kv = (2, 5, 6, 4), (2, 5, 9, 4)
        pairs = list(itertools.product(placements_for(q, 1), placements_for(kv, 1)))
        for causal in (False, True):
            _attend((4,), q, kv, kv, pairs, is_causal=causal, scale=0.3)

    run_ranks(4, check)


def test_q_sharded_on_its_sequence_by_both_axes():
    def check():
        q, kv = (2, 2, 5, 4), (2, 2, 7, 4)
        whole = (Replicate(), Replicate())
        places = [((Shard(2), Shard(2)), whole), ((Shard(1), Shard(2)), (Shard(1), Replicate()))]
        for causal in (False, True):
            _attend((2, 2), q, kv, kv, places, free=lambda *_: True, is_causal=causal)

    run_ranks(4, check)


@in_turns(3)
def test_grouped_queries():
    def check():
        for heads, kv_heads in ((8, 4), (8, 2), (6, 3), (4, 1), (6, 2)):
            q, kv = (2, heads, 5, 4), (2, kv_heads, 5, 4)
            places = [
                (q_at, kv_at)
                for q_at in itertools.product([Replicate(), Shard(0), Shard(1), Shard(2)], repeat=2)
                for kv_at in (q_at, (Replicate(), Replicate()), (Replicate(), Shard(1)))
            ]

            def free(q_at, kv_at, kv_heads=kv_heads):
                kv_whole = kv_at == (Replicate(), Replicate())
                divides = kv_heads % 4 == 0 and _heads_or_batch(q_at, kv_at) and q_at == kv_at
                return kv_whole or divides

            _attend((2, 2), q, kv, kv, places[::2], free=free, enable_gqa=True)
            interleaved = [(InterleavedShard(1, 2), Replicate()), (Replicate(), InterleavedShard(1, 2))]
            _attend((2, 2), q, kv, kv, [(at, (Replicate(), Replicate())) for at in interleaved], enable_gqa=True)
            _attend((2, 2), q, kv, kv, places[1::4], free=free, is_causal=True, enable_gqa=True)

    run_ranks(4, check)


@in_turns(3)
def test_masks_broadcast():
    def check():
        q, kv = (2, 4, 5, 4), (2, 4, 7, 4)
        grid = itertools.product([Replicate(), Shard(0), Shard(1), Shard(2)], repeat=2)
        places = [(at, tuple(Replicate() if p == Shard(2) else p for p in at)) for at in grid]
        for shape in ((5, 7), (1, 7), (2, 1, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7), (4, 5, 1)):
            mask = torch.rand(shape) > 0.3
            mask[..., 0] = True
            _attend((2, 2), q, kv, kv, places, mask=mask, free=lambda *_: True)
            _attend((2, 2), q, kv, kv, places[:6], mask=torch.randn(shape), mask_at=(Replicate(), Replicate()))
            sharded = tuple(Shard(len(shape) - 2) if shape[-2] > 1 else Replicate() for _ in range(2))
            _attend((2, 2), q, kv, kv, places, mask=mask, mask_at=sharded)

    run_ranks(4, check)


def test_batch_dims_broadcast_or_are_absent():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        for q, kv in (((5, 4), (7, 4)), ((3, 5, 4), (3, 7, 4)), ((3, 5, 4), (1, 7, 4)), ((1, 5, 4), (3, 7, 4))):
            places = [(at, (Replicate(), Replicate())) for at in placements_for(q, 2)]
            _attend((2, 2), q, kv, kv, places)

    run_ranks(4, check)


def test_pending_value_stays_pending():
    def check():
        shape = (2, 4, 5, 4)
        tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        at = [(Replicate(), Shard(1)), (Replicate(), Shard(1)), (Partial(), Shard(1))]
        assert not compare(SDPA, tensors, at, mesh_of(2, 2))

    run_ranks(4, check)


def test_dropout_is_that_of_one_device():
    def check():
        warnings.simplefilter("ignore", FallbackWarning)
        tensors = [torch.randn((2, 4, 5, 4), requires_grad=True) for _ in range(3)]

        def dropped(*t):
            torch.manual_seed(3)
            return SDPA(*t, dropout_p=0.5)

        for at in placements_for((2, 4, 5, 4), 2, partial=False):
            compare(dropped, tensors, [at] * 3, mesh_of(2, 2))
        assert not compare(lambda *t: SDPA(*t, dropout_p=0.0), tensors, [(Shard(0), Shard(1))] * 3, mesh_of(2, 2))

    run_ranks(4, check)


def test_multi_head_attention_module():
    """nn.MultiheadAttention runs its Python body on DTensors, with and without the weights of attention."""

    def check():
        warnings.simplefilter("ignore", FallbackWarning)
        torch.manual_seed(0)
        module = torch.nn.MultiheadAttention(8, 4, batch_first=True).double()
        names = list(dict(module.named_parameters()))
        parameters = [p.detach().clone().requires_grad_() for p in module.parameters()]
        x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = True
        causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
        mesh = mesh_of(2, 2)

        def attend(x, *parameters, **options):
            return torch.func.functional_call(module, dict(zip(names, parameters)), (x, x, x), options)

        whole = [(Replicate(), Replicate())] * len(parameters)
        for at in placements_for(x.shape, 2):
            for options in (
                {},
                {"need_weights": False},
                {"need_weights": False, "attn_mask": causal, "is_causal": True},
            ):
                compare(partial(attend, **options), [x, *parameters], [at, *whole], mesh)
        options = {"key_padding_mask": padding, "average_attn_weights": False}
        compare(partial(attend, **options), [x, *parameters], [(Shard(0), Replicate()), *whole], mesh)
        # Data parallel: nothing moves.
        for options in ({}, {"need_weights": False}):
            events = compare(partial(attend, **options), [x, *parameters], [(Shard(0), Replicate()), *whole], mesh)
            assert not events, events

    run_ranks(4, check)
