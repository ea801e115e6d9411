"""Parameters that a rank does not hold under a plan: those of other stages of a pipeline, or all, where the plan is for
fewer ranks than the world has. Their objects stay, as plain attributes of the modules, and come back with another plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_rng import attributes_of

from ..._calls.chain import add_step
from ..._plan.parts import PlanError
from ...installed._carried_hooks import Hooks
from ...plan import Plan
from .adopt import GONE, is_gone
from .identity import Became, become


class Absent:
    """A model's modules as they are before a plan takes parameters off them, and what it took."""

    def __init__(self, model: nn.Module) -> None:
        self.held = [(module, dict(module._parameters)) for module in model.modules()]
        self.hooks: dict[Tensor, Hooks] = {}  # the users', on gradients of parameters that are elsewhere
        self.buffers: frozenset[str] = frozenset()  # the names of those that others keep current
        self._kept = [(one, Empty(name, one.device, _kind_of(one), attributes_of(one)))
                      for name, one in model.named_parameters()]  # fmt: skip
        self._persistent = [(m, m._buffers.keys() - m._non_persistent_buffers_set) for m in model.modules()]

    def mark(self, model: nn.Module) -> None:
        """What the model's modules do not hold any more is elsewhere from here on."""
        left = set(nn.Module.parameters(model))
        for parameter, made in self._kept:
            if parameter not in left:
                parameter.__dict__.update({**made.attributes, **parameter.__dict__, GONE: made.name})

    def take_all(self, model: nn.Module) -> None:
        """Takes all parameters off the model, and the buffers off what it saves."""
        for module, parameters in self.held:
            for leaf, parameter in parameters.items():
                if parameter is not None:
                    del module._parameters[leaf]
                    module.__dict__[leaf] = parameter
            module._non_persistent_buffers_set.update(module._buffers)
        self.buffers = frozenset(name for name, _ in model.named_buffers())
        for parameter, made in self._kept:
            made._replace(device=torch.device("meta")).become(parameter)  # no value of it is anybody's
        self.mark(model)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the modules have all of their parameters, with whatever stands for those elsewhere."""
        now = [(module, dict(module._parameters)) for module, _ in self.held]
        try:
            for module, parameters in self.held:
                put(module, self._full(module, parameters))
            yield
        finally:
            for module, parameters in now:
                put(module, parameters)

    def give_back(self) -> None:
        """What is elsewhere is the modules' own again: parameters of the users' classes, without values."""
        for module, parameters in self.held:
            put(module, self._full(module, parameters))
            for leaf in parameters:
                module.__dict__.pop(leaf, None)
        for module, leaves in self._persistent:
            module._non_persistent_buffers_set -= leaves
        for parameter, made in self._kept:
            if is_gone(parameter):
                hooks = made.become(parameter).hooks
                if any(hooks):
                    self.hooks[parameter] = hooks

    @staticmethod
    def _full(module: nn.Module, before: dict[str, Any]) -> dict[str, Any]:
        """A module's parameters in the order that they had: those that it has now, and those elsewhere."""
        now, held = module._parameters, module.__dict__
        found = {leaf: held.get(leaf, now.get(leaf)) for leaf in before if leaf in now or leaf in held}
        return found | {leaf: one for leaf, one in now.items() if leaf not in found}


def put(module: nn.Module, parameters: dict[str, Any]) -> None:
    """These are the module's parameters, in this order."""
    module._parameters.clear()
    module._parameters.update(parameters)


class Empty(NamedTuple):
    """A parameter without values, of the class and with the attributes that it has outside of plans."""

    name: str
    device: torch.device
    kind: type
    attributes: dict[str, Any]

    def become(self, parameter: Tensor) -> Became:
        """The parameter's object is that from here on; gives what it was."""
        one = torch.empty((), dtype=parameter.dtype, device=self.device)  # in the place of every element
        made = one.expand(tuple(parameter.shape)).as_subclass(self.kind).requires_grad_(parameter.requires_grad)
        for key, value in self.attributes.items():
            setattr(made, key, value)
        return become(parameter, made, self.name)


def empty(parameter: Tensor, name: str) -> Became:
    """A parameter of a plan is one without values, as it was before any plan."""
    return Empty(name, parameter.device, _kind_of(parameter), attributes_of(parameter)).become(parameter)


def _kind_of(parameter: Tensor) -> type:
    kind = parameter._kind if type(parameter) is DTensor else type(parameter)
    return nn.Parameter if kind is DTensor else kind


class Outside:
    """Stands for the buckets of a model on a rank that its plan leaves out: there are none."""

    units: Sequence = ()

    def __init__(self, model: nn.Module, plan: Plan, world: int) -> None:
        self.optimizers: list[Any] = []
        self._sizes = plan.world_size, world
        for module in model.modules():
            add_step(module, "inputs", before=self._refuse)

    def param_of(self, parameter: Tensor) -> None:
        """No parameter has a place here."""

    def end_pass(self) -> None:
        """No backward came here."""

    def leave(self) -> tuple[dict[Tensor, Hooks], list]:
        return {}, []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def flush(self) -> NoReturn:
        raise self._outside("optimizer.step", "an optimizer")

    def _refuse(self, module: nn.Module, args: tuple, kwargs: dict) -> NoReturn:
        raise self._outside("model", f"a {type(module).__name__}")

    def _outside(self, operation: str, what: str) -> PlanError:
        ranks, world = self._sizes
        last = f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0"
        return PlanError(
            operation,
            f"{what} runs on a rank that the plan leaves out: it is for {last} of {world}, and the others hold nothing",
            (),
            [
                ("if torch.distributed.get_rank() < plan.world_size: ...", "around a step: others wait in reshape"),
                ("vescale.reshape(model, optimizer, plan)", "on all ranks: the next plan, which may be for all again"),
            ],
        )
