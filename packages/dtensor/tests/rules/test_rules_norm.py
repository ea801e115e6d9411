"""Softmax, vector norms and normalisation layers on every layout against one device."""

import pytest
import torch
import torch.nn.functional as F

from vescale_testkit import mesh_of, run_ranks

SOFTMAX = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax_0": lambda x: x.softmax(0),
    "softmax_dtype": lambda x: torch.softmax(x, 1, dtype=torch.float64),
    "functional_dtype": lambda x: F.log_softmax(x, 1, dtype=torch.float64),
    "log_softmax": lambda x: x.log_softmax(1),
    "log_softmax_0": lambda x: torch.log_softmax(x, dim=0),
    "softmin": lambda x: F.softmin(x, dim=1),
    "special": lambda x: torch.special.log_softmax(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, (0, 1)),
    "logsumexp_keepdim": lambda x: x.logsumexp(1, keepdim=True),
}
NORMS = {
    "norm": lambda x: x.norm(),
    "norm_dim": lambda x: torch.norm(x, dim=1, keepdim=True),
    "norm_p": lambda x: x.norm(3, 0),
    "norm_1": lambda x: x.norm(p=1),
    "norm_half": lambda x: torch.norm(x, 0.5, 1),
    "norm_0": lambda x: torch.linalg.vector_norm(x.detach().round(), 0, 1),
    "norm_inf": lambda x: x.round().norm(float("inf"), dim=(0, 1)),
    "norm_minus_inf": lambda x: torch.linalg.vector_norm(x, -float("inf"), 1),
    "norm_minus_1": lambda x: torch.linalg.vector_norm(x, -1, 1),
    "vector_norm_dtype": lambda x: torch.linalg.vector_norm(x, dim=0, dtype=torch.float64),
    "linalg_norm": lambda x: torch.linalg.norm(x),
    "linalg_norm_dim": lambda x: torch.linalg.norm(x, 1, dim=1),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "spectral_norm": lambda x: torch.linalg.norm(x, 2),
    "nuclear_norm": lambda x: torch.norm(x, "nuc"),
    "dist": lambda x: torch.dist(x, x * x, 3),
    "normalize": lambda x: F.normalize(x),
    "normalize_1": lambda x: F.normalize(x, p=1.0, dim=0),
}


def check(functions, shapes, sizes):
    import warnings

    from vescale_dtensor._dispatch.fallback import FallbackWarning
    from vescale_testkit.oracle import compare, placements_for

    warnings.simplefilter("error", FallbackWarning)
    mesh = mesh_of(*sizes)
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
        for placements in placements_for(shape, mesh.ndim):
            for name, function in functions.items():
                try:
                    compare(function, [x], [placements], mesh, rtol=1e-5, atol=1e-5)
                except BaseException as error:
                    error.add_note(f"{name} of {list(shape)} on {placements}")
                    raise


@pytest.mark.parametrize("functions", [SOFTMAX, NORMS], ids=["softmax", "norms"])
@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_every_layout(functions, sizes):
    run_ranks(4, check, functions, [(5, 3)] if len(sizes) == 2 else [(5, 3), (2, 9)], sizes)


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_layer_norm_and_rms_norm(sizes):
    def body():
        import warnings

        from vescale_dtensor._dispatch.fallback import FallbackWarning
        from vescale_testkit.oracle import compare, placements_for

        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(*sizes)
        for shape, normalized in (((3, 2, 5), (5,)), ((5, 2, 4), (2, 4))):
            generator = torch.Generator().manual_seed(3)
            x, w, b = (torch.randn(s, generator=generator).requires_grad_() for s in (shape, normalized, normalized))
            layers = (
                lambda x, w, b, n=normalized: F.layer_norm(x, n, w, b),
                lambda x, w, b, n=normalized: torch.layer_norm(x, n, w, b, 1e-3),
                lambda x, w, b, n=normalized: F.rms_norm(x, n, w) * b,
                lambda x, w, b, n=normalized: torch.rms_norm(x, n, eps=1e-2) * w + b,
            )
            weights = [None, *list(placements_for(normalized, mesh.ndim))[:: 3 if mesh.ndim == 2 else 1]]
            for i, layout in enumerate(placements_for(shape, mesh.ndim)):
                of_weight = weights[i % len(weights)]
                given = (x, w, b) if of_weight is not None else (x, w.detach(), b.detach())
                for layer in layers:
                    compare(layer, given, (layout, of_weight, of_weight), mesh, rtol=1e-5, atol=1e-5)

    run_ranks(4, body)


def test_half_precision():
    def body():
        from vescale_dtensor import Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(4)
        x = torch.randn(3, 64).bfloat16().requires_grad_()
        for function in (
            lambda x: F.layer_norm(x, (64,)), lambda x: F.rms_norm(x, (64,)), lambda x: x.softmax(1),
            lambda x: x.logsumexp(1), lambda x: x.norm(dim=1), lambda x: x.norm(3), lambda x: F.normalize(x),
        ):  # fmt: skip
            compare(function, [x], [(Shard(1),)], mesh, rtol=1.6e-2, atol=1e-2)

    run_ranks(4, body)


