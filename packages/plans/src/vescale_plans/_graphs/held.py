"""State that a graph keeps of what its step works on: addresses of memory, and numbers that Python gave.

A graph reads and writes the memory that its step had when it was captured, and computes with the numbers that Python
held then. Where a checkpoint was loaded into other memory, a learning rate is another number, or a layer was put into
evaluation, a run of it would be silently another step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.engine import local_only, plain_grad, set_plain_grad, set_reduced_grad
from vescale_trace.values import named, same, tensors_in

from .reads import Optimizer as Optimizer
from .reads import Reads


class Held:
    """The state of models and optimizers as it is now."""

    def __init__(self, step: Callable, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers
        self._reads = Reads(step, models, optimizers)
        with local_only():
            self._was = self._now()
        self._kept = [*self._tensors()]  # nobody else is given their memory

    def changed(self) -> str:
        """Returns what is otherwise by now, "" for nothing. Cost: a look at each tensor."""
        with local_only():
            now = self._now()
        if now == self._was:
            return self._reads.changed()
        for (what, before), (_, after) in zip(self._was.items(), now.items()):
            if before != after:
                return self._named(what, before, after)
        return "it has other tensors"

    def _now(self) -> dict[str, Any]:
        modules = [module for model in self._models for module in model.modules()]
        parameters = parameters_of(self._models, self._optimizers)
        return {
            "training": [module.training for module in modules],
            "memory": [(_address(one), one.requires_grad) for one in parameters],
            "hooks": [_hooks(one) for one in parameters],
            "buffers": [_address(one) for model in self._models for one in model.buffers()],
            "states": [_address(one) for one in _states(self._optimizers)],
            "groups": [*_numbers(self._optimizers)],
            "modes": _modes(),
        }

    def _tensors(self) -> Iterator[Tensor]:
        yield from parameters_of(self._models, self._optimizers)
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
            "hooks": "a parameter has other hooks",
            "buffers": "a buffer lies elsewhere", "states": "a state of the optimizer lies elsewhere",
            "modes": "autocast or a mode of torch is another",
        }[what]  # fmt: skip


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def parameters_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(one): one for group in groups for one in group["params"]}
    return [*(trained | {id(one): one for model in models for one in model.parameters()}).values()]


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the parameters' gradients, two of each: that of a DTensor may be in two places."""
    with local_only():
        return [held for one in parameters for held in (plain_grad(one), one.__dict__.get("_reduced_grad"))]


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Gives parameters back what `gradients_of` returned."""
    with local_only():
        for one, plain, reduced in zip(parameters, gradients[::2], gradients[1::2]):
            set_plain_grad(one, plain)
            if type(one) is DTensor:
                set_reduced_grad(one, reduced)


def has_apart(parameters: Sequence[Tensor]) -> bool:
    """Returns whether autograd holds a gradient that could not be put back: sparse, or of other sizes, as ZeRO-3's are
    within `no_sync`."""
    with local_only():
        held = [(one, plain_grad(one)) for one in parameters]
        return any(two is not None and (two.is_sparse or two.shape != one.shape) for one, two in held)


def _hooks(parameter: Tensor) -> tuple[int, int]:
    return len(parameter._backward_hooks or ()), len(parameter._post_accumulate_grad_hooks or ())


def _states(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Yields the tensors of optimizers' states, and those of their groups, that lie on the device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key != "params" and isinstance(value, Tensor) and not value.is_cpu:
                    yield value
        for state in getattr(optimizer, "_held_states", optimizer.state).values():  # of shards, as they lie
            yield from (one for one in tensors_in(state) if not one.is_cpu)


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
