"""Losses over classes and elementwise losses against one device."""

import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_testkit import in_turns, mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R = Replicate()


def _targets(shape, classes, seed=0, ignored=True):
    target = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))
    if ignored and target.numel() > 2:
        target.view(-1)[1::3] = -100
    return target


def _class_grid(mesh_sizes, shape, *, likely=False, kinds=(), targets=None, **options):
    """cross_entropy over every placement of the input; counts what its forward receives."""
    warnings.simplefilter("error", FallbackWarning)
    mesh, axes = mesh_of(*mesh_sizes), len(mesh_sizes)
    dim = min(len(shape) - 1, 1)
    batch = shape[:dim] + shape[dim + 1 :]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    if likely:
        target = torch.rand(shape, dtype=torch.float64).div(shape[dim]).requires_grad_()
    else:
        target = _targets(batch, shape[dim])
    samples = max(1, torch.Size(batch).numel())
    for x_at in placements_for(shape, axes, kinds=kinds):
        for target_at in targets or [None, (R,) * axes]:
            events = compare(lambda x, t: F.cross_entropy(x, t, **options), [x, target], [x_at, target_at], mesh)
            if Partial() not in x_at:
                most = max((event.received for event in events), default=0)
                assert most <= 8 * 3 * 4 * samples + 64, (x_at, most)
                assert targets or len(events) <= 3 * axes, (x_at, events)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_on_two_axes(reduction):
    run_ranks(4, _class_grid, (2, 2), (5, 101), reduction=reduction)
    run_ranks(4, _class_grid, (2, 2), (3, 7, 2), reduction=reduction)
    run_ranks(4, _class_grid, (2, 2), (7,), reduction=reduction)


def test_cross_entropy_on_one_axis_with_fewer_classes_or_samples_than_ranks():
    run_ranks(4, _class_grid, (4,), (5, 101))
    run_ranks(4, _class_grid, (4,), (5, 3))
    run_ranks(4, _class_grid, (4,), (2, 9))
    run_ranks(4, _class_grid, (4,), (1, 2), reduction="none")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_weighted_and_smoothed(smoothing, weighted):
    weight = torch.rand(11, dtype=torch.float64) if weighted else None
    for reduction in ("mean", "none"):
        run_ranks(4, _class_grid, (2, 2), (5, 11), weight=weight, label_smoothing=smoothing, reduction=reduction)
        run_ranks(
            4, _class_grid, (2, 2), (5, 11), weight=weight, label_smoothing=smoothing, reduction=reduction, likely=True
        )


def test_cross_entropy_with_sharded_weight_and_targets():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        x, target = torch.randn(5, 11, dtype=torch.float64, requires_grad=True), _targets((5,), 11)
        weight = torch.rand(11, dtype=torch.float64)
        everything = list(itertools.product(placements_for((5, 11), 2), placements_for((5,), 2)))
        for x_at, target_at in everything:
            compare(F.cross_entropy, [x, target], [x_at, target_at], mesh)
        for x_at, target_at in everything[::13]:
            for weight_at in placements_for((11,), 2):
                compare(
                    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
                    [x, target, weight], [x_at, target_at, weight_at], mesh,
                )  # fmt: skip

    run_ranks(4, check)


def test_cross_entropy_of_ragged_and_interleaved_batches_and_classes():
    kinds = [InterleavedShard(0, 3), RaggedShard((0,), (1, 2)), InterleavedShard(1, 2)]
    targets = [None, (Shard(0), R), (InterleavedShard(0, 3), Shard(0)), (RaggedShard((0,), (1, 2)), R)]
    run_ranks(4, _class_grid, (2, 2), (36, 8), kinds=kinds, targets=targets)


def test_cross_entropy_counts_of_a_vocabulary_parallel_batch():
    """dp x tp: one gather of three numbers per sample over tp, one count over dp, and the backward is silent."""

    def check():
        from vescale_dtensor._communication import events as _events
        from vescale_testkit.oracle import spread

        mesh = mesh_of(2, 2, names=("dp", "tp"))
        x = spread(torch.randn(6, 100, requires_grad=True), mesh, (Shard(0), Shard(1)))
        target = spread(_targets((6,), 100), mesh, (Shard(0), R))
        events = []
        _events.listeners.append(events.append)
        loss = F.cross_entropy(x, target)
        forward = [(e.kind, e.axes, e.received) for e in events]
        assert forward == [("all_gather", ("tp",), 3 * 3 * 4), ("all_reduce", ("dp",), 8)], forward
        assert loss.placements == (Partial(), R)
        del events[:]
        loss.backward()
        _events.listeners.clear()
        return events

    assert run_ranks(4, check) == [[]] * 4


