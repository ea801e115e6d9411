"""Optimizers over sharded parameters: what a user's optimizer is given, and when.

    elementwise            while it steps, plain Parameters: this rank's flat parts of the full-precision shards
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
from itertools import chain
from operator import attrgetter, is_
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vescale_dtensor import OperatorError
from vescale_dtensor.engine import convert, drop_gradients, held_gradients, local_only, route_of, set_plain_grad

from .._plan.parts import PlanError
from .._torch_private import version_of
from .matrix import Owners
from .optim_kinds import MATRIX, elementwise_methods, without_hooks
from .optim_states import ShardedStates, take_in_early
from .sharded_parameter import ShardedParameter
from .zero import DataParallel


def wrap(optimizer: torch.optim.Optimizer, data_parallel: DataParallel, names: dict[int, str]) -> Any:
    """The same object, of a class that also knows where its parameters lie. `names`: id(parameter) -> name."""
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:
        raise PlanError(
            "parallelize",
            "SparseAdam takes sparse gradients, but flat buckets hold dense ones",
            (),
            [("torch.optim.Adam", "dense gradients"), ("nn.Embedding(..., sparse=False)", "")],
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    scheduled = _without_step(optimizer)
    methods = elementwise_methods(optimizer)
    own = {name: _on_parts(name) for name in methods or ()}
    if kind.zero_grad is torch.optim.Optimizer.zero_grad:
        own["zero_grad"] = _zero_grad
    optimizer.__class__ = type(kind.__name__, (Sharded, kind), {"__module__": kind.__module__, **own})
    optimizer._parameter_names = names
    optimizer._on_dtensors = methods is None and kind not in MATRIX
    if scheduled:
        optimizer.step = _scheduled_step(optimizer)
    bind(optimizer, data_parallel)
    if methods is not None:
        take_in_early(optimizer)
    return optimizer


def bind(optimizer: Any, data_parallel: DataParallel) -> None:
    """The optimizer steps on these buckets from here on."""
    kind = type(optimizer).__bases__[1]
    optimizer._parallel = data_parallel
    data_parallel.optimizers.append(weakref.ref(optimizer))
    optimizer._owners, optimizer._exchange, optimizer._is_inside, optimizer._twin = None, None, False, {}
    is_elementwise = not optimizer._on_dtensors and kind not in MATRIX
    if not is_elementwise and any(bucket.offloads for unit in data_parallel.units for bucket in unit.buckets):
        raise PlanError(
            "parallelize",
            f"offload=True keeps optimizer states on the host, and {kind.__name__} steps on the device",
            (),
            [("offload=False", ""), ("torch.optim.AdamW", "treats every element alone: it can step on the host")],
        )
    if kind in MATRIX and data_parallel.units:
        params = [data_parallel.param_of(p) for group in optimizer.param_groups for p in group["params"]]
        sharing = data_parallel.sharing
        lead = sharing.lead if sharing.lead is not None and sharing.mesh.sizes[sharing.lead] > 1 else None
        optimizer._owners = Owners([param for param in params if param is not None], sharing.mesh, lead)


def _cannot_step(optimizer: torch.optim.Optimizer, error: Exception) -> PlanError:
    """Builds the error for an optimizer whose code does not take the DTensors themselves."""
    kind = type(optimizer).__bases__[1]
    why = str(error).strip().partition("\n")[0]
    return PlanError(
        "optimizer.step",
        f"{kind.__name__} is not known to treat each element of a parameter independently, and does not step on "
        "the shards' DTensors",
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
            f"the step of the {type(optimizer).__name__} was replaced: what it calls does not know about the shards",
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


class Sharded(ShardedStates):
    """Methods that `parallelize` adds to an optimizer. A mixin: the user's class follows in the order of resolution."""

    _exchange: Exchange | None  # as the last step had it

    @torch.optim.Optimizer.profile_hook_step  # hooks run around all of it, where parameters and gradients are global
    def step(self, closure: Any = None, **options: Any) -> Any:
        """Steps as the optimizer does: gradients still partial are reduced first, parameters follow after."""
        if closure is not None and not callable(closure):
            raise OperatorError(
                f"{type(self).__name__}.step",
                f"its argument is a {type(closure).__name__}, not a closure",
                ["step(closure)  calls it, and steps by the gradients that it leaves"],
                [("loss.backward(); optimizer.step()", "no closure is needed where gradients are there")],
            )
        own_step = self._own_step()
        if self._on_dtensors:
            if closure is not None:
                options["closure"] = _reducing(closure, self._parallel)
            self._parallel.flush()
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

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Plain Parameters, with the local parts of the gradients, in the places of the DTensors."""
        shown = [group["params"] for group in self.param_groups]
        exchange = self._exchange
        if exchange is None or not exchange.holds(shown):
            exchange = self._exchange = Exchange(shown, self._parallel, self._owners)
        self._lend(exchange)
        for group, inside in zip(self.param_groups, exchange.inside):
            group["params"] = inside.copy()
        self._is_inside = True
        self._rename(exchange.own, exchange.lent)
        if self._parallel.sharing.mesh.device_type != "cpu" and exchange.waits:
            torch.accelerator.current_stream().synchronize()  # gradients and full-precision shards are on the host
        before = list(map(version_of, exchange.lent))
        try:
            yield
            for param in exchange.taken_back:
                self._take_back(param)
        finally:
            self._tell_of_writes(exchange, before)
            for group, given in zip(self.param_groups, shown):
                group["params"] = given
            self._rename(exchange.lent, exchange.own)
            self._is_inside = False
            drop_gradients(exchange.lent)

    def _lend(self, exchange: Exchange) -> None:
        """Gives the plain parameters that step in the DTensors' places their gradients, and what else they lack."""
        if self._owners is not None:
            for param in exchange.params:
                self._owners.bring(param, param.parameter.grad)
            return
        gradients = _local_gradients(exchange)
        for param, plain in exchange.copied:  # the full-precision shard may have been loaded or written since
            with torch.no_grad():
                plain.copy_(param.shard, non_blocking=True)
        with local_only():
            for plain, gradient in zip(exchange.lent, gradients):
                set_plain_grad(plain, gradient)

    def _take_back(self, param: ShardedParameter) -> None:
        if self._owners is not None:
            self._owners.send_back(param)
        else:
            with torch.no_grad():
                param.shard.copy_(param.optimized, non_blocking=True)  # written again after the next step's wait

    def _tell_of_writes(self, exchange: Exchange, before: list[int]) -> None:
        """Autograd hears of a write to a parameter where it heard of one to the plain parameter that stepped in its
        place: a backward that needs the value from before raises, as on one device. On every rank, also of those that
        one rank steps for all."""
        after = list(map(version_of, exchange.lent))
        everything = self._owners is not None
        with local_only():
            increment_version(
                [own for own, one, other in zip(exchange.own, before, after) if everything or one != other]
            )

    def _rename(self, before: list[Tensor], after: list[Tensor]) -> None:
        """The state of each parameter of `before` becomes that of its other in `after`, in the order it had."""
        state, twin = self.state, self._twin
        in_order = 0 < len(before) == len(state) and all(map(is_, state, before))
        is_twin = len(twin) == len(state) and all(map(is_, twin.values(), state.values()))
        if not (in_order and is_twin and all(map(is_, twin, after))):
            if not in_order:  # some have none, or stand in another order
                other = dict(zip(before, after))
                after = [other.get(key, key) for key in state]
            twin = defaultdict(dict, zip(after, state.values()))
        self.state, self._twin = twin, state


