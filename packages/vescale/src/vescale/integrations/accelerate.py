"""accelerate: `parallelize(plan, accelerator)` after `Accelerator(...)`; the rest of the script stays.

What a script computes is one device's computation on global values, so accelerate sees one process: its batches are the
global ones, whatever it gathers or averages over processes is whole already, and nothing is counted once per rank. Only
accelerate's state has the rank as the index of the process, so that the first rank alone prints and writes.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from vescale_checkpoint import load, save, whole_state_dict
from vescale_plans import Plan, PlanError, adopt, loader, no_sync
from vescale_rng.state import get_state, set_state

from .._stages import parallelize as _parallelize
from ._whole import barrier, whole


def parallelize(plan: Plan, accelerator: Accelerator) -> Accelerator:
    """The same accelerator, which from now on prepares by `plan`.

    `prepare` shards a model (see `vescale.parallelize`) with the optimizer that was made of it, which may stand in the
    same call, in any order, or come later; loaders become `vescale.loader`s, whose batch size is that of all ranks
    together; schedulers step once. `gather`, `gather_for_metrics` and `get_state_dict` give whole plain tensors, and
    `save_state` and `load_state` use `vescale.save` and `vescale.load`, under any other plan.

    Raises PlanError for an accelerator that was configured for another engine, or has prepared already.
    """
    _check(accelerator)
    if not isinstance(accelerator, Planned):
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (Planned, kind), {"__module__": kind.__module__})
    accelerator.plan = plan
    accelerator.dataloader_config.dispatch_batches = False
    _see_one_process()
    _draw_alike()
    return accelerator


class Planned:
    """What `parallelize` adds to an Accelerator. A mixin: accelerate's own class follows in the order of resolution."""

    plan: Plan

    @property
    def process_index(self) -> int:
        """Of the one process that computes: whoever cuts its part out of what was gathered (TRL) gets all of it. Which
        rank prints and writes is told by `is_main_process`."""
        return 0

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's own; an optimizer is sharded together with its model."""
        _see_one_process()
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
        """As accelerate's own, mixed precision included, of a sharded model."""
        _see_one_process()
        if not hasattr(model, "_vescale"):
            _parallelize(self.plan, model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As accelerate's own, of an optimizer that steps on shards."""
        _see_one_process()
        for model in self._models:
            if _is_of(optimizer, model):
                adopt(model, optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        """As accelerate's own, of a loader of which this rank loads its part."""
        _see_one_process()
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if not is_prepared:
            prepared.base_dataloader = loader(prepared.base_dataloader, self.plan)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Whole plain tensors: they are global already. Cost: an all-gather of what is sharded."""
        return whole(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's own on one process, of whole plain tensors: what was repeated for rows that the last batch
        does not have is cut off."""
        return super().gather_for_metrics(whole(input_data), use_gather_object)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Nothing to pad: a tensor has one shape."""
        return tensor

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole plain tensors, of all stages of a pipeline, on the first rank's host; other ranks take part, and get
        none. Cost: an all-gather per sharded tensor."""
        return whole_state_dict(model)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients inside stay pending where the plan keeps them whole (ZeRO 0 and 1)."""
        with no_sync(model) if self.plan.zero < 2 else contextlib.nullcontext():
            yield

    def wait_for_everyone(self) -> None:
        """A barrier over all ranks."""
        barrier()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Everything prepared or registered, by `vescale.save`, as one step of the folder."""
        return save(_folder(self, output_dir), self._prepared_state()).path

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **options: Any) -> None:
        """What `save_state` wrote, under any plan."""
        load(_folder(self, input_dir), self._prepared_state())

    def _prepared_state(self) -> dict[str, Any]:
        loaders = [one.base_dataloader for one in self._dataloaders if hasattr(one, "base_dataloader")]
        groups = {
            "model": self._models,
            "optimizer": [one.optimizer for one in self._optimizers],
            "scheduler": self._schedulers,
            "loader": loaders,
            "object": self._custom_objects,
            "random": [_Generators()],
        }
        state = {f"{kind}_{at}": one for kind, group in groups.items() for at, one in enumerate(group)}
        return state | ({"scaler": self.scaler} if self.scaler is not None else {})


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


def _is_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = set(model.parameters())
    return any(parameter in own for group in optimizer.param_groups for parameter in group["params"])


def _see_one_process() -> None:
    """accelerate's shared state, as of one process; again at each use, for whoever makes new arguments resets it."""
    PartialState()  # made where it was reset
    rank = dist.get_rank() if dist.is_initialized() else 0
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state:
            state.update(distributed_type=DistributedType.NO, num_processes=1, process_index=rank)


def _draw_alike() -> None:
    """Every rank gets the first one's generators, which are one device's: `set_seed(seed, device_specific=True)`, which
    TRL calls, gave each rank others."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        states = [_Generators().state_dict()]
        dist.broadcast_object_list(states, src=0)
        _Generators().load_state_dict(states[0])


def _folder(accelerator: Any, given: str | None) -> str:
    if given is None:
        given = os.path.join(accelerator.project_dir or ".", "checkpoints")
    return str(given)


def _check(accelerator: Accelerator) -> None:
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
