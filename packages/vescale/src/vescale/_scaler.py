"""GradScaler under a pipeline: a gradient that is not finite on one stage skips the step on all of them.

A scaler's one look at the gradients is torch's `_amp_foreach_non_finite_check_and_unscale_`. On
distributed gradients vescale_dtensor makes what it finds that of their mesh; here it becomes that
of the stages before and after, too.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist

from vescale_dtensor import DTensor
from vescale_dtensor.engine import TABLE, Mesh, handler

from ._machine._torch_private import _amp_foreach_non_finite_check_and_unscale_

lines: WeakKeyDictionary[Mesh, dist.ProcessGroup] = WeakKeyDictionary()
"""Group of the ranks at the same place of every stage, by a pipeline stage's mesh."""

_on_one_stage = TABLE[_amp_foreach_non_finite_check_and_unscale_].handler


@handler(_amp_foreach_non_finite_check_and_unscale_)
def on_all_stages(function: Callable, args: tuple, kwargs: dict) -> None:
    """Cost, beside that on one stage: an all-reduce of 4 bytes over the pipeline."""
    gradients, found_inf, _ = args
    _on_one_stage(function, args, kwargs)
    mesh = next(gradient for gradient in gradients if type(gradient) is DTensor).mesh_layout.mesh
    if mesh in lines:
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=lines[mesh])
