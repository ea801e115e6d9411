"""Convolution, pooling and resampling against one device."""

# ruff: noqa: B023  every function that closes over a loop variable runs within that turn of the loop

import warnings

import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P, S = Replicate(), Partial(), Shard


def rand(*shape, grad=True):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def strictly(function):
    """On the ranks a fallback is an error."""

    def on_ranks():
        with warnings.catch_warnings(action="error", category=FallbackWarning):
            function()

    run_ranks(4, on_ranks)


def test_conv2d_on_the_grid():
    def check():
        mesh = mesh_of(2, 2)
        x, weight, bias = rand(3, 4, 5, 5), rand(6, 4, 3, 3), rand(6)
        ways = [
            (R, R),
            (S(0), R),
            (S(0), S(1)),
            (S(1), S(0)),
            (P, S(1)),
            (S(2), S(3)),
            (S(0), S(0)),
            (S(1), S(1)),
            (P, P),
        ]
        kernels = [(R, R), (R, S(0)), (S(1), S(0)), (S(0), S(0)), (P, R), (S(2), R)]
        for xp in ways:
            for wp in kernels:
                compare(
                    lambda x, w, b: F.conv2d(x, w, b, 2, 1), [x, weight, bias], [xp, wp, (R, S(0))], mesh,
                    rtol=1e-4, atol=1e-4,
                )  # fmt: skip

    strictly(check)


def test_free_layouts_do_not_communicate():
    def check():
        mesh = mesh_of(2, 2)
        x, weight, bias = rand(4, 4, 5, 5), rand(6, 4, 3, 3), rand(6)
        close = {"rtol": 1e-4, "atol": 1e-4}
        for places in (
            [(S(0), R), (R, R), (R, R)],
            [(S(0), R), (R, S(0)), (R, S(0))],
            [(S(0), S(1)), (R, S(1)), (R, R)],
            [(P, S(0)), (R, R), (R, R)],
            [(R, R), (S(0), S(0)), (S(0), S(0))],
        ):
            for call in (lambda x, w, b: F.conv2d(x, w, b), lambda x, w, b: torch.conv2d(x, w, b, padding="same")):
                assert not compare(call, [x, weight, bias], places, mesh, **close)
        assert not compare(
            F.conv_transpose2d, [x, rand(4, 6, 3, 3), bias], [(S(0), S(1)), (R, S(0)), (R, R)], mesh, **close
        )

    strictly(check)


def test_every_rank_of_dims():
    def check():
        mesh = mesh_of(2, 2)
        close = {"rtol": 1e-4, "atol": 1e-4}
        for n, conv, transposed in (
            (1, F.conv1d, F.conv_transpose1d), (2, F.conv2d, F.conv_transpose2d), (3, F.conv3d, F.conv_transpose3d),
        ):  # fmt: skip
            size, kernel = (5,) * n, (2,) * n
            for places in (
                [(S(0), S(1)), (R, S(1)), (R, R)], [(S(0), S(0)), (R, R), (R, R)], [(R, S(1)), (S(0), R), (R, R)],
            ):  # fmt: skip
                compare(
                    lambda x, w, b: conv(x, w, b, stride=2),
                    [rand(3, 5, *size), rand(7, 5, *kernel), rand(7)],
                    places,
                    mesh,
                    **close,
                )
                compare(
                    lambda x, w, b: transposed(x, w, b, stride=2, output_padding=1),
                    [rand(3, 5, *size), rand(5, 7, *kernel), rand(7)],
                    places,
                    mesh,
                    **close,
                )
            compare(conv, [rand(4, *size), rand(6, 4, *kernel)], [(S(0), R), (R, S(0))], mesh, **close)

    strictly(check)


def test_groups():
    def check():
        mesh = mesh_of(2, 2)
        close = {"rtol": 1e-4, "atol": 1e-4}
        for groups, x, weight in (
            (4, rand(3, 8, 4, 4), rand(12, 2, 2, 2)),
            (8, rand(3, 8, 4, 4), rand(8, 1, 2, 2)),
            (3, rand(2, 6, 4, 4), rand(6, 2, 2, 2)),
        ):
            bias = rand(weight.shape[0])
            for xp in ((S(0), R), (R, S(1)), (S(1), S(1)), (S(0), S(1)), (InterleavedShard(1, 2), R), (P, R)):
                if groups == 3 and InterleavedShard(1, 2) in xp:
                    continue
                for wp in ((R, R), (R, S(0)), (S(0), S(0))):
                    events = compare(
                        lambda x, w, b: F.conv2d(x, w, b, groups=groups),
                        [x, weight, bias],
                        [xp, wp, (R, R)],
                        mesh,
                        **close,
                    )
                    if groups == 8 and xp in ((S(0), S(1)), (R, S(1))) and wp in ((R, R), (R, S(0))):
                        assert not events
            single = [rand(*x.shape[1:]), weight, bias]
            compare(
                lambda x, w, b: F.conv2d(x, w, b, groups=groups),
                single,
                [(R, S(1)), (S(0), R), (S(0), R)],
                mesh,
                **close,
            )
            twisted = rand(x.shape[1], 2, 2, 2)
            compare(
                lambda x, w: F.conv_transpose2d(x, w, None, 2, 0, 0, groups),
                [x, twisted],
                [(S(0), S(1)), (R, S(0))],
                mesh,
                **close,
            )

    strictly(check)


