"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import distributed_c10d

# Operators of a simulated group's own, below subclasses. Instead: public `torch.overrides` and `torch.utils` names.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
_DisableTorchDispatch = torch._C._DisableTorchDispatch

# Which backward runs on this thread, -1 outside of one. Instead: a public question of `torch.autograd.graph`.
_current_graph_task_id = torch._C._current_graph_task_id

# Groups of several ranks in one process. Instead: a public switch of torch.distributed.
_set_thread_isolation_mode = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]

# What a GradScaler calls, to which a pipeline adds that its stages skip a step together. Instead: a hook of the scaler.
_amp_foreach_non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# Calls a function at the end of the backward that runs. Instead: a public one.
queue_callback = Variable._execution_engine.queue_callback

# Ends a group without waiting for what is in flight in it. Instead: a public `dist.abort_process_group`.
_abort_process_group = distributed_c10d._abort_process_group


def c10d_world() -> Any:
    """Returns torch.distributed's table of groups: each simulated rank has its own. Instead: none in public.

    The name is bound anew at every turn of a rank, and so is looked up in each call.
    """
    return distributed_c10d._world


def is_registered(backend: str) -> bool:
    """True if a backend was registered. Instead: `dist.Backend.backend_list`, which tells less."""
    return backend.upper() in dist.Backend._plugins


def leave_unrecorded(backend: str) -> None:
    """Takes a backend out of torch 2.15's flight recorder, which asks C++ for the name of a group: one that is written
    in Python has none there. Instead: a recorder that asks the group."""
    by_themselves: set[str] | None = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if by_themselves is not None:
        by_themselves.add(backend)
