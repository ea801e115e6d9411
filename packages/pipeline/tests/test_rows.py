"""Of every function of torch's operator database that a pipeline takes to leave each row of a batch at its place: it
does."""

import os
import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from vescale_pipeline._trace.rows.notes import Notes
from vescale_pipeline._trace.rows.tags import MEAN, ROWS, Lost, Tags, axis_of

SLICES, SAMPLES = 8, 40
DRAWS = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform", "rand_like",
    "randint_like", "randn_like", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention",
}  # fmt: skip
"""Functions that draw random numbers: a microbatch draws its own, as on one device that accumulates."""
OTHERWISE = {
    **dict.fromkeys(("_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm"), "of a microbatch"),
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), "has no values"),
    **dict.fromkeys(("repeat", "tile"), "the batch lies there several times, a microbatch beside itself"),
    "nn.functional.linear_cross_entropy": "the samples' classes are as many as their rows, and not the batch's",
}


def operators():
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes and op.name not in DRAWS | OTHERWISE.keys()]


def rows_of(sample):
    return sample.input.shape[0] if isinstance(sample.input, torch.Tensor) and sample.input.ndim else 0


def turned(given, rows):
    """Other rows, of the same entries."""
    return tree_map_only(torch.Tensor, lambda t: t.flip(0) if t.ndim and t.shape[0] == rows else t, given)


def doubled(given, rows):
    """The rows, and the others behind them."""
    double = lambda t: torch.cat([t, t.flip(0)]) if t.ndim and t.shape[0] == rows else t
    return tree_map_only(torch.Tensor, double, given)


def mixing(op):
    """Samples of which the tag says that the rows are at their places, and they are not; and how many are."""
    found, kept = [], 0
    for sample in list(op.sample_inputs("cpu", torch.float32))[:SAMPLES]:
        rows, given = rows_of(sample), (sample.input, sample.args, sample.kwargs)
        if rows < 2:
            continue
        try:
            other, both = turned(given, rows), doubled(given, rows)
            with Notes() as part:
                small = op.op(given[0], *given[1], **given[2])
            with Notes() as whole:
                large = op.op(both[0], *both[1], **both[2])
            rest = op.op(other[0], *other[1], **other[2])
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            continue  # a sample of another number of rows is none of the function's
        if len(part.notes) != len(whole.notes):
            continue
        tags = Tags(2)
        for note, its in zip(part.notes, whole.notes):
            tags.go_on(note, its)
        for one, of_both, of_other in zip(*map(tree_leaves, (small, large, rest))):
            if not isinstance(one, torch.Tensor) or tags.of.get(part.number_of(one)) != ROWS:
                continue
            axis = axis_of(tuple(one.shape), tuple(of_both.shape), 2)
            joined = torch.cat([one, of_other], axis) if type(axis) is int else None
            alike = joined is not None and torch.allclose(of_both, joined, 1e-4, 1e-5, equal_nan=True)
            kept += alike
            if not alike:
                found.append((sample.args, sample.kwargs, tuple(one.shape)))
    return found, kept


PARTS = range(SLICES) if os.environ.get("VESCALE_GRID") == "full" else [0]


@pytest.mark.parametrize("part", PARTS)
def test_functions_that_keep_rows_at_their_places(part):
    wrong, kept = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators()[part::SLICES]:
            found, times = mixing(op)
            kept += times
            if found:
                wrong[f"{op.name} {op.variant_test_name}"] = found[:2]
    assert not wrong
    assert kept > 200


def tag_of(program, *tensors):
    """Of what a program makes of a part, and of twice as many rows."""
    small, large = Notes(), Notes()
    twice = [torch.cat([one, one]) for one in tensors]
    with small:
        part = program(*tensors)
    with large:
        program(*twice)
    tags = Tags(2)
    for note, its in zip(small.notes, large.notes, strict=True):
        tags.go_on(note, its)
    return tags.of[small.number_of(part)]


def test_operators_below_the_functions():
    assert isinstance(tag_of(lambda x: torch.ops.aten.flip.default(x, [0]), torch.randn(4, 3)), Lost)


def test_a_loss_of_rows_in_two_orders():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    tiled, repeated = lambda t: t.repeat(2, 1), lambda t: t.repeat_interleave(2, 0)
    assert tag_of(lambda x, y: F.mse_loss(tiled(x), tiled(y)), x, y) == MEAN
    assert tag_of(lambda x, y: F.mse_loss(repeated(x), repeated(y)), x, y) == MEAN
    assert isinstance(tag_of(lambda x, y: F.mse_loss(tiled(x), repeated(y)), x, y), Lost)
