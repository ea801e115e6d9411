"""torch's private names that this package uses, each with what it is for and with what would replace it.

No other module of the package names a private part of torch: `make check` holds that, and
`tools/checks/torch_private.py` says which of them an installed torch lacks.
"""

import torch
from torch.distributed import distributed_c10d

# Copies the pieces of one read into many tensors in one call. Instead: a public `torch.foreach.copy_`.
_foreach_copy_ = torch._foreach_copy_

# Many small tensors as one, which is fetched from a device in one copy, and back. Instead: `torch.cat`
# and `split` of flat views, by hand.
_flatten_dense_tensors = torch._utils._flatten_dense_tensors
_unflatten_dense_tensors = torch._utils._unflatten_dense_tensors

# Where tensors lie that the process group sends. Instead: a public property of `dist.ProcessGroup`.
_get_pg_default_device = distributed_c10d._get_pg_default_device