def test_cross_entropy_of_large_and_masked_logits():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh, target = mesh_of(4), torch.tensor([0, 3, 9, -100, 5])
        far = (1e4 + torch.randn(5, 10)).requires_grad_()
        compare(F.cross_entropy, [far, target], [(Shard(1),), None], mesh)
        masked = torch.randn(5, 10)
        masked[:, 6:9] = -torch.inf  # all that one rank holds
        masked[1] = -torch.inf
        masked[1, 3] = 1
        compare(F.cross_entropy, [masked.clone().requires_grad_(), target], [(Shard(1),), None], mesh)
        masked[2] = -torch.inf
        compare(lambda x, t: F.cross_entropy(x, t, reduction="none"), [masked, target], [(Shard(1),), None], mesh)

    run_ranks(4, check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cross_entropy_in_half_precision(dtype):
    """In float16 the sum of these losses is out of range and their mean is not: as near float32 as dtype can be."""

    def check():
        from vescale_testkit.oracle import spread

        mesh, target = mesh_of(2, 2), torch.randint(0, 10, (6000,))
        x = (20 * torch.randn(6000, 10)).to(dtype).requires_grad_()
        wanted = F.cross_entropy(x.float(), target)
        (grad,) = torch.autograd.grad(wanted, x)
        for at in ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), R)):
            sharded = spread(x, mesh, at)
            loss = F.cross_entropy(sharded, target)
            assert loss.dtype == dtype
            torch.testing.assert_close(loss.full_tensor().float(), wanted, rtol=1e-2, atol=0)
            loss.backward()
            torch.testing.assert_close(sharded.grad.full_tensor(), grad, rtol=2e-2, atol=2e-6)

    run_ranks(4, check)


def test_cross_entropy_twice_differentiated():
    def check():
        from vescale_testkit.oracle import spread

        mesh, target = mesh_of(2, 2), _targets((5,), 11)
        x = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)

        def penalty(x):
            (grad,) = torch.autograd.grad(F.cross_entropy(x, target, label_smoothing=0.1), x, create_graph=True)
            return (grad.square() * torch.arange(11.0)).sum()

        penalty(x).backward()
        for at in placements_for((5, 11), 2):
            sharded = spread(x.detach().requires_grad_(), mesh, at)
            penalty(sharded).backward()
            torch.testing.assert_close(sharded.grad.full_tensor(), x.grad)

    run_ranks(4, check)


def test_cross_entropy_of_ignored_targets_only_and_under_autocast():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh, target = mesh_of(2, 2), torch.tensor([1, 2, 3, -100, 9])
        x = torch.randn(5, 10, requires_grad=True)
        half = x.detach().bfloat16().requires_grad_()
        for at in placements_for((5, 10), 2, partial=False):
            compare(F.cross_entropy, [x, torch.full((5,), -100)], [at, None], mesh)
            for reduction in ("mean", "none"):
                with torch.autocast("cpu", torch.bfloat16):
                    compare(
                        partial(F.cross_entropy, reduction=reduction), [half, target], [at, None], mesh,
                        rtol=1e-2, atol=1e-3,
                    )  # fmt: skip

    run_ranks(4, check)


