"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
"""

import torch
from torch import Tensor, nn
from torch.utils import _mode_utils, _python_dispatch, _pytree

# A tensor without memory, which stands for a parameter that is made later. Instead: a public constructor of it.
_make_wrapper_subclass = Tensor._make_wrapper_subclass

# Leaves a subclass out of the dispatch of functions. Instead: a public name for it in `torch.overrides`.
_disabled_torch_function_impl = torch._C._disabled_torch_function_impl

# Sees each operator of an initialisation, in order to do it again. Instead: a public `torch.utils` name of it.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Runs what is noted without the mode that notes. Instead: leaving a TorchDispatchMode in public.
_disable_current_modes = _python_dispatch._disable_current_modes
no_dispatch = _mode_utils.no_dispatch

# Tells an operator, which is done again, from a function of Python. Instead: a public class of `torch.ops.aten.*.*`.
OpOverload = torch._ops.OpOverload

# The tensors in an operator's arguments. Instead: a public pytree of torch in Python.
tree_flatten = _pytree.tree_flatten
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten

# The softmax of scaled_dot_product_attention, in which a row that is masked whole is 0. Instead: a public one.
_safe_softmax = torch._safe_softmax

# The fan that `nn.init`'s kaiming functions compute with. Instead: the same arithmetic here.
_calculate_correct_fan = nn.init._calculate_correct_fan