def _zero_grad(self: Sharded, set_to_none: bool = True) -> None:
    """Replaces torch's own, which would look at each gradient: a DTensor."""
    if not set_to_none:
        return torch.optim.Optimizer.zero_grad(self, set_to_none)
    self._parallel.end_pass()
    for group in self.param_groups:
        drop_gradients(group["params"])


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


class Exchange:
    """Exchanges DTensors for the plain Parameters that step in their place, in the order of the groups. Made once, and
    anew where a group or a bucket has others by now."""

    def __init__(self, shown: list[list[Tensor]], parallel: DataParallel, owners: Owners | None) -> None:
        self._shown, self._sizes = [*chain.from_iterable(shown)], list(map(len, shown))
        self._known = [param for one in self._shown if (param := parallel.param_of(one)) is not None]
        self._optimized = list(map(_optimized_of, self._known))
        self.params = [param for param in self._known if param.optimized is not None]
        self.own = [param.parameter for param in self.params]
        self.lent = list(map(_optimized_of if owners is None else owners.plain, self.params))
        stand_ins = dict(zip(map(id, self.own), self.lent))
        self.inside = [[stand_ins.get(id(one), one) for one in group] for group in shown]  # what optimizers are to see
        self.taken_back = [param for param in self.params if owners is not None or param.is_copied]
        self.copied = [(param, plain) for param, plain in zip(self.params, self.lent) if param.is_copied]
        self.waits = any(param.arriving is not None for param in self.params)  # for copies that a step reads

    def holds(self, shown: list[list[Tensor]]) -> bool:
        """True if the groups are as they were, and the buckets' plain parameters the same objects."""
        return (
            list(map(len, shown)) == self._sizes
            and all(map(is_, chain.from_iterable(shown), self._shown))
            and all(map(is_, map(_optimized_of, self._known), self._optimized))
        )


_optimized_of = attrgetter("optimized")


def _local_gradients(exchange: Exchange) -> list[Tensor | None]:
    """This rank's parts of the parameters' reduced gradients, views where they lie so already."""
    held = held_gradients(exchange.own)
    gradients = []
    for param, (gradient, layout) in zip(exchange.params, held):
        # Partial over axes of one rank it is whole, and nothing moves.
        moves = gradient is not None and layout is not param.gradient_layout
        if moves and route_of(layout, param.gradient_layout).recipe:
            gradient = convert(param.parameter.grad, param.gradient_layout, "step")
        gradients.append(gradient)
    with local_only():
        return [
            gradient if gradient is None else _as_stepped(gradient, param)
            for param, gradient in zip(exchange.params, gradients)
        ]


def _as_stepped(gradient: Tensor, param: ShardedParameter) -> Tensor:
    """Plain, in the shape and the dtype in which the parameter steps, and where it does."""
    optimized = param.optimized
    local = gradient
    if type(gradient) is not Tensor or gradient.requires_grad:
        local = Tensor.detach(gradient)  # C's, where a DTensor's is Python
    if local.dtype is not optimized.dtype:
        local = local.to(optimized.dtype)
    if local.shape != optimized.shape:
        local = local.view(size=optimized.shape)  # a view costs 2 us
    return local if param.arriving is None else param.arriving.copy_(local, non_blocking=True)


def _reducing(closure: Any, data_parallel: DataParallel) -> Any:
    def run() -> Any:
        loss = closure()
        data_parallel.flush()
        return loss

    return run
