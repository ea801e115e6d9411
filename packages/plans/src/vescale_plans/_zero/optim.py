"""Optimizers over sharded parameters: what a user's optimizer is given, and when.

    elementwise            while it steps, plain Parameters: this rank's flat parts of the masters
    matrix (a list)        while it steps, whole matrices, each on one rank of the data axis (`matrix.py`)
    sparse gradients       refused
    anything else          the DTensors themselves: right, by the rules of dtensor, not fast

torch's optimizers pick their foreach and fused paths by the exact type of parameters, so
plain Parameters it must be. They take the DTensors' places in `param_groups` and in
`state` only for the time of `step`: everywhere else a user, a scheduler, `clip_grad_norm_`
and a GradScaler see the model's own parameters, whose gradients know their layouts.
Groups stay as the user made them, for every parameter has a plain one of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from operator import is_
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout, OperatorError
from vescale_dtensor.engine import convert, convert_plain, drop_gradients, local_only, route_between, stamp

from .._plan.parts import PlanError
from .matrix import Owners
from .optim_kinds import MATRIX, elementwise_methods, without_hooks
from .slot import Slot
from .zero import DataParallel


def wrap(optimizer: torch.optim.Optimizer, data_parallel: DataParallel, names: dict[int, str]) -> Any:
    """The same object, of a class that also knows where its parameters lie. `names`: id(parameter) -> name."""
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:
        raise PlanError(
            "parallelize",
            "SparseAdam takes sparse gradients, and flat buffers hold dense ones",
            (),
            [("torch.optim.Adam", "dense gradients"), ("nn.Embedding(..., sparse=False)", "")],
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    scheduled = _without_step(optimizer)
    methods = elementwise_methods(optimizer)
    own = {name: _on_parts(name) for name in methods or ()}
    optimizer.__class__ = type(kind.__name__, (Sharded, kind), {"__module__": kind.__module__, **own})
    optimizer._parallel = data_parallel
    optimizer._parameter_names = names
    optimizer._owners = None
    optimizer._whole = methods is None and kind not in MATRIX
    if scheduled:
        optimizer.step = _scheduled_step(optimizer)
    if methods is None and any(buffer.offloads for unit in data_parallel.units for buffer in unit.buffers):
        raise PlanError(
            "parallelize",
            f"offload=True keeps optimizer states on the host, and {kind.__name__} steps on the device",
            (),
            [("offload=False", ""), ("torch.optim.AdamW", "treats every element alone: it can step on the host")],
        )
    if kind in MATRIX:
        slots = [data_parallel.slot_of(p) for group in optimizer.param_groups for p in group["params"]]
        sharing = data_parallel.sharing
        lead = sharing.lead if sharing.lead is not None and sharing.mesh.sizes[sharing.lead] > 1 else None
        optimizer._owners = Owners([slot for slot in slots if slot is not None], sharing.mesh, lead)
    elif methods is not None:
        _state_made_early(optimizer)
    return optimizer


def _cannot_step(optimizer: torch.optim.Optimizer, error: Exception) -> PlanError:
    """Of an optimizer whose code does not take the DTensors themselves."""
    kind = type(optimizer).__mro__[2]
    why = str(error).strip().partition("\n")[0]
    return PlanError(
        "optimizer.step",
        f"{kind.__name__} is not known to treat every element of a parameter alone, and does not step on the shards' "
        "DTensors",
        [f"{type(error).__name__}  {why[:200]}"],
        [
            (f"vescale.register_elementwise({kind.__name__})", "before parallelize: it then steps on flat parts"),
            ("torch.optim.AdamW", "is known"),
        ],
    )


def _without_step(optimizer: torch.optim.Optimizer) -> bool:
    """Takes off the step that a scheduler bound, of the optimizer's class of then; says whether there was one."""
    bound = optimizer.__dict__.get("step")
    if bound is not None and not hasattr(bound, "_wrapped_by_lr_sched"):
        raise PlanError(
            "parallelize",
            f"the step of the {type(optimizer).__name__} was replaced: what it calls would not know of the shards",
            [f"step  {getattr(bound, '__qualname__', type(bound).__name__)}"],
            [("replace it after parallelize", "what it then wraps knows of them")],
        )
    return optimizer.__dict__.pop("step", None) is not None


