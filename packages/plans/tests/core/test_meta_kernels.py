"""What stands in for operators in a dry run gives the shapes, dtypes and values that the kernels give."""

import pytest
import torch

from vescale_plans._dry.meta_kernels import FLOPS, STAND_INS
from vescale_plans._dry.meter import Meter

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
    assert FLOPS[torch.ops.aten._grouped_mm](x, weights, OFFSETS) == meter.flops
    assert FLOPS[torch.ops.aten._grouped_mm](x.t(), torch.randn(16, 32), OFFSETS) == meter.flops


def test_integers_are_counted_as_on_a_gpu():
    values = torch.tensor([0, 3, 3, 1, 7], dtype=torch.int32)
    found = STAND_INS[torch.ops.aten.histc.default](values, 8, 0, 7)
    assert found.tolist() == [1, 1, 0, 2, 0, 0, 0, 1]
    assert found.dtype == torch.int32