def test_a_mean_in_double_precision_is_exact():
    """The count of an uneven batch is an integer: dividing by its reciprocal would round to float32."""

    def check():
        x = torch.randn(15, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        target = _targets((15,), 6, ignored=False)
        mesh = mesh_of(4)
        found = F.cross_entropy(
            distribute_tensor(x, mesh, (Shard(0),)), distribute_tensor(target, mesh, (Shard(0),))
        ).full_tensor()
        expected = F.cross_entropy(x, target)
        assert abs(found - expected) < 1e-15 * expected

    run_ranks(4, check)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this torch")
def test_linear_cross_entropy():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh, target = mesh_of(2, 2), _targets((5,), 11)
        x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
        for x_at, weight_at in itertools.product(placements_for((5, 6), 2, partial=False), placements_for((11, 6), 2)):
            if (x_at[0] == R or weight_at[0] == R) and (x_at[1] == R or weight_at[1] == R):
                compare(F.linear_cross_entropy, [x, weight, target], [x_at, weight_at, None], mesh)

    run_ranks(4, check)


def test_targets_out_of_bounds_are_errors():
    def check():
        from vescale_testkit.oracle import spread

        for at in ((Shard(1),), (R,)):
            with pytest.raises(IndexError, match="out of bounds"):
                F.cross_entropy(spread(torch.randn(3, 11), mesh_of(4), at), torch.tensor([0, 11, 2]))

    run_ranks(4, check)


def test_nll_loss():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        for shape in ((5, 11), (3, 7, 2), (6,)):
            dim = min(len(shape) - 1, 1)
            batch = shape[:dim] + shape[dim + 1 :]
            x, target = torch.randn(shape, requires_grad=True), _targets(batch, shape[dim])
            weight = torch.rand(shape[dim])
            for x_at in placements_for(shape, 2):
                for reduction in ("mean", "sum", "none"):
                    events = compare(partial(F.nll_loss, reduction=reduction), [x, target], [x_at, None], mesh)
                    assert not events or Partial() in x_at
                for weight_at in ((R, R), (Shard(0), R)):
                    compare(F.nll_loss, [x, target, weight], [x_at, (R, R), weight_at], mesh)

    run_ranks(4, check)


def test_modules_and_legacy_arguments():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        warnings.filterwarnings("ignore", message=".*size_average.*")
        mesh, x, target = mesh_of(2, 2), torch.randn(5, 11, requires_grad=True), _targets((5,), 11)
        target[0] = 3
        for at in ((Shard(0), Shard(1)), (Shard(1), Shard(1)), (Shard(0), R), (R, R)):
            compare(torch.nn.CrossEntropyLoss(ignore_index=3), [x, target.clamp(min=0)], [at, None], mesh)
            for function in (
                torch.nn.CrossEntropyLoss(reduction="sum"),
                lambda x, t: F.cross_entropy(x, t, size_average=False),
                lambda x, t: F.cross_entropy(x, t, reduce=False),
                lambda x, t: F.nll_loss(x, target=t, reduce=True),
            ):
                compare(function, [x, target], [at, None], mesh)
            compare(lambda x, y: F.mse_loss(x, y, size_average=False), [x, x.detach() + 1], [at, at], mesh)
            compare(lambda x, y: F.l1_loss(x, y, reduce=False), [x, x.detach() + 1], [at, at], mesh)

    run_ranks(4, check)


# --- elementwise and batchwise losses -------------------------------------------------

_rand = lambda *shape: torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
_signs = lambda *shape: torch.randint(0, 2, shape).double() * 2 - 1
_three = lambda: (_rand(5, 3), _rand(5, 3), _rand(5, 3))
_LOSSES = {
    "mse": (F.mse_loss, lambda: (_rand(5, 3), _rand(5, 3))),
    "mse broadcast": (F.mse_loss, lambda: (_rand(5, 3), _rand(3))),
    "l1": (F.l1_loss, lambda: (_rand(5, 3), _rand(5, 3))),
    "smooth_l1": (lambda *a, **k: F.smooth_l1_loss(*a, beta=0.1, **k), lambda: (_rand(5, 3), _rand(5, 1))),
    "huber": (lambda *a, **k: F.huber_loss(*a, delta=0.1, **k), lambda: (_rand(5, 3), _rand(5, 3))),
    "huber weight": (lambda x, y, w, **k: F.huber_loss(x, y, weight=w, **k), _three),
    "mse weight": (lambda x, y, w, **k: F.mse_loss(x, y, weight=w, **k), _three),
    "bce": (F.binary_cross_entropy, lambda: (_rand(5, 3), _rand(5, 3), _rand(3))),
    "bce logits": (F.binary_cross_entropy_with_logits, lambda: (_rand(5, 3), _rand(5, 3), _rand(5, 1))),
    "bce pos_weight": (
        lambda x, y, w, **k: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, **k),
        lambda: (_rand(5, 3), _rand(5, 3), _rand(3)),
    ),
    "kl_div": (F.kl_div, lambda: (_rand(5, 3), _rand(5, 3))),
    "kl_div log": (lambda *a, **k: F.kl_div(*a, log_target=True, **k), lambda: (_rand(5, 3), _rand(5, 3))),
    "poisson": (F.poisson_nll_loss, lambda: (_rand(5, 3), _rand(5, 3))),
    "gaussian": (F.gaussian_nll_loss, _three),
    "gaussian row": (F.gaussian_nll_loss, lambda: (_rand(5, 3), _rand(5, 3), _rand(5))),
    "gaussian one": (F.gaussian_nll_loss, lambda: (_rand(5, 3), _rand(5, 3), _rand(5, 1))),
    "soft_margin": (F.soft_margin_loss, lambda: (_rand(5, 3), _signs(5, 3))),
    "hinge": (F.hinge_embedding_loss, lambda: (_rand(5, 3), _signs(5, 3))),
    "margin_ranking": (F.margin_ranking_loss, lambda: (_rand(5, 3), _rand(5, 3), _signs(5, 3))),
    "cosine_embedding": (F.cosine_embedding_loss, lambda: (_rand(5, 3), _rand(5, 3), _signs(5))),
    "triplet": (F.triplet_margin_loss, _three),
    "multi_margin": (F.multi_margin_loss, lambda: (_rand(5, 3), torch.tensor([0, 2, 1, 1, 0]))),
    "multilabel_margin": (F.multilabel_margin_loss, lambda: (_rand(5, 3), torch.tensor([[2, -1, 0]] * 5))),
    "multilabel_soft_margin": (F.multilabel_soft_margin_loss, lambda: (_rand(5, 3), _rand(5, 3), _rand(3))),
    "ctc": (
        F.ctc_loss,
        lambda: (
            torch.randn(7, 5, 4, dtype=torch.float64).log_softmax(-1), torch.randint(1, 4, (5, 2)),
            torch.tensor([7, 6, 7, 5, 7]), torch.tensor([2, 1, 2, 2, 1]),
        ),
    ),
}  # fmt: skip


