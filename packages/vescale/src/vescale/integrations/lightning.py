"""Lightning and Fabric: their loops, one device per process; with `Checkpoints()` among the plugins, their files.

    model, optimizer = vescale.parallelize(plan, module, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    fabric = Fabric(accelerator="auto", devices=1, plugins=[Checkpoints()])    # in each of torchrun's processes
    trainer = Trainer(devices=1, plugins=[Checkpoints()])                      # whose module returns that optimizer

A strategy of theirs would wrap the model and reduce gradients once more, so each process is on its own for them
(`SingleDeviceStrategy`, which devices=1 chooses): every rank takes every step, with the global loss.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from ..metrics import is_first
from ._full import barrier, full


class Checkpoints(TorchCheckpointIO):
    """Writes Lightning's files with whole plain tensors, so that any plan, and one device, can load them.

    All ranks take part; the first one writes and removes files. Cost: an all-gather of sharded tensors. The first rank
    holds all of them.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves whole tensors, as Lightning does."""
        found = full(checkpoint)
        barrier()  # all have looked whether the path is free
        if is_first():
            super().save_checkpoint(found, path, storage_options)
        barrier()  # who reads it finds it whole

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint as Lightning does."""
        if is_first():
            super().remove_checkpoint(path)
        barrier()
