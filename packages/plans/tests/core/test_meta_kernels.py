"""What stands in for operators in a dry run gives the shapes, dtypes and values that the kernels give."""

import pytest
import torch

from vescale_plans._dry.meta_kernels import CHOICES, STAND_INS, received
from vescale_plans._dry.meter import Meter
from vescale_trace.meter import flops_of

GROUPED = torch.ops.aten._grouped_mm.default
OFFSETS = torch.tensor([3, 8, 16], dtype=torch.int32)
FORMS = {
    "rows": ((16, 16), (3, 16, 32), OFFSETS),
    "columns": ((3, 16, 32), (32, 16), OFFSETS),
    "both": ((16, 16), (16, 32), OFFSETS),
    "stacks": ((3, 8, 16), (3, 16, 32), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_grouped_products_have_the_shapes_of_the_kernels(form, dtype):
    left, right, offsets = FORMS[form]
    a, b = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    real = GROUPED(a, b, offsets)
    dry = STAND_INS[GROUPED](a.to("meta"), b.to("meta"), offsets)
    assert (dry.shape, dry.dtype, dry.is_meta) == (real.shape, real.dtype, True)
    assert torch.equal(STAND_INS[GROUPED](a, b, offsets), real)


def test_grouped_products_are_counted_as_the_products_that_they_are():
    x, weights = torch.randn(16, 16), torch.randn(3, 16, 32)
    parts = x.split([3, 5, 8])
    with Meter() as meter:
        torch.cat([part @ weight for part, weight in zip(parts, weights)])
    assert flops_of(torch.ops.aten._grouped_mm, (x, weights, OFFSETS), {}, None) == meter.flops
    assert flops_of(torch.ops.aten._grouped_mm, (x.t(), torch.randn(16, 32), OFFSETS), {}, None) == meter.flops


ATTENTIONS = ["flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"]


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_with_grouped_heads_is_counted_head_by_head(kind):
    query, key, value = (torch.empty(2, heads, 24, 8, device="meta") for heads in (4, 2, 2))
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_backward")
    product = 2 * 2 * 4 * 24 * 24 * 8
    assert flops_of(forward, (query, key, value), {}, None) == 2 * product
    assert flops_of(backward, (query, query, key, value), {}, None) == 5 * product  # the scores are computed again


def test_integers_are_counted_as_on_a_gpu():
    values = torch.tensor([0, 3, 3, 1, 7], dtype=torch.int32)
    found = STAND_INS[torch.ops.aten.histc.default](values, 8, 0, 7)
    assert found.tolist() == [1, 1, 0, 2, 0, 0, 0, 1]
    assert found.dtype == torch.int32


BINCOUNT = torch.ops.aten.bincount.default


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.int64])
def test_counts_of_at_least_so_many_have_the_kernels_shape(dtype):
    """torch has no shape for them; a HuggingFace router's loss counts so the tokens of each expert."""
    values = torch.tensor([0, 3, 3, 1, 7])
    weights = None if dtype is None else torch.ones(5).to(dtype)
    real = torch.bincount(values, weights, 12)
    dry = STAND_INS[BINCOUNT](values.to("meta"), None if weights is None else weights.to("meta"), 12)
    assert (dry.shape, dry.dtype, dry.is_meta) == (real.shape, real.dtype, True)
    assert torch.equal(STAND_INS[BINCOUNT](values, weights, 12), real)
    with pytest.raises(NotImplementedError, match="bincount"):
        STAND_INS[BINCOUNT](values.to("meta"))


CHOSEN = {
    "topk": (torch.ops.aten.topk.default, (2,), 1),
    "topk of rows": (torch.ops.aten.topk.default, (2, 0), 1),
    "max": (torch.ops.aten.max.dim, (1,), 1),
    "max kept": (torch.ops.aten.max.dim, (0, True), 1),
    "argmax": (torch.ops.aten.argmax.default, (1,), None),
    "argmax kept": (torch.ops.aten.argmax.default, (-1, True), None),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_choices_by_values_that_are_not_there_are_even(name):
    function, given, at = CHOSEN[name]
    values = torch.randn(8, 4, 3)
    real, dry = (CHOICES[function](one, *given) for one in (values, values.to("meta")))
    real, dry = (one if at is None else one[at] for one in (real, dry))
    assert torch.equal(real, function(values, *given) if at is None else function(values, *given)[at])
    assert (dry.shape, dry.dtype, dry.device.type) == (real.shape, real.dtype, "cpu")
    dim = given[0] if "topk" not in name else (given[1] if len(given) > 1 else -1)
    choices = values.shape[dim]
    counts = torch.bincount(dry.flatten(), minlength=choices)
    assert counts.max() - counts.min() <= 1 and len(counts) == choices
    if "topk" in name:
        first, second = dry.unbind(dim)
        assert (first != second).all()


def test_what_a_real_group_receives_stays():
    """A meter counts real runs as well; whether a group fills its output in the call or later is the group's affair."""

    def receives(out):
        return out.fill_(3)

    out = torch.ones(4, dtype=torch.int64)
    received(receives)(out)
    assert out.tolist() == [3] * 4
    received(lambda out: None)(out)
    assert out.tolist() == [0] * 4
