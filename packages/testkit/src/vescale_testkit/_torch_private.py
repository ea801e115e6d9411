"""torch's private names that this package uses, each with what it is for and with what would replace it."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch, _pytree

# Sees the operators of a program, for the bytes that they leave alive. Instead: a public name of it.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Makes the second device known to torch. Instead: none in public; extensions all call it.
_register_device_module = torch._register_device_module

# What optimizers call, as a random program does. Instead: a public name.
_foreach_add = torch._foreach_add

# The tensors in a program's values. Instead: a public pytree of torch in Python.
tree_flatten = _pytree.tree_flatten
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank is in, in order of creation. Instead: a public list."""
    return list(distributed_c10d._world.pg_map)


def operator_database() -> list[Any]:
    """torch's own samples of each operator's arguments. Instead: none in public."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db