def test_whole_groups_that_are_dealt_out_stay_where_they_are():
    """As the heads of queries, and the fewer ones of keys, that are convolved together."""

    def check():
        mesh = mesh_of(2, 2)
        close = {"rtol": 1e-4, "atol": 1e-4}
        dealt, segments = InterleavedShard(1, 1, (0, 0, 1, 1, 0, 1)), InterleavedShard(1, 2)
        for groups, place, is_kept in (
            (12, dealt, True),
            (6, dealt, True),
            (3, dealt, False),  # a chunk is half of a group
            (2, segments, False),
            (4, segments, True),
            (8, segments, True),
        ):
            x, weight, bias = rand(3, 24, 4, 4), rand(24, 24 // groups, 2, 2), rand(24)
            more, twisted = rand(48, 24 // groups, 2, 2), rand(24, 2, 2, 2)
            own = InterleavedShard(0, place.groups, place.order)
            for xp in ((R, place), (place, R)):
                at = xp.index(place)
                wp = (own, R) if at == 0 else (R, own)
                for kernel, places in ((weight, (R, R)), (weight, wp), (more, (R, R))):
                    events = compare(
                        lambda x, w: F.conv2d(x, w, groups=groups), [x, kernel], [xp, places], mesh, **close
                    )
                    assert is_kept == (not events), (groups, xp, places)
                compare(
                    lambda x, w, b: F.conv2d(x, w, b, groups=groups),
                    [x, weight, bias],
                    [xp, (S(0), R), wp],
                    mesh,
                    **close,
                )
                events = compare(
                    lambda x, w: F.conv_transpose2d(x, w, groups=groups), [x, twisted], [xp, (R, R)], mesh, **close
                )
                assert is_kept == (not events), (groups, xp)
            compare(lambda x, w: F.conv2d(x, w, groups=groups), [x, weight], [(S(0), place), (S(0), R)], mesh, **close)
            compare(lambda x, w: F.conv2d(x, w, groups=groups), [x, weight], [(S(1), R), (R, own)], mesh, **close)

    strictly(check)


def test_empty_shards():
    def check():
        mesh = mesh_of(4)
        close = {"rtol": 1e-4, "atol": 1e-4}
        for xp, wp in (((S(0),), (R,)), ((R,), (S(0),)), ((S(1),), (S(1),))):
            compare(
                lambda x, w, b: F.conv2d(x, w, b),
                [rand(2, 3, 4, 4), rand(5, 3, 2, 2), rand(5)],
                [xp, wp, (R,)],
                mesh,
                **close,
            )
            compare(lambda x: F.max_pool2d(x, 2), [rand(2, 3, 4, 4)], [xp], mesh)
            compare(lambda x: F.adaptive_avg_pool2d(x, 2), [rand(2, 3, 4, 4)], [xp], mesh)
            compare(lambda x: F.interpolate(x, scale_factor=2), [rand(2, 3, 4, 4)], [xp], mesh)
            compare(lambda x: F.pad(x, (1, 1), mode="reflect"), [rand(2, 3, 4)], [xp], mesh)

    strictly(check)


POOLS = [
    (4, lambda x: F.max_pool2d(x, 2)),
    (4, lambda x: F.max_pool2d(x, 2, return_indices=True)),
    (4, lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    (4, lambda x: torch.max_pool2d(x, 2)),
    (4, lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    (4, lambda x: F.avg_pool2d(x, 2)),
    (4, lambda x: F.adaptive_avg_pool2d(x, (2, 1))),
    (4, lambda x: F.adaptive_max_pool2d(x, 2)),
    (4, lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)),
    (4, lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2)),
    (3, lambda x: F.max_pool1d(x, 2)),
    (3, lambda x: F.avg_pool1d(x, 2)),
    (3, lambda x: F.adaptive_avg_pool1d(x, 2)),
    (3, lambda x: F.adaptive_max_pool1d(x, 2)),
    (3, lambda x: F.max_pool2d(x, 2)),
    (5, lambda x: F.max_pool3d(x, 2)),
    (5, lambda x: F.avg_pool3d(x, 2)),
    (5, lambda x: F.adaptive_avg_pool3d(x, 2)),
    (4, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    (4, lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear")),
    (4, lambda x: F.interpolate(x, size=(3, 7), mode="nearest")),
    (4, lambda x: F.interpolate(x, size=(3, 7), mode="bicubic", align_corners=True)),
    (3, lambda x: F.interpolate(x, scale_factor=1.5, mode="linear")),
    (4, lambda x: F.pixel_shuffle(x, 2)),
    (4, lambda x: F.pixel_unshuffle(x, 2)),
    (4, lambda x: F.channel_shuffle(x, 2)),
    (4, lambda x: F.unfold(x, 2, stride=2)),
    (4, lambda x: F.fold(F.unfold(x, 2, stride=2), (4, 4), 2, stride=2)),
    (4, lambda x: F.local_response_norm(x, 2)),
    (4, lambda x: F.glu(x, 1)),
    (4, lambda x: F.glu(x)),
]


def test_pools_on_the_grid():
    def check():
        mesh = mesh_of(2, 2)
        for ndim, function in POOLS:
            shape = (3, 4, 4, 4, 4)[:ndim]
            x = rand(*shape)
            for places in (
                (R, R),
                (S(0), R),
                (S(0), S(1)),
                (S(1), S(0)),
                (S(0), S(0)),
                (P, S(1)),
                (S(2), P),
                (R, S(ndim - 1)),
            ):
                compare(function, [x], [places], mesh, rtol=1e-4, atol=1e-5)

    strictly(check)


def test_pools_of_batch_and_channels_are_free():
    def check():
        mesh = mesh_of(2, 2)
        for function in (POOLS[0][1], POOLS[1][1], POOLS[5][1], POOLS[6][1], POOLS[18][1]):
            assert not compare(function, [rand(4, 4, 4, 4)], [(S(0), S(1))], mesh, rtol=1e-4, atol=1e-5)
        assert not compare(POOLS[5][1], [rand(4, 4, 4, 4)], [(P, S(1))], mesh, rtol=1e-4, atol=1e-5)

    strictly(check)


def test_grids_bilinear_and_prelu():
    def check():
        mesh = mesh_of(2, 2)
        for places in placements_for((3, 4), 2):
            compare(lambda x, w: F.prelu(x, w), [rand(3, 4), rand(4)], [places, (R, S(0))], mesh)
            compare(lambda x, w: F.prelu(x, w), [rand(3, 4), rand(1)], [places, (R, R)], mesh)
            compare(
                F.bilinear,
                [rand(3, 4), rand(3, 2), rand(5, 4, 2), rand(5)],
                [places, (S(0), S(1)), (R, S(0)), (R, R)],
                mesh,
                rtol=1e-4,
                atol=1e-4,
            )
        for xp in ((R, R), (S(0), S(1)), (S(0), S(0)), (P, S(0)), (S(2), R)):
            for gp in ((R, R), (S(0), R), (S(1), P)):
                compare(
                    lambda x, g: F.grid_sample(x, g, align_corners=False),
                    [rand(3, 4, 4, 4), rand(3, 2, 2, 2)],
                    [xp, gp],
                    mesh,
                    rtol=1e-4,
                    atol=1e-4,
                )
        for tp in ((R, R), (S(0), R), (S(0), S(0)), (S(0), P), (S(1), R)):
            compare(lambda t: F.affine_grid(t, (3, 4, 2, 2), align_corners=False), [rand(3, 2, 3)], [tp], mesh)

    strictly(check)


def test_transposed_groups_of_one_channel_that_give_several():
    """Channels of input and result are cut into other pieces: groups stay whole where ranks would get parts of one."""

    def check():
        mesh = mesh_of(2, 2)
        x, weight, bias = rand(2, 2, 4, 4), rand(2, 2, 3, 3), rand(4)
        for places in ([(S(0), S(3)), (S(0), S(3)), (S(0), S(0))], [(S(1), R), (S(0), R), (R, S(0))]):
            for operands in ([x, weight, bias], [x, weight]):
                compare(
                    lambda *given: F.conv_transpose2d(*given, stride=2, groups=2),
                    operands,
                    places[: len(operands)],
                    mesh,
                    rtol=1e-4,
                    atol=1e-4,
                )

    run_ranks(4, check)
