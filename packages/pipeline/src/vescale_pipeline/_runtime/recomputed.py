"""Recomputes checkpoints once for both halves of a split backward.

torch's checkpoint computes again for each run of autograd, and gives what that made to the first node that asks. A
split backward is many runs (`backward.py`), in which a node may be run once for the gradient of the input and once
more for those of the weights. So the checkpoints of a stage and microbatch have one `Halves`: they compute again when
either half first asks for something, and what was handed out stays until both are through. Between the halves that
takes the memory which a stage without checkpoints takes from its forward on.

Reentrant checkpoints are run as the other kind (`skeleton.py`), and need nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

from .._torch_private import _checkpoint_hook, set_checkpoint_hook
from .._trace.placeholder import current


class Halves(GraphExecGroup):
    """The runs of autograd that share what is computed again: those of one stage and microbatch. Checkpoints that begin
    while it is `current.halves` are of this group."""

    def __init__(self) -> None:
        self.are_apart = False  # set when a half begins; a whole backward asks for everything once
        self._handed: dict[Any, Tensor] = {}

    def get(self, holder: Any, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Returns the tensor a checkpoint saved, for which autograd has `holder`."""
        if not self.are_apart:
            return unpack(holder)
        tensor = self._handed.get(holder)
        if tensor is None:
            if self._get_current_group() is self:  # it computes again, and asks a checkpoint around it for its inputs
                tensor = unpack(holder)
            else:
                with self:
                    tensor = unpack(holder)
            self._handed[holder] = tensor
        return tensor

    def end(self) -> None:
        """Both halves are through."""
        self._handed.clear()


class _Hook(_checkpoint_hook):
    """torch's hooks on what is saved inside of a checkpoint, which ask the group that the checkpoint is of."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        halves, unpack = current.halves, self.unpack_hook
        if halves is not None:
            self.unpack_hook = lambda holder: halves.get(holder, unpack)


set_checkpoint_hook(_Hook)
