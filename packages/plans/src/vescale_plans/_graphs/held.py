"""State that a graph keeps of what its step works on: addresses of memory, and numbers that Python gave.

A graph reads and writes the memory that its step had when it was captured, and computes with the numbers that Python
held then. Where a checkpoint was loaded into other memory, a learning rate is another number, or a layer was put into
evaluation, a run of it would be silently another step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only, plain_grad
from vescale_trace.values import named, same

Optimizer = torch.optim.Optimizer


class Held:
    """The state of models and optimizers as it is now."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers
        with local_only():
            self._was = self._now()
        self._kept = [*self._tensors()]  # nobody else is given their memory

    def changed(self) -> str:
        """Returns what is otherwise by now, "" for nothing. Cost: a look at each tensor."""
        with local_only():
            now = self._now()
        if now == self._was:
            return ""
        for (what, before), (_, after) in zip(self._was.items(), now.items()):
            if before != after:
                return self._named(what, before, after)
        return "it has other tensors"

    def _now(self) -> dict[str, Any]:
        modules = [module for model in self._models for module in model.modules()]
        parameters = self._parameters()
        return {
            "training": [module.training for module in modules],
            "memory": [(_address(one), one.requires_grad) for one in parameters],
            "buffers": [_address(one) for model in self._models for one in model.buffers()],
            "gradients": [_gradient(one) for one in parameters],
            "states": [_address(one) for one in _states(self._optimizers)],
            "groups": [*_numbers(self._optimizers)],
            "modes": _modes(),
        }

    def _parameters(self) -> list[Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {id(one): one for group in groups for one in group["params"]}
        return [*(trained | {id(one): one for model in self._models for one in model.parameters()}).values()]

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._parameters()
        yield from (one for model in self._models for one in model.buffers())
        yield from _states(self._optimizers)

    def _named(self, what: str, before: Any, after: Any) -> str:
        if what == "groups":
            for (name, old), (other, new) in zip(before, after):
                if name != other or not same(old, new):
                    return f"{name} of the optimizer went from {old} to {new}"
            return "the optimizer has other groups"
        return {
            "training": "train() or eval() was called", "memory": "a parameter lies elsewhere, or is trained otherwise",
            "buffers": "a buffer lies elsewhere", "gradients": "gradients lie elsewhere, or are gone",
            "states": "a state of the optimizer lies elsewhere", "modes": "autocast or a mode of torch is another",
        }[what]  # fmt: skip


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def _gradient(parameter: Tensor) -> tuple[int, ...]:
    """Returns where a parameter's gradient lies, in both of the places where that of a DTensor may."""
    held = [parameter.grad]
    if type(parameter) is DTensor:
        held = [plain_grad(parameter), parameter.__dict__.get("_reduced_grad")]
    return tuple(0 if one is None else _address(one) for one in held)


def _states(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Yields the tensors of optimizers' states, and those of their groups, that lie on the device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key != "params" and isinstance(value, Tensor) and not value.is_cpu:
                    yield value
        for state in optimizer.state.values():
            yield from (one for one in state.values() if isinstance(one, Tensor) and not one.is_cpu)


def _numbers(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yields what groups say beside tensors on the device, by name."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, value in named({key: one for key, one in group.items() if key != "params"}, ""):
                if not isinstance(value, Tensor):
                    yield name[1:], value
                elif value.is_cpu:
                    yield name[1:], value.tolist()


def _modes() -> tuple:
    device = torch.accelerator.current_accelerator()
    kind = "cpu" if device is None else device.type
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )  # fmt: skip
