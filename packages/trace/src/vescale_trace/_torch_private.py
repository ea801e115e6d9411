"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
"""

import torch

# Runs functions of subclasses as on plain tensors. Instead: the public `torch.overrides` name of it.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
