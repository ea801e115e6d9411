"""Tells whether other stages' parameters may have changed, from this rank's own calls: all ranks run one loop.

Gradients there change with a call, and with the gradients here; values with a step of any optimizer, and with the
values here. An optimizer may write to memory of its own behind a parameter, which counts no version up: steps are
counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._torch_private import DisableTorchFunctionSubclass as local_only

_steps = 0


def _stepped(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_stepped)


def moment(parameters: Iterable[nn.Parameter], calls: int, values: bool) -> tuple:
    """Equal to an earlier one where nothing has changed: neither the `values` of parameters, or their gradients, here,
    nor the number of calls and steps."""
    with local_only():
        if values:
            return calls, _steps, tuple(one._version for one in parameters)
        gradients = (one.grad for one in parameters)
        return calls, _steps, tuple(None if one is None else (id(one), one._version) for one in gradients)
