"""accelerate: `parallelize(plan, accelerator)` after `Accelerator(...)`; the rest of the script stays.

What a script computes is one device's computation on global values. So the accelerator computes as one process: its
batches are the global ones, and nothing is counted once per rank. accelerate's state knows the ranks, for what is done
between processes: who prints and writes, who goes first, what one tells the others, what is gathered from all. A
DTensor is global, and gathering or reducing it gives its value. A plain tensor or object is each rank's own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import gather, pad_across_processes, recursively_apply, reduce
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from vescale_checkpoint import load, save, whole_state_dict
from vescale_dtensor import DTensor
from vescale_plans import Loader, Plan, PlanError, adopt, no_sync
from vescale_rng.state import get_state, set_state

from .._stages import parallelize as _parallelize
from ..metrics import is_first
from ._full import barrier, full


def parallelize(plan: Plan, accelerator: Accelerator) -> Accelerator:
    """Returns the same accelerator, which from now on prepares objects according to `plan`.

    `prepare` shards a model (see `vescale.parallelize`) together with the optimizer that was made from it, which may be
    in the same call, in any order, or come later. Loaders become `vescale.loader`s, whose batch size is that of all
    ranks together, and whose batches are DTensors. Schedulers step once. `gather`, `gather_for_metrics` and
    `get_state_dict` return whole plain tensors. To `gather`, `reduce` and the functions of accelerate's utils, what is
    no DTensor is each rank's own. `save_state` and `load_state` use `vescale.save` and `vescale.load`, and work under
    any other plan.

    Raises PlanError if the accelerator was configured for another engine, or has already prepared objects.
    """
    _check(plan, accelerator)
    if not isinstance(accelerator, Planned):
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (Planned, kind), {"__module__": kind.__module__})
    accelerator.plan = plan
    accelerator.dataloader_config.dispatch_batches = False
    accelerator.dataloader_config.split_batches = True  # a loader's batch is that of all ranks
    _tell_processes()
    _draw_alike()
    return accelerator


class Planned:
    """Methods that `parallelize` adds to an Accelerator. A mixin: accelerate's own class follows in the order of
    resolution."""

    plan: Plan

    @property
    def distributed_type(self) -> DistributedType:
        """Type of the one process that computes: accelerate distributes nothing. `state` tells of the ranks."""
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        """One computes. As many ranks as the state has processes take part in it."""
        return 1

    @property
    def process_index(self) -> int:
        """Index of the one process that computes: whoever cuts its part out of what was gathered (TRL) gets all of it.
        Which rank prints and writes is told by `is_main_process`."""
        return 0

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        return False

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as accelerate does; an optimizer is sharded together with its model."""
        _tell_processes()
        _draw_alike()
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        for model in args:
            if isinstance(model, nn.Module) and not hasattr(model, "_vescale"):
                its = [one for one in optimizers if _is_of(one, model)]
                if len(its) > 1:
                    raise PlanError(
                        "Accelerator.prepare",
                        f"{len(its)} optimizers were made of one model before it is sharded",
                        [type(one).__name__ for one in its],
                        [("model = accelerator.prepare(model)", "then make the optimizers, and prepare them")],
                    )
                _parallelize(self.plan, model, its[0] if its else None)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares a sharded model as accelerate does, mixed precision included."""
        if not hasattr(model, "_vescale"):
            _parallelize(self.plan, model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepares an optimizer that steps on shards, as accelerate does."""
        for model in self._models:
            if _is_of(optimizer, model):
                adopt(model, optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        """Prepares a loader of which this rank loads its part, as accelerate does."""
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if not is_prepared:
            prepared.base_dataloader = _Global(prepared.base_dataloader, self.plan, None)
            prepared.base_dataloader.plan = self.plan
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Whole plain tensors: of a DTensor, which is global already, its value; of plain tensors, which are each
        rank's own, those of all ranks, one after the other."""
        return recursively_apply(_either(full, gather), tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Whole plain tensors of what was computed from a prepared loader's batch, which is global, in whatever form;
        what was repeated for rows that the last batch does not have is cut off."""
        data, state = full(input_data), self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        if use_gather_object:
            return data[: state.remainder]
        return recursively_apply(lambda one: one[: state.remainder] if one.ndim else one, data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces like `gather`: a DTensor's value, and of plain tensors the sum or mean over all ranks."""
        plain = partial(reduce, reduction=reduction, scale=scale)
        return recursively_apply(_either(full, plain), tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads plain tensors as accelerate does. A DTensor has one shape, and nothing to pad."""
        plain = partial(pad_across_processes, dim=dim, pad_index=pad_index, pad_first=pad_first)
        return recursively_apply(_either(lambda one: one, plain), tensor, error_on_other_type=True)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole plain tensors, of all stages of a pipeline, on the first rank's host; other ranks take part, and get
        none. Cost: an all-gather per sharded tensor."""
        return whole_state_dict(model)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients inside stay partial where the plan keeps them whole (ZeRO 0 and 1)."""
        with no_sync(model) if self.plan.zero < 2 else contextlib.nullcontext():
            yield

    def wait_for_everyone(self) -> None:
        """A barrier over all ranks."""
        barrier()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Everything prepared or registered, by `vescale.save`, as one step of the folder. Hooks are called as by
        accelerate's own: a model whose weights one of them took away is left out. Where the project names its
        checkpoints, each has a folder of its own, of which `total_limit` stay."""
        folder = self._named_folder() if self.project_configuration.automatic_checkpoint_naming else output_dir
        folder = _folder(self, folder)
        models = list(self._models)
        if self._save_model_state_pre_hook:
            given = [self.get_state_dict(model, unwrap=False) for model in models]
            weights = list(given)
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, folder)
            models = [model for model, state in zip(models, given) if any(state is one for one in weights)]
        path = save(folder, self._prepared_state(models)).path
        self.project_configuration.iteration += 1
        return path

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **options: Any) -> None:
        """Loads what `save_state` wrote, under any plan; a model that a hook took away is left as it is."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = next(reversed(_numbered(_folder(self, None))), None)
        folder = _folder(self, input_dir)
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, folder)
        load(folder, self._prepared_state(models))

    def _named_folder(self) -> str:
        """The next one of a project that names its checkpoints, once there is room for it."""
        parent, limit = _folder(self, None), self.project_configuration.total_limit
        folder = os.path.join(parent, f"checkpoint_{self.save_iteration}")
        barrier()  # all that were begun are whole
        if os.path.exists(folder):
            raise PlanError(
                "Accelerator.save_state",
                f"the project's checkpoint {self.save_iteration} is there already",
                [f"folder  {folder}"],
                [("accelerator.project_configuration.iteration = n", "the number of the next one")],
            )
        barrier()  # all have looked
        if limit is not None and is_first():
            before = _numbered(parent)
            for old in before[: max(0, len(before) + 1 - limit)]:
                shutil.rmtree(old)
        return folder

    def _prepared_state(self, models: list[nn.Module]) -> dict[str, Any]:
        loaders = [one.base_dataloader for one in self._dataloaders if hasattr(one, "base_dataloader")]
        groups = {
            "optimizer": [one.optimizer for one in self._optimizers],
            "scheduler": self._schedulers,
            "loader": loaders,
            "object": self._custom_objects,
            "random": [_Generators()],
            "accumulation": [_Accumulation(self)],
        }
        state = {f"{kind}_{at}": one for kind, group in groups.items() for at, one in enumerate(group)}
        state |= {f"model_{at}": one for at, one in enumerate(self._models) if any(one is other for other in models)}
        return state | ({"scaler": self.scaler} if self.scaler is not None else {})


class _Global(Loader):
    """A loader whose batches are DTensors, those too that every rank loads whole: they are global, and say so."""

    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        return map(self.plan.shard_batch, super().__iter__())


class _Accumulation:
    """Position of `accumulate` in a step's backwards."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = int(state["step"])


class _Generators:
    """torch's, Python's and numpy's generators, which are alike on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        name, keys, *rest = numpy.random.get_state()
        return {
            "torch": get_state(),
            "python": [version, list(numbers), gauss],
            "numpy": [name, keys.tolist(), *rest],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state(state["torch"])
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys, *rest))


def _either(of_global: Callable, of_plain: Callable) -> Callable:
    return lambda one: of_global(one) if isinstance(one, DTensor) else of_plain(one)


def _is_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = set(model.parameters())
    return any(parameter in own for group in optimizer.param_groups for parameter in group["params"])


def _tell_processes() -> None:
    """accelerate's state, where it was made before there was a process group, or otherwise than by torchrun."""
    state = PartialState()
    if dist.is_initialized() and state.num_processes != dist.get_world_size():
        kind = DistributedType.MULTI_CPU if state.device.type == "cpu" else DistributedType.MULTI_GPU
        known = {"distributed_type": kind, "backend": dist.get_backend(), "num_processes": dist.get_world_size()}
        PartialState._shared_state.update(**known, process_index=dist.get_rank())
        AcceleratorState()  # takes it over


def one_process() -> PartialState:
    """A state of its own, for whoever computes by it: one process, whose index tells who prints and writes."""
    state = object.__new__(PartialState)
    state.__dict__ = {**PartialState._shared_state, "distributed_type": DistributedType.NO, "num_processes": 1}
    return state


def _draw_alike() -> None:
    """Every rank gets the first one's generators, which are one device's: `set_seed(seed, device_specific=True)`, which
    TRL calls, gave each rank others."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        states = [_Generators().state_dict()]
        dist.broadcast_object_list(states, src=0)
        _Generators().load_state_dict(states[0])


def _numbered(parent: str) -> list[str]:
    """The checkpoints of a project, the oldest first."""
    names = os.listdir(parent) if os.path.isdir(parent) else []
    found = [(int(name.rpartition("_")[2]), name) for name in names if name.rpartition("_")[2].isdigit()]
    return [os.path.join(parent, name) for _, name in sorted(found)]


def _folder(accelerator: Any, given: str | None) -> str:
    if given is None:
        given = os.path.join(accelerator.project_dir or ".", "checkpoints")
    return str(given)


def _check(plan: Any, accelerator: Accelerator) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(
            "vescale.integrations.accelerate.parallelize",
            f"its first argument is of type {type(plan).__name__}, not a plan",
            (),
            [("vescale.plan_from_config(config, model)", "the plan of a ParallelismConfig or DistributedConfig")],
        )
    used = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"} & {accelerator.distributed_type.name}
    if used:
        raise PlanError(
            "vescale.integrations.accelerate.parallelize",
            f"the accelerator was configured for {used.pop()}, which shards models itself",
            (),
            [("Accelerator()", "without a plugin: the plan says what is sharded")],
        )
    wrapped = [one for one in accelerator._models if isinstance(one, DistributedDataParallel)]
    if wrapped or accelerator._optimizers or accelerator._dataloaders:
        raise PlanError(
            "vescale.integrations.accelerate.parallelize",
            "the accelerator has prepared objects already, for ranks that each compute on their own batches",
            [f"prepared  {len(wrapped)} models, {len(accelerator._dataloaders)} loaders"],
            [("parallelize(plan, accelerator)", "right after Accelerator(...)")],
        )