def test_infinite_rows_and_zeros():
    def body():
        from vescale_dtensor import Shard
        from vescale_testkit.oracle import compare

        inf, nan = float("inf"), float("nan")
        mesh = mesh_of(4)
        for row in ([-inf] * 5, [-inf, 1, 2, -inf, 0], [inf, 0, 1, 2, 3], [nan, 0, 1, 2, 3]):
            x = torch.tensor([row, row[::-1]])
            x.requires_grad_(bool(x.isfinite().any()))
            for function in (lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: x.logsumexp(1)):
                compare(function, [x], [(Shard(1),)], mesh)
        zeros = torch.zeros(2, 5).requires_grad_()
        for order in (0.5, 1, 2, 3, inf):
            compare(lambda x, order=order: x.norm(order, 1), [zeros], [(Shard(1),)], mesh)
        compare(lambda x: x.std(1), [zeros], [(Shard(1),)], mesh)
        compare(lambda x: F.normalize(x), [zeros], [(Shard(1),)], mesh)

    run_ranks(4, body)


def test_communication():
    def body():
        from vescale_dtensor import Replicate, Shard
        from vescale_testkit.oracle import compare

        x, w = torch.randn(8, 512).requires_grad_(), torch.randn(512).requires_grad_()
        mesh = mesh_of(4)
        along = (
            lambda x, w: x.softmax(1), lambda x, w: x.log_softmax(1), lambda x, w: x.logsumexp(1),
            lambda x, w: F.layer_norm(x, (512,), w), lambda x, w: F.rms_norm(x, (512,), w),
            lambda x, w: x.norm(dim=1), lambda x, w: F.normalize(x),
        )  # fmt: skip
        for function in along:
            events = compare(function, [x, w], [(Shard(0),), (Replicate(),)], mesh)
            assert not events
            events = compare(function, [x, w], [(Shard(1),), (Shard(0),)], mesh, rtol=1e-5, atol=1e-5)
            assert len(events) <= 2
            assert 0 < sum(event.received for event in events) < x.nbytes * 3 / 4 / 10, events

    run_ranks(4, body)


# --- by channel ----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_batch_norm(sizes):
    def body():
        import warnings

        from vescale_dtensor import Replicate, Shard, distribute_tensor
        from vescale_dtensor._dispatch.fallback import FallbackWarning
        from vescale_testkit.oracle import compare, placements_for

        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(*sizes)
        generator = torch.Generator().manual_seed(3)
        for shape in ((5, 4, 3), (3, 5)):
            x = torch.randn(shape, generator=generator).requires_grad_()
            w, b = (torch.randn(shape[1], generator=generator).requires_grad_() for _ in range(2))
            mean, var = torch.randn(shape[1], generator=generator), torch.rand(shape[1], generator=generator) + 0.5
            layouts = [tuple(p) for p in placements_for(shape, mesh.ndim)]
            channels = [tuple(p) for p in placements_for((shape[1],), mesh.ndim, partial=False)]
            for i, layout in enumerate(layouts):
                for training in (True, False):
                    of_channels = channels[i % len(channels)]
                    for running in (None, of_channels):
                        def layer(x, w, b, mean, var, training=training):
                            mean, var = mean.clone(), var.clone()
                            return F.batch_norm(x, mean, var, w, b, training, 0.3), mean, var

                        placed = (layout, of_channels, channels[(i + 1) % len(channels)], running, running)
                        compare(layer, (x, w, b, mean, var), placed, mesh, rtol=1e-4, atol=1e-5)
                compare(
                    lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False), [x], [layout], mesh,
                    rtol=1e-4, atol=1e-5,
                )  # fmt: skip
        layer = torch.nn.BatchNorm1d(5)
        layer(distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1)))
        assert type(layer.running_mean) is torch.Tensor

    run_ranks(4, body)


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_group_norm_and_instance_norm(sizes):
    def body():
        import warnings

        from vescale_dtensor._dispatch.fallback import FallbackWarning
        from vescale_testkit.oracle import compare, placements_for

        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(*sizes)
        generator = torch.Generator().manual_seed(3)
        for shape in ((5, 8, 3), (1, 8, 3)):
            x = torch.randn(shape, generator=generator).requires_grad_()
            w, b = (torch.randn(shape[1], generator=generator).requires_grad_() for _ in range(2))
            channels = list(placements_for((shape[1],), mesh.ndim))
            for i, layout in enumerate(placements_for(shape, mesh.ndim)):
                of_channels = channels[i % len(channels)]
                for layer in (
                    lambda x, w, b: F.group_norm(x, 4, w, b), lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-3),
                    lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
                    lambda x, w, b: F.instance_norm(x, w.detach(), b.detach().abs() + 1, use_input_stats=False),
                ):  # fmt: skip
                    compare(layer, (x, w, b), (layout, of_channels, of_channels), mesh, rtol=1e-4, atol=1e-5)

    run_ranks(4, body)


def test_no_communication_by_channel():
    def body():
        from vescale_dtensor import Replicate, Shard
        from vescale_testkit.oracle import compare

        mesh = mesh_of(2, 2)
        x, w, b = (torch.randn(shape).requires_grad_() for shape in ((4, 8, 3), 8, 8))
        for layer in (
            lambda x, w, b: F.group_norm(x, 4, w, b), lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
            lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().abs(), w, b),
        ):  # fmt: skip
            for of_channels in ((Replicate(), Shard(0)), (Replicate(), Replicate())):
                assert not compare(layer, (x, w, b), ((Shard(0), Shard(1)), of_channels, of_channels), mesh)
        over_channels = ((Shard(1), Replicate()), (Shard(0), Replicate()), (Shard(0), Replicate()))
        train = lambda x, w, b: F.batch_norm(x, None, None, w, b, True)
        assert not compare(train, (x, w, b), over_channels, mesh)
        whole = (Replicate(), Replicate())
        events = compare(train, (x, w, b), ((Shard(0), Shard(1)), whole, whole), mesh)
        assert len(events) == 2
        assert sum(event.received for event in events) <= 2 * 4 * w.nbytes

    run_ranks(4, body)