@in_turns(3)
@pytest.mark.parametrize("name", _LOSSES)
def test_losses(name):
    function, inputs = _LOSSES[name]
    tensors = inputs()

    def check():
        warnings.simplefilter("error", FallbackWarning)
        warnings.filterwarnings("ignore", message="(?s).*(target size|reduction: 'mean').*")
        mesh = mesh_of(2, 2)
        for t in tensors[: 2 if name != "ctc" else 1]:
            t.requires_grad_(t.is_floating_point() and not (t is tensors[1] and name in ("soft_margin", "hinge")))
        others = [(R, R), None]
        for at in placements_for(tensors[0].shape, 2):
            moved = [p for p in at if p == Partial() or isinstance(p, Shard) and p.dim != 0]
            for reduction in ("mean", "sum", "none", *(["batchmean"] if "kl" in name else [])):
                alike = [at if t.shape == tensors[0].shape and t.is_floating_point() else others[0] for t in tensors]
                for placements in (alike, [at, *[others[reduction == "sum"]] * (len(tensors) - 1)]):
                    events = compare(
                        partial(function, reduction=reduction), tensors, placements, mesh, rtol=1e-9, atol=1e-12
                    )
                    assert moved or not events or name in ("mse weight", "ctc"), (placements, events)

    run_ranks(4, check)


def test_losses_on_fewer_samples_than_ranks_and_in_half_precision():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(4)
        for shape in ((2, 3), (1, 3), (5,)):
            x, y = torch.randn(shape, requires_grad=True), torch.randn(shape)
            for function in (F.mse_loss, F.l1_loss, F.huber_loss, F.soft_margin_loss):
                compare(function, [x, y], [(Shard(0),), (R,)], mesh)
        x = (200 * torch.ones(600)).half().requires_grad_()
        compare(F.mse_loss, [x, torch.zeros(600).half()], [(Shard(0),), (R,)], mesh)

    run_ranks(4, check)


