"""What counts as seen although it is not Python code: functions that read nothing but their arguments.

They keep nothing, change nothing but tensors (which a tape shows) and call nothing that
they were given, as long as what they are given is tensors, scalars and containers made in
the call. A function that is not here, and has no source, cannot be seen into.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

_STATEFUL = frozenset({
    "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "set_",
    "share_memory_", "data_ptr", "const_data_ptr", "storage", "untyped_storage", "record_stream", "resize_",
    "resize_as_", "is_shared", "is_set_to", "__setstate__", "__reduce_ex__", "__dlpack__", "module_load", "apply_",
    "map_", "map2_", "is_pinned", "detach_",
})  # fmt: skip
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "finfo", "full", "full_like",
    "iinfo", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
    "is_tensor", "is_floating_point", "is_complex", "broadcast_shapes", "result_type", "promote_types", "can_cast",
    "from_numpy", "complex", "polar", "normal", "bernoulli", "meshgrid", "cartesian_prod", "block_diag",
    "is_grad_enabled", "hann_window", "hamming_window", "bartlett_window", "blackman_window", "Size", "device",
    "sym_int", "sym_float", "sym_max", "sym_min", "sym_not",
)  # fmt: skip


def _functions() -> frozenset:
    by_owner = get_overridable_functions()
    found = {function for functions in by_owner.values() for function in functions if callable(function)}
    found |= {getattr(torch, name) for name in _FACTORIES}
    found |= {one for name, one in vars(F).items() if not name.startswith("_") and _is_of_functional(one)}
    found -= {getattr(Tensor, name, None) for name in _STATEFUL}
    found |= {one for name, one in vars(math).items() if callable(one)}
    found |= {one for name, one in vars(operator).items() if callable(one) and name not in _CALLING}
    return frozenset(one for one in found if _is_hashable(one))


def _is_of_functional(one: Any) -> bool:
    return callable(one) and getattr(one, "__module__", "").startswith(("torch.nn.functional", "torch._C"))


_CALLING = frozenset({"call", "methodcaller", "attrgetter", "itemgetter", "setitem", "delitem", "iadd", "iconcat"})


def _is_hashable(one: Any) -> bool:
    try:
        hash(one)
    except TypeError:
        return False
    return True


PURE = _functions()

# Of tensors: what is a method, and what is a value. Neither is what others set on a tensor, such as its gradient.
TENSOR_METHODS = frozenset(
    name for name, one in ((name, getattr(Tensor, name, None)) for name in dir(Tensor))
    if not name.startswith("__") and name not in _STATEFUL and _is_hashable(one) and one in PURE
) | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "stride", "unflatten"}  # fmt: skip
TENSOR_VALUES = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "T", "mT", "H", "mH", "real", "imag", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_mps", "is_xpu", "is_nested", "itemsize", "nbytes",
})  # fmt: skip

# Of what is made in a call, and of standard containers and scalars held by others: methods that only read.
_READING = {
    str: [name for name in dir(str) if not name.startswith("_")],
    bytes: ["startswith", "endswith", "decode"],
    int: ["bit_length", "bit_count"],
    float: ["is_integer", "hex"],
    complex: ["conjugate"],
    list: ["index", "count", "copy"],
    tuple: ["index", "count"],
    dict: ["get", "keys", "values", "items", "copy"],
    set: ["copy", "union", "intersection", "difference", "issubset", "issuperset", "isdisjoint"],
    torch.Size: ["numel", "index", "count"],
    slice: ["indices"],
    range: ["index", "count"],
    torch.dtype: [],
    torch.device: [],
    type(None): [],
    bool: [],
}
READING = {kind: frozenset(names) for kind, names in _READING.items()}
READING[frozenset] = READING[set]
WRITING = frozenset({
    "append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "add", "discard", "sort",
    "reverse", "popitem",
})  # fmt: skip
MADE_METHODS = TENSOR_METHODS.union(*READING.values()) | WRITING
MADE_VALUES = TENSOR_VALUES | {
    "real", "imag", "start", "stop", "step", "index", "type", "is_floating_point", "is_complex", "itemsize", "values",
    "indices", "bits", "max", "min", "eps", "tiny", "smallest_normal", "resolution", "numerator", "denominator",
}  # fmt: skip

# Builtins that are given what is known, and answer with what is known where all is; `_static_calls` has the others.
FOLDING = frozenset({
    abs, bool, float, int, complex, str, divmod, max, min, pow, round, sum, ord, chr, repr, format, bin, hex,
    ascii, bytes,
})  # fmt: skip
CONTAINERS = {tuple: tuple, list: list, set: set, frozenset: set, dict: dict}

# What stands around a block: what they change is in a call's key, or gone when the block ends.
CONTEXTS = (
    torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.autocast, torch.amp.autocast,
    torch.cpu.amp.autocast, contextlib.nullcontext,
)  # fmt: skip

# Answers that are the same for as long as nobody changes how the process runs: asked for again with each guard.
ASKED = frozenset({
    torch.get_default_dtype, torch.jit.is_scripting, torch.jit.is_tracing, torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting,
})  # fmt: skip

BUILTINS = vars(builtins)
