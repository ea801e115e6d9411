"""A model that is cast (`model.to(torch.float64)`) once its stages are made: what stands for other stages' follows."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .._errors import PipelineError
from .._torch_private import _swap_tensor_impl
from .._trace.placeholder import local_only
from .ownership import is_elsewhere

_dtype_of = Tensor.dtype.__get__  # type: ignore[attr-defined]


class Casts:
    """Follows the dtypes of one rank's `parameters`."""

    def __init__(self, model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        self._model, self._parameters = model, list(parameters)
        self._dtypes = self._now()

    def _now(self) -> list[torch.dtype]:
        with local_only():
            return list(map(_dtype_of, self._parameters))

    def follow(self) -> bool:
        """Gives whether parameters were cast since it last looked: what is known of calls is of other dtypes, then.
        Placeholders get the dtype that parameters here have got which had theirs. Cost: a look at each parameter.

        Raises PipelineError for a cast of some of them only: nobody here can know which of other stages' were.
        """
        now = self._now()
        if now == self._dtypes:
            return False
        became = dict(zip(self._dtypes, now))
        if any(became[before] is not dtype for before, dtype in zip(self._dtypes, now)):
            raise PipelineError(
                "pipeline",
                "some parameters were cast to another dtype, and others of theirs were not: other stages do not know "
                "which",
                [f"dtypes here  {', '.join(sorted({str(dtype) for dtype in now}))}"],
                [
                    ("model.to(dtype)", "all parameters, on every rank"),
                    ("model.layer.to(dtype) before parallelize", "some of them"),
                ],
            )
        self._dtypes = now
        alike = now[0] if len(set(now)) == 1 else None  # `model.to`: of dtypes, too, that none here has had
        for module in self._model.modules():
            for held in filter(is_elsewhere, module.__dict__.values()):
                dtype = became.get(held.dtype, alike) or held.dtype
                if held.dtype.is_floating_point and held.dtype is not dtype:
                    _swap_tensor_impl(held, torch.empty(held.shape, dtype=dtype, device="meta"))
        return True