def _scheduled_step(optimizer: torch.optim.Optimizer) -> Any:
    """The step of its class of now, which tells schedulers that it ran."""
    made = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = made()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    return step


class Sharded:
    """What `parallelize` adds to an optimizer. A mixin: the user's class follows in the order of resolution."""

    _parallel: DataParallel
    _parameter_names: dict[int, str]
    _whole: bool  # on the DTensors themselves
    _owners: Owners | None  # of matrices

    @torch.optim.Optimizer.profile_hook_step  # hooks run around all of it, where parameters and gradients are global
    def step(self, closure: Any = None, **options: Any) -> Any:
        """As the optimizer's own: gradients still pending are reduced first, parameters follow after."""
        own_step = self._own_step()
        if self._whole:
            if closure is not None:
                options["closure"] = _reducing(closure, self._parallel)
            self._parallel.flush()
            self._parallel.rest()
            try:
                loss = own_step(**options)
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                if closure is not None or hasattr(error, "remedies"):
                    raise
                raise _cannot_step(self, error) from error
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._parallel.flush()
            with self._plain():
                own_step(**options)
        self._parallel.updated()
        return loss

    step.hooked = True  # torch would wrap it again

    def _own_step(self) -> Any:
        """The step of the user's class, without hooks."""
        step = super().step
        function = getattr(step, "__func__", None)  # a step need not be a function
        return step if function is None else MethodType(without_hooks(function), self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OperatorError(
            "pickle",
            f"{type(self).__name__} is parallelized: it steps on this rank's parts, in memory of this process",
            (),
            [
                ('vescale.save(path, {"optimizer": optimizer})', "a checkpoint: any plan and number of ranks loads it"),
                ("vescale.adopt(copied_model, torch.optim.AdamW(...))", "an optimizer of its own for a copied model"),
            ],
        )

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own, but a state of a parameter's shape is a DTensor of its global shape, over the real
        memory: whoever writes it as a plain tensor gathers it first, or raises. No communication."""
        found = super().state_dict()
        held = self._held()
        found["state"] = {
            key: {name: self._as_dtensor(name, one, self._parallel.slot_of(held[key])) for name, one in values.items()}
            if isinstance(key, int)
            else values
            for key, values in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own, of what `state_dict` gives on one device or under any plan: of whole plain tensors,
        and of DTensors in any layout, this rank's part is taken. Cost: nothing for those that lie as here."""
        super().load_state_dict(state_dict)
        given = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(given, self._held()):
            slot = self._parallel.slot_of(parameter)
            if slot is not None and slot.optimized is not None and not self._whole and parameter in self.state:
                own = self.state[parameter]
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and name in own and name not in _COUNTS:
                        own[name] = self._own_part(own[name], value, slot)

    def _own_part(self, loaded: Tensor, given: Tensor, slot: Slot) -> Tensor:
        """Of a state as it was given, this rank's part, plain, in the shape in which it steps; of one that is not of
        the parameter's shape what torch made of it."""
        plain, layout = self._plain_of(slot)
        if tuple(given.shape) != layout.shape:
            return loaded
        if type(given) is DTensor:
            part = convert(given.detach(), layout, "load_state_dict")
        else:
            part = convert_plain(given.detach(), layout.mesh, layout, "load_state_dict")
        with local_only():
            kind = plain.dtype if given.is_floating_point() else given.dtype
            part = part.as_subclass(Tensor).to(device=plain.device, dtype=kind, copy=True)
            return part.view(self._owners.local_shape(slot) if self._owners is not None else plain.shape)

    def _held(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        if set_to_none:
            for group in self.param_groups:
                drop_gradients(group["params"])
        else:
            super().zero_grad(set_to_none=False)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Plain Parameters, with the local parts of the gradients, in the places of the DTensors."""
        own: list[DTensor] = []
        lent: list[nn.Parameter] = []
        slots: list[Slot] = []
        shown = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            inside = []
            for parameter in group["params"]:
                slot = self._parallel.slot_of(parameter)
                if slot is None or slot.optimized is None:
                    inside.append(parameter)
                    continue
                plain = self._lend(slot)
                inside.append(plain)
                own.append(parameter)
                lent.append(plain)
                slots.append(slot)
            group["params"] = inside
        self._rename(own, lent)
        if self._parallel.sharing.mesh.device_type != "cpu" and any(slot.arriving is not None for slot in slots):
            torch.accelerator.current_stream().synchronize()  # gradients and masters are on the host
        try:
            yield
            for slot in slots:
                self._take_back(slot)
        finally:
            for group, params in zip(self.param_groups, shown):
                group["params"] = params
            self._rename(lent, own)
            for plain in lent:
                plain.grad = None

    def _lend(self, slot: Slot) -> nn.Parameter:
        """The plain parameter that steps in a DTensor's place, with its gradient."""
        if self._owners is not None:
            return self._owners.bring(slot, slot.parameter.grad)
        plain, gradient = slot.optimized, _local_gradient(slot)
        if slot.arriving is not None and gradient is not None:
            gradient = slot.arriving.copy_(gradient, non_blocking=True)
        if slot.is_copied:  # the master may have been loaded or written since
            with torch.no_grad():
                plain.copy_(slot.master, non_blocking=True)
        plain.grad = gradient
        return plain

    def _take_back(self, slot: Slot) -> None:
        if self._owners is not None:
            self._owners.send_back(slot)
        elif slot.is_copied:
            with torch.no_grad():
                slot.master.copy_(slot.optimized, non_blocking=True)  # written again after the next step's wait

    def _plain_of(self, slot: Slot) -> tuple[nn.Parameter, Layout]:
        """The parameter whose shape a state has, and the layout of such a state."""
        if self._owners is not None:
            return self._owners.plain(slot), self._owners.layout(slot)
        return slot.optimized, slot.gradient_layout

    def _rename(self, before: list[Tensor], after: list[Tensor]) -> None:
        """The state of each parameter of `before` becomes that of its other in `after`, in the order it had."""
        state = self.state
        if len(before) != len(state) or not all(map(is_, state, before)):  # some have none, or in another order
            other = dict(zip(before, after))
            after = [other.get(key, key) for key in state]
        self.state = defaultdict(dict, zip(after, state.values()))

    # --- state, sharded -------------------------------------------------------------------

    def sharded_state_dict(self, *, materialize: bool = False) -> dict[str, Any]:
        """State by parameter name, tensors as DTensors over the real memory: writing a shard changes the optimizer.

        Returns: {"state": {name: {key: DTensor | Tensor | number}}, "param_groups": [...]};
        groups hold the names in place of the parameters. A tensor state of a
        parameter's own shape is a DTensor of its global shape; others (a step count)
        are as they are.

        With materialize, states that the first step would make are made, as they are
        before it: zeros, and a step count of 0. Nothing else changes. No communication.
        """
        if materialize and not self._whole:
            self._materialize()
        state = {}
        for parameter, values in self.state.items():
            slot = self._parallel.slot_of(parameter)
            state[self._parameter_names[id(parameter)]] = {
                key: self._as_dtensor(key, value, slot) for key, value in values.items()
            }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [self._parameter_names[id(parameter)] for parameter in group["params"]]}
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
        for group in self.param_groups:
            saved = next((by_name.get(self._parameter_names[id(p)]) for p in group["params"]), None)
            if saved is not None:
                group.update({key: value for key, value in saved.items() if key != "params"})
        parameters = {self._parameter_names[id(p)]: p for group in self.param_groups for p in group["params"]}
        for name, values in state["state"].items():
            own = self.state[parameters[name]]
            for key, value in values.items():
                mine = own.get(key)
                if isinstance(value, Tensor) and isinstance(mine, Tensor):
                    with torch.no_grad(), local_only():
                        if mine.numel() + value.numel() and mine.data_ptr() != value.data_ptr():
                            mine.copy_(value)
                elif type(value) is DTensor and not self._whole:
                    with torch.no_grad(), local_only():
                        own[key] = value.detach().clone().as_subclass(Tensor)
                else:
                    own[key] = value.clone() if isinstance(value, Tensor) else value

    def _as_dtensor(self, key: str, value: Any, slot: Slot | None) -> Any:
        if slot is None or self._whole or type(value) is not Tensor or key in _COUNTS:
            return value
        plain, layout = self._plain_of(slot)
        if plain is None:  # frozen since before `parallelize`: its state is as the optimizer made it
            return value
        if value.numel() != prod(layout.local_shape) or value.ndim != plain.ndim:
            return value
        return stamp(value.detach().view(layout.local_shape), layout)

    def _materialize(self) -> None:
        """Steps over throw-away zeros with zero gradients: what that makes is the state before the first step."""
        waiting = [
            (group, parameter, slot)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter not in self.state and (slot := self._parallel.slot_of(parameter)) is not None
            and slot.optimized is not None
        ]  # fmt: skip
        if not waiting:
            return
        kept_groups, kept_state, own_step = self.param_groups, self.state, self._own_step()
        for group, parameter, slot in waiting:
            shape = self._owners.local_shape(slot) if self._owners is not None else slot.optimized.shape
            blank = nn.Parameter(torch.zeros(shape, dtype=slot.optimized.dtype, device=slot.optimized.device))
            blank.grad = torch.zeros_like(blank)
            self.param_groups, self.state = [{**group, "params": [blank]}], defaultdict(dict)
            try:
                own_step()
                made = dict(self.state[blank])
                numbers = {key: _number(value) for key, value in made.items()}
                counters = [key for key, number in numbers.items() if number == 1]
                if counters:
                    blank.grad = torch.zeros_like(blank)
                    made = {key: value.clone() if isinstance(value, Tensor) else value for key, value in made.items()}
                    own_step()
                    counters = [key for key in counters if _number(self.state[blank].get(key)) == 2]
            finally:
                self.param_groups, self.state = kept_groups, kept_state
            for key in counters:
                made[key] = torch.zeros_like(made[key]) if isinstance(made[key], Tensor) else 0
            kept_state[parameter] = made


def _number(value: Any) -> float | None:
    """What a state that is one number counts."""
    if isinstance(value, Tensor):
        return value.item() if not value.ndim else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _on_parts(name: str) -> Any:
    """The method `name` of the user's class, on what `step` is given."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._parallel.flush()
        with self._plain():
            out = getattr(super(Sharded, self), name)(*args, **kwargs)
        self._parallel.updated()
        return out

    method.__name__ = name
    return method


_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch.optim that are one number per parameter, whatever its shape."""


def _local_gradient(slot: Slot) -> Tensor | None:
    """This rank's part of a parameter's reduced gradient, a view where it lies so already."""
    gradient = slot.parameter.grad
    if gradient is None:
        return None
    layout = gradient.mesh_layout
    # Pending over axes of one rank it is whole, and nothing moves.
    if layout is not slot.gradient_layout and route_between(layout, slot.gradient_layout).recipe:
        gradient = convert(gradient, slot.gradient_layout, "step")
    with local_only():
        local = gradient.detach()
        local = local if local.dtype is slot.optimized.dtype else local.to(slot.optimized.dtype)
        return local.view(size=slot.optimized.shape)


def _state_made_early(optimizer: torch.optim.Optimizer) -> None:
    """State that the constructor made for DTensors (Adagrad's sums): their local parts, cut like the masters."""
    for parameter, values in optimizer.state.items():
        slot = optimizer._parallel.slot_of(parameter)
        for key, value in values.items():
            if type(value) is DTensor and slot is not None:
                local = convert(value, slot.gradient_layout, "step")
                with local_only():
                    like = slot.master if slot.optimized is None else slot.optimized
                    own = torch.empty(like.shape, dtype=local.dtype, device=like.device)
                    values[key] = own.copy_(local.reshape(own.shape))


def _reducing(closure: Any, data_parallel: DataParallel) -> Any:
    def run() -> Any:
        loss = closure()
        data_parallel.flush()
        data_parallel.rest()
        return loss

    return run
