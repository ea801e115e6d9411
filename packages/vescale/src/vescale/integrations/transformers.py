"""transformers: `parallelize(plan, trainer)` after `Trainer(...)`; the rest of the script stays.

The Trainer is the class itself, or one that derives from it; its accelerator sees one process (see `accelerate`), so
that what it counts, averages, logs and writes is one device's. `per_device_train_batch_size` is the batch of all ranks
together, as on one device.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from vescale_checkpoint import load, save, whole_state_dict
from vescale_plans import Plan, PlanError

from .._planning.from_config import as_plan
from .._stages import parallelize as _parallelize
from . import accelerate

FOLDER = "vescale"
"""Folder in a Trainer's checkpoint: the optimizer's state, as a step of `vescale.save`."""


def parallelize(plan: Plan, trainer: Trainer) -> Trainer:
    """Returns the same trainer, which from now on trains under `plan`: training, evaluation, accumulation, clipping,
    schedules, mixed precision and checkpoints work as on one device.

    The model is sharded at once, or when `model_init` is called. An optimizer that was passed to the Trainer is taken
    over. A checkpoint has the whole weights, as `save_pretrained` writes them (for a PEFT model, the adapter), and the
    shards of the optimizer; `train(resume_from_checkpoint=...)` resumes under any other plan. Random numbers, batches
    and `num_items_in_batch` are those of one device. Subclasses, such as TRL's SFTTrainer, are accepted.

    Raises PlanError for a Trainer that has already trained, or uses DeepSpeed or FSDP.
    """
    if trainer.model is not None:
        plan = as_plan(plan, trainer.model)
    accelerate.parallelize(plan, trainer.accelerator)
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (Planned, kind), {"__module__": kind.__module__})
    trainer.plan = plan
    trainer.args.distributed_state = accelerate.one_process()  # by which it counts
    gather = trainer.accelerator.gather_for_metrics
    trainer.gather_function = functools.partial(gather, use_gather_object=trainer.args.eval_use_gather_object)
    if trainer.model is not None and trainer.model_init is None:
        trainer._shard(trainer.model)
    return trainer


class Planned:
    """Methods that `parallelize` adds to a Trainer. A mixin: the trainer's own class follows in the order of
    resolution."""

    plan: Plan
    _whole: dict[str, torch.Tensor] | None = None
    """State dict of the model that is being saved."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes the Trainer's model, sharded."""
        return self._shard(super().call_model_init(trial))

    def _shard(self, model: nn.Module) -> nn.Module:
        if not hasattr(model, "_vescale"):
            _parallelize(self.plan, model, self.optimizer)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A sharded model lies where its mesh is."""
        if not hasattr(model, "_vescale"):
            super()._move_model_to_device(model, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves whole tensors as the Trainer does: all ranks make them, and the first one writes."""
        self._whole = whole_state_dict(self.model)  # here: of `_save` some releases make a call on the first rank alone
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None
        accelerate.barrier()  # who reads it finds it whole

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if state_dict is None and self._whole is not None:
            return super()._save(output_dir, state_dict=self._whole)
        super()._save(output_dir, state_dict=whole_state_dict(self.model) if state_dict is None else state_dict)
        accelerate.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The optimizer by `vescale.save`: every rank writes its shards."""
        accelerate.barrier()
        save(os.path.join(output_dir, FOLDER), {"optimizer": _own(self.optimizer)}, overwrite=True, step=0)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads what `_save_optimizer_and_scheduler` wrote, under any plan."""
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, FOLDER)
        if not os.path.isdir(folder):
            raise PlanError(
                "Trainer.train",
                "the checkpoint has no optimizer state that veScale wrote: a Trainer without a plan made it",
                [f"checkpoint  {checkpoint}"],
                [
                    ("model = AutoModel.from_pretrained(checkpoint)", "its weights alone, with a new optimizer"),
                    ("save it under a plan of one rank", "parallelize(plan, trainer) works outside torchrun, too"),
                ],
            )
        load(folder, {"optimizer": _own(self.optimizer)})
        path = os.path.join(checkpoint, SCHEDULER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        """Generators are alike on all ranks: the first writes them."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)


def _own(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
