"""States of an optimizer over sharded parameters: as DTensors for whoever asks, as local parts for the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import INVARIANT, attach, layout_of, local_only
from vescale_trace.values import map_tensors

from .._calls.meanwhile import meanwhile
from .._plan.parts import PlanError
from .matrix import Owners
from .optim_shown import ShownState, ShownStates
from .sharded_parameter import ShardedParameter, laid
from .zero import DataParallel

_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch.optim that are one number per parameter, whatever its shape."""


class ShardedStates:
    """Adds to an optimizer the reading and loading of its states. A mixin, see `optim.Sharded`."""

    _parallel: DataParallel
    _parameter_names: dict[int, str]
    _on_dtensors: bool  # on the DTensors themselves
    _owners: Owners | None  # of matrices
    _is_inside: bool  # its own code runs, on plain local parts
    _twin: dict[Tensor, dict[str, Any]]  # the same states, keyed as they are within a step, or as they are between

    @property
    def state(self) -> Any:
        """States of the optimizer, as DTensors between steps (`optim_shown.py`)."""
        if self._on_dtensors or self._is_inside:
            return self._held_states
        self._twin = {}  # what is taken out is to be gone
        return ShownStates(self)

    @state.setter
    def state(self, states: Any) -> None:
        if self._on_dtensors or self._is_inside:
            self._held_states = states
        else:
            self._held_states, self._twin = defaultdict(dict), {}
            ShownStates(self).update(states)

    @property
    def _held_states(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's own states, where torch's code puts them when it loads."""
        return self.__dict__["state"]

    @_held_states.setter
    def _held_states(self, states: Any) -> None:
        self.__dict__["state"] = states

    def _name_of(self, parameter: Tensor) -> str:
        name = self._parameter_names.get(id(parameter))
        if name is None:
            raise PlanError(
                "optimizer.sharded_state_dict",
                "the optimizer holds a parameter that the model did not have when it was parallelized: it has no name",
                [f"parameter  {list(parameter.shape)}"],
                [
                    ("optimizer.state_dict()", "holds it by its place in the groups"),
                    ("put it into the model before parallelize", "it is sharded then, and has a name"),
                ],
            )
        return name

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's own, but a state of a parameter's shape is a DTensor of its global shape, over the
        real memory: whoever writes it as a plain tensor gathers it first, or raises. No communication."""
        found = super().state_dict()
        found["state"] = {
            key: dict(values) if isinstance(values, ShownState) else values for key, values in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gives on one device or under any plan: of whole plain tensors, and of DTensors in any
        layout, this rank's part is taken. Cost: nothing for those that lie as here."""
        with meanwhile(self, _is_inside=True):
            super().load_state_dict(state_dict)
        states = self._held_states
        given = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(given, self._held()):
            param = self._parallel.param_of(parameter)
            if param is not None and not self._on_dtensors and parameter in states:
                own, (plain, layout) = states[parameter], self._plain_of(param)
                for name, value in state_dict["state"].get(key, {}).items():
                    is_state = isinstance(value, Tensor) and name in own and name not in _COUNTS
                    if is_state and tuple(value.shape) == layout.shape:  # of others what torch made of them stays
                        kind = plain.dtype if value.is_floating_point() else value.dtype
                        own[name] = self._taken_in(name, value, param).to(kind, copy=True)

    def sharded_state_dict(self, *, materialize: bool = False) -> dict[str, Any]:
        """State by parameter name, tensors as DTensors over the real memory: writing a shard changes the optimizer.

        Returns: {"state": {name: {key: DTensor | Tensor | number}}, "param_groups": [...]};
        groups hold the names in place of the parameters. A tensor state of a
        parameter's own shape is a DTensor of its global shape; others (a step count)
        are as they are.

        With materialize, states that the first step would make are made, as they are
        before it: zeros, and a step count of 0. Nothing else changes. No communication.
        """
        if materialize and not self._on_dtensors:
            self._materialize()
        state = {self._name_of(parameter): dict(values) for parameter, values in self.state.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [self._name_of(parameter) for parameter in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_sharded_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `sharded_state_dict` gave: options of the groups, numbers, and tensors.

        Groups are matched by the names they hold. A tensor of the state is copied into
        this optimizer's own, which must lie alike (a reshard is `vescale.load`'s work);
        one that is this optimizer's own memory stays.
        """
        by_name = {name: group for group in state["param_groups"] for name in group["params"]}
        are_as_many = len(state["param_groups"]) == len(self.param_groups)
        for place, group in enumerate(self.param_groups):
            saved = next((by_name.get(self._name_of(p)) for p in group["params"]), None)
            if are_as_many and not group["params"]:  # of a pipeline's stage that trains nothing
                saved = state["param_groups"][place]
            if saved is not None:
                group.update({key: value for key, value in saved.items() if key != "params"})
        parameters = {self._name_of(p): p for group in self.param_groups for p in group["params"]}
        for name, values in state["state"].items():
            own = self._held_states[parameters[name]]
            for key, value in values.items():
                mine = own.get(key)
                if isinstance(value, Tensor) and isinstance(mine, Tensor):
                    with torch.no_grad(), local_only():
                        if mine.numel() + value.numel() and mine.data_ptr() != value.data_ptr():
                            mine.copy_(value)
                elif type(value) is DTensor and not self._on_dtensors:
                    with torch.no_grad(), local_only():
                        own[key] = value.detach().clone().as_subclass(Tensor)
                else:
                    own[key] = value.clone() if isinstance(value, Tensor) else value

    def named_states(self) -> Iterator[tuple[str, DTensor]]:
        """Yields what is a tensor of its parameter's shape, with what an error calls it."""
        for parameter, values in self.state.items():
            name = self._parameter_names.get(id(parameter), "a parameter that is not the model's")
            yield from ((f"the state {key!r} of {name!r}", one) for key, one in values.items() if type(one) is DTensor)

    def shown_states(self) -> dict[Tensor, dict[str, Any]]:
        """States between steps, as DTensors where they are of a parameter's shape. Raises PlanError for other tensors
        of an optimizer that steps on parts: how they go with the parts is not known."""
        found = {parameter: dict(values) for parameter, values in self.state.items()}
        odd = [
            f"{self._name_of(parameter)}  {key} {list(value.shape)}"
            for parameter, values in found.items()
            for key, value in values.items()
            if type(value) is Tensor and value.ndim and not self._on_dtensors
        ]
        if odd:
            raise PlanError(
                "reshape",
                f"states of {type(self).__name__} are neither of the parameter's shape nor numbers",
                odd[:4],
                [("vescale.save, then vescale.load in a job with the other plan", "if its states can be saved")],
            )
        return found

    def blank_states(self, told: dict[Tensor, dict[str, Any]]) -> dict[Tensor, list[DTensor]]:
        """Has states as `shown_states` gave under another plan, told by meta tensors in the places of DTensors. Returns
        its own of these, in their order, whose values are not there yet."""
        made: dict[Tensor, list[DTensor]] = {}
        self._held_states = defaultdict(dict)
        for parameter, values in told.items():
            param, own = self._parallel.param_of(parameter), made.setdefault(parameter, [])
            blank = map_tensors(values, lambda one, param=param, own=own: self._blank(one, param, own))
            self._held_states[parameter] = blank
        return made

    def _blank(self, told: Tensor, param: ShardedParameter, own: list[DTensor]) -> Tensor:
        if not told.is_meta:
            return told
        plain, layout = (None, param.at_rest[1]) if self._on_dtensors else self._plain_of(param)
        if tuple(told.shape) != layout.shape:
            layout = layout_of(layout.mesh, (INVARIANT,) * layout.mesh.ndim, tuple(told.shape))
        with local_only():
            device = param.full.device if plain is None else plain.device
            made = torch.empty(layout.local_shape, dtype=told.dtype, device=device)
            held = made.view(layout.local_shape if plain is None else self._shape_of(param))
        whole = attach(made.detach(), layout)
        own.append(whole)
        return whole if plain is None else held

    def _shape_of(self, param: ShardedParameter) -> tuple[int, ...]:
        """Returns the shape of a state of the parameter's shape, as it is held."""
        return self._owners.local_shape(param) if self._owners is not None else self._plain_of(param)[0].shape

    def _as_dtensor(self, key: str, value: Any, param: ShardedParameter | None) -> Any:
        if param is None or self._on_dtensors or type(value) is not Tensor or key in _COUNTS:
            return value
        plain, layout = self._plain_of(param)
        if value.numel() != prod(layout.local_shape) or value.ndim != plain.ndim:
            return value
        return attach(value.detach().view(layout.local_shape), layout)

    def _taken_in(self, key: str, value: Tensor, param: ShardedParameter) -> Tensor:
        """Converts a tensor that somebody puts into a state: to this rank's part if it has the parameter's shape, over
        the same memory if it lies so already; else to all of it, plain."""
        if self._on_dtensors:
            return value
        plain, layout = self._plain_of(param)
        if tuple(value.shape) != layout.shape or key in _COUNTS:
            return value.full_tensor().detach() if type(value) is DTensor else value
        part = laid(value.detach(), layout, "optimizer.state")
        with local_only():
            return part.detach().as_subclass(Tensor).to(plain.device).reshape(self._shape_of(param)).contiguous()

    def _materialize(self) -> None:
        """Steps over throw-away zeros with zero gradients: what that makes is the state before the first step."""
        waiting = [
            (group, parameter, param)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter not in self._held_states and (param := self._parallel.param_of(parameter)) is not None
            and param.optimized is not None
        ]  # fmt: skip
        if not waiting:
            return
        own_step = self._own_step()
        for group, parameter, param in waiting:
            blank = nn.Parameter(
                torch.zeros(self._shape_of(param), dtype=param.optimized.dtype, device=param.optimized.device)
            )
            blank.grad = torch.zeros_like(blank)
            groups = [{**group, "params": [blank]}]
            with meanwhile(self, param_groups=groups, state=defaultdict(dict), _is_inside=True):
                own_step()
                made = dict(self.state[blank])
                numbers = {key: _number(value) for key, value in made.items()}
                counters = [key for key, number in numbers.items() if number == 1]
                if counters:
                    blank.grad = torch.zeros_like(blank)
                    made = {key: value.clone() if isinstance(value, Tensor) else value for key, value in made.items()}
                    own_step()
                    counters = [key for key in counters if _number(self.state[blank].get(key)) == 2]
            for key in counters:
                made[key] = torch.zeros_like(made[key]) if isinstance(made[key], Tensor) else 0
            self._held_states[parameter] = made

    def _held(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _plain_of(self, param: ShardedParameter) -> tuple[Tensor, Layout]:
        """The tensor whose shape a state has, and the layout of such a state; of a frozen parameter they are those with
        which it would step if it were thawed."""
        if self._owners is not None:
            return self._owners.plain(param), self._owners.layout(param)
        return param.shard if param.optimized is None else param.optimized, param.gradient_layout


def _number(value: Any) -> float | None:
    """Returns the value of a state that is one number."""
    if isinstance(value, Tensor):
        return value.item() if not value.ndim else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def take_in_early(optimizer: torch.optim.Optimizer) -> None:
    """State that the constructor made (Adagrad's sums), of frozen parameters too: local parts, cut like the shards."""
    for parameter, values in optimizer._held_states.items():
        param = optimizer._parallel.param_of(parameter)
        for key, value in values.items():
            # One plain number may be a count, whatever the parameter is.
            if param is not None and (type(value) is DTensor or isinstance(value, Tensor) and value.ndim):
                part = optimizer._taken_in(key, value, param)
                values[key] = value if part is value else part.clone()  # else it keeps all of what it was cut from
