"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.utils import clip_grad
from torch.utils import _python_dispatch, checkpoint

# Runs functions of subclasses as on plain tensors. Instead: the public `torch.overrides` name of it.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# What two tensor objects stand for, exchanged. Instead: `torch.utils.swap_tensors`, without its refusals.
_swap_tensor_impl = torch._C._swap_tensor_impl

# Whether somebody has taken functions out of the dispatch. Instead: a public question in `torch.overrides`.
_is_torch_function_enabled = torch._C._is_torch_function_enabled

# The name of a device that an extension brings, whose kernels are the CPU's in tests. Instead: a public getter beside
# `torch.utils.rename_privateuse1_backend`.
_get_privateuse1_backend_name = torch._C._get_privateuse1_backend_name

# Whether anybody else holds a tensor's memory, before it is used for the next receive or for a sum. Instead: a public
# count.
_storage_Use_Count = torch._C._storage_Use_Count

# Gradients of a stage's parameters added, scaled and measured in one call each. Instead: public `torch.foreach`
# functions.
_foreach_add_ = torch._foreach_add_
_foreach_mul = torch._foreach_mul
_foreach_norm = torch._foreach_norm

# What torch's clipping calls for the norm of all gradients. Instead: a public hook on it.
_get_total_norm = clip_grad._get_total_norm

# Tensors without memory that keep their device, to count a model's work. Instead: a public name of it.
FakeTensorMode = fake_tensor.FakeTensorMode

# Sees each operator of a forward. Instead: a public `torch.utils` name of it.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# A backward without the checks of the seeds, which cost more than a small one. Instead: `torch.autograd.grad`.
run_backward = Variable._execution_engine.run_backward

# The hooks on what is saved inside of a checkpoint: a split backward asks for it twice. Instead: backwards under one
# `GraphExecGroup` that may use the same saved tensor.
_checkpoint_hook = checkpoint._checkpoint_hook

# Ends a group without waiting for what is in flight in it. Instead: a public `dist.abort_process_group`.
_abort_process_group = distributed_c10d._abort_process_group


def set_total_norm(function: Any) -> None:
    """Replaces the function that torch's clipping calls. Instead: as for `_get_total_norm`."""
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = function


def set_checkpoint_hook(hook: type) -> None:
    """Sets the hook by which checkpoints that begin from now on save. Instead: as for `_checkpoint_hook`."""
    checkpoint._checkpoint_hook = hook


def make_subclass(cls: type, data: Tensor, requires_grad: bool = False) -> Any:
    """A tensor of a class of ours that stands for one of another stage. Instead: a public constructor.

    torch's is looked up in each call: the tensor core replaces it.
    """
    return Tensor._make_subclass(cls, data, requires_grad)
