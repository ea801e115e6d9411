"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
"""

import torch
from torch.utils import _python_dispatch

# Runs functions of subclasses as on plain tensors. Instead: the public `torch.overrides` name of it.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# A tensor that is made of others, of no bits of its own. Instead: a public `torch.utils` name of it.
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