def test_l1_loss_refuses_a_weight_that_torch_would_drop():
    def check():
        from vescale_dtensor._errors import OperatorError
        from vescale_testkit.oracle import spread

        x = spread(torch.randn(4, 3), mesh_of(4), (Shard(0),))
        F.l1_loss(x, torch.zeros(4, 3))
        with pytest.raises(OperatorError, match="weight"):
            F.l1_loss(x, torch.zeros(4, 3), weight=torch.ones(4, 3))

    run_ranks(4, check)


def test_triplet_loss_with_a_distance():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        points = [torch.randn(5, 3, requires_grad=True) for _ in range(3)]

        def loss(*points):
            return F.triplet_margin_with_distance_loss(*points, distance_function=lambda a, b: (a - b).abs().sum(-1))

        for at in placements_for((5, 3), 2):
            compare(loss, points, [at] * 3, mesh_of(2, 2))

    run_ranks(4, check)


def test_similarities():
    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh = mesh_of(2, 2)
        x, y = torch.randn(5, 3, 4, requires_grad=True), torch.randn(5, 3, 4, requires_grad=True)
        for at in placements_for(x.shape, 2):
            for dim in (0, 1, -1):
                events = compare(partial(F.cosine_similarity, dim=dim), [x, y], [at, at], mesh)
                assert any(p in (Partial(), Shard(dim % 3)) for p in at) or not events
            compare(lambda x, y: F.pairwise_distance(x, y, 1.5, keepdim=True), [x, y], [at, (R, R)], mesh)
            compare(lambda x, y: F.pairwise_distance(x, y), [x, y[0, 0]], [at, None], mesh)

    run_ranks(4, check)


def test_tied_embedding_and_head_of_a_language_model():
    """One table, sharded on the vocabulary over tp, looks ids up and makes logits; the batch is sharded over dp."""

    def check():
        warnings.simplefilter("error", FallbackWarning)
        mesh, vocabulary, width = mesh_of(2, 2), 1001, 6
        ids = torch.randint(0, vocabulary, (4, 7))
        labels = _targets((4, 7), vocabulary)
        table = torch.randn(vocabulary, width, dtype=torch.float64, requires_grad=True)

        def loss(ids, labels, table):
            hidden = F.embedding(ids, table, 3).tanh()
            logits = F.linear(hidden, table)
            return F.cross_entropy(logits.view(-1, vocabulary), labels.view(-1), label_smoothing=0.1)

        for table_at in ((R, Shard(0)), (R, Shard(1)), (R, R)):
            events = compare(loss, [ids, labels, table], [(Shard(0), R)] * 2 + [table_at], mesh)
            if table_at == (R, Shard(0)):  # the sum of the embeddings, the classes' numbers, the count
                assert [e.kind for e in events] == ["all_reduce", "all_gather", "all_reduce"], events
                assert max(e.received for e in events) <= 14 * width * 8, events

    run_ranks(4, check)


def test_rules_on_meta_tensors():
    """Nothing here looks at values, so that a dry run can pass through."""
    from vescale_dtensor import from_local
    from vescale_testkit import fake_world

    def meta(shape, local, placements, dtype=torch.float32):
        return from_local(torch.empty(local, device="meta", dtype=dtype), mesh, placements, shape=shape)

    with fake_world(8):
        mesh = mesh_of(2, 4)
        logits = meta((32, 1000), (16, 250), (Shard(0), Shard(1))).requires_grad_()
        ids = meta((32,), (16,), (Shard(0), R), torch.long)
        loss = F.cross_entropy(logits, ids, label_smoothing=0.1)
        loss.backward()
        assert loss.placements == (Partial(), R) and logits.grad.placements == logits.placements
        table = meta((1000, 8), (250, 8), (R, Shard(0)))
        assert F.embedding(ids, table, 3).placements == (Shard(0), Partial())
        query = meta((4, 8, 8, 16), (2, 2, 8, 16), (Shard(0), Shard(1)))
        key = meta((4, 2, 8, 16), (2, 2, 8, 16), (Shard(0), R))
        out = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        assert out.placements == (Shard(0), Shard(1))
