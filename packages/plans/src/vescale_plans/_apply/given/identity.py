"""A parameter's object becomes its shard: who holds the object, in a list, a closure or an optimizer, holds the shard.

torch exchanges what two tensor objects stand for (`torch.utils.swap_tensors`), which refuses objects that somebody
knows weakly or in a graph. Here both are meant: a weak reference goes on to name the user's object, and a graph of
before keeps the values of before, but may not send a gradient into them any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vescale_dtensor.engine import local_only

from ..._plan.parts import PlanError
from ..._torch_private import _swap_tensor_impl
from ...installed._carried_hooks import Hooks, take_hooks


class Became:
    """A parameter's former tensor, and its hooks, which go to the shard once buffers are made."""

    def __init__(self, old: Tensor, hooks: Hooks) -> None:
        self.old, self.hooks = old, hooks


def become(parameter: nn.Parameter, shard: nn.Parameter, name: str) -> Became:
    """Exchanges the two objects: `parameter` is the shard from now on, and `shard` what the parameter was."""
    hooks = take_hooks(parameter)
    with local_only():
        if parameter.requires_grad and parameter._use_count() > 1:
            get_gradient_edge(parameter).node.register_prehook(_refused(name))
    kind, held = type(parameter), parameter.__dict__  # of a user's class, a DTensor says another `__class__`
    parameter.__class__, shard.__class__ = type(shard), kind
    parameter.__dict__, shard.__dict__ = shard.__dict__, held
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter):
        parameter._kind = kind
    _swap_tensor_impl(parameter, shard)
    return Became(shard, hooks)


def _refused(name: str) -> Callable[[Any], NoReturn]:
    def refuse(gradients: Any) -> NoReturn:
        raise PlanError(
            "backward",
            f"a graph from before the plan ends in {name}, which is another shard now: its gradient would be lost",
            (),
            [("compute the value under the plan, in forward or in the loop", "views of parameters are cheap")],
        )

    return refuse
